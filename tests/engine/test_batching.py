"""Requests that share steps: each gets what it would get alone, in a fair order, and none waits for another's fault."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rekindle.core.kv import Span
from rekindle.engine.base import EngineSequence, HeldKv, Logits, Row, StayingFeed
from rekindle.engine.batching import BatchingEngine
from rekindle.engine.fairness import FairShare, Requester, taking
from rekindle.engine.fake import FakeEngine
from rekindle.engine.hooks import KvDrift
from rekindle.engine.step_scheduler import StepCall, StepPart, StepScheduler
from rekindle.errors import Cancelled, Closed, KvLost, OutOfMemory, StepRefused


class Watched(FakeEngine):
    """Notes how many tokens of each sequence a step had, and can be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[int]] = []
        self.sequences: list[list[object]] = []
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.refuses: object = None
        self.refusal: BaseException = StepRefused("not this one")

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        self.entered.set()
        assert self.go.wait(30)
        self.steps.append([len(row.tokens) for row in rows])
        self.sequences.append([row.sequence for row in rows])
        if any(row.sequence is self.refuses for row in rows):
            raise self.refusal
        return super().step(rows, cancelled)


class Asking(threading.Thread):
    """A request: a prompt, then some tokens, one after the other."""

    def __init__(self, engine: Any, prompt: list[int], tokens: int, turn: Requester | None = None) -> None:
        super().__init__(daemon=True)
        self.engine, self.prompt, self.tokens, self.turn = engine, prompt, tokens, turn or Requester()
        self.sequence = engine.open(len(prompt) + tokens, engine.regime(1))
        self.cancelled = threading.Event()
        self.said: list[int] = []
        self.logits: list[np.ndarray] = []
        self.error: BaseException | None = None
        self.comes_back = True

    def run(self) -> None:
        try:
            with taking(self.turn):
                row = Row.following(self.sequence, self.prompt)
                for left in reversed(range(self.tokens)):
                    self.comes_back = left > 0
                    (logits,) = self.engine.step([row], self.cancelled.is_set)
                    self.logits.append(logits)
                    self.said.append(int(logits[-1].argmax()))
                    row = Row.following(self.sequence, self.said[-1:])
        except BaseException as error:  # noqa: BLE001
            self.error = error


def together(engine: Watched, asking: Sequence[Asking]) -> None:
    """Start all of them at once: they meet in front of the engine."""
    engine.go.clear()
    for request in asking:
        request.start()
    engine.go.set()
    for request in asking:
        request.join(60)
        assert not request.is_alive()


