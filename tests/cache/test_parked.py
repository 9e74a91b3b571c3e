"""Contexts that wait in the engine: which of them leave when there is no room, and when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from rekindle import Session
from rekindle.cache import context as parking
from rekindle.cache.context import Context, ParkedContexts
from rekindle.core.scope import Scope
from rekindle.engine.base import EngineSequence
from rekindle.engine.fake import FakeEngine
from rekindle.store.catalog import app_rows
from rekindle.store.evict import ContextUse
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE

TEXTS = [f"{number}: a harbour with {number} cranes, and each of them had a name of its own." for number in range(4)]


class Sequenced:
    """A sequence of the engine that only takes memory."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes, self.closed = size_bytes, False

    def close(self) -> None:
        self.closed = True


def made(number: int, size_bytes: int = 100) -> Context:
    context = Context(KV_SPACE, cast(EngineSequence, Sequenced(size_bytes)))
    context.tokens = (number,) * 10
    return context


def is_open(context: Context) -> bool:
    return not cast(Sequenced, context.sequence).closed


def test_the_least_recently_used_leaves_first_and_the_bound_holds() -> None:
    parked = ParkedContexts(300)
    contexts = [made(number) for number in range(4)]
    for context in contexts[:3]:
        parked.park(context)
    again = parked.take(KV_SPACE, contexts[0].tokens)
    assert again is contexts[0]
    parked.park(again)
    parked.park(contexts[3])
    assert [is_open(context) for context in contexts] == [True, False, True, True]
    parked.park(made(4, 301))
    assert not any(map(is_open, contexts)), "one that is larger than the bound leaves too, after all others"


def test_the_given_order_decides_and_sees_what_each_context_is() -> None:
    seen: list[Sequence[ContextUse]] = []

    def newest_first(contexts: Sequence[ContextUse]) -> Sequence[int]:
        seen.append(contexts)
        return range(len(contexts))[::-1]

    parked = ParkedContexts(200, newest_first)
    contexts = [made(number) for number in range(3)]
    contexts[1].hits = 5
    for context in contexts:
        parked.park(context)
    assert [is_open(context) for context in contexts] == [True, True, False]
    assert [(one.tokens, one.size_bytes, one.hits) for one in seen[0]] == [(10, 100, 0), (10, 100, 5), (10, 100, 0)]


def test_without_a_limit_nothing_is_parked_and_nothing_is_asked() -> None:
    def never(contexts: Sequence[ContextUse]) -> Sequence[int]:
        raise AssertionError(contexts)

    context = made(0)
    ParkedContexts(0, never).park(context)
    assert not is_open(context)


@pytest.fixture
def room_for_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_MAX_PARKED", 3)


def ask(session: Session, number: int, **options: Any) -> int:
    """Ask one of the texts; how many of its tokens were in the engine."""
    reply = session.generate(TEXTS[number], max_tokens=1, **options)
    session.flush()
    return reply.reuse.engine


def parked_texts(session: Session) -> list[int]:
    encoded = [tuple(session.engine.tokenizer.encode(text)) for text in TEXTS]
    waiting = [context.tokens for context in session.cache._parked._parked]
    return [number for number, tokens in enumerate(encoded) if any(one[: len(tokens)] == tokens for one in waiting)]


def kill_elsewhere(session: Session, app: str) -> None:
    """As another process does: this one only reads it from the catalog."""
    store = session.cache.store
    assert store is not None
    with store.disk.database.writing() as connection:
        app_rows.set_state(connection, Scope("local"), app, "killed", store.disk.clock(), store.disk.room.allows)


@pytest.mark.usefixtures("room_for_three")
@pytest.mark.parametrize("policy", ["lru", "utility"])
def test_contexts_of_killed_apps_leave_before_older_ones(tmp_path: Path, policy: str) -> None:
    with Session(FakeEngine(), cache=tmp_path / "c", policy=policy) as session:
        session.cache.kv.writer.free_killed = None  # type: ignore[union-attr]  # what frees it without need
        for number, app in enumerate(("mail", "notes", "chat")):
            ask(session, number, app=app)
        kill_elsewhere(session, "chat")
        ask(session, 3, app="mail")
        assert parked_texts(session) == [0, 1, 3]


@pytest.mark.usefixtures("room_for_three")
def test_under_utility_what_is_continued_often_stays(tmp_path: Path) -> None:
    left = {}
    for policy in ("lru", "utility"):
        with Session(FakeEngine(), cache=tmp_path / policy, policy=policy) as session:
            for _ in range(3):
                ask(session, 0)
            for number in (1, 2, 3):
                ask(session, number)
            left[policy] = parked_texts(session)
    assert left == {"lru": [1, 2, 3], "utility": [0, 2, 3]}


@pytest.mark.usefixtures("room_for_three")
def test_a_store_that_fails_leaves_the_least_recently_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(store: TieredStore, contexts: Sequence[ContextUse]) -> Sequence[int]:
        raise OSError(len(contexts))

    with Session(FakeEngine(), cache=tmp_path / "c") as session:
        monkeypatch.setattr(TieredStore, "rank_contexts", broken)
        for number in range(4):
            ask(session, number)
        assert parked_texts(session) == [1, 2, 3]


def test_a_killed_app_is_alive_again_when_it_asks(tmp_path: Path) -> None:
    with Session(FakeEngine(), cache=tmp_path / "c") as session:
        ask(session, 0, app="mail")
        session.apps.set("mail", "killed")
        assert parked_texts(session) == [], "its contexts leave at once"
        assert ask(session, 0, app="mail") == 0 and parked_texts(session) == [0]
