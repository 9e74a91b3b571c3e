"""Compute or stream: the schedule of any shape that promises the soonest end, found by potential.

Sessions let both lanes meet (`remote/schedule`), which bends best where a link is not as expected. Where
chunks differ much in what they cost, another shape can be sooner: a cell is worth computing for the streaming that it
spares, and for what it unlocks above itself in its chunk. Never later than computing everything, streaming everything,
or meeting in the middle by whole chunks. `revise` changes such a schedule while it runs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.waiting.timeline import LinkCosts, SearchTask, simulate
from rekindle.core.cells import Progress, Schedule, Split, TransferOrder
from rekindle.remote.schedule import (
    CLOSE,
    Candidate,
    Depths,
    Edges,
    Lanes,
    Seconds,
    best_of,
    candidates_around,
    front_edges,
    spared_seconds,
)

_NEAR = 1.002  # so near to what no schedule can beat, the search ends
_SIMPLER = 0.98  # other shapes than whole chunks in front must take this share of its time: a slow link hurts them more
_LOOKS = 80_000  # cells that the last part of the search looks at, all tries together: it stays within milliseconds
_ROUNDS = 4  # in which it does so, at least
_STEPS = (1, 2, 3)  # layers more or less
_TRADES = ((1, 1), (1, 2), (2, 1), (2, 2))  # layers more of one chunk, and less of another
_ALIKE = 0.05  # rewards that differ by this share are about alike
_TINY = 1e-12  # seconds: less is nothing


def bidirectional(costs: LinkCosts) -> Schedule:
    """Whole chunks: computed from the front, streamed from the back, each lane taking the next when it is free, until
    they meet. As published."""
    link, compute = costs.link_seconds.sum(axis=1), costs.depth_seconds[:, -1]
    front, back, computing, carrying = 0, costs.chunks, 0.0, 0.0
    while front < back:
        if computing <= carrying:
            computing += compute[front]
            front += 1
        else:
            back -= 1
            carrying += link[back]
    return whole(costs, front)


def whole(costs: LinkCosts, front: int) -> Schedule:
    """A number of whole chunks computed, the others streamed from the back, each from its lowest layer."""
    split = Split(costs.layers, (costs.layers,) * front + (0,) * (costs.chunks - front))
    numbers = np.arange(front * costs.layers, costs.chunks * costs.layers).reshape(-1, costs.layers)
    order = TransferOrder(costs.layers, tuple(numbers[::-1].ravel().tolist()))
    return Schedule(split, order, simulate(split, order, costs).seconds)


def greedy(costs: LinkCosts, progress: Progress | None = None) -> Schedule:
    """The split and the order that promise the soonest end, found by potential.

    Every chunk has points (computing, streaming spared), one for each depth; the upper edge of their hull says what a
    second of computing spares at best, the depths that it unlocks included. Edges are taken, the steepest first, until
    both lanes end together. That leaves out who waits for whom, so others are tried too: some whole chunks in front
    first, which wait for nobody, then by potential; or the front alone. The best are looked at closely.
    """
    task = SearchTask.of(costs, progress)
    edges = _edges(task)
    enough = min_seconds(Lanes.of(task, edges)) * _NEAR
    single = [np.zeros_like(task.done), task.most]
    single += [task.depths(bidirectional(costs).split)] if progress is None else []
    best = best_of(
        task,
        np.stack([*single, *(t for least in (0, 1) for t in candidates_around(task, front_edges(task, least), 1))]),
    )
    if best.seconds > enough:
        free = _free(task, edges, enough)
        best = free if free.seconds < best.seconds * _SIMPLER else best
    schedule = task.schedule(best.depths)
    if not costs.decode_seconds_per_byte and schedule.seconds <= task.estimate(np.stack(single)).min():
        return schedule
    others = [*map(task.schedule, single), *([bidirectional(costs)] if progress is None else [])]
    return min(schedule, *others, key=lambda other: other.seconds)


def lower_bound(costs: LinkCosts) -> float:
    """The seconds that no schedule of these costs can beat."""
    task = SearchTask.of(costs, None)
    return min_seconds(Lanes.of(task, _edges(task)))


def min_seconds(lanes: Lanes) -> float:
    """When they end, if edges could be taken in part, and nobody waited for anybody."""
    if lanes.meet == 0:
        return float(lanes.computing[0])
    (less, more), (much, little) = (lane[lanes.meet - 1 : lanes.meet + 1] for lane in (lanes.computing, lanes.carrying))
    share = (much - less) / max(much - less + more - little, _TINY)
    return float(less + (more - less) * min(share, 1.0))


def _free(task: SearchTask, edges: Edges, enough: float) -> Candidate:
    """The best of any shape: by potential behind whole chunks in front, ever more of them, then polished."""
    ways = [*(_behind(edges, front) for front in _doubling(task.costs.chunks)), edges]
    found = [best_of(task, candidates_around(task, way, 0)) for way in ways]
    order = sorted(range(len(ways)), key=lambda way: found[way].seconds)
    best = found[order[0]]
    for way in order[:2]:
        if best.seconds > enough:
            best = best_of(task, candidates_around(task, ways[way], CLOSE), best)
    return _polish(task, best, enough)


def _doubling(chunks: int) -> list[int]:
    return [0, *(1 << n for n in range(chunks.bit_length()) if 1 << n < chunks)]


def _behind(edges: Edges, front: int) -> Edges:
    """The same edges, but those of the first chunks come first, chunk by chunk, and what rewards about alike goes from
    the front as well: a chunk that is computed as a whole keeps nobody waiting."""
    reward = np.round(np.log(np.maximum(edges.spares / np.maximum(edges.work, _TINY), _TINY)) / _ALIKE)
    order = np.lexsort((edges.depth, edges.chunk, -reward, np.minimum(edges.chunk, front)))
    return Edges(edges.chunk[order], edges.depth[order], edges.work[order], edges.spares[order])


def _edges(task: SearchTask) -> Edges:
    """The hull of every chunk, from no computing to all."""
    work, spared = task.costs.depth_seconds, spared_seconds(task)  # [chunks, layers + 1]
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
        return Edges(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    chunk, depth, adds, spares = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((chunk, -spares / np.maximum(adds, _TINY)))
    return Edges(chunk[order], depth[order], adds[order], spares[order])


def _polish(task: SearchTask, found: Candidate, enough: float) -> Candidate:
    """The best of the tries near one, then near that, until none is better or enough were looked at."""
    looks = 0
    while found.seconds > enough and looks < _LOOKS:
        tries = _neighbours(task, found.depths)
        looks += len(tries) * task.missing.size
        better = best_of(task, tries, found)
        if better is found:
            break
        found = better
    return found


def _neighbours(task: SearchTask, depths: Depths) -> Depths:
    """[tries, chunks] one chunk a little deeper, or less deep, or one of each; the chunks where that spares most."""
    if len(depths) ** 2 * (task.costs.layers + 1) ** 2 * task.missing.size <= _LOOKS:
        return _any_two(task, depths)
    chunks = np.arange(len(depths))
    work, spared = task.costs.depth_seconds, spared_seconds(task)
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


def _any_two(task: SearchTask, depths: Depths) -> Depths:
    """[tries, chunks] any two chunks at any depth, where that is few."""
    chunks, layers = task.missing.shape
    one, other, high, low = (grid.ravel() for grid in np.indices((chunks, chunks, layers + 1, layers + 1)))
    tries, rows = np.repeat(depths[None], len(one), axis=0), np.arange(len(one))
    tries[rows, one] = high
    tries[rows, other] = low
    return np.asarray(np.where(tries > task.done, tries, 0))


def _many(task: SearchTask) -> int:
    """How many chunks a round of tries looks at: all where there are few cells."""
    tries = _LOOKS / _ROUNDS / task.missing.size
    return max(2, int((tries / len(_TRADES)) ** 0.5))