@pytest.fixture
def company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the last step that come back are waited for, however late this machine gives them a core."""
    opened: dict[EngineSequence, Asking] = {}
    start, computed = Asking.start, StepScheduler.computed

    def noted(self: Asking) -> None:
        opened[self.sequence] = self
        start(self)

    def without_those_that_end(self: StepScheduler, step: Sequence[StepPart], seconds: float) -> None:
        computed(self, step, seconds)
        self.returning = {one for one in self.returning if one in opened and opened[one].comes_back}

    monkeypatch.setattr(Asking, "start", noted)
    monkeypatch.setattr(StepScheduler, "computed", without_those_that_end)
    monkeypatch.setattr("rekindle.engine.batching._RETURN_SECONDS", 60.0)
    monkeypatch.setattr(StepScheduler, "_sharing_pays", True)  # whether it does is measured: noise where others work


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


def alone(given: list[int], tokens: int) -> list[np.ndarray]:
    request = Asking(FakeEngine(), given, tokens)
    request.run()
    return request.logits


@pytest.mark.parametrize("merges", [True, False])
def test_requests_that_share_steps_say_what_each_says_alone(merges: bool) -> None:
    inner = Watched()
    engine = BatchingEngine(inner, together=merges)
    asking = [Asking(engine, prompt(5 + 40 * number, number), 4 + number) for number in range(5)]
    together(inner, asking)
    for request in asking:
        expected = alone(request.prompt, request.tokens)
        assert request.error is None
        assert all(np.array_equal(a, b) for a, b in zip(request.logits, expected, strict=True))


@pytest.mark.usefixtures("company")
def test_replies_that_are_written_at_the_same_time_share_their_steps() -> None:
    inner = Watched()
    engine = BatchingEngine(inner)
    first, others = Asking(engine, prompt(5), 1), [Asking(engine, prompt(4, number), 40) for number in range(4)]
    meet(inner, first, others)
    assert all(request.error is None for request in (first, *others))
    assert len(inner.steps) < 0.7 * 4 * 40
    assert max(len(step) for step in inner.steps) == 4


def test_a_request_that_finds_the_engine_idle_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        seconds = 0.0

        def perf_counter(self) -> float:
            return self.seconds

    clock = Clock()
    monkeypatch.setattr("rekindle.engine.batching.time", clock)
    monkeypatch.setattr("rekindle.engine.batching._RETURN_SECONDS", 600.0)
    engine = BatchingEngine(FakeEngine())
    Asking(engine, prompt(5), 4).run()
    clock.seconds = 601.0
    later = Asking(engine, prompt(6), 4)
    later.start()
    later.join(60)
    assert not later.is_alive() and later.error is None


def test_without_sharing_every_row_is_computed_alone_and_whole() -> None:
    inner = Watched()
    engine = BatchingEngine(inner, together=False)
    together(inner, [Asking(engine, prompt(90, number), 6) for number in range(3)])
    assert all(len(step) == 1 for step in inner.steps)
    assert sorted(step[0] for step in inner.steps) == [1] * 15 + [90] * 3


@pytest.mark.usefixtures("company")
def test_a_long_prompt_is_cut_so_that_replies_go_on_meanwhile() -> None:
    inner = Watched()
    inner.prefill_tokens = 64  # a fast machine may compute all of it within the time that others can wait
    engine = BatchingEngine(inner)
    writer, reader = Asking(engine, prompt(3), 60), Asking(engine, prompt(600, 1), 1)
    meet(inner, Asking(engine, prompt(5), 1), [writer, reader])
    assert writer.error is None and reader.error is None
    pieces = [step for step, owners in zip(inner.steps, inner.sequences, strict=True) if reader.sequence in owners]
    assert len(pieces) > 2
    assert any(len(step) == 2 and 1 in step for step in pieces)
    assert np.array_equal(reader.logits[0], alone(reader.prompt, 1)[0])


def test_a_request_that_is_cancelled_leaves_the_others_alone_and_nothing_behind() -> None:
    inner = Watched()
    engine = BatchingEngine(inner)
    gone, stays = Asking(engine, prompt(900), 1), Asking(engine, prompt(5, 1), 30)
    inner.go.clear()
    gone.start()
    stays.start()
    assert inner.entered.wait(30)
    gone.cancelled.set()
    inner.go.set()
    gone.join(60)
    stays.join(60)
    assert isinstance(gone.error, Cancelled)
    assert gone.sequence.length == 0
    assert stays.error is None and len(stays.said) == 30


def test_only_the_row_whose_fault_it_is_fails() -> None:
    inner = Watched()
    engine = BatchingEngine(inner)
    asking = [Asking(engine, prompt(6, number), 10) for number in range(3)]
    inner.refuses = asking[1].sequence
    together(inner, asking)
    assert isinstance(asking[1].error, StepRefused)
    for request in (asking[0], asking[2]):
        assert request.error is None
        assert np.array_equal(request.logits[-1], alone(request.prompt, 10)[-1])


def test_a_call_of_several_rows_is_one_step_of_its_own() -> None:
    inner = Watched()
    engine = BatchingEngine(inner)
    one, two = (engine.open(30, engine.regime(30)) for _ in range(2))
    both = engine.step([Row.following(one, prompt(30), logits="all"), Row.following(two, prompt(20))])
    assert [len(found) for found in both] == [30, 1]
    assert inner.steps == [[30, 20]]
    assert np.array_equal(both[1], alone(prompt(20), 1)[0])


def test_a_row_of_no_token_is_refused_as_by_the_engine() -> None:
    engine = BatchingEngine(FakeEngine())
    with pytest.raises(StepRefused):
        engine.step([Row.following(engine.open(5, engine.regime(5)), [])])


def test_after_it_was_closed_every_call_raises() -> None:
    engine = BatchingEngine(FakeEngine())
    sequence = engine.open(5, engine.regime(5))
    engine.close()
    for rows in ([], [Row.following(sequence, [1, 2])]):
        with pytest.raises(Closed):
            engine.step(rows)


def test_when_the_thread_that_computes_is_interrupted_another_one_goes_on() -> None:
    inner = Watched()
    engine = BatchingEngine(inner)
    first = Asking(engine, prompt(5), 1)
    others = [Asking(engine, prompt(6 + number, number), 4) for number in (1, 2)]
    inner.refuses, inner.refusal = first.sequence, KeyboardInterrupt()
    meet(inner, first, others)
    assert isinstance(first.error, KeyboardInterrupt) and first.sequence.length == 0
    for request in others:
        assert request.error is None
        assert np.array_equal(request.logits[-1], alone(request.prompt, 4)[-1])


def test_a_caller_that_is_interrupted_while_it_waits_leaves_once_its_sequence_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = Watched()
    engine = BatchingEngine(inner)
    first, waits = Asking(engine, prompt(5), 8), Asking(engine, prompt(7, 1), 8)
    inner.go.clear()
    first.start()
    assert inner.entered.wait(30)

    class Interrupting(threading.Event):
        interrupted = False

        def wait(self, timeout: float | None = None) -> bool:
            if not self.interrupted and not inner.go.is_set():
                self.interrupted = True
                raise KeyboardInterrupt
            inner.go.set()
            return super().wait(timeout)

    monkeypatch.setattr("rekindle.engine.batching.StepCall", lambda *given: StepCall(*given, woken=Interrupting()))
    waits.run()
    monkeypatch.undo()
    first.join(60)
    assert isinstance(waits.error, KeyboardInterrupt) and waits.sequence.length == 0
    assert first.error is None and len(first.said) == 8


def meet(inner: Watched, first: Asking, others: Sequence[Asking]) -> None:
    """The others wait behind `first`, which is in the middle of a step, in their order."""
    inner.go.clear()
    inner.entered.clear()
    first.start()
    assert inner.entered.wait(30)
    engine: Any = first.engine
    for number, request in enumerate(others, 1):
        request.start()
        while engine._arrivals.qsize() < number:
            threading.Event().wait(0.001)
    inner.go.set()
    for request in (first, *others):
        request.join(60)
        assert not request.is_alive()


class Recomputing(Asking):
    """A request whose prompt is there: of a passage from another prompt it computes every third token, and its last."""

    def run(self) -> None:
        self.comes_back = False
        try:
            with taking(self.turn):
                self.logits = self.engine.step([self.row()])
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def row(self) -> Row:
        places = [*range(3, len(self.prompt) - 1, 3), len(self.prompt) - 1]
        whole = Span(0, len(self.prompt) - 1)
        present = (StayingFeed(whole, range(len(self.engine.layout.layers))),)
        tokens = [self.prompt[place] for place in places]
        return Row(self.sequence, tokens, places, "last", present, spread=KvDrift((whole,), 0.5))


def recomputing(engine: Any, given: list[int]) -> Recomputing:
    request = Recomputing(engine, given, 1)
    engine.step([replace(Row.following(request.sequence, given, logits="none"), until=len(engine.layout.layers))])
    assert request.sequence.length == 0
    return request


def mended_alone(given: list[int]) -> np.ndarray:
    request = recomputing(FakeEngine(), given)
    request.run()
    return request.logits[0]


@pytest.mark.usefixtures("company")
def test_recomputed_tokens_of_reused_passages_share_a_step_and_give_what_they_give_alone() -> None:
    inner = Watched()
    engine = BatchingEngine(inner)
    writing = [Asking(engine, prompt(4, number), 30) for number in (2, 3)]
    mending = recomputing(engine, prompt(90, 1))
    meet(inner, Asking(engine, prompt(5), 1), [*writing, mending])
    assert mending.error is None and np.array_equal(mending.logits[0], mended_alone(prompt(90, 1)))
    for request in writing:
        assert all(np.array_equal(a, b) for a, b in zip(request.logits, alone(request.prompt, 30), strict=True))
    (shared,) = [owners for owners in inner.sequences[1:] if mending.sequence in owners]
    assert len(shared) == 3


@pytest.mark.usefixtures("company")
def test_recomputed_tokens_are_not_computed_twice_when_a_step_fails_by_another_s_fault() -> None:
    inner = Watched()
    engine = BatchingEngine(inner)
    faulty, writing = Asking(engine, prompt(4, 2), 3), Asking(engine, prompt(4, 3), 3)
    mending = recomputing(engine, prompt(90, 1))
    inner.refuses, inner.refusal = faulty.sequence, OutOfMemory("nothing left")
    meet(inner, Asking(engine, prompt(5), 1), [faulty, writing, mending])
    assert isinstance(faulty.error, OutOfMemory) and isinstance(mending.error, KvLost)
    assert all(np.array_equal(a, b) for a, b in zip(writing.logits, alone(writing.prompt, 3), strict=True))
    assert sum(mending.sequence in owners for owners in inner.sequences[1:]) == 1


def test_recomputed_tokens_are_never_cut_and_wait_if_they_do_not_fit_behind_others() -> None:
    engine, scheduler = FakeEngine(), StepScheduler(FairShare(), 512)
    long, short = recomputing(engine, prompt(900, 1)), recomputing(engine, prompt(90, 2))
    calls = [StepCall([request.row()], Requester()) for request in (long, short)]
    for call in calls:
        assert call.recomputes and not call.goes_alone and not call.divisible
        scheduler.add(call)
    step = scheduler.next_step()
    assert [(part.call, part.tokens) for part in step] == [(calls[0], calls[0].tokens)]
    scheduler.computed(step, 1.0)
    assert [part.call for part in scheduler.next_step()] == [calls[1]]


def test_a_row_whose_loads_may_fail_or_that_looks_inside_goes_alone() -> None:
    engine = FakeEngine()
    row = recomputing(engine, prompt(90)).row()
    (present,) = row.feeds
    stored = recomputing(engine, prompt(90))
    engine.step([Row.following(stored.sequence, stored.prompt)])
    loads = replace(row, feeds=(HeldKv(stored.sequence.export(present.span)),))
    for odd in (loads, replace(row, until=1, logits="none"), replace(row, logits="all")):
        call = StepCall([odd], Requester())
        assert call.goes_alone and not call.recomputes


def finishing_order(inner: Watched, asking: Sequence[Asking]) -> list[int]:
    assert all(request.error is None for request in asking)
    last = {
        number: max(place for place, owners in enumerate(inner.sequences) if request.sequence in owners)
        for number, request in enumerate(asking)
    }
    return sorted(last, key=lambda number: last[number])


def test_the_foreground_comes_before_the_background() -> None:
    inner = Watched()
    engine = BatchingEngine(inner, together=False)
    first = Asking(engine, prompt(5), 1)
    asking = [
        Asking(engine, prompt(20, 1), 1, Requester("a", background=True)),
        Asking(engine, prompt(20, 2), 1, Requester("b")),
    ]
    meet(inner, first, asking)
    assert finishing_order(inner, asking) == [1, 0]


def test_who_was_served_least_comes_first() -> None:
    inner, shares = Watched(), FairShare()
    engine = BatchingEngine(inner, shares, together=False)
    for app in ("greedy", "modest"):
        shares.enter(app)
    shares.serve("greedy", 100)
    asking = [
        Asking(engine, prompt(20, 1), 1, Requester("greedy")),
        Asking(engine, prompt(20, 2), 1, Requester("modest")),
    ]
    meet(inner, Asking(engine, prompt(5), 1), asking)
    assert finishing_order(inner, asking) == [1, 0]


def test_an_app_that_comes_back_has_no_claim_to_what_it_missed() -> None:
    shares = FairShare()
    shares.enter("old")
    shares.serve("old", 1000)
    shares.enter("new")
    assert shares.served("new") == shares.served("old") == 1000
    shares.serve("new", 5)
    shares.leave("new")
    shares.serve("old", 1)
    shares.enter("new")
    assert shares.served("new") == 1005


def test_of_apps_that_left_only_so_many_are_remembered() -> None:
    shares = FairShare()
    for number in range(1100):
        shares.enter(f"app {number}")
        shares.leave(f"app {number}")
    assert len(shares._served) <= 1024
