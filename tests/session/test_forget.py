"""What is forgotten leaves no byte: not its text, not its words, not its tokens, not KV computed from it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.core.keys import token_bytes
from rekindle.engine.fake import FakeEngine
from rekindle.errors import DocumentNotFound, InvalidSetting
from rekindle.idle.idle import Idle, IdleOptions
from rekindle.knowledge.sqlite_pages import SqlitePages
from rekindle.session.library import Knowledge, purging
from rekindle.settings import Settings
from rekindle.store.catalog import catalog
from rekindle.store.disk import CATALOG
from rekindle.store.disk_space import Reservation
from tests.server.soak import tiny_embedder
from tests.session.asking import WholeStates, forms_of_text, forms_of_tokens, traces

pytestmark = pytest.mark.thorough

SECRET = (
    "The combination of the safe is 83-14-27. Only Agneta Falkenrath knows it. She wrote it on the back of the "
    "photograph that hangs beside the barometer in the chartroom. On Sundays the xylographer comes."
)
HARMLESS = "Tea is served at five. The kettle stands on the left of the stove, and the cups are in the cupboard."


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


def a_busy_folder(folder: Path, embedder: str) -> None:
    """Documents, questions about them, a chat, and their KV, in memory and on disk."""
    with Session(FakeEngine(context_tokens=4000), cache=folder, embedder=embedder) as session:
        session.ingest(documents=[{"text": SECRET, "source": "safe"}, {"text": HARMLESS, "source": "tea"}])
        for question in ("combination of the safe", "tea at five", "Agneta and the kettle"):
            session.ask(question, max_tokens=6)
            session.ask(question, top_k=1, retrieval="bm25", max_tokens=6)
        session.chat("What is a kettle?", max_tokens=6)
        session.flush()


def everything_of(text: str) -> list[bytes]:
    tokens = FakeEngine().tokenizer.encode(text)
    return [*forms_of_text(text), *forms_of_tokens(tokens, 24)]


def test_the_folder_holds_the_document_before_and_nothing_of_it_after(tmp_path: Path, embedder: str) -> None:
    folder = tmp_path / "cache"
    a_busy_folder(folder, embedder)
    before = traces(folder, everything_of(SECRET))
    assert any("cache-library" in name for name in before) and any("catalog" in name for name in before)
    with Session(FakeEngine(context_tokens=4000), cache=folder, embedder=embedder) as session:
        session.ask("combination of the safe", max_tokens=6)  # in memory and in the engine, too
        gone = session.forget("safe")
        assert [entry.source for entry in gone.documents] == ["safe"]
        assert traces(folder, everything_of(SECRET)) == {}
        assert traces(folder, [b"xylograph", b"falkenrath", b"agneta", b"Falkenrath"]) == {}
        assert session.ask("tea at five", max_tokens=6).sources[0].source == "tea"
    assert traces(folder, everything_of(SECRET)) == {}


def test_what_was_not_forgotten_is_still_reused(tmp_path: Path, embedder: str) -> None:
    folder = tmp_path / "cache"
    a_busy_folder(folder, embedder)
    with Session(FakeEngine(context_tokens=4000), cache=folder, embedder=embedder) as session:
        session.forget("safe")
        answer = session.ask("tea at five", top_k=1, retrieval="bm25", max_tokens=6)
        assert answer.reuse.disk > 200  # the system prompt and the passage of tea
        assert session.chat("What is a kettle?", max_tokens=6).reuse.computed == 1


def test_forgetting_needs_no_model(tmp_path: Path, embedder: str) -> None:
    folder = tmp_path / "cache"
    a_busy_folder(folder, embedder)
    settings = Settings.load({"cache": folder, "embedder": embedder})
    known = Knowledge(settings, purging(settings))
    known.forget("safe")
    known.close()
    assert traces(folder, everything_of(SECRET)) == {}
    with pytest.raises(DocumentNotFound):
        known.forget("safe")
    with pytest.raises(InvalidSetting):
        known.forget()


def test_files_of_a_lost_catalog_are_forgotten_too(tmp_path: Path, embedder: str) -> None:
    folder = tmp_path / "cache"
    a_busy_folder(folder, embedder)
    (folder / CATALOG).rename(folder / f"{CATALOG}.broken-1")
    settings = Settings.load({"cache": folder, "embedder": embedder})
    known = Knowledge(settings, purging(settings))
    known.forget("safe")
    known.close()
    assert traces(folder, everything_of(SECRET)) == {}


def test_a_session_that_keeps_nothing_forgets_what_others_kept_in_the_users_own_folder(
    tmp_path: Path, embedder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))
    for settings in ({}, {"cache": "off"}):
        with Session(FakeEngine(context_tokens=4000), **settings, embedder=embedder) as session:
            if session.cache.store is not None:
                session.ingest(documents=[{"text": SECRET, "source": "safe"}, {"text": HARMLESS, "source": "tea"}])
                ask(session)
            else:
                assert traces(tmp_path / "home", everything_of(SECRET))
                session.forget("safe")
    assert traces(tmp_path / "home", everything_of(SECRET)) == {}


def test_a_removed_file_takes_its_kv_along(tmp_path: Path, embedder: str) -> None:
    papers, folder = tmp_path / "papers", tmp_path / "cache"
    papers.mkdir()
    (papers / "safe.txt").write_text(SECRET)
    (papers / "tea.txt").write_text(HARMLESS)
    with Session(FakeEngine(context_tokens=4000), cache=folder, embedder=embedder) as session:
        session.ingest(papers)
        session.ask("combination of the safe", max_tokens=6)
        (papers / "safe.txt").unlink()
        assert session.ingest(papers).removed == 1
    assert traces(folder, everything_of(SECRET)) == {}


def test_a_changed_file_takes_the_kv_of_its_old_text_along(tmp_path: Path, embedder: str) -> None:
    papers, folder = tmp_path / "papers", tmp_path / "cache"
    papers.mkdir()
    (papers / "safe.txt").write_text(SECRET)
    with Session(FakeEngine(context_tokens=4000), cache=folder, embedder=embedder) as session:
        session.ingest(papers)
        session.ask("combination of the safe", max_tokens=6)
        (papers / "safe.txt").write_text(HARMLESS)
        assert session.ingest(papers).changed == 1
        assert session.ask("tea at five", max_tokens=6).sources[0].text == HARMLESS
    assert traces(folder, everything_of(SECRET)) == {}


# -- what forgetting needs is there before any KV is -------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    """KV that became visible: its tokens, and what the library had noted then, as other processes see it."""

    tokens: bytes
    noted: frozenset[bytes]


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Listed]:
    """All KV that becomes visible; the library is in `tmp_path`."""
    seen: list[Listed] = []
    publish = catalog.publish

    def watched(connection: sqlite3.Connection, id: int, run: catalog.BlockRun, *given: Any) -> None:
        (path,) = (tmp_path / "library").glob("*.sqlite")
        with closing(sqlite3.connect(path)) as other:
            noted = frozenset(row[0] for row in other.execute("SELECT tokens FROM tokens").fetchall())
        seen.append(Listed(run.tokens, noted))
        publish(connection, id, run, *given)

    monkeypatch.setattr(catalog, "publish", watched)
    return seen


def ask(session: Session) -> None:
    session.ask("combination of the safe", top_k=1, retrieval="bm25", max_tokens=2)


def ask_with_reused_passages(session: Session) -> None:
    session.ask("combination of the safe", top_k=2, max_tokens=2)
    session.ask("tea at five", top_k=2, max_tokens=2)


def warm(session: Session) -> None:
    session.knowledge.library().note_retrieved([1])
    session.warm_knowledge()


def work_when_idle(session: Session) -> None:
    Idle(session, IdleOptions(sources=(), warm_passages=1)).run()


@pytest.mark.parametrize(
    ("use", "settings"),
    [
        (ask, {}),
        (ask_with_reused_passages, {"reuse": "approximate", "recompute_budget": 0.3}),
        (warm, {}),
        (work_when_idle, {}),
    ],
)
def test_the_tokens_of_passages_are_noted_before_their_kv_is_listed(
    tmp_path: Path, embedder: str, listed: list[Listed], use: Callable[[Session], None], settings: dict[str, Any]
) -> None:
    engine, where = FakeEngine(context_tokens=4000), {"cache": tmp_path / "cache", "library": tmp_path / "library"}
    parts = {text: token_bytes(engine.tokenizer.encode(text)[8:24]) for text in (SECRET, HARMLESS)}
    with Session(engine, **where, **settings, embedder=embedder) as session:
        session.ingest(documents=[{"text": text, "source": text[:3]} for text in parts])
        use(session)
        session.flush()
    holding = [(one, part) for one in listed for part in parts.values() if part in one.tokens]
    assert holding and all(any(part in noted for noted in one.noted) for one, part in holding)


def test_whole_states_are_listed_when_their_passages_are_noted_and_go_with_them(
    tmp_path: Path, embedder: str, listed: list[Listed]
) -> None:
    where = {"cache": tmp_path / "cache", "library": tmp_path / "library"}
    with Session(WholeStates(), **where, embedder=embedder) as session:
        session.ingest(documents=[{"text": SECRET, "source": "safe"}, {"text": HARMLESS, "source": "tea"}])
        ask(session)
        session.flush()
        assert session.cache.store is not None and session.cache.store.disk.entries()
        assert listed and all(one.noted for one in listed)
        session.forget("safe")
        assert session.cache.store.disk.entries() == []  # none tells what it was computed from
        assert session.ask("tea at five", max_tokens=2).sources


def test_a_passage_that_stood_in_prompts_cut_in_several_places_is_forgotten_everywhere(
    tmp_path: Path, embedder: str
) -> None:
    folder = tmp_path / "cache"
    with Session(FakeEngine(context_tokens=240), cache=folder, embedder=embedder) as session:
        session.ingest(documents=[{"text": SECRET, "source": "safe"}])
        for question in ("What is the combination of the safe beside the barometer?", "safe?"):
            asked = session.ask(question, instructions="Be brief.", max_tokens=2)
            assert asked.sources[0].cut
        session.flush()
        assert traces(folder, forms_of_tokens(session.engine.tokenizer.encode(SECRET), 24))
        session.forget("safe")
        assert traces(folder, everything_of(SECRET)) == {}


def test_after_power_loss_forgetting_finds_all_kv_that_is_listed(tmp_path: Path, embedder: str) -> None:
    """The library may have lost what SQLite does not sync at a commit, and the catalog nothing."""
    places = {"cache": tmp_path / "cache", "library": tmp_path / "library"}
    lost = {name: tmp_path / "lost" / name for name in places}
    with Session(FakeEngine(context_tokens=4000), **places, embedder=embedder) as session:
        session.ingest(documents=[{"text": SECRET, "source": "safe"}, {"text": HARMLESS, "source": "tea"}])
    with Session(FakeEngine(context_tokens=4000), **places, embedder=embedder) as session:
        ask(session)
        session.flush()
        with session.knowledge.library().writing() as connection:
            (synchronous,) = connection.execute("PRAGMA synchronous").fetchone()
        for name, place in places.items():
            shutil.copytree(place, lost[name])
    if synchronous < 2:  # less than FULL
        for log in lost["library"].glob("*-wal"):
            log.unlink()
    assert traces(lost["cache"], everything_of(SECRET))
    with Session(FakeEngine(context_tokens=4000), **lost, embedder=embedder) as session:
        session.forget("safe")
        assert traces(tmp_path / "lost", everything_of(SECRET)) == {}


def test_nothing_is_listed_that_was_removed_while_it_was_written(
    tmp_path: Path, embedder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dies right after listing KV cannot look again whether it may stay."""
    folder = tmp_path / "cache"
    with Session(FakeEngine(context_tokens=4000), cache=folder, embedder=embedder) as session:
        session.ingest(documents=[{"text": SECRET, "source": "safe"}, {"text": HARMLESS, "source": "tea"}])
        store, library = session.cache.store, session.knowledge.library()
        assert store is not None
        reserved = store.disk.room.reserved

        @contextmanager
        def then_removed(*given: Any, **options: Any) -> Iterator[Reservation]:
            with reserved(*given, **options) as room:
                library.remove([entry.id for entry in library.entries("d.source='safe'")])
                yield room

        monkeypatch.setattr(store.disk.room, "reserved", then_removed)
        monkeypatch.setattr("rekindle.store.tiered.TieredStore.purge", lambda *_, **__: None)  # it died before
        ask(session)
        session.flush()
        with store.disk.database.reading() as connection:
            kept = b"".join(row[0] for row in connection.execute("SELECT tokens FROM blocks ORDER BY extent, place"))
        assert token_bytes(session.engine.tokenizer.encode(SECRET)[8:24]) not in kept
        monkeypatch.undo()


