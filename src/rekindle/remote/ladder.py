"""Which level each slice of a prompt comes at: the smallest with which the prompt stays within its KL budget.

Every quantized level has a KL: how far what the model says after all of a context in that level is from what it says
after exact KV. Who published it measured it, or `origin pair`. A part of a context costs a part of that, and what is
computed costs nothing. So a slow link, which brings less before computing meets it, may bring it smaller, and sooner:

    what has come  +  KL of the level * weight of what is still expected to come  <=  budget

This is asked before every request, with the bandwidth of that moment. What might come beyond that is counted at the
best level: if the link becomes faster, the rest comes in better levels, and the budget still holds.

Recent tokens weigh more than their share. Measured with SmolLM2 and contexts of 512 and 1,024 tokens, the last part of
a context costs at most the square root of its share of the KL of all of it: so its weight is that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cells import Cell, CellGrid
from rekindle.core.plan import RAW
from rekindle.core.reply import OriginMiss
from rekindle.remote.client import PublishedPrefix

_MIN_SHARE = 0.125  # of what is left: so much may be asked for at once


@dataclass(frozen=True, eq=False)
class PricedLevel:
    """A published level that may be used: its size and what it costs."""

    name: str
    kl: float  # nats, the mean, if all of the context comes in it
    bits: float  # a number; infinite if nothing is lost
    sizes: NDArray[np.int64]  # [chunks, layers] bytes


@dataclass(frozen=True)
class LevelLimit:
    """What a request allows. Unquantized KV is always allowed.

    kl_budget  of a prompt, in nats; None: no quantized KV
    measured   KL of levels on this machine, in place of what was published; None: it is as published
    """

    kl_budget: float | None = None
    measured: Mapping[str, float] | None = None

    def levels(self, found: PublishedPrefix) -> tuple[PricedLevel, ...]:
        """The levels that may be used, the best first, each smaller than those before; none if not even the best stays
        within the budget."""
        levels: list[PricedLevel] = []
        for price in sorted(self._prices(found), key=lambda price: (price.kl, price.sizes.sum())):
            if not levels or price.sizes.sum() < levels[-1].sizes.sum():
                levels.append(price)
        return tuple(levels) if levels and levels[0].kl <= (self.kl_budget or 0.0) else ()

    def allows(self, found: PublishedPrefix) -> bool:
        return bool(self.levels(found))

    def smallest(self, found: PublishedPrefix) -> str | None:
        """The smallest level that all of a context may come in; None if there is none."""
        fits = [level.name for level in self.levels(found) if level.kl <= (self.kl_budget or 0.0)]
        return fits[-1] if fits else None

    def why_none(self, found: PublishedPrefix) -> OriginMiss:
        """Why no level may be used: none within the budget, none that is allowed, or unquantized for others only."""
        if self.kl_budget is not None and any(name != RAW for name in found.levels):
            return "budget"
        return "dtype" if any(level.name == RAW for level in found.manifest.levels) else "level"

    def _prices(self, found: PublishedPrefix) -> Iterable[PricedLevel]:
        for name in found.levels:
            file = found.manifest.level(name)
            kl = 0.0 if name == RAW else file.kl if self.measured is None else self.measured.get(name)
            if kl is not None and (name == RAW or self.kl_budget is not None):
                yield PricedLevel(name, kl, math.inf if name == RAW else file.bits, found.sizes(name))


@dataclass
class LevelLadder:
    """The levels of one context, and which its slices were asked for in. Used by one thread; others may read.

    compute_seconds  of all cells
    """

    levels: Sequence[PricedLevel]  # the best first
    cells: CellGrid
    kl_budget: float
    compute_seconds: float
    taken: dict[Cell, PricedLevel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        starts = np.array([*(span.start for span in self.cells.spans), self.cells.tokens])
        behind = np.sqrt(1 - starts / self.cells.tokens)  # [chunks + 1] weight of all from there on
        self._weights = -np.diff(behind) / self.cells.layers  # [chunks] of a cell
        self._spent = 0.0
        self.level = self.levels[0]
        self.adapt(list(self.cells), None)

    def adapt(self, left: Sequence[Cell], bytes_per_second: float | None, pace: float = 1.0) -> None:
        """Choose the level of the next slices. `left`: the cells that may still come, in this order; `pace`: how many
        times longer computing takes than expected."""
        weights = np.cumsum([0.0, *(self._weights[cell.chunk] for cell in left)])
        room, best = self.kl_budget - self._spent, self.levels[0]
        smallest = best
        for level in self.levels:
            expected = weights[-1]
            if bytes_per_second is not None:
                compute, link = self.compute_seconds * pace, float(level.sizes.sum()) / bytes_per_second
                share = max(_MIN_SHARE, compute / max(compute + link, 1e-9))
                expected = weights[math.ceil(share * len(left))]
            if expected * level.kl + (weights[-1] - expected) * best.kl <= room:
                smallest = level
        self.level = smallest

    def take(self, cells: Iterable[Cell]) -> None:
        """These are asked for at the current level."""
        taken = dict.fromkeys(cells, self.level)
        self.taken |= taken
        self._spent += self.kl(taken)

    def kl(self, cells: Iterable[Cell]) -> float:
        """The expected KL of a prompt of which these cells came."""
        return float(sum(self._weights[cell.chunk] * self.taken[cell].kl for cell in cells))

    def slices(self, cells: Iterable[Cell]) -> dict[str, int]:
        """How many of these cells came at each level, the best first."""
        counts = Counter(self.taken[cell].name for cell in cells)
        return {level.name: counts[level.name] for level in self.levels if counts[level.name]}
