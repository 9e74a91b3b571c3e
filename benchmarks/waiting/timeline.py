"""What happens when in two lanes, if a schedule is followed to the letter, and the order of the link that is soonest.

Beside what the product reckons with, a slice may cost something however small it is, and be decoded while the next one
travels. For a given split the best order of the link is that of the need: a schedule is found when its split is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cells import Cell, Progress, Schedule, Split, TransferOrder
from rekindle.remote.schedule import Depths, RemainingWork, Seconds, StreamCosts

if TYPE_CHECKING:
    from typing_extensions import Self

_EVEN = 1e-9  # times that differ by this share are equal


def start(chunks: int) -> Progress:
    """Nothing has begun."""
    return Progress((0,) * chunks)


def order_of(layers: int, cells: Iterable[Cell]) -> TransferOrder:
    """An order of cells."""
    return TransferOrder(layers, tuple(cell.chunk * layers + cell.layer for cell in cells))


def mask_of(split: Split) -> NDArray[np.bool_]:
    """[chunks, layers] whether each cell is computed here."""
    return np.arange(split.layers) < np.asarray(split.computed)[:, None]


def owners(schedule: Schedule, progress: Progress | None = None) -> NDArray[np.int64]:
    """[chunks, layers] how often each cell is provided for: by the origin so far, by computing, by what it still
    sends. One everywhere, or the schedule is wrong."""
    progress = progress or start(schedule.split.chunks)
    brought = progress.brought(schedule.split.layers)
    again = np.zeros(brought.size, np.int64)
    np.add.at(again, np.asarray(schedule.order.numbers, np.int64), 1)
    return brought.astype(np.int64) + (mask_of(schedule.split) & ~brought) + again.reshape(brought.shape)


@dataclass(frozen=True, eq=False)
class LinkCosts(StreamCosts):
    """Costs over a link whose slices are asked for one by one, and decoded."""

    decode_seconds_per_byte: float = 0.0
    request_seconds: float = 0.0  # that a slice takes however small it is

    @cached_property
    def link_seconds(self) -> Seconds:
        """[chunks, layers] how long each slice keeps the link."""
        return self.request_seconds + self.size_bytes / self.bandwidth

    @cached_property
    def decode_seconds(self) -> Seconds:
        """[chunks, layers] how long each slice is decoded."""
        return self.size_bytes * self.decode_seconds_per_byte

    def at(self, bandwidth: float) -> LinkCosts:
        """The same over another link."""
        return replace(self, bandwidth=bandwidth)


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each cell is computed, carried and ready, in seconds from now; NaN where it is not. The last row of the
    compute lane is the question.

    compute_start, compute_stop       [chunks + 1, layers]
    link_start, link_stop, ready      [chunks, layers]
    """

    seconds: float
    compute_start: Seconds
    compute_stop: Seconds
    link_start: Seconds
    link_stop: Seconds
    ready: Seconds


