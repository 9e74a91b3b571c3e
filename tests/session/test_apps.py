"""Apps that ask a session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rekindle import Session
from rekindle.apps import Apps
from rekindle.cache.lookup import CacheLookup
from rekindle.core.request import Request
from rekindle.core.scope import Scope
from rekindle.engine.fake import FakeEngine
from rekindle.errors import CacheUnusable, InvalidSetting
from rekindle.store import tiered
from rekindle.store.disk import DiskStore
from rekindle.store.settings import StoreSettings

pytestmark = pytest.mark.usefixtures("crowded")

SYSTEM = "You answer letters about the lighthouse, the lamp, the boats and the tides, and never about money. "


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(FakeEngine(), cache=tmp_path / "cache", disk_limit="50MB", killed_ttl="0s") as session:
        yield session


def ask(session: Session, text: str, **options: object) -> None:
    session.generate(SYSTEM + text, max_tokens=4, **options)  # type: ignore[arg-type]
    assert session.flush()


def look(session: Session, text: str) -> CacheLookup:
    with session.cache.peek(Request.of(SYSTEM + text), session.engine.tokenizer.encode(SYSTEM + text)) as prefill:
        return prefill.lookup


def kept(session: Session, text: str) -> int:
    """How many tokens the store knows of a prompt."""
    known, store = look(session, text), session.cache.store
    assert store is not None
    return store.lookup(known.kv_space, known.tokens).length


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def maintain(session: Session) -> None:
    assert session.flush() and session.cache.store is not None
    session.cache.store.maintain()


def test_a_session_knows_who_asked(session: Session) -> None:
    ask(session, "When is the lamp lit?", app="mail")
    ask(session, "When is the lamp lit?", app="notes", app_state="background")
    ask(session, "Where are the boats?", app="mail")
    maintain(session)
    told = {app.name: app for app in session.apps.ls()}
    assert {name: (app.state, app.requests) for name, app in told.items()} == {
        "mail": ("foreground", 2),
        "notes": ("background", 1),
    }


def test_private_kv_of_a_killed_app_goes_and_the_shared_prefix_stays(session: Session) -> None:
    questions = "When is the lamp lit, and who lights it in winter?" * 3, "Where are the boats at night, in fog?" * 3
    for app, question in zip(("mail", "notes"), questions, strict=True):
        ask(session, question, app=app)
    maintain(session)
    whole = [kept(session, question) for question in questions]
    session.apps.set("mail", "killed")
    maintain(session)
    after = [kept(session, question) for question in questions]
    assert after[1] == whole[1]
    assert len(session.engine.tokenizer.encode(SYSTEM)) - 32 <= after[0] < whole[0]
    ask(session, questions[0], app="mail")  # alive again
    assert {app.name: app.state for app in session.apps.ls()}["mail"] == "foreground"


@pytest.mark.parametrize("state", [None, "foreground"])
def test_an_app_that_is_killed_right_after_it_asked_stays_killed(session: Session, state: str | None) -> None:
    given = {} if state is None else {"app_state": state}
    session.generate(SYSTEM + "When is the lamp lit?", max_tokens=4, app="mail", **given)  # type: ignore[arg-type]
    session.apps.set("mail", "killed")  # before anything of the request is noted
    maintain(session)
    (mail,) = session.apps.ls()
    assert (mail.state, mail.requests) == ("killed", 1)


def test_an_app_that_is_killed_while_it_is_answered_stays_killed(session: Session) -> None:
    ask(session, "When is the lamp lit?", app="mail")
    stream = session.stream(SYSTEM + "Where are the boats?", max_tokens=4, app="mail")
    next(iter(stream))
    session.apps.set("mail", "killed")
    assert stream.reply.usage.completion_tokens == 4
    maintain(session)
    assert [(app.state, app.requests) for app in session.apps.ls()] == [("killed", 2)]
    ask(session, "Where are the boats?", app="mail")
    maintain(session)
    assert [(app.state, app.requests) for app in session.apps.ls()] == [("foreground", 3)]


def test_a_session_that_nobody_asks_still_sweeps(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered, "_LOOK_AGAIN_SECONDS", 0.05)
    ask(session, "When is the lamp lit?" * 5, app="mail")
    store = session.cache.store
    assert store is not None
    eventually(lambda: store.wake_seconds is not None)
    session.apps.set("mail", "killed")
    eventually(lambda: store.disk.entries() == [] and len(store.memory) == 0)


def test_what_a_killed_app_left_in_the_engine_goes_at_once(session: Session) -> None:
    ask(session, "When is the lamp lit?", app="mail")
    session.apps.set("notes", "killed")
    assert look(session, "When is the lamp lit?").parked is not None
    session.apps.set("mail", "killed")
    assert look(session, "When is the lamp lit?").parked is None


def test_a_killed_app_frees_its_memory_at_once_and_its_kv_stays_on_disk(tmp_path: Path) -> None:
    with Session(FakeEngine(), cache=tmp_path / "cache", disk_limit="50MB", killed_ttl="none") as session:
        ask(session, "When is the lamp lit?" * 5, app="mail")
        session.generate("Where are the boats at night?" * 5, max_tokens=4, app="notes")
        maintain(session)
        store = session.cache.store
        assert store is not None
        stored = kept(session, "When is the lamp lit?" * 5)
        assert len(store.memory) == 2
        session.apps.set("mail", "killed")
        assert len(store.memory) == 1
        assert kept(session, "When is the lamp lit?" * 5) == stored > 64


def test_memory_of_an_app_that_another_process_killed_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered, "_LOOK_AGAIN_SECONDS", 0.05)
    folder = tmp_path / "cache"
    with Session(FakeEngine(), cache=folder, disk_limit="50MB", killed_ttl="none") as session:
        ask(session, "When is the lamp lit?" * 5, app="mail")
        store = session.cache.store
        assert store is not None and len(store.memory) > 0
        other = DiskStore(folder, StoreSettings(disk_limit="50MB"))
        Apps(other, Scope("local")).set("mail", "killed")
        other.close()
        eventually(lambda: len(store.memory) == 0)
        eventually(lambda: look(session, "When is the lamp lit?" * 5).parked is None)
        assert kept(session, "When is the lamp lit?" * 5) > 64


def test_apps_have_names_and_states_that_are_known(session: Session) -> None:
    with pytest.raises(InvalidSetting, match="foreground"):
        session.apps.set("mail", "dreaming")
    with pytest.raises(InvalidSetting, match="alive|makes no sense"):
        session.generate("text", app="mail", app_state="killed")  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="characters"):
        session.apps.set("", "killed")
    with pytest.raises(InvalidSetting, match="lone surrogate"):
        session.generate("text", app="\ud800")


def test_without_a_cache_asking_by_name_changes_nothing() -> None:
    with Session(FakeEngine(), cache="off") as session:
        assert session.generate("text", max_tokens=3, app="mail").usage.completion_tokens == 3
        assert session.apps.ls() == []
        with pytest.raises(CacheUnusable):
            session.apps.set("mail", "killed")


class TestCheckpoints:
    """Of models whose state cannot be cut: what is kept of them is found by name, not by tokens."""

    TALK = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": "When is the lamp lit?"})

    @pytest.fixture
    def session(self, tmp_path: Path) -> Iterator[Session]:
        pytest.importorskip("xllamacpp")
        from tests.tiny_hybrids import write_mamba

        model = str(write_mamba(tmp_path / "mamba.gguf"))
        limits = {"disk_limit": "200MB", "killed_ttl": "0s"}
        with Session(model, engine="llamacpp", threads=1, cache=tmp_path / "cache", **limits) as session:  # type: ignore[arg-type]
            yield session

    def chat(self, session: Session, **options: object) -> None:
        session.chat(self.TALK, max_tokens=2, **options)  # type: ignore[arg-type]
        maintain(session)

    @pytest.mark.llamacpp
    @pytest.mark.parametrize("other", [None, "notes"])
    def test_what_others_use_of_a_killed_app_stays(self, session: Session, other: str | None) -> None:
        store = session.cache.store
        assert store is not None
        self.chat(session, app="mail")
        kept = {row.name for row in store.disk.entries()}
        self.chat(session, app=other)
        session.apps.set("mail", "killed")
        maintain(session)
        assert {row.name for row in store.disk.entries()} == kept != set()

    @pytest.mark.llamacpp
    def test_what_it_alone_used_goes(self, session: Session) -> None:
        store = session.cache.store
        assert store is not None
        self.chat(session, app="mail")
        assert store.disk.entries() != []
        session.apps.set("mail", "killed")
        maintain(session)
        assert store.disk.entries() == []

    @pytest.mark.llamacpp
    def test_where_nobody_gives_a_name_nothing_is_looked_for_and_nothing_noted(
        self, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = session.cache.store
        assert store is not None
        noted: list[object] = []
        monkeypatch.setattr(store, "record_use_by", lambda *use, **_: noted.append(use))
        self.chat(session)
        self.chat(session)
        assert noted == []
        with store.disk.database.reading() as connection:
            assert connection.execute(
                "SELECT (SELECT count(*) FROM app_uses) + (SELECT count(*) FROM apps)"
            ).fetchone() == (0,)
