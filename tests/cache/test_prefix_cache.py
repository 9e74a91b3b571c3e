"""The handle of a prefill: however a request ends, what it took comes back, once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.cache.prefix_cache import PromptPrefill
from rekindle.core.request import Request
from rekindle.engine.base import Logits, Row, note_brought
from rekindle.engine.fake import FakeEngine
from tests.unmeasured_costs import UnmeasuredCosts

RULES = "The rules of the house are long and many, and everybody has to know them by heart. " * 3


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(FakeEngine(), cache=tmp_path / "cache") as session:
        yield session


def never() -> bool:
    return False


def prepare(session: Session, text: str) -> PromptPrefill:
    return session.cache.prepare(Request.of(text), session.engine.tokenizer.encode(text), never)


def parked(session: Session) -> int:
    return len(session.cache._parked._parked)


def assert_nothing_is_taken(session: Session) -> None:
    assert session.flush()
    assert session.cache._memory_gate._running == 0 and not session.cache._inflight._flying


def test_what_is_planned_is_what_is_done(session: Session) -> None:
    with prepare(session, RULES) as cold:
        assert cold.reuse.reused == 0
        cold.run(len(RULES) + 8, never)
        assert cold.reuse.computed == len(cold.lookup.tokens) == len(cold.context.tokens)
    with prepare(session, RULES + "Why?") as warm:
        planned = warm.reuse
        warm.run(len(RULES) + 16, never)
        assert warm.reuse.engine == planned.engine == len(cold.lookup.tokens)
    assert_nothing_is_taken(session)


def test_a_prefill_that_is_never_run_gives_back_the_parked_context(session: Session) -> None:
    session.generate(RULES, max_tokens=1)
    assert parked(session) == 1
    with pytest.raises(KeyError), prepare(session, RULES + "Why?") as prefill:
        assert prefill.plan.in_engine and parked(session) == 0
        raise KeyError("something else failed")
    assert parked(session) == 1
    assert_nothing_is_taken(session)
    assert session.generate(RULES + "Why?", max_tokens=1).reuse.engine > 0


def test_a_listener_that_fails_leaves_nothing_behind(session: Session) -> None:
    """The next request with the same prefix would wait for a prefill that nobody runs."""

    def fail(prefill: object, reuse: object) -> None:
        raise KeyError("the listener failed")

    with pytest.raises(KeyError):
        list(session.answer(Request.of(RULES, max_tokens=1), planned=fail))
    assert_nothing_is_taken(session)
    assert session.generate(RULES, max_tokens=1).reuse.computed > 0


def test_a_run_that_fails_leaves_nothing_behind(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(MemoryError), prepare(session, RULES) as prefill:
        patch.setattr(session.engine, "step", lambda *_: (_ for _ in ()).throw(MemoryError()))
        prefill.run(len(RULES) + 8, never)
    assert parked(session) == 0
    assert_nothing_is_taken(session)
    assert session.generate(RULES, max_tokens=1).reuse.computed > 0


def test_commit_is_idempotent(session: Session) -> None:
    with prepare(session, RULES) as prefill:
        prefill.run(len(RULES) + 8, never)
        prefill.commit()
        prefill.commit()
    assert parked(session) == 1
    assert_nothing_is_taken(session)


def test_a_peek_changes_nothing(session: Session) -> None:
    session.generate(RULES, max_tokens=1)
    text = RULES + "Why?"
    for _ in range(2):
        with session.cache.peek(Request.of(text), session.engine.tokenizer.encode(text)) as prefill:
            assert prefill.reuse.engine > 0
        assert parked(session) == 1
    assert_nothing_is_taken(session)


class _NotedLoads(UnmeasuredCosts):
    """Keeps the seconds of loads."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[float] = []

    def loaded(self, tier: str, size_bytes: int, seconds: float) -> None:
        self.loads.append(seconds)


def test_computing_slowly_is_never_a_loads_time_and_taking_over_what_was_filled_is(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the feed is filled before its KV is where the step needs it: the engine times that, and only that."""
    session.generate(RULES, max_tokens=1)
    session.flush()
    step, delay = session.engine.step, 0.5

    def slow(rows: Sequence[Row], *rest: Any) -> Sequence[Logits]:
        time.sleep(delay if any(row.feeds for row in rows) else 0)
        note_brought([feed for row in rows for feed in row.feeds], brought)
        return step(rows, *rest)

    monkeypatch.setattr(session.engine, "step", slow)
    for brought in (0.0, 100.0):
        session.cache.unpark()
        costs = session.cache.kv.costs = _NotedLoads()
        assert session.generate(RULES + "Why?", max_tokens=1).reuse.reused
        (took,) = costs.loads
        assert brought <= took < brought + delay
