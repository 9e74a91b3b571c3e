"""Several at once: rows in one batch, exports beside steps, requests that wait for the engine's memory."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.core.kv import Kv, Span
from rekindle.core.reply import Reply
from rekindle.engine.base import Row
from rekindle.errors import Cancelled
from tests.engine.contract import Stored
from tests.parity.engines import KINDS, PRINCIPAL, WITH_SPANS, assert_same, each, make
from tests.parity.sessions import PROMPT, N, ask, assert_right, is_open, opened, tokens_of, watch

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("one_thread")]

every = each(*KINDS)
principal = each(*PRINCIPAL)
crowded = each("llamacpp", "llamacpp-opaque")


@every
def test_sequences_decoded_in_one_batch_say_what_each_says_alone(kind: str) -> None:
    """Of different lengths, some of them ending earlier, in any company."""
    engine: Any = make(kind)
    prompts = [tokens_of(5 + 11 * number, seed=number) for number in range(6)]
    alone: list[list[int]] = []
    scores: list[list[np.ndarray]] = []
    for prompt in prompts:
        sequence = engine.open(128, engine.regime(128))
        (logits,) = engine.step([Row.following(sequence, prompt)])
        said, seen = [], []
        for _ in range(12):
            seen.append(logits)
            said.append(int(logits[-1].argmax()))
            (logits,) = engine.step([Row.following(sequence, said[-1:])])
        alone.append(said)
        scores.append(seen)
        sequence.close()
    sequences = [engine.open(128, engine.regime(128)) for _ in prompts]
    rows = [Row.following(sequence, prompt) for sequence, prompt in zip(sequences, prompts, strict=True)]
    together = engine.step(rows)
    ties = 0
    for turn in range(12):
        going_on = [number for number in range(6) if turn < 12 - number]
        for number in going_on:
            assert_same(kind, together[going_on.index(number)], scores[number][turn])
            ties += int(together[going_on.index(number)][-1].argmax()) != alone[number][turn]
        staying = [number for number in going_on if turn + 1 < 12 - number]
        rows = [Row.following(sequences[number], [alone[number][turn]]) for number in staying]
        together = engine.step(rows) if rows else []
    assert ties <= (2 if KINDS[kind].tolerance > 1e-2 else 0)
    engine.close()


@each(*WITH_SPANS, "llamacpp-flash")
def test_kv_may_be_exported_while_another_thread_steps(kind: str) -> None:
    """Of the sequence that grows, behind what is exported, and of one beside it."""
    engine: Any = make(kind)
    growing, beside = (engine.open(400, engine.regime(400)) for _ in range(2))
    engine.step([Row.following(growing, PROMPT, logits="none"), Row.following(beside, PROMPT[::-1], logits="none")])
    expected = [growing.export(Span(0, N)), beside.export(Span(0, N))]
    errors: list[BaseException] = []

    def grow() -> None:
        try:
            for token in tokens_of(200, seed=1):
                engine.step([Row.following(growing, [token])])
        except BaseException as error:  # noqa: BLE001  (shown below)
            errors.append(error)

    thread = threading.Thread(target=grow)
    thread.start()
    exports = 0
    while thread.is_alive():
        start = exports * 7 % (N - 1)
        for sequence, known in zip((growing, beside), expected, strict=True):
            assert_part(sequence.export(Span(start, N)), known, start)
        exports += 1
    thread.join()
    assert errors == [] and exports > 3
    assert growing.length == N + 200
    assert_part(growing.export(Span(0, N)), expected[0], 0)
    engine.close()


def assert_part(got: Kv, whole: Kv, start: int) -> None:
    for ours, theirs in zip(got.layers, whole.layers, strict=True):
        np.testing.assert_array_equal(ours.keys, theirs.keys[:, start:])
        np.testing.assert_array_equal(ours.values, theirs.values[:, start:])


@each("llamacpp", "llamacpp-f32", "llamacpp-flash", "llamacpp-q8")
def test_kv_goes_into_cells_that_are_scattered_and_comes_out_in_order(kind: str) -> None:
    engine: Any = make(kind, kv_tokens=512, context_tokens=512)
    whole = engine.open(512, engine.regime(512))
    tokens = tokens_of(200, seed=3)
    engine.step([Row.following(whole, tokens[:199], logits="none")])
    kv = whole.export(Span(0, 199))
    (expected,) = engine.step([Row.following(whole, tokens[199:])])
    whole.close()
    sequences = [engine.open(128, engine.regime(128)) for _ in range(4)]
    for number in range(128):  # one cell each, in turn
        engine.step([Row.following(sequence, [5 + number]) for sequence in sequences])
    sequences.pop().close()
    sequences.pop(1).close()
    target = engine.open(256, engine.regime(256))
    (got,) = engine.step([Row(target, tokens[199:], [199], feeds=(Stored(kv),))])
    assert_same(kind, got, expected)
    for count in (0, 100):
        target.truncate(count)
        (got,) = engine.step([Row(target, tokens[199:], [199], feeds=(Stored(kv, Span(count, 199)),))])
        assert_same(kind, got, expected)
        assert_part(target.export(Span(0, 199)), kv, 0)
    engine.close()


def tight(kind: str, **options: int) -> partial[Any]:
    """An engine with cells for about one whole context."""
    if not kind.startswith("llamacpp"):
        return partial(make, kind)
    return partial(make, kind, context_tokens=500, kv_tokens=500, **options)


# -- waiting for room ----------------------------------------------------------------------------------------------


def ask_all(session: Any, prompts: list[list[int]], count: int) -> list[Reply]:
    """All of them at once, each in a thread of its own."""
    replies: dict[int, Reply] = {}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            replies[number] = ask(session, prompts[number], count)
        except BaseException as error:  # noqa: BLE001  (shown below)
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == [] and len(replies) == len(prompts)
    return [replies[number] for number in range(len(prompts))]


@crowded
@pytest.mark.parametrize("small", [{}, {"sequences": 2}, {"sequences": 3}], ids=str)
@pytest.mark.parametrize("cache", ["on", "off"])
def test_seventeen_requests_at_once_wait_for_each_other_and_all_succeed(
    kind: str, small: dict[str, int], cache: str, tmp_path: Path
) -> None:
    folder = tmp_path / "cache" if cache == "on" else "off"
    with opened(tight(kind, **small), folder) as session:
        sequences = watch(session.engine)
        prompts = [[*PROMPT, *tokens_of(30 + 9 * number, seed=number)] for number in range(17)]
        for reply, prompt in zip(ask_all(session, prompts, 8), prompts, strict=True):
            assert_right(kind, reply, prompt, 8)
        session.cache.unpark()
        assert not any(map(is_open, sequences))
        assert session.cache._memory_gate._running == 0
        cells: Any = session.engine
        assert cells._cells._reserved == 0
        # Nothing was lost of the room: the largest request that fits at all still does.
        largest = tokens_of(480, seed=99)
        assert_right(kind, ask(session, largest, 12), largest, 12)


@crowded
def test_a_request_that_waits_for_room_can_be_cancelled(kind: str, tmp_path: Path) -> None:
    with opened(tight(kind), tmp_path / "cache") as session:
        running = session.stream(PROMPT, max_tokens=400, min_tokens=400)
        next(running)
        waiting = session.stream(tokens_of(200, seed=1), max_tokens=50)
        started = time.monotonic()
        threading.Timer(0.3, waiting.cancel).start()
        assert list(waiting) == []
        with pytest.raises(Cancelled):
            _ = waiting.reply
        assert time.monotonic() - started > 0.2, "it waited until then"
        assert_right(kind, running.reply, PROMPT, 400)
        assert session.cache._memory_gate._running == 0


@crowded
@pytest.mark.parametrize("how", ["close", "cancel", "finish"])
def test_room_is_there_again_however_a_request_ends(kind: str, how: str, tmp_path: Path) -> None:
    with opened(tight(kind), tmp_path / "cache") as session:
        question = tokens_of(300, seed=2)
        for _ in range(5):
            running = session.stream(PROMPT, max_tokens=300, min_tokens=300)
            next(running)
            if how == "finish":
                _ = running.reply
            else:
                getattr(running, how)()
                assert list(running) == []
            assert_right(kind, ask(session, question), question)
        assert session.cache._memory_gate._running == 0


@crowded
def test_what_only_waits_in_the_engine_makes_room(kind: str, tmp_path: Path) -> None:
    """A chat that grows in an engine that is otherwise full of parked contexts."""
    with opened(tight(kind), tmp_path / "cache", memory_limit="64MB") as session:
        known = list(PROMPT)
        for turn in range(4):
            other = tokens_of(250, seed=turn)
            assert_right(kind, ask(session, other), other)
            question = [*known, *tokens_of(60, seed=50 + turn)]
            reply = ask(session, question, 20)
            assert_right(kind, reply, question, 20)
            known = [*question, *reply.tokens[:-1]]
        assert session.cache._memory_gate._running == 0


@principal
def test_a_context_that_outgrows_what_is_free_is_computed_elsewhere(kind: str, tmp_path: Path) -> None:
    """It goes on from where it is, or from the store; either way the same answer."""
    with opened(tight(kind), tmp_path / "cache", memory_limit="64MB") as session:
        first = ask(session, PROMPT, 5)
        known = [*PROMPT, *first.tokens[:-1]]
        session.flush()
        for count in (20, 200, 380):
            following = [*known, 251]
            reply = ask(session, following, count)
            assert_right(kind, reply, following, count)
            assert reply.reuse.reused == len(known)
            known = [*following, *reply.tokens[:3]]
            session.flush()
            ask(session, known, 0)
