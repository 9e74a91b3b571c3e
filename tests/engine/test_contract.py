"""The engine contract, the same for every engine: rows, feeds, selectors, probes, failures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from rekindle.core.kv import Kv, Span
from rekindle.engine.base import Engine, Probe, Reading, Row
from rekindle.engine.fake import FakeEngine
from rekindle.errors import Cancelled, Closed, StepRefused
from tests.engine.contract import Choosing, Failing, Garbage, Stored
from tests.tiny import tiny_engine

COUNT = 40
TOKENS = np.random.default_rng(5).integers(3, 250, COUNT).tolist()


@pytest.fixture(scope="module", params=["fake", "llama", "gemma3_text", "gemma2"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    yield FakeEngine() if request.param == "fake" else tiny_engine(request.param)


@pytest.fixture
def reference(engine: Engine) -> tuple[np.ndarray, Kv]:
    """Logits and KV of the whole prompt in one step."""
    sequence = engine.open(COUNT, engine.regime(COUNT))
    (logits,) = engine.step([Row.following(sequence, TOKENS, logits="all")])
    kv = sequence.export(Span(0, COUNT))
    sequence.close()
    return logits, kv


def assert_same(engine: Engine, got: np.ndarray, expected: np.ndarray) -> None:
    if isinstance(engine, FakeEngine):
        np.testing.assert_array_equal(got, expected)
    else:
        assert np.abs(got - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max())


def assert_same_kv(engine: Engine, got: Kv, expected: Kv) -> None:
    for new, old in zip(got.layers, expected.layers, strict=True):
        assert_same(engine, new.keys, old.keys)
        assert_same(engine, new.values, old.values)


def opened(engine: Engine, capacity: int = COUNT):
    return engine.open(capacity, engine.regime(capacity))


def test_any_cut_into_steps_gives_the_same(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    logits, kv = reference
    for cuts in ([0, COUNT], [0, 1, 2, COUNT], [0, 13, 26, COUNT], [0, COUNT - 1, COUNT]):
        sequence = opened(engine)
        parts = [engine.step([Row.following(sequence, TOKENS[a:b], logits="all")])[0] for a, b in pairwise(cuts)]
        assert_same(engine, np.concatenate(parts), logits)
        assert_same_kv(engine, sequence.export(Span(0, COUNT)), kv)
        sequence.close()


def test_logits_come_as_asked(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    logits, _ = reference
    sequences = [opened(engine) for _ in range(3)]
    none, last, every = engine.step(
        [Row.following(s, TOKENS, logits=w) for s, w in zip(sequences, ("none", "last", "all"), strict=True)]
    )
    assert none.shape == (0, logits.shape[1])
    assert_same(engine, last, logits[-1:])
    assert_same(engine, every, logits)


def test_garbage_is_mended_by_recomputing_exactly_where_it_stood(
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


def test_garbage_left_alone_shows(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    """The test above would mean nothing if fed KV were not really read."""
    logits, kv = reference
    feeds = (Stored(kv, Span(0, COUNT - 1)), Garbage(Span(30, 34), len(engine.layout.layers)))
    (got,) = engine.step([Row(opened(engine), TOKENS[-1:], [COUNT - 1], feeds=feeds)])
    assert np.abs(got[0] - logits[-1]).max() > 1e-2


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


def test_several_feeds_may_cover_the_layers_together(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    logits, kv = reference
    layers = len(engine.layout.layers)
    halves = (Stored(kv, Span(0, COUNT - 1), range(2)), Stored(kv, Span(0, COUNT - 1), range(2, layers)))
    (got,) = engine.step([Row(opened(engine), TOKENS[-1:], [COUNT - 1], feeds=halves)])
    assert_same(engine, got, logits[-1:])
    dropping = Choosing(lambda layer, p: p[-1:].tolist())
    (got,) = engine.step([Row(opened(engine), TOKENS, range(COUNT), feeds=halves, selector=dropping)])
    assert_same(engine, got, logits[-1:])


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


def test_rows_dropped_in_one_lane_leave_the_others_alone(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
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


def test_rows_that_break_the_contract_are_refused(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    _, kv = reference
    sequence = opened(engine)
    layers = len(engine.layout.layers)
    cases = [
        ([], "at least one row"),
        ([Row.following(sequence, [5]), Row.following(sequence, [5])], "one row of a step"),
        ([Row(sequence, [5, 6], [0])], "one position a token"),
        ([Row(sequence, [], [])], "one position a token"),
        ([Row(sequence, [5, 6], [1, 0])], "sorted"),
        ([Row(sequence, [5, 6], [0, 0])], "sorted"),
        ([Row(sequence, [5], [-1])], "sorted"),
        ([Row(sequence, [10**6], [0])], "vocabulary"),
        ([Row(sequence, [5], [COUNT])], "capacity"),
        ([Row(sequence, [5], [1])], "gap"),
        ([Row(sequence, [5, 6], [0, 2])], "Position 1 is neither"),
        ([Row(sequence, [5], [3], feeds=(Stored(kv, Span(0, 2)),))], "Position 2 is neither"),
        (
            [Row(sequence, [5], [3], feeds=(Stored(kv, Span(0, 3), range(1, layers)),))],
            "Position 0 is neither",
        ),
        ([Row(sequence, [5], [3], feeds=(Stored(kv, Span(0, 3), range(layers - 1)),))], "Position 0 is neither"),
        ([Row(sequence, [5], [3], feeds=(Stored(kv, Span(0, 4)),))], "must be computed"),
        ([Row(sequence, [5], [0], logits="lst")], "'lst' is unknown"),
        ([Row(sequence, [5], [3], feeds=(Garbage(Span(0, 3), layers + 1),))], "covers layers"),
    ]
    for rows, words in cases:
        with pytest.raises(StepRefused, match=words):
            engine.step(rows)
        assert sequence.length == 0


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


def test_an_export_is_a_copy(engine: Engine) -> None:
    sequence = opened(engine)
    engine.step([Row.following(sequence, TOKENS, logits="none")])
    kv = sequence.export(Span(0, COUNT))
    before = kv.layers[0].keys.copy()
    sequence.truncate(0)
    engine.step([Row.following(sequence, TOKENS[::-1], logits="none")])
    np.testing.assert_array_equal(kv.layers[0].keys, before)


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


def test_an_unknown_regime_is_refused(engine: Engine) -> None:
    with pytest.raises(StepRefused, match="regime 'nonsense' is unknown"):
        engine.open(10, "nonsense")


def test_a_capacity_beyond_the_context_is_refused(engine: Engine) -> None:
    for capacity in (0, -1, engine.context_tokens + 1):
        with pytest.raises(StepRefused):
            engine.open(capacity, "plain")


def test_a_probe_reads_attention_that_adds_up(engine: Engine) -> None:
    """Every token spends a mass of one; what one span of keys got is what the others did not."""
    readings: list[Reading] = []
    halves = (Span(0, 18), Span(18, COUNT))
    probe = Probe(readings.append, queries=Span(30, COUNT), segments=halves)
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


def test_probing_changes_nothing(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    logits, _ = reference
    probe = Probe(lambda reading: None, queries=Span(0, COUNT), segments=(Span(0, 9),), deviation=True)
    (got,) = engine.step([Row(opened(engine), TOKENS, range(COUNT), logits="all", probe=probe)])
    assert_same(engine, got, logits)


def test_a_sequence_can_grow_and_keeps_what_it_holds(engine: Engine, reference: tuple[np.ndarray, Kv]) -> None:
    logits, kv = reference
    others = [opened(engine, 300) for _ in range(5)]  # whatever larger buffers lie ready
    sequence = opened(engine, 20)
    engine.step([Row.following(sequence, TOKENS[:20], logits="none")])
    before = sequence.size_bytes
    sequence.reserve(20 + 400)  # further than any rounding of buffers
    assert sequence.capacity >= 420 and sequence.length == 20 and sequence.size_bytes > before
    for other in others:
        other.close()
    (rest,) = engine.step([Row.following(sequence, TOKENS[20:], logits="all")])
    assert_same(engine, rest, logits[20:])
    assert_same_kv(engine, sequence.export(Span(0, COUNT)), kv)
    sequence.reserve(5)
    assert sequence.length == COUNT
    with pytest.raises(StepRefused):
        sequence.reserve(engine.context_tokens + 1)
    sequence.close()
