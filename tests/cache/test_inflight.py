"""Prompts that are computed at the same time: what they share is computed once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rekindle import Session
from rekindle.cache.writer import WriteJob
from rekindle.core.reply import Reply
from rekindle.engine.base import Logits, Row
from rekindle.engine.fake import FakeEngine
from rekindle.errors import Cancelled
from rekindle.store.tiered import TieredStore

pytestmark = pytest.mark.thorough

RULES = "The rules of the house are long and many, and everybody has to know them by heart. " * 5


class Slow(FakeEngine):
    """Lets others come before a prompt is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.entered = threading.Event()
        self.fails = 0

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        self.entered.set()
        assert self.go.wait(30)
        if self.fails and len(rows[0].tokens) > 1:
            self.fails -= 1
            raise MemoryError("the first one fails")
        return super().step(rows, cancelled)


class Asking(threading.Thread):
    def __init__(self, session: Session, prompt: str, **options) -> None:
        super().__init__(daemon=True)
        self.stream = session.stream(prompt, max_tokens=2, **options)
        self.reply: Reply | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.reply = self.stream.reply
        except BaseException as error:  # noqa: BLE001
            self.error = error


def finish(asking: Sequence[Asking]) -> list[Reply]:
    for one in asking:
        one.join(60)
        assert one.reply is not None, one.error
    return [one.reply for one in asking if one.reply is not None]


def waiting(session: Session) -> int:
    return sum(inflight.waiting for inflight in session.cache._inflight._flying)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def together(engine: Slow, session: Session, prompts: Sequence[str], others: int) -> list[Asking]:
    """The first is being computed when the others come; so many of them find it worth waiting for."""
    first = Asking(session, prompts[0])
    assert engine.entered.wait(30)
    rest = [Asking(session, prompt) for prompt in prompts[1:]]
    until(lambda: waiting(session) == others)
    engine.go.set()
    return [first, *rest]


@pytest.mark.parametrize("parallel", [None, 4])
def test_what_several_prompts_share_is_computed_once(tmp_path: Path, parallel: int | None) -> None:
    engine = Slow()
    prompts = [f"{RULES}Question {number}: why?" for number in range(4)]
    with Session(engine, cache=tmp_path / "kv", parallel=parallel) as session:
        replies = finish(together(engine, session, prompts, others=3))
        assert sum(reply.reuse.computed for reply in replies) < len(RULES) + 4 * 64
        until(lambda: not session.cache._inflight._flying)  # they land when they are kept
    with Session(FakeEngine(), cache="off") as alone:
        assert [reply.text for reply in replies] == [alone.generate(p, max_tokens=2).text for p in prompts]


def test_nobody_waits_for_a_prompt_that_is_mostly_other_text(tmp_path: Path) -> None:
    engine = Slow()
    with Session(engine, cache=tmp_path / "kv", parallel=4) as session:
        asking = together(engine, session, [RULES + "x" * 2 * len(RULES), RULES + "why?"], others=0)
        finish(asking)


def test_nobody_waits_for_another_tenant(tmp_path: Path) -> None:
    engine = Slow()
    with Session(engine, cache=tmp_path / "kv", parallel=4) as session:
        first = Asking(session, RULES, tenant="alice")
        assert engine.entered.wait(30)
        second = Asking(session, RULES, tenant="bob")
        until(lambda: len(session.cache._inflight._flying) == 2)
        engine.go.set()
        assert [reply.reuse.computed for reply in finish([first, second])] == [len(RULES)] * 2


def test_where_the_first_one_fails_the_next_one_computes(tmp_path: Path) -> None:
    engine = Slow()
    engine.fails = 1
    with Session(engine, cache=tmp_path / "kv", parallel=4) as session:
        first, *rest = together(engine, session, [RULES + str(number) for number in range(3)], others=2)
        finish(rest)
        first.join(60)
        assert isinstance(first.error, MemoryError)
        until(lambda: not session.cache._inflight._flying)  # they land when they are kept


def test_one_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    engine = Slow()
    with Session(engine, cache=tmp_path / "kv", parallel=4) as session:
        first = Asking(session, RULES)
        assert engine.entered.wait(30)
        second = Asking(session, RULES)
        until(lambda: waiting(session) == 1)
        second.stream.cancel()
        second.join(60)
        assert isinstance(second.error, Cancelled)
        engine.go.set()
        finish([first])


def test_nobody_waits_longer_for_the_disk_than_computing_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt is computed, and its KV does not get to the disk until the second one is answered."""
    written, do = threading.Event(), WriteJob.do

    def slow(job: WriteJob, store: TieredStore) -> str:
        assert written.wait(30)
        return do(job, store)

    monkeypatch.setattr(WriteJob, "do", slow)
    monkeypatch.setattr("rekindle.cache.inflight._WRITE_SECONDS", 0.01)
    engine = Slow()
    with Session(engine, cache=tmp_path / "kv", parallel=4, memory_limit=0) as session:
        first, second = together(engine, session, [RULES + "1", RULES + "2"], others=1)
        assert finish([second])[0].reuse.computed == len(RULES) + 1
        written.set()
        finish([first])


def test_with_the_cache_off_nobody_waits(tmp_path: Path) -> None:
    engine = Slow()
    with Session(engine, cache="off", parallel=4) as session:
        asking = [Asking(session, RULES), Asking(session, RULES)]
        engine.go.set()
        assert [reply.reuse.computed for reply in finish(asking)] == [len(RULES)] * 2
