"""The engine contract, the same for every engine: rows, feeds, selectors, probes, failures.

What `Capabilities` say an engine can do must hold; what it cannot do is refused before anything is computed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rekindle.core.kv import Kv, Span
from rekindle.engine.base import Engine, MovedFeed, Row
from rekindle.engine.fake import FakeEngine
from rekindle.engine.hooks import AttentionMap, Probe, Reading
from rekindle.errors import Cancelled, Closed, KvLost, OutOfMemory, StepRefused
from tests.engine.contract import Choosing, Failing, Garbage, Stored
from tests.faults.folders import REPOSITORY
from tests.parity.engines import KINDS, is_installed, make

COUNT = 40
TOKENS = np.random.default_rng(5).integers(3, 250, COUNT).tolist()

FAMILIES = ("llama", "gemma3_text", "gemma2")  # of transformers
LLAMAS = ("llamacpp", "llamacpp-f32", "llamacpp-sliding", "llamacpp-opaque")  # of llama.cpp
ONNX = ("onnx", "onnx-f16", "onnx-packed")  # of ONNX Runtime
SCATTERED = ("fake", *FAMILIES)
SPANS_BEHIND = ("llamacpp", "llamacpp-f32", "llamacpp-sliding", *ONNX)  # KV is fed behind what is present
WITH_SPANS = (*SCATTERED, *SPANS_BEHIND)


def kind_of(name: str) -> str:
    return "hf" if name in FAMILIES else name


def of(*names: str) -> pytest.MarkDecorator:
    """For engines of these names, where they are installed."""
    found = [name for name in names if is_installed(kind_of(name))]
    marked = [pytest.param(name, marks=[pytest.mark.llamacpp] if name in LLAMAS else []) for name in found]
    return pytest.mark.parametrize("engine", marked, indirect=True, scope="module")


every = of(*SCATTERED, *LLAMAS, *ONNX)
with_spans = of(*WITH_SPANS)
scattered = of(*SCATTERED)
llamas = of(*LLAMAS)
behind = of(*LLAMAS, *ONNX)  # rows are the tokens that come next


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine that also knows how far it may round."""
    name = request.param
    if name in FAMILIES:
        from tests.tiny import tiny_engine

        made: Any = tiny_engine(name)
    else:
        made = make(name, kv_tokens=4096) if name in LLAMAS else make(name)
    made.tolerance = KINDS[kind_of(name)].tolerance
    yield made
    made.close()


@pytest.fixture
def reference(engine: Engine) -> tuple[np.ndarray, Kv]:
    """Logits and KV of the whole prompt in one step."""
    return computed(engine, TOKENS)


@pytest.fixture
def logits(engine: Engine) -> np.ndarray:
    """Logits of the whole prompt in one step."""
    return computed(engine, TOKENS, with_kv=False)[0]


def computed(engine: Engine, tokens: list[int], *, with_kv: bool = True) -> Any:
    sequence = engine.open(len(tokens), engine.regime(len(tokens)))
    (logits,) = engine.step([Row.following(sequence, tokens, logits="all")])
    kv = sequence.export(Span(0, len(tokens))) if with_kv else None
    sequence.close()
    return logits, kv


def assert_same(engine: Any, got: np.ndarray, expected: np.ndarray) -> None:
    if isinstance(engine, FakeEngine):
        np.testing.assert_array_equal(got, expected)
    else:
        got, expected = got.astype(np.float32), expected.astype(np.float32)
        assert np.abs(got - expected).max() <= engine.tolerance * max(1.0, np.abs(expected).max())


def assert_same_kv(engine: Engine, got: Kv, expected: Kv) -> None:
    for new, old in zip(got.layers, expected.layers, strict=True):
        assert_same(engine, new.keys, old.keys)
        assert_same(engine, new.values, old.values)


def opened(engine: Engine, capacity: int = COUNT) -> Any:
    return engine.open(capacity, engine.regime(capacity))


def has_spans(engine: Engine) -> bool:
    return engine.capabilities.spans


@every
def test_any_cut_into_steps_gives_the_same(engine: Engine) -> None:
    logits, kv = computed(engine, TOKENS, with_kv=has_spans(engine))
    for cuts in ([0, COUNT], [0, 1, 2, COUNT], [0, 13, 26, COUNT], [0, COUNT - 1, COUNT]):
        sequence = opened(engine)
        parts = [engine.step([Row.following(sequence, TOKENS[a:b], logits="all")])[0] for a, b in pairwise(cuts)]
        assert_same(engine, np.concatenate(parts), logits)
        if kv is not None:
            assert_same_kv(engine, sequence.export(Span(0, COUNT)), kv)
        sequence.close()


