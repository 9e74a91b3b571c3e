"""Two lanes that fill one context, one computing, one streaming: what things cost in them, and what happens when.

What depends on what. A step computes one chunk through its layers `[0, c)`. To go through a layer as a whole (project,
attend, multiply) it needs K and V of that layer of all earlier chunks; what comes out is the hidden state that enters
the layer above. K and V of a cell are projected from the hidden state that enters its layer, so the cell (t, l) needs
K and V of the layers below l of all chunks before t, and none of l itself: the top layer of a step, c - 1, is two
projections, waits for nobody, and costs little.

    computing c layers of chunk t  =  compute[t, 0] + ... + compute[t, c - 2] + top[t, c - 1]

Two lanes work at once. The compute lane takes the chunks from the front, one step each, and waits where K and V of an
earlier chunk are still on their way. The link carries one slice at a time, in any order; a slice is decoded while the
next one travels. At last the question, the rest of the prompt, goes through all layers as a step does.

For a given split the best order of the link is that of the need: a schedule is found when its split is (`stream`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cells import Progress, Schedule, Split, Streamed

Seconds = NDArray[np.float64]
Depths = NDArray[np.int64]  # [..., chunks] how many layers of each chunk are still to be computed, from layer 0

_EVEN = 1e-9  # times that differ by this share are equal


@dataclass(frozen=True, eq=False)
class StreamCosts:
    """What every cell costs. What a step costs before its first layer is part of layer 0 in both matrices.

    compute_seconds   [chunks, layers] the whole layer, attention to all earlier chunks included
    top_seconds       [chunks, layers] K and V only, where the step ends
    size_bytes        [chunks, layers] as it travels
    question_seconds  [layers] the rest of the prompt, after everything else
    """

    compute_seconds: Seconds
    top_seconds: Seconds
    size_bytes: Seconds
    question_seconds: Seconds
    bandwidth: float  # bytes a second
    decode_seconds_per_byte: float = 0.0
    request_seconds: float = 0.0  # that a slice takes however small it is

    def __post_init__(self) -> None:
        shape = np.shape(self.compute_seconds)
        if len(shape) != 2 or not all(shape) or np.shape(self.question_seconds) != shape[1:]:
            raise ValueError("costs are [chunks, layers], those of the question [layers]")
        if np.shape(self.top_seconds) != shape or np.shape(self.size_bytes) != shape:
            raise ValueError("computing and streaming are about the same cells")
        if not self.bandwidth > 0:
            raise ValueError("a dead link has a small bandwidth, not none")

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return int(self.compute_seconds.shape[0])

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return int(self.compute_seconds.shape[1])

    @cached_property
    def link_seconds(self) -> Seconds:
        """[chunks, layers] how long each slice keeps the link."""
        return self.request_seconds + self.size_bytes / self.bandwidth

    @cached_property
    def decode_seconds(self) -> Seconds:
        """[chunks, layers] how long each slice is decoded."""
        return self.size_bytes * self.decode_seconds_per_byte

    @cached_property
    def depth_seconds(self) -> Seconds:
        """[chunks, layers + 1] how long a step takes that computes so many layers of a chunk."""
        below = np.cumsum(self.compute_seconds, axis=1) - self.compute_seconds
        return np.concatenate([np.zeros((self.chunks, 1)), below + self.top_seconds], axis=1)

    def at(self, bandwidth: float) -> StreamCosts:
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

    @property
    def waiting_seconds(self) -> float:
        """How long the compute lane stands still before the question is through."""
        work = np.nansum(self.compute_stop - self.compute_start)
        return float(self.seconds - work)


@dataclass(frozen=True, eq=False)
class Task:
    """What is left to do, in arrays."""

    costs: StreamCosts
    progress: Progress
    done: Depths  # [chunks] layers that steps have computed
    missing: NDArray[np.bool_]  # [chunks, layers] neither computed nor brought
    flying: NDArray[np.bool_]  # [chunks, layers]

    @classmethod
    def of(cls, costs: StreamCosts, progress: Progress | None) -> Task:
        progress = progress or Progress.start(costs.chunks)
        if len(progress.computed) != costs.chunks:
            raise ValueError(f"progress of {len(progress.computed)} chunks, costs of {costs.chunks}")
        done = np.asarray(progress.computed, np.int64)
        layers = np.arange(costs.layers)
        flying = np.zeros((costs.chunks, costs.layers), bool)
        for cell in progress.flying:
            flying[cell] = True
        missing = ~progress.brought(costs.layers) & (layers >= done[:, None])
        return cls(costs, progress, done, missing, flying)

    @cached_property
    def _on_its_way(self) -> Seconds:
        """[chunks, layers] next to nothing for cells that fly: they take no more of the link, but are not there."""
        return np.where(self.flying, np.finfo(float).tiny, 0.0)

    @cached_property
    def slice_seconds(self) -> Seconds:
        """[chunks, layers] how long a slice that is missing keeps what is slower, the link or who decodes."""
        slower = np.maximum(self.costs.link_seconds, self.costs.decode_seconds)
        return np.where(self.missing, slower, self._on_its_way)

    @cached_property
    def most(self) -> Depths:
        """[chunks] the depth that leaves nothing to stream."""
        above = self.missing[:, ::-1].argmax(axis=1)
        return np.where(self.missing.any(axis=1), self.costs.layers - above, 0)

    def depths(self, split: Split) -> Depths:
        """What a split leaves to compute: a step that adds nothing is none."""
        wanted = np.asarray(split.computed, np.int64)
        if len(wanted) != len(self.done) or (wanted < self.done).any():
            raise ValueError("a split takes back what was computed, or is about other chunks")
        return np.where(wanted > self.done, wanted, 0)

    def split(self, depths: Depths) -> Split:
        """The other way round."""
        return Split(self.costs.layers, tuple(np.maximum(depths, self.done).tolist()))

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
        """[tries] when each of many tries, [tries, chunks], is through, the link working in the order of the need.

        The end is the latest of (when what a place of the compute lane needs is there + the work from there on). It is
        what `simulate` says, but that all slices are taken to be alike where one is decoded while another travels.
        """
        costs, layer = self.costs, np.arange(self.costs.layers)
        asked = np.cumsum(costs.question_seconds[::-1])[::-1]  # [layers] from each on
        steps = costs.depth_seconds[np.arange(costs.chunks), depths]  # [tries, chunks]
        left = np.cumsum(steps[:, ::-1], axis=1)[:, ::-1] + asked[0]  # from the beginning of each step on
        above = depths[..., None] - layer  # [tries, chunks, layers]
        whole = above > 1
        # What streams of each layer up to a chunk only grows, and so does what was needed: the most so far.
        passed = np.cumsum(np.where(above > 0, self._on_its_way, self.slice_seconds), axis=1)
        needed = np.zeros_like(passed)
        np.multiply(passed[:, :-1], whole[:, 1:], out=needed[:, 1:])
        np.maximum.accumulate(needed, axis=1, out=needed)
        there = needed.copy()
        there[:, 1:] -= needed[:, :-1]  # what a step is the first to need
        np.cumsum(there, axis=2, out=there)
        there[:, 1:] += needed[:, :-1].sum(axis=2)[..., None]
        whole &= there > 0
        there += left[..., None]
        there -= self._below
        waits = np.max(there, axis=(1, 2), where=whole, initial=0.0)
        last, held = passed[:, -1], needed[:, -1]
        there = np.cumsum(last - held, axis=1) + held.sum(axis=1)[:, None]
        waits = np.maximum(waits, np.where(there > 0, there + asked, 0.0).max(axis=1))
        waits += np.where(waits > 0, self.progress.link_busy_seconds + self._tail, 0.0)
        return np.asarray(np.maximum(waits, left[:, 0] + self.progress.compute_busy_seconds))

    @cached_property
    def _tail(self) -> float:
        """How long the faster of link and decoder works on a slice alone, the first or the last."""
        if not self.costs.decode_seconds_per_byte or not self.missing.any():
            return 0.0
        return float(np.minimum(self.costs.link_seconds, self.costs.decode_seconds)[self.missing].mean())

    @cached_property
    def _below(self) -> Seconds:
        """[chunks, layers] what a step has done when it comes to a layer."""
        return np.asarray(np.cumsum(self.costs.compute_seconds, axis=1) - self.costs.compute_seconds)

    def _waiting(self, depths: Depths) -> Seconds:
        """[chunks * layers] how much work of the compute lane cannot begin without a cell, if it is streamed."""
        work, attends = self.lane(depths)
        chunks, layers = self.missing.shape
        left = np.cumsum(work.ravel()[::-1])[::-1]  # [places] from each on
        rows = np.where(attends, np.arange(chunks + 1)[:, None], chunks)
        first = np.minimum.accumulate(rows[::-1], axis=0)[::-1][1:]  # the first row behind a cell that needs it
        return np.asarray(left[first * layers + np.arange(layers)].ravel())

    def order(self, depths: Depths) -> Streamed:
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
        return Streamed(self.costs.layers, tuple(best.tolist()))

    def schedule(self, depths: Depths) -> Schedule:
        """The schedule of a try."""
        split, order = self.split(depths), self.order(depths)
        return Schedule(split, order, simulate(split, order, self.costs, self.progress).seconds)


def simulate(split: Split, order: Streamed, costs: StreamCosts, progress: Progress | None = None) -> Timeline:
    """What happens when, if the costs are right. Raises `ValueError` for an order that is not what is left to stream.

    A lane whose things begin no sooner than `free[i]` and take `work[i]`, in their order, is through with them at
    `max over k <= i of (free[k] + work[k] + ... + work[i])`: sums and running maxima, no loop.
    """
    task = Task.of(costs, progress)
    depths = task.depths(split)
    numbers = np.asarray(order.numbers, np.int64)
    left = task.missing & (np.arange(costs.layers) >= depths[:, None])
    if not np.array_equal(np.sort(numbers), np.flatnonzero(left.ravel())):
        raise ValueError("the order is not what is left to stream")

    carry, decode = costs.link_seconds.ravel()[numbers], costs.decode_seconds.ravel()[numbers]
    stop = task.progress.link_busy_seconds + np.cumsum(carry)
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
