"""What is forgotten leaves no byte: not its text, not its words, not its tokens, not KV computed from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle import Session
from rekindle.engine.fake import FakeEngine
from rekindle.errors import DocumentNotFound, InvalidSetting
from rekindle.run.knowledge import Knowledge, purging
from rekindle.settings import Settings
from tests.run.asking import forms_of_text, forms_of_tokens, traces
from tests.server.soak import tiny_embedder

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
    assert any("knowledge" in name for name in before) and any("catalog" in name for name in before)
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