@every
def test_logits_come_as_asked(engine: Engine, logits: np.ndarray) -> None:
    sequences = [opened(engine) for _ in range(3)]
    none, last, every = engine.step(
        [Row.following(s, TOKENS, logits=w) for s, w in zip(sequences, ("none", "last", "all"), strict=True)]
    )
    assert none.shape == (0, logits.shape[1])
    assert_same(engine, last, logits[-1:])
    assert_same(engine, every, logits)
    for sequence in sequences:
        sequence.close()


@scattered
def test_garbage_is_repaired_by_recomputing_exactly_its_positions(
    engine: Engine, reference: tuple[np.ndarray, Kv]
) -> None:
    """KV of scattered positions is overwritten in every layer; recomputing just those gives the right KV back."""
    logits, kv = reference
    broken = [3, 4, 11, 20, 33]
    layers = len(engine.layout.layers)
    feeds = (Stored(kv, Span(0, COUNT - 1)), *(Garbage(Span(p, p + 1), layers) for p in broken))
    chosen = [*broken, COUNT - 1]
    sequence = opened(engine)
    (got,) = engine.step([Row(sequence, [TOKENS[p] for p in chosen], chosen, logits="all", feeds=feeds)])
    assert_same(engine, got, logits[chosen])
    assert_same_kv(engine, sequence.export(Span(0, COUNT)), kv)