@dataclass(frozen=True, eq=False)
class SearchTask(RemainingWork):
    """What is left to do, for schedules of any shape."""

    costs: LinkCosts

    @classmethod
    def of(cls, costs: StreamCosts, progress: Progress | None) -> Self:
        """From the start on, if nobody says how far it has come."""
        return super().of(costs, progress or start(costs.chunks))

    @cached_property
    def slice_seconds(self) -> Seconds:
        """[chunks, layers] how long a slice that is missing keeps what is slower, the link or who decodes."""
        slower = np.maximum(self.costs.link_seconds, self.costs.decode_seconds)
        return np.where(self.missing, slower, self._on_its_way)

    def depths(self, split: Split) -> Depths:
        """What a split leaves to compute: a step that adds nothing is none."""
        wanted = np.asarray(split.computed, np.int64)
        if len(wanted) != len(self.done) or (wanted < self.done).any():
            raise ValueError("a split takes back what was computed, or is about other chunks")
        return np.where(wanted > self.done, wanted, 0)

    def lane(self, depths: Depths) -> tuple[Seconds, NDArray[np.bool_]]:
        """[..., chunks + 1, layers] how long each layer keeps the compute lane, and whether it attends."""
        costs, layer, depth = self.costs, np.arange(self.costs.layers), depths[..., None]
        whole = layer < depth - 1
        work = whole * costs.compute_seconds
        work += (layer == depth - 1) * costs.top_seconds
        shape = (*depths.shape[:-1], 1, costs.layers)
        question = np.broadcast_to(costs.question_seconds, shape)
        return np.concatenate([work, question], axis=-2), np.concatenate([whole, np.ones(shape, bool)], axis=-2)

    def estimate(self, depths: Depths) -> Seconds:
        """As without decoding; with it all slices are taken to be alike."""
        if not self._tail:
            return super().estimate(depths)
        later = replace(self.progress, link_busy_seconds=self.progress.link_busy_seconds + self._tail)
        return RemainingWork.estimate(replace(self, progress=later), depths)

    @cached_property
    def _tail(self) -> float:
        """How long the faster of link and decoder works on a slice alone, the first or the last."""
        if not self.costs.decode_seconds_per_byte or not self.missing.any():
            return 0.0
        return float(np.minimum(self.costs.link_seconds, self.costs.decode_seconds)[self.missing].mean())

    def _waiting(self, depths: Depths) -> Seconds:
        """[chunks * layers] how much work of the compute lane cannot begin without a cell, if it is streamed."""
        work, attends = self.lane(depths)
        chunks, layers = self.missing.shape
        left = np.cumsum(work.ravel()[::-1])[::-1]  # [places] from each on
        rows = np.where(attends, np.arange(chunks + 1)[:, None], chunks)
        first = np.minimum.accumulate(rows[::-1], axis=0)[::-1][1:]  # the first row behind a cell that needs it
        return np.asarray(left[first * layers + np.arange(layers)].ravel())

    def order(self, depths: Depths) -> TransferOrder:
        """The order that is as soon as that of the need, and bends best.

        Last chunk first, top layer first: what has come then spares whole steps, or their ends, and what has not can
        be computed after all. Built from its end: the last place goes to the first cell, by number, that can wait.
        """
        left, carry, decode = self._waiting(depths), self.costs.link_seconds.ravel(), self.costs.decode_seconds.ravel()
        total = float(self.lane(depths)[0].sum()) + self.progress.compute_busy_seconds
        numbers = np.flatnonzero(self.missing & (np.arange(self.costs.layers) >= depths[:, None]))
        needed = numbers[np.lexsort((-decode[numbers], -left[numbers]))]

        def end(order: NDArray[np.int64]) -> float:
            there = _through(self.progress.link_busy_seconds + np.cumsum(carry[order]), decode[order])
            return float((there + left[order]).max(initial=total))

        soonest = end(needed) * (1 + _EVEN)
        due = (soonest - left - decode)[needed].tolist()  # the last in this order can wait longest, nearly
        waiting = needed.tolist()
        time = self.progress.link_busy_seconds + float(carry[needed].sum())
        able: list[int] = []
        placed: list[int] = []
        while waiting:
            while waiting and (due[len(waiting) - 1] >= time or not able):
                heapq.heappush(able, waiting.pop())
            placed.append(heapq.heappop(able))
            time -= carry[placed[-1]]
        placed += sorted(able)
        bent = np.asarray(placed[::-1], np.int64)
        best = bent if end(bent) <= soonest else needed
        return TransferOrder(self.costs.layers, tuple(best.tolist()))

    def schedule(self, depths: Depths) -> Schedule:
        """The schedule of a try."""
        split, order = self.split(depths), self.order(depths)
        return Schedule(split, order, simulate(split, order, self.costs, self.progress).seconds)


def simulate(
    split: Split,
    order: TransferOrder,
    costs: LinkCosts,
    progress: Progress | None = None,
    carried: Seconds | None = None,
) -> Timeline:
    """What happens when, if the costs are right. Raises `ValueError` for an order that is not what is left to stream.

    `carried` is when each of the order has come, if not at the bandwidth of the costs.

    A lane whose things begin no sooner than `free[i]` and take `work[i]`, in their order, is through with them at
    `max over k <= i of (free[k] + work[k] + ... + work[i])`: sums and running maxima, no loop.
    """
    task = SearchTask.of(costs, progress)
    depths = task.depths(split)
    numbers = np.asarray(order.numbers, np.int64)
    left = task.missing & (np.arange(costs.layers) >= depths[:, None])
    if not np.array_equal(np.sort(numbers), np.flatnonzero(left.ravel())):
        raise ValueError("the order is not what is left to stream")

    carry, decode = costs.link_seconds.ravel()[numbers], costs.decode_seconds.ravel()[numbers]
    stop = task.progress.link_busy_seconds + np.cumsum(carry) if carried is None else carried
    ready = _through(stop, decode)
    link_start, link_stop, usable = (np.full(left.shape, np.nan) for _ in range(3))
    link_start.ravel()[numbers], link_stop.ravel()[numbers], usable.ravel()[numbers] = stop - carry, stop, ready

    there = np.where(task.flying, task.progress.link_busy_seconds, np.nan_to_num(usable))
    work, attends = task.lane(depths)
    free = np.full(work.shape, task.progress.compute_busy_seconds)
    free[1:] = np.maximum(free[1:], np.where(attends[1:], np.maximum.accumulate(there, axis=0), 0.0))
    end = _through(free.ravel(), work.ravel()).reshape(work.shape)
    works = np.concatenate([np.arange(costs.layers) < depths[:, None], attends[-1:]])
    compute_start, compute_stop = np.where(works, end - work, np.nan), np.where(works, end, np.nan)
    return Timeline(float(end[-1, -1]), compute_start, compute_stop, link_start, link_stop, usable)


def _through(free: Seconds, work: Seconds) -> Seconds:
    """When a lane is through with each of its things."""
    done = np.cumsum(work)
    return np.asarray(done + np.maximum.accumulate(free - (done - work)))
