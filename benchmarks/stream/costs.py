"""What computing costs on this machine, measured on the engine: so the schedules of a bench are made from.

A step that computes the first `k` layers of some tokens is timed for a small and a large `k`: the difference is whole
layers, the small one is a step that ends at once, whose keys and values are all that it computes. On an engine that
computes whole tokens only, each layer counts as an equal part of a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.base import Advance
from benchmarks.baselines.predictor import Chosen, best_model
from benchmarks.models import settle
from benchmarks.waiting.timeline import LinkCosts
from rekindle.core.cells import CHUNK_TOKENS, CellGrid
from rekindle.engine.base import Engine, EngineSequence, Row
from rekindle.remote.latency import Floats, LayerTiming, cell_seconds

_LAYERS = 9  # that the longer of the two steps computes, or all there are
COUNTS, QUICK_COUNTS = (16, 32, 48, 64, 80, 96, 112, 128), (24, 56, 88, 128)  # tokens of a step
CONTEXTS, QUICK_CONTEXTS = 11, 5  # from none to the longest


@dataclass(frozen=True)
class LayerTimings:
    """Times of single layers, and what was learned from them."""

    whole: tuple[LayerTiming, ...]
    top: tuple[LayerTiming, ...]  # keys and values alone, with all that a step costs beside its layers
    whole_model: Chosen
    top_model: Chosen

    @classmethod
    def of(cls, whole: Sequence[LayerTiming], top: Sequence[LayerTiming], seed: int) -> LayerTimings:
        """With models of these samples."""
        return cls(tuple(whole), tuple(top), best_model(whole, seed), best_model(top, seed))

    def compute_seconds(self, cells: CellGrid) -> Floats:
        """[chunks, layers] of whole layers."""
        return cell_seconds(self.whole_model.model, cells)

    def costs(self, cells: CellGrid, size_bytes: Floats, question_tokens: int) -> LinkCosts:
        """What each cell costs; the bandwidth is for others to say."""
        question = self.whole_model.model.predict(question_tokens, cells.tokens)
        return LinkCosts(
            self.compute_seconds(cells),
            cell_seconds(self.top_model.model, cells),
            size_bytes,
            np.full(cells.layers, question),
            bandwidth=1.0,
        )


def measure(
    engine: Engine, tokens: Sequence[int], quick: bool, rounds: int, seed: int, advance: Advance
) -> LayerTimings:
    """Time steps after contexts of several lengths, the beginnings of `tokens`, and learn from that."""
    sequence = engine.open(len(tokens), engine.regime(len(tokens)))
    try:
        for start in range(0, len(tokens) - CHUNK_TOKENS, CHUNK_TOKENS):
            engine.step([Row.following(sequence, tokens[start : start + CHUNK_TOKENS], logits="none")])
        contexts, counts = (QUICK_CONTEXTS, QUICK_COUNTS) if quick else (CONTEXTS, COUNTS)
        longest = min(sequence.length, len(tokens) - max(counts))
        whole, top = [], []
        for context in np.linspace(longest, 0, contexts).astype(int).tolist():  # ever shorter: it is cut off
            advance(f"costs of layers after {context} tokens")
            sequence.truncate(context)
            for sample, ending in _samples(engine, sequence, tokens, counts, rounds):
                whole.append(sample)
                top.append(ending)
    finally:
        sequence.close()
    advance("models of the costs")
    return LayerTimings.of(whole, top, seed)


def _samples(
    engine: Engine, sequence: EngineSequence, tokens: Sequence[int], counts: Sequence[int], rounds: int
) -> Iterator[tuple[LayerTiming, LayerTiming]]:
    """A whole layer and a top one for each number of tokens: medians of some rounds, in turns."""
    layers, context = len(engine.layout.layers), sequence.length
    by_layer = engine.capabilities.layer_feeds
    deep = min(_LAYERS, layers)
    times: dict[tuple[int, int | None], list[float]] = {}
    for turn in range(rounds + 1):
        for count in counts:
            for depth in (1, deep) if by_layer else (None,):
                seconds = _step_seconds(engine, sequence, tokens[context : context + count], depth)
                if turn:
                    times.setdefault((count, depth), []).append(seconds)
    for count in counts:
        if not by_layer:
            layer = LayerTiming(count, context, statistics.median(times[count, None]) / layers)
            yield layer, layer
            continue
        short, long = (statistics.median(times[count, depth]) for depth in (1, deep))
        if long > short > 0:  # else somebody else had the machine
            yield LayerTiming(count, context, (long - short) / (deep - 1)), LayerTiming(count, context, short)


def _step_seconds(engine: Engine, sequence: EngineSequence, tokens: Sequence[int], depth: int | None) -> float:
    context = sequence.length
    at = np.arange(context, context + len(tokens), dtype=np.int64)
    row = Row(sequence, tokens, at, logits="none", until=depth, replay=False, prefill=True)
    settle(engine)
    started = time.perf_counter()
    engine.step([row])
    settle(engine)
    seconds = time.perf_counter() - started
    sequence.truncate(context)
    return seconds
