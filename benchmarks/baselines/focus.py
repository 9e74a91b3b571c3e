"""Which chunks the question attends to, decided while the layers run: Algorithm 1 of Cache-Craft.

The attention that the question paid to each chunk is summed over the layers so far and sorted, the largest first:

    masses    s1 >= s2 >= ... >= sk
    gaps      g_i = s_i - s_(i+1),      p_i = g_i / (s1 - sk)               i in 1 .. k-1
    entropy   h_i = -sum of p_j log p_j for j <= i
    cut       i* = argmax of h_(i+1) - h_i,     focused: the first i*        i in 1 .. k-2

All indices count from 1, so at least one chunk is focused and at least two are not. This is kept as published, to
compare against, though it is no sharp cut: the rise at i* is that of the gap after i* + 1, and -p log p is small where
one gap makes up nearly all. Two clear groups are separated only where the first gap in the lower one is the next
largest. Read `at_gap`, the cut is at the gap that makes the rise: one chunk more is focused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import InvalidSetting

_FEWEST_CHUNKS = 3
_NOISE = 1e-12  # rises that differ by less are equal


class Focus:
    """Takes the question's attention layer by layer; once the focused chunks have settled, they stay."""

    def __init__(self, chunks: int, window: int = 3, *, at_gap: bool = False) -> None:
        """`window` layers in a row must give the same set. Fewer than three chunks never focus."""
        if window < 1:
            raise InvalidSetting(f"A window of {window} layers cannot be: give 1 or more.")
        self._window, self._at_gap = window, at_gap
        self._masses: NDArray[np.float64] = np.zeros(chunks)  # [chunks], summed over the layers so far
        self._last: frozenset[int] | None = None
        self._times = 0  # how many layers in a row gave it
        self._settled: frozenset[int] | None = None

    def add(self, mass: Sequence[float] | NDArray[np.floating]) -> frozenset[int] | None:
        """The numbers of the focused chunks, None while they have not settled. `mass [chunks]` is of one layer.

        A mass that is no number, or below 0, counts as 0.
        """
        layer = np.asarray(mass, dtype=np.float64)
        if layer.shape != self._masses.shape:
            raise ValueError(f"masses of shape {layer.shape} for {len(self._masses)} chunks")
        if self._settled is not None:
            return self._settled
        self._masses += np.where(np.isfinite(layer) & (layer > 0.0), layer, 0.0)
        focused = cut(self._masses, at_gap=self._at_gap)
        self._times = self._times + 1 if focused == self._last else 1
        self._last = focused
        if focused is not None and self._times >= self._window:
            self._settled = focused
        return self._settled


def cut(masses: NDArray[np.float64], *, at_gap: bool = False) -> frozenset[int] | None:
    """The chunks that stand out by these `masses [chunks]`: equal ones by number, equal rises by the first.

    None for fewer than three chunks, and where all masses are equal: then nothing stands out.
    """
    if len(masses) < _FEWEST_CHUNKS:
        return None
    order = np.argsort(-masses, kind="stable")  # [chunks]
    gaps = -np.diff(masses[order])  # [chunks - 1]
    total = gaps.sum()
    if total <= _NOISE * masses[order[0]]:  # rounding alone makes no gap
        return None
    shares = gaps / total
    terms = -shares * np.log(np.where(shares > 0.0, shares, 1.0))  # 0 log 0 is 0
    rises = terms[1:]  # [chunks - 2] h_(i+1) - h_i
    count = int(np.argmax(rises >= rises.max() - _NOISE)) + 1 + at_gap
    return frozenset(order[:count].tolist())
