"""Which tokens of reused chunks to mend.

A signal tells for each token how much mending it would help; signals multiply. `choose_top` spends one budget over the
whole prompt; the others choose within each chunk, as rivals do. All give positions, sorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import InvalidSetting, nearest

Positions = NDArray[np.int64]

_LEAD_WEIGHT, _LEAD_TOKENS = 4.0, 12.0
_NOISE = 1e-9  # of floating point, before rounding up


@dataclass(frozen=True, eq=False)
class Stale:
    """The tokens of a prompt whose KV comes from another prompt, in order of position.

    positions  [n] where they stand in the prompt
    chunk      [n] the number of their chunk
    place      [n] their place in it
    outside    [n] the share of their attention that left the chunk, when the KV was computed
    received   [n] the attention that they got then
    seen       [n] the attention that the question pays to them now; None until it was asked
    deviation  [n] how far their KV is from the exact one in the layers that were computed; None until it was
    """

    positions: Positions
    chunk: NDArray[np.int64]
    place: NDArray[np.int64]
    outside: NDArray[np.float32]
    received: NDArray[np.float32]
    seen: NDArray[np.float32] | None = None
    deviation: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        for name in ("positions", "chunk", "place", "outside", "received", "seen", "deviation"):
            values = getattr(self, name)
            if values is not None and values.shape != (len(self),):
                raise ValueError(f"{name} of shape {values.shape} for {len(self)} stale tokens")
        if (np.diff(self.positions) <= 0).any():
            raise ValueError("the positions of stale tokens must grow")

    def __len__(self) -> int:
        return len(self.positions)


def _lead(stale: Stale) -> NDArray[np.float64]:
    """A soft preference for the first tokens of a chunk, where the KV of another prompt is most wrong."""
    return 1.0 + _LEAD_WEIGHT * np.exp(-stale.place / _LEAD_TOKENS)


_SIGNALS: Mapping[str, Callable[[Stale], NDArray[np.floating] | None]] = {
    "outside": lambda stale: stale.outside,
    "received": lambda stale: stale.received,
    "seen": lambda stale: stale.seen,
    "deviation": lambda stale: stale.deviation,
    "lead": _lead,
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


def score(stale: Stale, names: Collection[str]) -> NDArray[np.float64]:
    """The product of the named signals, `[n]`, never negative; a value that is no number, or below 0, counts as 0.

    Raises `InvalidSetting` for an unknown name, ValueError for a signal that `stale` has not (see `needs`).
    """
    needs(names)
    product = np.ones(len(stale))
    for name in names:
        values = _SIGNALS[name](stale)
        if values is None:
            raise ValueError(f"the signal {name!r} was not given: ask `needs` first")
        product *= _clean(values)
    return _clean(product)  # of very large ones


def choose_top(stale: Stale, names: Collection[str], budget: float) -> Positions:
    """The `round(budget * n)` tokens with the largest product of signals, of all chunks; of equals the first.

    A larger budget chooses the same tokens and more.
    """
    count = _count(budget, len(stale))
    products = score(stale, names)
    if count == 0:
        return stale.positions[:0]
    # Sorting all would take five times as long as finding the least that is chosen.
    least = np.partition(products, len(products) - count)[len(products) - count]
    chosen = products > least
    equals = np.flatnonzero(products == least)
    chosen[equals[: count - int(chosen.sum())]] = True
    found: Positions = stale.positions[chosen]
    return found


def choose_leading(stale: Stale, budget: float) -> Positions:
    """The first tokens of each chunk, the same share of each, `round(budget * n)` in all."""
    return _best_of_each(stale, -stale.place.astype(np.float64), _shares(stale, budget))


def choose_random(stale: Stale, budget: float, seed: int) -> Positions:
    """Tokens drawn within each chunk, the same share of each, `round(budget * n)` in all. Same seed: same tokens."""
    return _best_of_each(stale, np.random.default_rng(seed).random(len(stale)), _shares(stale, budget))


def choose_heavy(stale: Stale, budget: float) -> Positions:
    """The tokens of each chunk with the most attention (H2O), the same share of each, `round(budget * n)` in all."""
    return _best_of_each(stale, _clean(stale.received), _shares(stale, budget))


def choose_published(stale: Stale, overheads: Mapping[int, float]) -> Positions:
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
    return _best_of_each(stale, _clean(stale.outside), np.array(counts, dtype=np.int64))


def _count(budget: float, tokens: int) -> int:
    if not 0.0 <= budget <= 1.0:
        raise InvalidSetting(f"A budget of {budget} cannot be: give a share of the tokens, from 0 to 1.")
    return round(budget * tokens)


def _shares(stale: Stale, budget: float) -> NDArray[np.int64]:
    """How many tokens of each chunk `[chunks]`: the share rounded down or up, so that the total is what it should be.

    Where the shares are cut most by rounding down, they are rounded up; of equals the first chunk's.
    """
    total = _count(budget, len(stale))
    sizes = np.unique(stale.chunk, return_counts=True)[1]
    exact = sizes * budget
    counts: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def _best_of_each(stale: Stale, key: NDArray[np.float64], counts: NDArray[np.int64]) -> Positions:
    """The first `counts [chunks]` tokens of each chunk, the largest key `[n]` first, of equals the first position."""
    number, sizes = np.unique(stale.chunk, return_inverse=True, return_counts=True)[1:]
    order = np.lexsort((-key, number))  # [n] chunk by chunk; stable
    rank = np.arange(len(stale)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # [n] within the chunk, in that order
    return np.sort(stale.positions[order[rank < np.repeat(counts, sizes)]])


def _clean(values: NDArray[np.floating]) -> NDArray[np.float64]:
    return np.where(np.isfinite(values) & (values > 0.0), values, 0.0).astype(np.float64)
