"""Schedules that decide once, or by whole chunks: everything computed, everything streamed, and rivals."""

from __future__ import annotations

import numpy as np

from benchmarks.waiting.schedule import whole
from benchmarks.waiting.timeline import LinkCosts, SearchTask
from rekindle.core.cells import Progress, Schedule


def all_compute(costs: LinkCosts, progress: Progress | None = None) -> Schedule:
    """The link is not used."""
    task = SearchTask.of(costs, progress)
    return task.schedule(task.max_count)


def all_stream(costs: LinkCosts, progress: Progress | None = None) -> Schedule:
    """Nothing is computed but the question."""
    task = SearchTask.of(costs, progress)
    return task.schedule(np.zeros_like(task.done))


def fixed(costs: LinkCosts, mean_bandwidth: float) -> Schedule:
    """A hybrid that is planned once, from the mean bandwidth: whole chunks in front are computed, the others streamed.
    A rival. Its seconds are those at the bandwidth of the costs."""
    usual = costs.at(mean_bandwidth)
    computing = np.concatenate([[0.0], np.cumsum(usual.depth_seconds[:, -1])])
    carrying = usual.link_seconds.sum() - np.concatenate([[0.0], np.cumsum(usual.link_seconds.sum(axis=1))])
    return whole(costs, int(np.argmin(np.maximum(computing, carrying))))
