"""Compute or stream: which cells of a published context are computed here, which come from an origin, in which order.

`timeline` says how long a schedule takes, here one is chosen, `revise` changes it while it runs. `greedy` goes by
potential: a cell is worth computing for the streaming that it spares, and for what it unlocks above itself in its
chunk. It is never later than computing everything, streaming everything, or meeting in the middle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cells import Progress, Schedule, Split, Streamed
from rekindle.reuse.revise import revise, speculate
from rekindle.reuse.timeline import Depths, Seconds, StreamCosts, Task, Timeline, simulate

__all__ = [
    "StreamCosts",
    "Timeline",
    "all_compute",
    "all_stream",
    "bidirectional",
    "fixed",
    "greedy",
    "revise",
    "simulate",
    "speculate",
]

_NEAR = 1.002  # so near to what no schedule can beat, the search ends
_SIMPLER = 0.98  # other shapes than whole chunks in front must take this share of its time: a slow link hurts them more
_LOOKS = 80_000  # cells that the last part of the search looks at, all tries together: it stays within milliseconds
_ROUNDS = 4  # in which it does so, at least
_CLOSE = 2  # edges looked at on either side of where both lanes end together
_STEPS = (1, 2, 3)  # layers more or less
_TRADES = ((1, 1), (1, 2), (2, 1), (2, 2))  # layers more of one chunk, and less of another
_ALIKE = 0.05  # rewards that differ by this share are about alike
_TINY = 1e-12  # seconds: less is nothing
_EVEN = 1e-9  # times that differ by this share are equal


def all_compute(costs: StreamCosts, progress: Progress | None = None) -> Schedule:
    """The link is not used."""
    task = Task.of(costs, progress)
    return task.schedule(task.most)


def all_stream(costs: StreamCosts, progress: Progress | None = None) -> Schedule:
    """Nothing is computed but the question."""
    task = Task.of(costs, progress)
    return task.schedule(np.zeros_like(task.done))


def bidirectional(costs: StreamCosts) -> Schedule:
    """Whole chunks: computed from the front, streamed from the back, each lane taking the next when it is free, until
    they meet. A rival, as published."""
    link, compute = costs.link_seconds.sum(axis=1), costs.depth_seconds[:, -1]
    front, back, computing, carrying = 0, costs.chunks, 0.0, 0.0
    while front < back:
        if computing <= carrying:
            computing += compute[front]
            front += 1
        else:
            back -= 1
            carrying += link[back]
    return _whole(costs, front)


def fixed(costs: StreamCosts, mean_bandwidth: float) -> Schedule:
    """A hybrid that is planned once, from the mean bandwidth: whole chunks in front are computed, the others streamed.
    A rival. Its seconds are those at the bandwidth of the costs."""
    usual = costs.at(mean_bandwidth)
    computing = np.concatenate([[0.0], np.cumsum(usual.depth_seconds[:, -1])])
    carrying = usual.link_seconds.sum() - np.concatenate([[0.0], np.cumsum(usual.link_seconds.sum(axis=1))])
    return _whole(costs, int(np.argmin(np.maximum(computing, carrying))))


def _whole(costs: StreamCosts, front: int) -> Schedule:
    """So many whole chunks computed, the others streamed from the back, each from its lowest layer."""
    split = Split(costs.layers, (costs.layers,) * front + (0,) * (costs.chunks - front))
    numbers = np.arange(front * costs.layers, costs.chunks * costs.layers).reshape(-1, costs.layers)
    order = Streamed(costs.layers, tuple(numbers[::-1].ravel().tolist()))
    return Schedule(split, order, simulate(split, order, costs).seconds)


@dataclass(frozen=True, eq=False)
class _Edges:
    """Ways to compute more, the most rewarding first: `chunk` up to `depth`, from where an earlier edge left it.

    work    seconds of computing that it adds
    spares  seconds of streaming that it spares
    """

    chunk: NDArray[np.int64]
    depth: NDArray[np.int64]
    work: Seconds
    spares: Seconds


def greedy(costs: StreamCosts, progress: Progress | None = None) -> Schedule:
    """The split and the order that promise the soonest end, found by potential.

    Every chunk has points (computing, streaming spared), one for each depth; the upper edge of their hull says what a
    second of computing spares at best, the depths that it unlocks included. Edges are taken, the steepest first, until
    both lanes end together. That leaves out who waits for whom, so others are tried too: some whole chunks in front
    first, which wait for nobody, then by potential; or the front alone. The best are looked at closely.
    """
    task = Task.of(costs, progress)
    edges = _edges(task)
    enough = _Lanes.of(task, edges).least_seconds * _NEAR
    single = [np.zeros_like(task.done), task.most]
    single += [task.depths(bidirectional(costs).split)] if progress is None else []
    best = _better(task, np.stack([*single, *(t for least in (0, 1) for t in _around(task, _fronts(task, least), 1))]))
    if best.seconds > enough:
        free = _free(task, edges, enough)
        best = free if free.seconds < best.seconds * _SIMPLER else best
    schedule = task.schedule(best.depths)
    if not costs.decode_seconds_per_byte and schedule.seconds <= task.estimate(np.stack(single)).min():
        return schedule
    others = [*map(task.schedule, single), *([bidirectional(costs)] if progress is None else [])]
    return min(schedule, *others, key=lambda other: other.seconds)


def _free(task: Task, edges: _Edges, enough: float) -> _Found:
    """The best of any shape: by potential behind whole chunks in front, ever more of them, then polished."""
    ways = [*(_behind(edges, front) for front in _doubling(task.costs.chunks)), edges]
    found = [_better(task, _around(task, way, 0)) for way in ways]
    order = sorted(range(len(ways)), key=lambda way: found[way].seconds)
    best = found[order[0]]
    for way in order[:2]:
        if best.seconds > enough:
            best = _better(task, _around(task, ways[way], _CLOSE), best)
    return _polish(task, best, enough)


@dataclass(frozen=True, eq=False)
class _Found:
    depths: Depths
    seconds: float


def _better(task: Task, tries: Depths, than: _Found | None = None) -> _Found:
    """The best of some tries, or what was found before."""
    seconds = task.estimate(tries)
    best = int(np.argmin(seconds))
    if than is not None and seconds[best] >= than.seconds * (1 - _EVEN):
        return than
    return _Found(tries[best], float(seconds[best]))


def _doubling(chunks: int) -> list[int]:
    return [0, *(1 << n for n in range(chunks.bit_length()) if 1 << n < chunks)]


def _behind(edges: _Edges, front: int) -> _Edges:
    """The same edges, but those of so many chunks come first, chunk by chunk, and what rewards about alike goes from
    the front as well: a chunk that is computed as a whole keeps nobody waiting."""
    reward = np.round(np.log(np.maximum(edges.spares / np.maximum(edges.work, _TINY), _TINY)) / _ALIKE)
    order = np.lexsort((edges.depth, edges.chunk, -reward, np.minimum(edges.chunk, front)))
    return _Edges(edges.chunk[order], edges.depth[order], edges.work[order], edges.spares[order])


def _edges(task: Task) -> _Edges:
    """The hull of every chunk, from no computing to all."""
    work, spared = task.costs.depth_seconds, _spared(task)  # [chunks, layers + 1]
    chunks, depths = np.arange(len(work)), np.arange(work.shape[1])
    at = np.zeros(len(work), np.int64)
    found: list[tuple[NDArray[np.int64], NDArray[np.int64], Seconds, Seconds]] = []
    while True:
        more, less = work - work[chunks, at, None], spared - spared[chunks, at, None]
        able = (depths > at[:, None]) & (less > 0)
        speed = np.where(able, less / np.maximum(more, _TINY), 0.0)
        to = depths[-1] - speed[:, ::-1].argmax(axis=1)  # the farthest of equals
        rows = np.flatnonzero(speed[chunks, to] > 0)
        if not len(rows):
            break
        found.append((rows, to[rows], more[rows, to[rows]], less[rows, to[rows]]))
        at[rows] = to[rows]
    if not found:
        return _Edges(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    chunk, depth, adds, spares = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((chunk, -spares / np.maximum(adds, _TINY)))
    return _Edges(chunk[order], depth[order], adds[order], spares[order])


def _spared(task: Task) -> Seconds:
    """[chunks, layers + 1] the streaming that computing so many layers of a chunk spares."""
    return np.concatenate([np.zeros((len(task.done), 1)), np.cumsum(task.slice_seconds, axis=1)], axis=1)


def _fronts(task: Task, least: int) -> _Edges:
    """Whole chunks from the front, after so many layers of each were computed."""
    work, spared = task.costs.depth_seconds, _spared(task)
    chunks = np.arange(len(work))
    first = np.minimum(np.where(task.done > 0, 0, least), task.most)
    chunk, depth = np.concatenate([chunks, chunks]), np.concatenate([first, task.most])
    low = np.concatenate([np.zeros_like(first), first])
    keep = depth > low
    chunk, depth, low = chunk[keep], depth[keep], low[keep]
    return _Edges(chunk, depth, work[chunk, depth] - work[chunk, low], spared[chunk, depth] - spared[chunk, low])


@dataclass(frozen=True, eq=False)
class _Lanes:
    """[edges + 1] how long both lanes work once so many edges are taken, and how many bring them together."""

    computing: Seconds
    carrying: Seconds
    meet: int

    @classmethod
    def of(cls, task: Task, edges: _Edges) -> _Lanes:
        computing = np.concatenate([[0.0], np.cumsum(edges.work)])
        computing += task.costs.question_seconds.sum() + task.progress.compute_busy_seconds
        carrying = task.slice_seconds.sum() - np.concatenate([[0.0], np.cumsum(edges.spares)])
        carrying += task.progress.link_busy_seconds
        later = np.flatnonzero(computing >= carrying)
        return cls(computing, carrying, int(later[0]) if len(later) else len(computing) - 1)

    @property
    def least_seconds(self) -> float:
        """If edges could be taken in part, and nobody waited for anybody."""
        if self.meet == 0:
            return float(self.computing[0])
        (less, more), (much, little) = (lane[self.meet - 1 : self.meet + 1] for lane in (self.computing, self.carrying))
        share = (much - less) / max(much - less + more - little, _TINY)
        return float(less + (more - less) * min(share, 1.0))


def _around(task: Task, edges: _Edges, near: int) -> Depths:
    """[tries, chunks] what results so near to the edge at which both lanes end together."""
    lanes = _Lanes.of(task, edges)
    tries = []
    for count in range(max(0, lanes.meet - near - 1), min(len(edges.chunk), lanes.meet + near) + 1):
        depths = np.zeros(len(task.done), np.int64)
        depths[edges.chunk[:count]] = edges.depth[:count]  # a later edge of a chunk goes higher
        tries.append(depths)
        if count == lanes.meet - 1:
            tries += _inside(task, depths, int(edges.chunk[count]), lanes)
    return np.array(tries)


def _inside(task: Task, depths: Depths, chunk: int, lanes: _Lanes) -> list[Depths]:
    """The same within an edge: the depths of its chunk next to which both lanes end together."""
    work, spared, at = task.costs.depth_seconds[chunk], _spared(task)[chunk], depths[chunk]
    computing = lanes.computing[lanes.meet - 1] + work - work[at]
    carrying = lanes.carrying[lanes.meet - 1] - spared + spared[at]
    able = np.arange(max(at, task.done[chunk]) + 1, task.most[chunk] + 1)
    near = able[np.argsort(np.abs(computing - carrying)[able], kind="stable")][:_CLOSE]
    tries = np.repeat(depths[None], len(near), axis=0)
    tries[:, chunk] = near
    return list(tries)


def _polish(task: Task, found: _Found, enough: float) -> _Found:
    """The best of the tries near one, then near that, until none is better or enough were looked at."""
    looks = 0
    while found.seconds > enough and looks < _LOOKS:
        tries = _neighbours(task, found.depths)
        looks += len(tries) * task.missing.size
        better = _better(task, tries, found)
        if better is found:
            break
        found = better
    return found


def _neighbours(task: Task, depths: Depths) -> Depths:
    """[tries, chunks] one chunk a little deeper, or less deep, or one of each; the chunks where that spares most."""
    if len(depths) ** 2 * (task.costs.layers + 1) ** 2 * task.missing.size <= _LOOKS:
        return _any_two(task, depths)
    chunks = np.arange(len(depths))
    work, spared = task.costs.depth_seconds, _spared(task)
    up, down = np.minimum(depths + 1, task.most), np.maximum(depths - 1, 0)

    def speed(low: Depths, high: Depths) -> Seconds:
        return np.asarray(
            (spared[chunks, high] - spared[chunks, low]) / np.maximum(work[chunks, high] - work[chunks, low], _TINY)
        )

    many = _many(task)
    raised = [c for c in np.argsort(-speed(depths, up), kind="stable") if depths[c] < task.most[c]][:many]
    lowered = [c for c in np.argsort(speed(down, depths), kind="stable") if depths[c] > 0][:many]
    changes = [{chunk: depths[chunk] + by} for chunk in raised for by in _STEPS]
    changes += [{chunk: depths[chunk] - by} for chunk in lowered for by in _STEPS]
    changes += [{chunk: depth} for chunk in {*raised, *lowered} for depth in (0, 1, task.most[chunk])]
    changes += [
        {one: depths[one] + by, other: depths[other] - less}
        for one in raised
        for other in lowered
        if one != other
        for by, less in _TRADES
    ]
    tries = np.repeat(depths[None], len(changes) + 1, axis=0)
    for row, change in zip(tries, changes, strict=False):
        for chunk, depth in change.items():
            row[chunk] = min(max(depth, 0), task.most[chunk])
    return np.asarray(np.where(tries > task.done, tries, 0))


def _any_two(task: Task, depths: Depths) -> Depths:
    """[tries, chunks] any two chunks at any depth, where that is few."""
    chunks, layers = task.missing.shape
    one, other, high, low = (grid.ravel() for grid in np.indices((chunks, chunks, layers + 1, layers + 1)))
    tries, rows = np.repeat(depths[None], len(one), axis=0), np.arange(len(one))
    tries[rows, one] = high
    tries[rows, other] = low
    return np.asarray(np.where(tries > task.done, tries, 0))


def _many(task: Task) -> int:
    """How many chunks a round of tries looks at: all where there are few cells."""
    tries = _LOOKS / _ROUNDS / task.missing.size
    return max(2, int((tries / len(_TRADES)) ** 0.5))