@with_spans
def test_garbage_left_alone_shows(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    """The test above would mean nothing if fed KV were not really read."""
    logits, kv = reference
    feeds = (Stored(kv, Span(0, COUNT - 1)), Garbage(Span(30, 34), len(engine.layout.layers)))
    sequence = opened(engine)
    (got,) = engine.step([Row(sequence, TOKENS[-1:], [COUNT - 1], feeds=feeds)])
    assert np.abs(got[0] - logits[-1]).max() > 1e-2
    sequence.close()


@scattered
def test_a_token_dropped_between_layers_uses_fed_kv_from_there_on(
    engine: Engine, reference: tuple[np.ndarray, Kv]
) -> None:
    """Lower layers computed, upper layers fed: the split that streaming uses."""
    logits, kv = reference
    layers = len(engine.layout.layers)
    start, stop = 10, 25
    feed = Stored(kv, Span(start, stop), range(2, layers))
    selector = Choosing(lambda layer, p: [x for x in p if layer < 2 or not start <= x < stop])
    sequence = opened(engine)
    (got,) = engine.step([Row(sequence, TOKENS, range(COUNT), feeds=(feed,), selector=selector)])
    assert_same(engine, got, logits[-1:])
    assert_same_kv(engine, sequence.export(Span(0, COUNT)), kv)
    assert feed.filled == list(range(2, layers))
    assert [layer for layer, _ in selector.seen] == list(range(1, layers))
    assert all(len(seen) == COUNT - (stop - start) for layer, seen in selector.seen if layer > 2)


@with_spans
def test_several_feeds_may_cover_the_layers_together(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    logits, kv = reference
    layers = len(engine.layout.layers)
    halves = (Stored(kv, Span(0, COUNT - 1), range(2)), Stored(kv, Span(0, COUNT - 1), range(2, layers)))
    sequence = opened(engine)
    (got,) = engine.step([Row(sequence, TOKENS[-1:], [COUNT - 1], feeds=halves)])
    assert_same(engine, got, logits[-1:])
    sequence.close()
    if engine.capabilities.recompute == "scattered":
        dropping = Choosing(lambda layer, p: p[-1:].tolist())
        (got,) = engine.step([Row(opened(engine), TOKENS, range(COUNT), feeds=halves, selector=dropping)])
        assert_same(engine, got, logits[-1:])


@with_spans
def test_feeds_side_by_side_fill_what_lies_between(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    """Behind what is present, too."""
    logits, kv = reference
    for kept in (0, 1, 9):
        sequence = opened(engine)
        if kept:
            engine.step([Row.following(sequence, TOKENS[:kept], logits="none")])
        feeds = (Stored(kv, Span(kept, 13)), Stored(kv, Span(13, 14)), Stored(kv, Span(14, 33)))
        (got,) = engine.step([Row(sequence, TOKENS[33:], range(33, COUNT), "all", feeds)])
        assert_same(engine, got, logits[33:])
        assert_same_kv(engine, sequence.export(Span(0, COUNT)), kv)
        sequence.close()


@scattered
def test_everything_may_be_dropped_when_nothing_is_read(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    """Only the feeds go on then, to the last layer; a probe sees what was still there."""
    _, kv = reference
    readings: list[Reading] = []
    layers = len(engine.layout.layers)
    fed = Stored(kv, Span(0, COUNT - 1))
    row = Row(
        opened(engine), TOKENS[:-1], range(COUNT - 1), "none", (Stored(kv, Span(0, COUNT - 2)),),
        Choosing(lambda layer, p: p[-1:].tolist()), Probe(readings.append, queries=Span(0, COUNT)),
    )  # fmt: skip
    engine.step([row])
    assert len(readings) == layers
    sequence = opened(engine)
    engine.step([Row.following(sequence, TOKENS, logits="none")])
    everything = Row(
        sequence,
        TOKENS[:9],
        range(9),
        "none",
        (),
        Choosing(lambda layer, p: []),
        Probe(readings.append, deviation=True),
    )
    engine.step([everything])
    assert len(readings) == layers + 1
    assert fed.filled == []


@scattered
def test_tokens_dropped_in_one_row_leave_the_other_rows_alone(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    logits, kv = reference
    first, second = opened(engine), opened(engine)
    keep_last = Choosing(lambda layer, p: p[-1:].tolist())
    rows = [
        Row(first, TOKENS, range(COUNT), selector=keep_last, feeds=(Stored(kv, Span(0, COUNT - 1)),)),
        Row.following(second, TOKENS[:23], logits="all"),
    ]
    got_first, got_second = engine.step(rows)
    assert_same(engine, got_first, logits[-1:])
    assert_same(engine, got_second, logits[:23])


@scattered
def test_what_a_selector_may_not_do_is_refused(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    _, kv = reference
    cases = {
        "not in the row": lambda layer, p: [*p.tolist(), 99],
        "last token": lambda layer, p: p[:-1].tolist(),
        "no other KV": lambda layer, p: p[1:].tolist(),
    }
    for words, choice in cases.items():
        sequence = opened(engine)
        with pytest.raises(StepRefused, match=words):
            engine.step([Row(sequence, TOKENS, range(COUNT), selector=Choosing(choice))])
        assert sequence.length == 0
    fed = Row(
        opened(engine),
        TOKENS,
        range(COUNT),
        "all",
        (Stored(kv, Span(0, 5)),),
        Choosing(lambda layer, p: p[5:].tolist()),
    )
    with pytest.raises(StepRefused, match="all wanted"):
        engine.step([fed])


@every
def test_rows_that_break_the_contract_are_refused(engine: Engine) -> None:
    sequence = opened(engine)
    cases = [
        ([], "at least one row"),
        ([Row.following(sequence, [5]), Row.following(sequence, [5])], "one row of a step"),
        ([Row(sequence, [5, 6], [0])], "one position a token"),
        ([Row(sequence, [], [])], "one position a token"),
        ([Row(sequence, [5, 6], [1, 0])], "sorted"),
        ([Row(sequence, [5, 6], [0, 0])], "sorted"),
        ([Row(sequence, [5], [-1])], "sorted"),
        ([Row(sequence, [10**6], [0])], "vocabulary"),
        ([Row(sequence, [-1], [0])], "vocabulary"),
        ([Row(sequence, [5], [COUNT])], "capacity"),
        ([Row(sequence, [5], [1])], "gap"),
        ([Row(sequence, [5, 6], [0, 2])], "Position 1 is neither"),
        ([Row(sequence, [5], [0], logits="lst")], "'lst' is unknown"),
    ]
    for rows, words in cases:
        with pytest.raises(StepRefused, match=words):
            engine.step(rows)
        assert sequence.length == 0
    sequence.close()


@with_spans
def test_feeds_that_break_the_contract_are_refused(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    _, kv = reference
    sequence = opened(engine)
    layers = len(engine.layout.layers)
    cases = [
        (Stored(kv, Span(0, 2)), "Position 2 is neither"),
        (Stored(kv, Span(0, 3), range(1, layers)), "Position 0 is neither"),
        (Stored(kv, Span(0, 3), range(layers - 1)), "Position 0 is neither"),
        (Stored(kv, Span(0, 4)), "must be computed"),
        (Garbage(Span(0, 3), layers + 1), "covers layers"),
    ]
    for feed, words in cases:
        with pytest.raises(StepRefused, match=words):
            engine.step([Row(sequence, [5], [3], feeds=(feed,))])
        assert sequence.length == 0
    sequence.close()


@behind
def test_what_cannot_be_done_is_refused_before_anything_is_computed(engine: Any) -> None:
    """Scattered rows, rows over what is present, selectors, probes; and feeds, where its KV cannot be taken apart."""
    kv = computed(engine, TOKENS)[1] if has_spans(engine) else None
    layers = len(engine.layout.layers)
    sequence, beside = opened(engine), opened(engine)
    engine.step([Row.following(sequence, TOKENS[:20], logits="none")])
    state = sequence.export(Span(0, 20)) if has_spans(engine) else sequence.snapshot()
    fed = Garbage(Span(20, 30), layers)
    cases = [
        Row(sequence, [5], [3]),
        Row(sequence, TOKENS[19:25], range(19, 25)),
        Row(sequence, [5, 6], [20, 22], feeds=(Garbage(Span(21, 22), layers),)),
        Row(sequence, [5, 6], [7, 20]),
        Row(sequence, TOKENS[20:], range(20, COUNT), selector=Choosing(lambda layer, p: p.tolist())),
        Row(sequence, TOKENS[20:], range(20, COUNT), probe=Probe(lambda reading: None, deviation=True)),
        Row(sequence, TOKENS[30:], range(30, COUNT), feeds=(Garbage(Span(15, 30), layers),)),
        Row(sequence, TOKENS[20:], range(20, COUNT), feeds=(Garbage(Span(3, 5), layers),)),
        Row(sequence, TOKENS[20:], range(20, COUNT), feeds=(fed,)),
    ]
    if not has_spans(engine):
        cases.append(Row(sequence, TOKENS[30:], range(30, COUNT), feeds=(fed,)))
    for row in cases:
        with pytest.raises(StepRefused):  # also for those that would have been fine by themselves
            engine.step([Row.following(beside, TOKENS), row])
        assert (sequence.length, beside.length) == (20, 0)
    if kv is not None:
        assert_exactly(sequence.export(Span(0, 20)), state)
    else:
        assert sequence.snapshot() == state
    with pytest.raises(StepRefused, match="another engine"):
        engine.step([Row.following(FakeEngine().open(9, "plain"), [5])])
    sequence.close()
    beside.close()


def assert_exactly(got: Kv, expected: Kv) -> None:
    for new, old in zip(got.layers, expected.layers, strict=True):
        np.testing.assert_array_equal(new.keys, old.keys)
        np.testing.assert_array_equal(new.values, old.values)


@with_spans
def test_truncate_and_export_keep_to_what_is_present(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    logits, _ = reference
    sequence = opened(engine)
    engine.step([Row.following(sequence, TOKENS[:30], logits="none")])
    sequence.truncate(20)
    assert sequence.length == 20
    for refused in (lambda: sequence.truncate(21), lambda: sequence.export(Span(0, 21))):
        with pytest.raises(StepRefused):
            refused()
    (got,) = engine.step([Row.following(sequence, TOKENS[20:])])
    assert_same(engine, got, logits[-1:])
    part = sequence.export(Span(5, 9))
    assert part.layers[0].keys.shape[1] == 4
    np.testing.assert_array_equal(part.layers[1].keys, sequence.export(Span(0, COUNT)).layers[1].keys[:, 5:9])
    sequence.close()


@of("llamacpp-opaque")
def test_without_spans_all_is_forgotten_or_nothing(engine: Engine, logits: np.ndarray) -> None:
    sequence = opened(engine)
    engine.step([Row.following(sequence, TOKENS[:30], logits="none")])
    for refused in (
        lambda: sequence.truncate(20),
        lambda: sequence.truncate(31),
        lambda: sequence.truncate(-1),
        lambda: sequence.export(Span(0, 20)),
        lambda: sequence.append(Kv(Span(0, 0), engine.layout, ())),
    ):
        with pytest.raises(StepRefused):
            refused()
        assert sequence.length == 30
    sequence.truncate(30)
    (got,) = engine.step([Row.following(sequence, TOKENS[30:])])
    assert_same(engine, got, logits[-1:])
    sequence.truncate(0)
    assert sequence.length == 0
    (got,) = engine.step([Row.following(sequence, TOKENS)])
    assert_same(engine, got, logits[-1:])
    sequence.close()


@of("llamacpp-opaque")
def test_a_snapshot_makes_another_sequence_what_this_one_was(engine: Engine, logits: np.ndarray) -> None:
    sequence = opened(engine)
    engine.step([Row.following(sequence, TOKENS[:30], logits="none")])
    snapshot = sequence.snapshot()
    engine.step([Row.following(sequence, TOKENS[::-1][:9], logits="none")])
    others = [opened(engine) for _ in range(3)]
    for other in others:  # as often as one likes, next to the one it was taken from
        other.restore(memoryview(snapshot), 30)
        assert other.length == 30
    for other in others:
        (got,) = engine.step([Row.following(other, TOKENS[30:])])
        assert_same(engine, got, logits[-1:])
    with pytest.raises(StepRefused, match="empty"):
        sequence.restore(snapshot, 30)
    for length in (0, -1, COUNT + 1):
        with pytest.raises(StepRefused):
            fresh = opened(engine)
            try:
                fresh.restore(snapshot, length)
            finally:
                fresh.close()
    for broken in (b"", b"rubbish" * 99, snapshot[:-1], snapshot[: len(snapshot) // 2], snapshot + b"more"):
        fresh = opened(engine)
        with pytest.raises(KvLost):
            fresh.restore(broken, 30)
        assert fresh.length == 0
        (got,) = engine.step([Row.following(fresh, TOKENS)])
        assert_same(engine, got, logits[-1:])
        fresh.close()
    for one in (sequence, *others):
        one.close()


@with_spans
def test_with_spans_there_are_no_snapshots(engine: Engine) -> None:
    sequence = opened(engine)
    engine.step([Row.following(sequence, TOKENS, logits="none")])
    for refused in (sequence.snapshot, lambda: sequence.restore(b"anything", 3)):
        with pytest.raises(StepRefused):
            refused()
    assert sequence.length == COUNT
    sequence.close()


@of(*SCATTERED, *ONNX)
def test_an_engine_that_feeds_rows_appends_nothing(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    sequence = opened(engine)
    with pytest.raises(StepRefused):
        sequence.append(reference[1])
    assert sequence.length == 0


@of("llamacpp", "llamacpp-f32", "llamacpp-sliding")
def test_kv_is_appended_only_where_it_fits(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    _, kv = reference
    sequence = opened(engine, COUNT + 5)
    engine.step([Row.following(sequence, TOKENS[:6], logits="none")])
    before = sequence.export(Span(0, 6))
    other = computed(FakeEngine(), TOKENS)[1]
    for unfit in (kv, other):
        with pytest.raises(StepRefused):
            sequence.append(unfit)
        assert sequence.length == 6
    assert_exactly(sequence.export(Span(0, 6)), before)
    sequence.close()


@with_spans
def test_an_export_is_a_copy(engine: Engine) -> None:
    sequence = opened(engine)
    engine.step([Row.following(sequence, TOKENS, logits="none")])
    kv = sequence.export(Span(0, COUNT))
    before = kv.layers[0].keys.copy()
    sequence.truncate(0)
    engine.step([Row.following(sequence, TOKENS[::-1], logits="none")])
    np.testing.assert_array_equal(kv.layers[0].keys, before)
    sequence.close()


@scattered
def test_a_failing_feed_leaves_nothing_half_computed(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    logits, _ = reference
    layers = len(engine.layout.layers)
    sequence = opened(engine)
    engine.step([Row.following(sequence, TOKENS[:20], logits="none")])
    row = Row(sequence, TOKENS[30:], range(30, COUNT), feeds=(Failing(Span(15, 30), layers, layers - 1),))
    with pytest.raises(OSError, match="disk is gone"):
        engine.step([row])
    assert sequence.length == 15
    (got,) = engine.step([Row.following(sequence, TOKENS[15:])])
    assert_same(engine, got, logits[-1:])


@of(*SPANS_BEHIND)
@pytest.mark.parametrize("kept", [0, 15])
def test_a_failing_feed_leaves_every_sequence_as_it_was(engine: Engine, kept: int, logits: np.ndarray) -> None:
    """Where feeds lie behind what is present, and all of them come first: nothing is lost at all."""
    layers = len(engine.layout.layers)
    sequence, beside = opened(engine), opened(engine)
    engine.step([Row.following(beside, TOKENS[:9], logits="none")])
    if kept:
        engine.step([Row.following(sequence, TOKENS[:kept], logits="none")])
    for broken in range(layers):
        row = Row(sequence, TOKENS[30:], range(30, COUNT), feeds=(Failing(Span(kept, 30), layers, broken),))
        with pytest.raises(OSError, match="disk is gone"):
            engine.step([Row.following(beside, TOKENS[9:]), row])
        assert (sequence.length, beside.length) == (kept, 9)
    got, other = engine.step([Row.following(sequence, TOKENS[kept:]), Row.following(beside, TOKENS[9:])])
    assert_same(engine, got, logits[-1:])
    assert_same(engine, other, logits[-1:])
    sequence.close()
    beside.close()


@behind
@pytest.mark.parametrize("kept", [0, 15])
def test_a_cancelled_step_leaves_nothing_half_computed(engine: Engine, kept: int, logits: np.ndarray) -> None:
    """What was present stays, where a part can be forgotten; else nothing does."""
    sequence, beside = opened(engine), opened(engine)
    if kept:
        engine.step([Row.following(sequence, TOKENS[:kept], logits="none")])
    with pytest.raises(Cancelled):
        engine.step([Row.following(beside, TOKENS), Row.following(sequence, TOKENS[kept:])], lambda: True)
    assert beside.length == 0
    assert sequence.length == (kept if has_spans(engine) else 0)
    (got,) = engine.step([Row.following(sequence, TOKENS[sequence.length :])], lambda: False)
    assert_same(engine, got, logits[-1:])
    sequence.close()
    beside.close()


@behind
def test_a_step_may_be_cancelled_while_it_computes(engine: Engine) -> None:
    """It ends at once, and those that come later are not affected."""
    long = np.random.default_rng(6).integers(3, 250, 500).tolist()
    expected, _ = computed(engine, long, with_kv=False)
    looks: list[Callable[[], bool]] = [lambda count=count: next(asked) >= count for count in range(4)]  # type: ignore[misc]
    stopped = 0
    for look in looks:
        asked = iter(range(10**6))
        sequence = opened(engine, 500)
        try:
            (got,) = engine.step([Row.following(sequence, long, logits="all")], look)
            assert_same(engine, got, expected)
            assert sequence.length == 500
        except Cancelled:
            stopped += 1
            assert sequence.length == 0
        (again,) = engine.step([Row.following(opened_again := opened(engine, 500), long)])
        assert_same(engine, again, expected[-1:])
        opened_again.close()
        sequence.close()
    assert stopped >= 1


@scattered
def test_cancelling_stops_between_layers_and_leaves_nothing_half_computed(
    engine: Engine, reference: tuple[np.ndarray, Kv]
) -> None:
    logits, _ = reference
    asked: list[bool] = []

    def cancelled() -> bool:
        asked.append(len(asked) >= 2)
        return asked[-1]

    sequence = opened(engine)
    with pytest.raises(Cancelled):
        engine.step([Row.following(sequence, TOKENS)], cancelled)
    assert len(asked) == 3
    assert sequence.length == 0
    (got,) = engine.step([Row.following(sequence, TOKENS)])
    assert_same(engine, got, logits[-1:])


@every
def test_a_closed_sequence_refuses_every_use(engine: Engine) -> None:
    sequence = opened(engine)
    sequence.close()
    sequence.close()
    for use in (
        lambda: sequence.length,
        lambda: sequence.export(Span(0, 0)),
        lambda: sequence.truncate(0),
        lambda: engine.step([Row(sequence, [5], [0])]),
    ):
        with pytest.raises(Closed):
            use()


@llamas
def test_after_close_everything_is_refused_and_nothing_dies(engine: Engine, request: pytest.FixtureRequest) -> None:
    mine: Any = make(request.node.callspec.params["engine"])
    sequence = opened(mine)
    mine.step([Row.following(sequence, TOKENS, logits="none")])
    mine.close()
    mine.close()
    for use in (
        lambda: mine.step([Row.following(sequence, [5])]),
        lambda: mine.open(10, mine.regime(10)),
        lambda: mine.tokenizer.encode("text"),
        lambda: mine.tokenizer.decode([5, 6]),
        lambda: sequence.export(Span(0, 3)) if has_spans(mine) else sequence.snapshot(),
        lambda: sequence.truncate(0),
    ):
        with pytest.raises(Closed):
            use()
    sequence.close()
    sequence.close()


@llamas
def test_sequences_are_as_many_and_as_large_as_there_is_room(engine: Engine, request: pytest.FixtureRequest) -> None:
    mine: Any = make(request.node.callspec.params["engine"], context_tokens=400, kv_tokens=400, sequences=3)
    free = mine._cells.size - 300
    several = [opened(mine, 100) for _ in range(3)]
    with pytest.raises(OutOfMemory, match="sequences"):
        opened(mine, 1)
    with pytest.raises(OutOfMemory, match=f"has {free} of"):
        several[0].reserve(100 + free + 1)
    assert several[0].capacity == 100
    several.pop().close()
    with pytest.raises(OutOfMemory, match=f"has {free + 100} of"):
        opened(mine, free + 101)
    several.append(opened(mine, free + 100))
    (first,) = mine.step([Row.following(several[0], TOKENS)])
    for sequence in several:
        sequence.close()
    (again,) = mine.step([Row.following(opened(mine, 400), TOKENS)])
    assert_same(engine, again, first)
    mine.close()


@of("llamacpp")
@pytest.mark.exhaustive
def test_options_that_llama_cpp_cannot_take_do_not_kill_the_process(engine: Engine) -> None:
    program = f"""
from rekindle.engine.base import Row
from rekindle.errors import RekindleError
from tests.parity.engines import make
cases = [("sequences", 400), ("micro_batch_tokens", 1), ("batch_tokens", 16), ("batch_tokens", 1)]
for name, value in cases:
    print(name, value, flush=True)
    try:
        engine = make("llamacpp", **{{name: value}})
        engine.step([Row.following(engine.open(50, "plain"), {TOKENS})])
        engine.close()
    except RekindleError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[:500]


@every
def test_an_unknown_regime_is_refused(engine: Engine) -> None:
    with pytest.raises(StepRefused, match="regime 'nonsense' is unknown"):
        engine.open(10, "nonsense")


@every
def test_a_capacity_beyond_the_context_is_refused(engine: Engine) -> None:
    for capacity in (0, -1, engine.context_tokens + 1):
        with pytest.raises(StepRefused):
            engine.open(capacity, "plain")


@scattered
@pytest.mark.parametrize("sampled", [False, True])
def test_a_probe_reads_attention_that_adds_up(engine: Engine, sampled: bool) -> None:
    """Every token spends a mass of one; what one span of keys got is what the others did not."""
    readings: list[Reading] = []
    halves = (Span(0, 18), Span(18, COUNT))
    probe = Probe(readings.append, queries=Span(30, COUNT), segments=halves, sampled=sampled)
    engine.step([Row(opened(engine), TOKENS, range(COUNT), probe=probe)])
    assert [r.layer for r in readings] == list(range(len(engine.layout.layers)))
    for reading in readings:
        assert reading.received is not None and reading.sent is not None and reading.received_most is not None
        assert reading.deviation is None
        np.testing.assert_allclose(reading.sent.sum(axis=1), 1.0, atol=1e-4)
        np.testing.assert_allclose(reading.received.sum(), 1.0, atol=1e-4)
        assert (reading.received_most >= reading.received - 1e-6).all()
        np.testing.assert_allclose(reading.received[:18].sum(), reading.sent[30:, 0].mean(), atol=1e-4)
        np.testing.assert_allclose(reading.sent[:18, 1], 0.0, atol=1e-6)


@scattered
def test_a_probe_reads_how_far_kv_is_from_what_stood_there(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    _, kv = reference
    layers = len(engine.layout.layers)
    readings: list[Reading] = []
    feeds = (Stored(kv, Span(0, COUNT - 1)), Garbage(Span(7, 8), layers))
    probe = Probe(readings.append, deviation=True, layers=range(1, 2))
    engine.step([Row(opened(engine), [TOKENS[6], TOKENS[7], TOKENS[-1]], [6, 7, COUNT - 1], feeds=feeds, probe=probe)])
    assert [r.layer for r in readings] == [1]
    deviation = readings[0].deviation
    assert deviation is not None and readings[0].received is None and readings[0].sent is None
    assert deviation[0] < 1e-4 < 0.1 < deviation[1]


@scattered
def test_probing_changes_nothing(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    logits, _ = reference
    probe = Probe(lambda reading: None, queries=Span(0, COUNT), segments=(Span(0, 9),), deviation=True)
    (got,) = engine.step([Row(opened(engine), TOKENS, range(COUNT), logits="all", probe=probe)])
    assert_same(engine, got, logits)


@every
def test_a_sequence_can_grow_and_keeps_what_it_holds(engine: Engine) -> None:
    logits, kv = computed(engine, TOKENS, with_kv=has_spans(engine))
    others = [opened(engine, 300) for _ in range(5)]  # whatever larger buffers lie ready
    sequence = opened(engine, 20)
    engine.step([Row.following(sequence, TOKENS[:20], logits="none")])
    before = sequence.size_bytes
    sequence.reserve(20 + 400)  # further than any rounding of buffers
    assert sequence.capacity >= 420 and sequence.length == 20
    assert sequence.size_bytes > before or not has_spans(engine)
    for other in others:
        other.close()
    (rest,) = engine.step([Row.following(sequence, TOKENS[20:], logits="all")])
    assert_same(engine, rest, logits[20:])
    if kv is not None:
        assert_same_kv(engine, sequence.export(Span(0, COUNT)), kv)
    sequence.reserve(5)
    assert sequence.length == COUNT
    with pytest.raises(StepRefused):
        sequence.reserve(engine.context_tokens + 1)
    sequence.close()


@scattered
def test_an_attention_map_weighs_what_the_probe_reads_by_the_length_of_the_values(engine: Engine) -> None:
    tokens = list(range(1, 25))
    readings: list[Reading] = []
    seen: list[np.ndarray] = []
    asked = Span(20, 24)
    with_both = engine.open(32, engine.regime(32))
    probe = Probe(report=readings.append, queries=asked)
    row = Row.following(with_both, tokens, logits="all")
    engine.step([replace(row, probe=probe, gaze=AttentionMap(asked, seen.append))])
    (gaze,) = seen
    assert gaze.shape == (24,) and np.isfinite(gaze).all() and (gaze >= 0).all()
    kv = with_both.export(Span(0, 24))
    bounds = []
    for reading in readings:
        values = kv.layers[reading.layer].values
        lengths = np.sqrt(np.square(values).sum(axis=-1))  # [kv_heads, keys]
        lengths /= lengths.mean()
        assert reading.received_most is not None
        bounds.append((reading.received_most * lengths.min(axis=0), reading.received_most * lengths.max(axis=0)))
    low, high = np.mean(bounds, axis=0)
    assert (gaze >= low * 0.98 - 1e-6).all() and (gaze <= high * 1.02 + 1e-6).all()
    plain = engine.open(32, engine.regime(32))
    (alone,) = engine.step([Row.following(plain, tokens, logits="all")])
    (again,) = engine.step([replace(Row(plain, tokens, range(24), "all"), gaze=AttentionMap(asked, seen.append))])
    assert np.allclose(alone, again, atol=1e-4)
    with_both.close()
    plain.close()


OLD, NEW, SIZE = 4, 13, 12  # where a passage stood, where it shall stand, and how many tokens it has


def standing(engine: Engine, *feeds: MovedFeed) -> Any:
    """A sequence with feeds in it, what is not fed computed from the last tokens of the prompt."""
    last = max(feed.span.stop for feed in feeds)
    free = [p for p in range(last + 1) if not any(p in feed.span for feed in feeds)]
    sequence = opened(engine, last + 1)
    engine.step([Row(sequence, TOKENS[-len(free) :], free, logits="none", feeds=feeds)])
    return sequence


@scattered
def test_moved_keys_are_those_of_their_new_place(engine: Engine) -> None:
    """In the first layer, where they depend on nothing else, whichever way they move. Values stay as they were."""
    passage = TOKENS[5 : 5 + SIZE]
    for old, new in ((OLD, NEW), (NEW, OLD)):
        kv = computed(engine, [*TOKENS[:old], *passage])[1]
        expected = computed(engine, [*TOKENS[20 : 20 + new], *passage])[1].layers[0].keys[:, new:]
        feed = MovedFeed(Stored(kv, Span(old, old + SIZE)), new, new - old)
        assert feed.span == Span(new, new + SIZE) and feed.layers == range(len(engine.layout.layers))
        sequence = standing(engine, feed)
        got = sequence.export(feed.span)
        np.testing.assert_allclose(got.layers[0].keys, expected, atol=1e-5)
        for moved, own in zip(got.layers, kv.layers, strict=True):
            np.testing.assert_array_equal(moved.values, own.values[:, old:])
            assert np.abs(moved.keys - own.keys[:, old:]).max() > 1e-2
        sequence.close()


@scattered
def test_moving_by_nothing_leaves_every_bit(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    _, kv = reference
    sequence = standing(engine, MovedFeed(Stored(kv, Span(OLD, OLD + SIZE)), NEW, 0))
    for got, own in zip(sequence.export(Span(NEW, NEW + SIZE)).layers, kv.layers, strict=True):
        np.testing.assert_array_equal(got.keys, own.keys[:, OLD : OLD + SIZE])
        np.testing.assert_array_equal(got.values, own.values[:, OLD : OLD + SIZE])
    sequence.close()


@scattered
def test_moves_add_up(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    _, kv = reference
    first = standing(engine, MovedFeed(Stored(kv, Span(OLD, OLD + SIZE)), NEW, NEW - OLD))
    again = Stored(first.export(Span(NEW, NEW + SIZE)))
    twice = standing(engine, MovedFeed(again, 2, 2 - NEW), MovedFeed(again, 2 + SIZE, 2 + SIZE - NEW))
    for start in (2, 2 + SIZE):
        once = standing(engine, MovedFeed(Stored(kv, Span(OLD, OLD + SIZE)), start, start - OLD))
        span = Span(start, start + SIZE)
        for got, expected in zip(twice.export(span).layers, once.export(span).layers, strict=True):
            np.testing.assert_allclose(got.keys, expected.keys, atol=1e-5)
        once.close()
    first.close()
    twice.close()
    with pytest.raises(ValueError, match="cannot be moved"):
        MovedFeed(MovedFeed(again, 2, 2), 4, 2)


@of(*SPANS_BEHIND)
def test_who_cannot_turn_the_keys_of_feeds_refuses_those_that_move(
    engine: Engine, reference: tuple[np.ndarray, Kv]
) -> None:
    feed = Stored(reference[1], Span(OLD, OLD + SIZE))
    sequence = opened(engine)
    engine.step([Row.following(sequence, TOKENS[:NEW], logits="none")])
    with pytest.raises(StepRefused, match="turn the keys"):
        engine.step([Row(sequence, [5], [NEW + SIZE], feeds=(MovedFeed(feed, NEW, NEW - OLD),))])
    assert (sequence.length, feed.filled) == (NEW, [])
    sequence.close()
