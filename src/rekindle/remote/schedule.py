"""How a prefix is split between computing and fetching, and how long a split takes.

Dependencies: a step computes one chunk through its layers `[0, c)`. A whole layer (project, attend, multiply) needs K
and V of that layer of all earlier chunks; its output is the hidden state that enters the layer above. K and V of a cell
are projected from the hidden state that enters its layer, so cell (t, l) needs K and V of the layers below l of all
chunks before t, and none of l itself: the top layer of a step, c - 1, is two projections, waits for nothing, and costs
little.

    computing c layers of chunk t  =  compute[t, 0] + ... + compute[t, c - 2] + top[t, c - 1]

The compute lane takes chunks from the front, one step each, and waits where K and V of an earlier chunk have not
arrived. The link carries one slice at a time, in any order. At the end the question, the rest of the prompt, goes
through all layers.

Meeting in the middle: chunks in front are computed, the others fetched from the back, so neither lane waits, whatever
the link does.

    compute   [chunk 0][chunk 1][chunk 2, from below]
    link      [chunk 5][chunk 4][chunk 3][chunk 2, from above]

Where they meet is found by `Edges`: ways to compute more, the most rewarding first, until both lanes end together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cells import Progress, Schedule, Split, TransferOrder

if TYPE_CHECKING:
    from typing_extensions import Self

Seconds = NDArray[np.float64]
Depths = NDArray[np.int64]  # [..., chunks] number of layers of each chunk to compute, from layer 0


@dataclass(frozen=True, eq=False)
class StreamCosts:
    """Costs of every cell. The overhead of a step is part of layer 0 in both matrices.

    compute_seconds   [chunks, layers] the whole layer, attention to all earlier chunks included
    top_seconds       [chunks, layers] K and V only, where the step ends
    size_bytes        [chunks, layers] bytes to transfer
    question_seconds  [layers] the rest of the prompt
    """

    compute_seconds: Seconds
    top_seconds: Seconds
    size_bytes: Seconds
    question_seconds: Seconds
    bandwidth: float  # bytes a second

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
        return int(self.compute_seconds.shape[1])

    @cached_property
    def link_seconds(self) -> Seconds:
        """[chunks, layers] transfer seconds of each slice."""
        return self.size_bytes / self.bandwidth

    @cached_property
    def depth_seconds(self) -> Seconds:
        """[chunks, layers + 1] seconds of a step that computes this many layers of a chunk."""
        below = np.cumsum(self.compute_seconds, axis=1) - self.compute_seconds
        return np.concatenate([np.zeros((self.chunks, 1)), below + self.top_seconds], axis=1)


@dataclass(frozen=True, eq=False)
class RemainingWork:
    """What is left to compute and fetch, as arrays."""

    costs: StreamCosts
    progress: Progress
    done: Depths  # [chunks] number of computed layers
    missing: NDArray[np.bool_]  # [chunks, layers] neither computed nor arrived
    flying: NDArray[np.bool_]  # [chunks, layers]

    @classmethod
    def of(cls, costs: StreamCosts, progress: Progress) -> Self:
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
        """[chunks, layers] a tiny time for requested cells: they cost no more transfer, but have not arrived."""
        return np.where(self.flying, np.finfo(float).tiny, 0.0)

    @cached_property
    def slice_seconds(self) -> Seconds:
        """[chunks, layers] transfer seconds of missing slices."""
        return np.where(self.missing, self.costs.link_seconds, self._on_its_way)

    @cached_property
    def most(self) -> Depths:
        """[chunks] the depth that leaves nothing to fetch."""
        above = self.missing[:, ::-1].argmax(axis=1)
        return np.where(self.missing.any(axis=1), self.costs.layers - above, 0)

    def split(self, depths: Depths) -> Split:
        """The split after computing to these depths."""
        return Split(self.costs.layers, tuple(np.maximum(depths, self.done).tolist()))

    def estimate(self, depths: Depths) -> Seconds:
        """[tries] end time of each try, [tries, chunks], with the link in the order of need.

        The end is the maximum over the compute lane of (arrival of what a point needs + the work from there on).
        """
        costs, layer = self.costs, np.arange(self.costs.layers)
        asked = np.cumsum(costs.question_seconds[::-1])[::-1]  # [layers] from each on
        steps = costs.depth_seconds[np.arange(costs.chunks), depths]  # [tries, chunks]
        left = np.cumsum(steps[:, ::-1], axis=1)[:, ::-1] + asked[0]  # from the start of each step on
        above = depths[..., None] - layer  # [tries, chunks, layers]
        whole = above > 1
        # What is fetched of each layer up to a chunk only grows, and so does what was needed: take the running maximum.
        passed = np.cumsum(np.where(above > 0, self._on_its_way, self.slice_seconds), axis=1)
        needed = np.zeros_like(passed)
        np.multiply(passed[:, :-1], whole[:, 1:], out=needed[:, 1:])
        np.maximum.accumulate(needed, axis=1, out=needed)
        there = needed.copy()
        there[:, 1:] -= needed[:, :-1]  # what a step needs first
        np.cumsum(there, axis=2, out=there)
        there[:, 1:] += needed[:, :-1].sum(axis=2)[..., None]
        whole &= there > 0
        there += left[..., None]
        there -= self._below
        waits = np.max(there, axis=(1, 2), where=whole, initial=0.0)
        last, held = passed[:, -1], needed[:, -1]
        there = np.cumsum(last - held, axis=1) + held.sum(axis=1)[:, None]
        waits = np.maximum(waits, np.where(there > 0, there + asked, 0.0).max(axis=1))
        waits += np.where(waits > 0, self.progress.link_busy_seconds, 0.0)
        return np.asarray(np.maximum(waits, left[:, 0] + self.progress.compute_busy_seconds))

    @cached_property
    def _below(self) -> Seconds:
        """[chunks, layers] seconds of a step before it reaches a layer."""
        return np.asarray(np.cumsum(self.costs.compute_seconds, axis=1) - self.costs.compute_seconds)


CLOSE = 2  # edges, or depths within one, tried on either side of the meeting point
_TINY = 1e-12  # seconds
_EVEN = 1e-9  # relative tolerance for equal times


def count_computed(computing: Sequence[float], streaming: Sequence[float]) -> int:
    """Number of pieces computed from the front by the time all others have arrived from the back.

    Both are seconds of whole pieces; a piece that is here already has 0 in `streaming`.
    """
    left, worked = sum(streaming), 0.0
    for count, (work, link) in enumerate(zip(computing, streaming, strict=True)):
        if left <= worked:
            return count
        worked, left = worked + work, left - link
    return len(computing)


@dataclass(frozen=True, eq=False)
class Edges:
    """Ways to compute more, the most rewarding first: `chunk` up to `depth`, from where an earlier edge left it.

    work    seconds of computing that it adds
    spares  seconds of fetching that it saves
    """

    chunk: NDArray[np.int64]
    depth: NDArray[np.int64]
    work: Seconds
    spares: Seconds


@dataclass(frozen=True, eq=False)
class Candidate:
    """Depths, and when they end."""

    depths: Depths
    seconds: float


def best_of(task: RemainingWork, tries: Depths, than: Candidate | None = None) -> Candidate:
    """The best of the tries, or `than` if none is clearly better."""
    seconds = task.estimate(tries)
    best = int(np.argmin(seconds))
    if than is not None and seconds[best] >= than.seconds * (1 - _EVEN):
        return than
    return Candidate(tries[best], float(seconds[best]))


@dataclass(frozen=True, eq=False)
class Lanes:
    """[edges + 1] seconds of both lanes after taking this many edges; `meet`: the number at which they end together."""

    computing: Seconds
    carrying: Seconds
    meet: int

    @classmethod
    def of(cls, task: RemainingWork, edges: Edges) -> Lanes:
        computing = np.concatenate([[0.0], np.cumsum(edges.work)])
        computing += task.costs.question_seconds.sum() + task.progress.compute_busy_seconds
        carrying = task.slice_seconds.sum() - np.concatenate([[0.0], np.cumsum(edges.spares)])
        carrying += task.progress.link_busy_seconds
        later = np.flatnonzero(computing >= carrying)
        return cls(computing, carrying, int(later[0]) if len(later) else len(computing) - 1)


def candidates_around(task: RemainingWork, edges: Edges, near: int) -> Depths:
    """[tries, chunks] the depths after taking up to `near` edges more or fewer than at the meeting point."""
    lanes = Lanes.of(task, edges)
    tries = []
    for count in range(max(0, lanes.meet - near - 1), min(len(edges.chunk), lanes.meet + near) + 1):
        depths = np.zeros(len(task.done), np.int64)
        depths[edges.chunk[:count]] = edges.depth[:count]  # a later edge of a chunk goes higher
        tries.append(depths)
        if count == lanes.meet - 1:
            tries += _inside(task, depths, int(edges.chunk[count]), lanes)
    return np.array(tries)


def _inside(task: RemainingWork, depths: Depths, chunk: int, lanes: Lanes) -> list[Depths]:
    """The same within an edge: the depths of its chunk closest to the meeting point."""
    work, spared, at = task.costs.depth_seconds[chunk], spared_seconds(task)[chunk], depths[chunk]
    computing = lanes.computing[lanes.meet - 1] + work - work[at]
    carrying = lanes.carrying[lanes.meet - 1] - spared + spared[at]
    able = np.arange(max(at, task.done[chunk]) + 1, task.most[chunk] + 1)
    near = able[np.argsort(np.abs(computing - carrying)[able], kind="stable")][:CLOSE]
    tries = np.repeat(depths[None], len(near), axis=0)
    tries[:, chunk] = near
    return list(tries)


def front_edges(task: RemainingWork, least: int) -> Edges:
    """Whole chunks from the front, after the first `least` layers of each."""
    work, spared = task.costs.depth_seconds, spared_seconds(task)
    chunks = np.arange(len(work))
    first = np.minimum(np.where(task.done > 0, 0, least), task.most)
    chunk, depth = np.concatenate([chunks, chunks]), np.concatenate([first, task.most])
    low = np.concatenate([np.zeros_like(first), first])
    keep = depth > low
    chunk, depth, low = chunk[keep], depth[keep], low[keep]
    return Edges(chunk, depth, work[chunk, depth] - work[chunk, low], spared[chunk, depth] - spared[chunk, low])


def spared_seconds(task: RemainingWork) -> Seconds:
    """[chunks, layers + 1] seconds of fetching saved by computing this many layers of a chunk."""
    return np.concatenate([np.zeros((len(task.done), 1)), np.cumsum(task.slice_seconds, axis=1)], axis=1)


def meet_in_the_middle(task: RemainingWork) -> Schedule:
    """The best schedule with a meeting point, with or without computing the lowest layer of every chunk first."""
    tries = [np.zeros_like(task.done), task.most]
    tries += [depths for least in (0, 1) for depths in candidates_around(task, front_edges(task, least), 1)]
    best = best_of(task, np.stack(tries))
    layers = np.arange(task.costs.layers)
    beyond = np.flatnonzero(task.missing & (layers >= best.depths[:, None]))
    before = np.flatnonzero(task.missing & (layers < best.depths[:, None]))  # in case the link is faster than expected
    # The top layer first, where the lanes meet.
    order = TransferOrder(task.costs.layers, tuple(np.concatenate([beyond[::-1], before[::-1]]).tolist()))
    return Schedule(task.split(best.depths), order, best.seconds)