def test_another_tenants_copy_stays(tmp_path: Path, embedder: str) -> None:
    with Session(FakeEngine(context_tokens=4000), cache=tmp_path / "cache", embedder=embedder) as session:
        for tenant in ("a", "b"):
            session.ingest(documents=[{"text": SECRET, "source": "safe"}], tenant=tenant)
            session.ask("combination", max_tokens=4, tenant=tenant)
        session.forget("safe", tenant="a")
        answer = session.ask("combination", max_tokens=4, tenant="b")
        assert answer.sources and answer.reuse.computed == 1


def test_forget_by_app_and_by_age(tmp_path: Path, embedder: str) -> None:
    with Session(FakeEngine(context_tokens=4000), cache=tmp_path / "cache", embedder=embedder) as session:
        session.ingest(documents=[{"text": SECRET, "source": "safe"}], app="vault")
        session.ingest(documents=[{"text": HARMLESS, "source": "tea"}])
        assert not session.forget(before=1.0).documents
        assert [entry.source for entry in session.forget(app="vault").documents] == ["safe"]
        assert [entry.source for entry in session.forget(everything=True).documents] == ["tea"]
        assert traces(tmp_path / "cache", everything_of(HARMLESS)) == {}


def test_kv_whose_tokens_were_lost_to_damage_is_forgotten_with_the_rest(tmp_path: Path, embedder: str) -> None:
    """The page on which the library noted the tokens is gone: nothing tells any more which KV is of which passage."""
    folder = tmp_path / "cache"
    a_busy_folder(folder, embedder)
    (path,) = Path(f"{folder}-library").glob("*.sqlite")
    raw = SqlitePages(path)
    kinds = [int, str, bytes]
    (page,) = [n for n in range(1, raw.pages + 1) if any([*map(type, row.values)] == kinds for row in raw.rows_of(n))]
    with path.open("r+b") as file:
        file.seek((page - 1) * raw.page_bytes)
        file.write(bytes(raw.page_bytes))
    with Session(FakeEngine(context_tokens=4000), cache=folder, embedder=embedder) as session:
        gone = session.forget("safe")
        assert [entry.source for entry in gone.documents] == ["safe"] and gone.damaged_files == (path,)
        assert set(traces(folder, everything_of(SECRET))) == {f"cache-library/{path.name}"}, "the damaged file"
        assert session.knowledge.losses() and "Tea" in session.knowledge.search("tea").hits[0].chunk.passage.text
