"""Contexts that wait in the engine: which of them leave when there is no room, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from rekindle import Session
from rekindle.cache.context import Context, ParkedContexts
from rekindle.engine.base import EngineSequence
from rekindle.engine.fake import FakeEngine
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


def test_without_a_limit_nothing_is_parked() -> None:
    context = made(0)
    ParkedContexts(0).park(context)
    assert not is_open(context)


def ask(session: Session, number: int, **options: Any) -> int:
    """Ask one of the texts; how many of its tokens were in the engine."""
    reply = session.generate(TEXTS[number], max_tokens=1, **options)
    session.flush()
    return reply.reuse.engine


def parked_texts(session: Session) -> list[int]:
    encoded = [tuple(session.engine.tokenizer.encode(text)) for text in TEXTS]
    waiting = [context.tokens for context in session.cache._parked._parked]
    return [number for number, tokens in enumerate(encoded) if any(one[: len(tokens)] == tokens for one in waiting)]


def test_a_killed_app_is_alive_again_when_it_asks(tmp_path: Path) -> None:
    with Session(FakeEngine(), cache=tmp_path / "c") as session:
        ask(session, 0, app="mail")
        session.apps.set("mail", "killed")
        assert parked_texts(session) == [], "its contexts leave at once"
        assert ask(session, 0, app="mail") == 0 and parked_texts(session) == [0]
