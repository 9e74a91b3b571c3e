"""KV that is not computed follows that which is: by the mean change of its span, layer by layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rekindle.core.kv import Kv, Span
from rekindle.engine.base import Engine, Row
from rekindle.engine.fake import FakeEngine
from rekindle.engine.hooks import KvDrift
from rekindle.errors import Cancelled
from tests.engine.contract import Stored
from tests.tiny import tiny_engine

COUNT = 40
TOKENS = np.random.default_rng(2).integers(3, 250, COUNT).tolist()
OTHERS = np.random.default_rng(3).integers(3, 250, COUNT).tolist()
SPANS = (Span(4, 12), Span(13, 20), Span(20, 30), Span(30, 34))
CHOSEN = [0, 1, 2, 3, 5, 11, 12, *range(20, 30), 31, *range(34, COUNT)]  # some, none, all and one of the spans


@pytest.fixture(params=["fake", "llama", "gemma2"], scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    return FakeEngine() if request.param == "fake" else tiny_engine(request.param)


def stale_of(engine: Engine) -> Kv:
    """KV of other tokens."""
    sequence = engine.open(COUNT, "plain")
    engine.step([Row.following(sequence, OTHERS, logits="none")])
    kv = sequence.export(Span(0, COUNT))
    sequence.close()
    return kv


def recompute(engine: Engine, chosen: list[int], spread: KvDrift | None, logits: str = "last") -> tuple[Kv, np.ndarray]:
    sequence = engine.open(COUNT, "plain")
    feeds = (Stored(stale_of(engine), Span(0, COUNT - 1)),)
    row = Row(sequence, [TOKENS[p] for p in chosen], chosen, logits=logits, feeds=feeds, spread=spread)  # type: ignore[arg-type]
    (found,) = engine.step([row])
    kv = sequence.export(Span(0, COUNT))
    sequence.close()
    return kv, found


@pytest.mark.parametrize("logits", ["last", "all"])
def test_the_others_of_a_span_move_by_a_share_of_the_mean_change(engine: Engine, logits: str) -> None:
    before = stale_of(engine)
    after, _ = recompute(engine, CHOSEN, KvDrift(SPANS, 0.5), logits)
    moved = 0
    for old, new in zip(before.layers, after.layers, strict=True):
        for a, b in ((old.keys, new.keys), (old.values, new.values)):
            for span in SPANS:
                own = [p for p in CHOSEN if p in span]
                rest = [p for p in range(span.start, span.stop) if p not in CHOSEN]
                change = (b[:, own] - a[:, own]).mean(axis=1, keepdims=True) if own else 0.0
                np.testing.assert_allclose(b[:, rest], a[:, rest] + 0.5 * change, atol=2e-5)
                moved += bool(own and rest and np.abs(change).max() > 1e-3)
            outside = [p for p in range(COUNT - 1) if p not in CHOSEN and not any(p in span for span in SPANS)]
            np.testing.assert_array_equal(a[:, outside], b[:, outside])
    assert moved >= 2 * 2 * len(before.layers) - 2  # two spans, keys and values


def test_what_computes_sees_what_moved(engine: Engine) -> None:
    plain, moved = (recompute(engine, CHOSEN, spread)[1] for spread in (None, KvDrift(SPANS, 0.5)))
    assert np.abs(plain - moved).max() > 1e-4 * np.abs(plain).max()
    nothing = recompute(engine, CHOSEN, KvDrift((Span(13, 20), Span(20, 30)), 0.5))[1]  # none, and all
    np.testing.assert_array_equal(nothing, plain)


def test_a_run_that_reaches_into_a_span_moves_its_beginning(engine: Engine) -> None:
    chosen = [*range(32, COUNT)]
    before = stale_of(engine)
    after, _ = recompute(engine, chosen, KvDrift((Span(30, 34),), 1.0))
    old, new = before.layers[-1].values, after.layers[-1].values
    change = (new[:, 32:34] - old[:, 32:34]).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(new[:, 30:32], old[:, 30:32] + change, atol=2e-5)


def test_a_selector_that_drops_tokens_lets_them_follow(engine: Engine) -> None:
    class Dropping:
        def choose(self, layer: int, positions: np.ndarray) -> np.ndarray:
            return positions[positions != 5] if layer >= 2 else positions

    sequence = engine.open(COUNT, "plain")
    before = stale_of(engine)
    row = Row(sequence, [TOKENS[p] for p in CHOSEN], CHOSEN, feeds=(Stored(before, Span(0, COUNT - 1)),))
    engine.step([replace(row, spread=KvDrift(SPANS[:1], 0.5), selector=Dropping())])
    after = sequence.export(Span(0, COUNT))
    sequence.close()
    old, new = before.layers[2].values, after.layers[2].values
    change = new[:, [11]] - old[:, [11]]
    np.testing.assert_allclose(new[:, [5]], old[:, [5]] + 0.5 * change, atol=2e-5)


def test_a_step_that_fails_leaves_nothing_that_moved(engine: Engine) -> None:
    sequence = engine.open(COUNT, "plain")
    engine.step([Row.following(sequence, OTHERS, logits="none")])
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(0)
        return len(asked) > 1

    chosen = [11, *range(34, COUNT)]
    row = Row(sequence, [TOKENS[p] for p in chosen], chosen, spread=KvDrift(SPANS[:1], 0.5))
    with pytest.raises(Cancelled):
        engine.step([row], cancelled)
    assert sequence.length == SPANS[0].start
    sequence.close()
