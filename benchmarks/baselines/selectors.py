"""Which tokens of reused chunks others recompute: by a product of signals, within each chunk, or as Cache-Craft."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.chunks import select
from rekindle.chunks.select import Positions, StaleTokens, best_of_each, checked_share, clean, counts_of
from rekindle.errors import InvalidSetting, nearest

_NOISE = 1e-9  # of floating point, before rounding up


@dataclass(frozen=True, eq=False)
class MeasuredStale(StaleTokens):
    """`deviation` [n] is how far the KV is from the exact one in the layers that were computed; None until it was."""

    deviation: NDArray[np.float32] | None = None


_SIGNALS: Mapping[str, Callable[[StaleTokens], NDArray[np.floating] | None]] = {
    "outside": lambda stale: stale.outside,
    "received": lambda stale: stale.received,
    "seen": lambda stale: stale.seen,
    "deviation": lambda stale: getattr(stale, "deviation", None),
    "lead": select.lead_weight,
}
_ASKED_FOR = frozenset({"seen", "deviation"})  # cost work with this prompt; the others were kept or are free

SIGNALS = tuple(_SIGNALS)


def needs(names: Collection[str]) -> frozenset[str]:
    """Which of `seen` and `deviation` a product of these signals needs. Raises `InvalidSetting` for an unknown name."""
    if not names:
        raise InvalidSetting(f"No signal was named: give one or more of {', '.join(SIGNALS)}.")
    for name in names:
        if name not in _SIGNALS:
            raise InvalidSetting(f"There is no signal {name!r}.{nearest(name, SIGNALS)}")
    return _ASKED_FOR.intersection(names)


def score(stale: StaleTokens, names: Collection[str]) -> NDArray[np.float64]:
    """The product of the named signals, `[n]`, never negative; a value that is no number, or below 0, counts as 0.

    Raises `InvalidSetting` for an unknown name, ValueError for a signal that `stale` has not (see `needs`).
    """
    needs(names)
    product = np.ones(len(stale))
    for name in names:
        values = _SIGNALS[name](stale)
        if values is None:
            raise ValueError(f"the signal {name!r} was not given: ask `needs` first")
        product *= clean(values)
    return clean(product)  # of very large ones


def choose_by(stale: StaleTokens, names: Collection[str], budget: float) -> Positions:
    """The tokens with the largest product of signals, of all chunks; of equals the first."""
    return select.choose_top(stale, score(stale, names), round(checked_share(budget) * len(stale)))


def choose_random(stale: StaleTokens, budget: float, seed: int) -> Positions:
    """Tokens drawn within each chunk, the same share of each, `round(budget * n)` in all. Same seed: same tokens."""
    return best_of_each(stale, np.random.default_rng(seed).random(len(stale)), counts_of(stale, budget))


def choose_heavy(stale: StaleTokens, budget: float) -> Positions:
    """The tokens of each chunk with the most attention (H2O), the same share of each, `round(budget * n)` in all."""
    return best_of_each(stale, clean(stale.received), counts_of(stale, budget))


def choose_published(stale: StaleTokens, overheads: Mapping[int, float]) -> Positions:
    """The tokens that Cache-Craft takes: of each chunk those that looked outside most, of equals the first.

    `overheads` has the overhead (CFO) of every chunk by its number: `ceil(overhead * tokens)` are taken, at most all.
    Of a chunk whose overhead is no number, all are.
    """
    chunks, sizes = np.unique(stale.chunk, return_counts=True)
    counts = []
    for chunk, size in zip(chunks.tolist(), sizes.tolist(), strict=True):
        overhead = overheads[chunk]
        share = 1.0 if math.isnan(overhead) else min(max(overhead, 0.0), 1.0)
        counts.append(math.ceil(share * size - _NOISE))
    return best_of_each(stale, clean(stale.outside), np.array(counts, dtype=np.int64))
