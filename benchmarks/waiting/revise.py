"""A schedule of computing and streaming, changed while it runs: no link is what it was expected to be.

A schedule is revised after each step, and now and then while only the link works. Work moves when a lane is
about to run dry, or would wait, not sooner: what is decided later is decided knowing more.
"""

from __future__ import annotations

import numpy as np

from benchmarks.waiting.timeline import LinkCosts, SearchTask, Timeline, simulate
from rekindle.core.cells import Progress, Schedule, TransferOrder
from rekindle.remote.schedule import Depths

_WORTH = 0.98  # a revised schedule must take this share of the time of the one it replaces: no swinging to and fro
_SOON = 1.3  # times the compute lane goes through a whole chunk: who has less left than that is about to run dry
_WAITS = 0.02  # the share of the time left that the next step may wait for the link


def revise(schedule: Schedule, progress: Progress, costs: LinkCosts, max_cells: int | None = None) -> Schedule:
    """The schedule for the remaining work, changed where current measurements make that faster. Pure.

    Cells move from the tail of the slower lane to the other, `max_cells` at a time, two chunks' if nobody says. What
    was computed, has come or flies stays. Only a dead link is not bounded, one that takes longer for a slice than
    computing all that is left takes: then that is computed, chunks whose hidden state is gone from layer 0 again. Never
    expected to be later than the schedule as it was; nearly as late is not worth a change.
    """
    task = SearchTask.of(costs, progress)
    wanted = np.maximum(np.asarray(schedule.split.computed, np.int64), task.done)
    depths = _trimmed(task, np.where(wanted > task.done, wanted, 0))
    numbers = _left(task, schedule, depths)
    split, order = task.split(depths), TransferOrder(costs.layers, tuple(numbers))
    timeline = simulate(split, order, costs, progress)
    kept = Schedule(split, order, timeline.seconds)
    if not numbers and not depths.any():
        return kept
    if numbers and costs.link_seconds.ravel()[numbers].min() > _work(task, task.most):
        return min(kept, task.schedule(task.most), key=lambda schedule: schedule.seconds)
    tries = _tries(task, depths, numbers, timeline, max_cells or 2 * costs.layers)
    if not tries:
        return kept
    seconds = task.estimate(np.stack(tries))
    if seconds.min() >= kept.seconds * _WORTH:
        return kept
    revised = task.schedule(tries[int(np.argmin(seconds))])
    return revised if revised.seconds < kept.seconds * _WORTH else kept


def _trimmed(task: SearchTask, depths: Depths) -> Depths:
    """No step goes higher than the highest cell that it is needed for."""
    layers = np.arange(task.costs.layers)
    wanted = task.missing & (layers < depths[:, None])
    return np.asarray(np.where(wanted, layers + 1, 0).max(axis=1))


def _left(task: SearchTask, schedule: Schedule, depths: Depths) -> list[int]:
    """What is left to stream, in the order that was; what was given up on its way has to come again, at the end."""
    streamed = set(np.flatnonzero(task.missing & (np.arange(task.costs.layers) >= depths[:, None])).tolist())
    numbers = [number for number in schedule.order.numbers if number in streamed]
    return numbers + sorted(streamed.difference(numbers))


def _work(task: SearchTask, depths: Depths) -> float:
    """How long the compute lane works before the question."""
    steps = task.costs.depth_seconds[np.arange(len(depths)), depths]
    return float(steps.sum()) + task.progress.compute_busy_seconds


def _tries(task: SearchTask, depths: Depths, numbers: list[int], timeline: Timeline, max_count: int) -> list[Depths]:
    """What could be done instead, if anything has to be done now."""
    costs, waiting = task.costs, np.flatnonzero(depths)
    computing = _work(task, depths)
    carrying = task.progress.link_busy_seconds + float(task.slice_seconds.ravel()[numbers].sum())
    soon = _SOON * float(costs.depth_seconds[waiting[0] if len(waiting) else 0, -1])
    tries = _freed(task, depths, timeline, max_count)
    if computing + costs.question_seconds.sum() > carrying:
        return tries + (_less(task, depths, max_count) if carrying < soon else [])
    return tries + (_more(task, depths, numbers, max_count) if computing < soon else [])


def _less(task: SearchTask, depths: Depths, max_count: int) -> list[Depths]:
    """Ever less to compute, from the tail of the compute lane: the top of the last step first."""
    tries, moved, now = [], 0, depths.copy()
    for chunk in np.flatnonzero(depths)[::-1]:
        while now[chunk] and moved < max_count:
            now = now.copy()
            now[chunk] -= 1
            moved += 1
            now = _trimmed(task, now)
            tries.append(now)
    return tries


def _more(task: SearchTask, depths: Depths, numbers: list[int], max_count: int) -> list[Depths]:
    """Ever more to compute, from the tail of the link; chunks that would be computed again come last."""
    tries, moved, now = [], 0, depths.copy()
    cells = [divmod(number, task.costs.layers) for number in reversed(numbers)]
    for chunk, layer in sorted(cells, key=lambda cell: bool(task.done[cell[0]])):
        if layer < now[chunk]:
            continue
        moved += int(task.missing[chunk, now[chunk] : layer + 1].sum())
        if moved > max_count:
            break
        now = now.copy()
        now[chunk] = layer + 1
        tries.append(now)
    return tries


def _freed(task: SearchTask, depths: Depths, timeline: Timeline, max_count: int) -> list[Depths]:
    """If a step would wait long for the link: it ends where it would wait, or what it waits for is computed, ever more
    of the chunks before it."""
    layers = np.arange(task.costs.layers)
    stops = np.where(layers < depths[:, None], timeline.compute_stop[:-1], -np.inf).ravel()
    free = np.maximum.accumulate(np.concatenate([[task.progress.compute_busy_seconds], stops[:-1]]))
    waits = np.nan_to_num(timeline.compute_start[:-1] - free.reshape(depths.size, -1))  # [chunks, layers]
    late = np.flatnonzero(waits.sum(axis=1) > _WAITS * timeline.seconds)
    if not len(late):
        return []
    chunk, now = int(late[0]), depths.copy()
    now[chunk] = int(np.argmax(waits[chunk] > 0)) + 1
    tries = [_trimmed(task, now)]
    needed = np.where(task.missing & (layers < depths[chunk] - 1), layers + 1, 0).max(axis=1)
    now = depths.copy()
    for before in np.flatnonzero(needed[:chunk] > depths[:chunk]):
        now = now.copy()
        now[before] = needed[before]
        tries.append(now)
    held = task.missing & (layers < depths[:, None])
    return [t for t in tries if (held ^ (task.missing & (layers < t[:, None]))).sum() <= max_count]
