"""Where two lanes meet: whole chunks in front are computed, the others streamed from the back.

    compute   [chunk 0][chunk 1][chunk 2, from below]
    link      [chunk 5][chunk 4][chunk 3][chunk 2, from above]

Nobody waits for anybody, and whatever the link does, both go on until they meet: no shape bends better. All shapes are
found by edges: ways to compute more, the most rewarding first, until both lanes end together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cells import Schedule, Streamed
from rekindle.reuse.timeline import Depths, Seconds, Task

CLOSE = 2  # edges, or depths within one, looked at on either side of where both lanes end together
_TINY = 1e-12  # seconds: less is nothing
_EVEN = 1e-9  # times that differ by this share are equal


def meet_whole(computing: Sequence[float], streaming: Sequence[float]) -> int:
    """How many of some pieces are computed, from the front, by the time all others have come, from the back.

    Both are seconds; none is computed or streamed in part. What is here already takes no streaming.
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
    spares  seconds of streaming that it spares
    """

    chunk: NDArray[np.int64]
    depth: NDArray[np.int64]
    work: Seconds
    spares: Seconds


@dataclass(frozen=True, eq=False)
class Try:
    """Depths, and when they are through."""

    depths: Depths
    seconds: float


def best_of(task: Task, tries: Depths, than: Try | None = None) -> Try:
    """The best of some tries, or what was found before."""
    seconds = task.estimate(tries)
    best = int(np.argmin(seconds))
    if than is not None and seconds[best] >= than.seconds * (1 - _EVEN):
        return than
    return Try(tries[best], float(seconds[best]))


@dataclass(frozen=True, eq=False)
class Lanes:
    """[edges + 1] how long both lanes work once so many edges are taken, and how many bring them together."""

    computing: Seconds
    carrying: Seconds
    meet: int

    @classmethod
    def of(cls, task: Task, edges: Edges) -> Lanes:
        computing = np.concatenate([[0.0], np.cumsum(edges.work)])
        computing += task.costs.question_seconds.sum() + task.progress.compute_busy_seconds
        carrying = task.slice_seconds.sum() - np.concatenate([[0.0], np.cumsum(edges.spares)])
        carrying += task.progress.link_busy_seconds
        later = np.flatnonzero(computing >= carrying)
        return cls(computing, carrying, int(later[0]) if len(later) else len(computing) - 1)

    @property
    def least_seconds(self) -> float:
        """When they end, if edges could be taken in part, and nobody waited for anybody."""
        if self.meet == 0:
            return float(self.computing[0])
        (less, more), (much, little) = (lane[self.meet - 1 : self.meet + 1] for lane in (self.computing, self.carrying))
        share = (much - less) / max(much - less + more - little, _TINY)
        return float(less + (more - less) * min(share, 1.0))


def around(task: Task, edges: Edges, near: int) -> Depths:
    """[tries, chunks] what results so near to the edge at which both lanes end together."""
    lanes = Lanes.of(task, edges)
    tries = []
    for count in range(max(0, lanes.meet - near - 1), min(len(edges.chunk), lanes.meet + near) + 1):
        depths = np.zeros(len(task.done), np.int64)
        depths[edges.chunk[:count]] = edges.depth[:count]  # a later edge of a chunk goes higher
        tries.append(depths)
        if count == lanes.meet - 1:
            tries += _inside(task, depths, int(edges.chunk[count]), lanes)
    return np.array(tries)


def _inside(task: Task, depths: Depths, chunk: int, lanes: Lanes) -> list[Depths]:
    """The same within an edge: the depths of its chunk next to which both lanes end together."""
    work, spared, at = task.costs.depth_seconds[chunk], spared_seconds(task)[chunk], depths[chunk]
    computing = lanes.computing[lanes.meet - 1] + work - work[at]
    carrying = lanes.carrying[lanes.meet - 1] - spared + spared[at]
    able = np.arange(max(at, task.done[chunk]) + 1, task.most[chunk] + 1)
    near = able[np.argsort(np.abs(computing - carrying)[able], kind="stable")][:CLOSE]
    tries = np.repeat(depths[None], len(near), axis=0)
    tries[:, chunk] = near
    return list(tries)


def fronts(task: Task, least: int) -> Edges:
    """Whole chunks from the front, after so many layers of each were computed."""
    work, spared = task.costs.depth_seconds, spared_seconds(task)
    chunks = np.arange(len(work))
    first = np.minimum(np.where(task.done > 0, 0, least), task.most)
    chunk, depth = np.concatenate([chunks, chunks]), np.concatenate([first, task.most])
    low = np.concatenate([np.zeros_like(first), first])
    keep = depth > low
    chunk, depth, low = chunk[keep], depth[keep], low[keep]
    return Edges(chunk, depth, work[chunk, depth] - work[chunk, low], spared[chunk, depth] - spared[chunk, low])


def spared_seconds(task: Task) -> Seconds:
    """[chunks, layers + 1] the streaming that computing so many layers of a chunk spares."""
    return np.concatenate([np.zeros((len(task.done), 1)), np.cumsum(task.slice_seconds, axis=1)], axis=1)


def meet(task: Task) -> Schedule:
    """Both lanes on their way to each other, maybe after the lowest layer of every chunk: it costs little."""
    tries = [np.zeros_like(task.done), task.most]
    tries += [depths for least in (0, 1) for depths in around(task, fronts(task, least), 1)]
    best = best_of(task, np.stack(tries))
    left = np.flatnonzero(task.missing & (np.arange(task.costs.layers) >= best.depths[:, None]))
    order = Streamed(task.costs.layers, tuple(left[::-1].tolist()))  # the top layer first: there the lanes meet
    return Schedule(task.split(best.depths), order, best.seconds, meeting=True)
