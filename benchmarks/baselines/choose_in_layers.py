"""Choosing inside the layer loop: which of a row's stale tokens go on to the next layer.

Each of these observes the layers (`take`, for a probe) and is asked before each layer (`choose`, as a selector).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.baselines.focus import Focus
from benchmarks.baselines.selectors import MeasuredStale, choose_by
from rekindle.chunks.select import StaleTokens
from rekindle.core.kv import Span
from rekindle.engine.hooks import Positions, Probe, Reading

_READ_LAYERS = range(1, 3)  # where the deviation of KV is read: in layer 0 there is none


class ChooseByDeviation:
    """All stale tokens go through the first layers; those go on whose KV turned out to be most wrong, and counts."""

    def __init__(self, stale: StaleTokens, signals: Sequence[str], budget: float, layers: int) -> None:
        self._stale = stale
        self._signals, self._budget = signals, budget
        self._read = range(_READ_LAYERS.start, min(_READ_LAYERS.stop, layers - 1))
        self._deviation = np.zeros(len(stale), dtype=np.float32)
        self.probe = Probe(self.take, deviation=True, layers=self._read)
        self.chosen: Positions = stale.positions
        self._layers = layers

    @property
    def cells(self) -> int:
        """How many tokens of chunks were computed, over all layers."""
        return len(self._stale) * self._read.stop + len(self.chosen) * (self._layers - self._read.stop)

    def take(self, reading: Reading) -> None:
        """Add up what one layer shows."""
        assert reading.deviation is not None
        places = np.searchsorted(reading.positions, self._stale.positions)
        self._deviation += reading.deviation[places] / len(self._read)

    def choose(self, layer: int, positions: Positions) -> Positions:
        """Everything until all is read; then what is chosen, and what is not stale."""
        if layer == self._read.stop:
            stale = MeasuredStale(**vars(self._stale), deviation=self._deviation)
            self.chosen = choose_by(stale, self._signals, self._budget)
            dropped = np.setdiff1d(self._stale.positions, self.chosen, assume_unique=True)
            return np.setdiff1d(positions, dropped, assume_unique=True)
        return positions


class ChooseByFocus:
    """Tokens of chunks that the question turns out not to look at stop being computed (Cache-Craft, Algorithm 1)."""

    def __init__(self, chosen: Positions, chunks: Sequence[Span], question: Span, *, at_gap: bool = False) -> None:
        self._chunks = chunks
        self._focus = Focus(len(chunks), at_gap=at_gap)
        self._focused: frozenset[int] | None = None
        self._left = chosen  # of the chunks' tokens
        self.cells = 0  # tokens of chunks computed, over all layers
        self.probe = Probe(self.take, queries=question)

    def take(self, reading: Reading) -> None:
        """Count what the question pays to each chunk in one layer."""
        assert reading.received is not None
        self.cells += len(self._left)
        mass = [float(reading.received[span.start : span.stop].sum()) for span in self._chunks]
        self._focused = self._focus.add(mass)

    def choose(self, layer: int, positions: Positions) -> Positions:  # noqa: ARG002  (as soon as it is known)
        """Everything, until it is known which chunks count."""
        if self._focused is None or not len(self._left):
            return positions
        keep = np.zeros(len(self._left), dtype=bool)
        for number in self._focused:
            span = self._chunks[number]
            keep |= (self._left >= span.start) & (self._left < span.stop)
        dropped, self._left = self._left[~keep], self._left[keep]
        return np.setdiff1d(positions, dropped, assume_unique=True)
