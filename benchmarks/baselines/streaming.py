"""The executor of sessions, steered by somebody else: a schedule is followed, in place of going on until lanes meet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from benchmarks.waiting.schedule import whole
from benchmarks.waiting.timeline import LinkCosts, SearchTask
from rekindle.core.cells import Cell, Progress, Schedule, steps
from rekindle.core.kv import Span
from rekindle.engine.base import Engine, Row
from rekindle.remote.hybrid_prefill import ComputeStep, HybridPrefill, WholeTokenPrefill
from rekindle.remote.ladder import LevelLadder
from rekindle.remote.schedule import StreamCosts


@dataclass
class DeadlineLadder(LevelLadder):
    """CacheGen's: the best level with which all that is left comes by the deadline, else the smallest."""

    deadline: float = math.inf  # of `clock`
    clock: Callable[[], float] = time.monotonic

    def adapt(self, left: Sequence[Cell], bytes_per_second: float | None, pace: float = 1.0) -> None:  # noqa: ARG002
        """In the middle while nothing is known, as published."""
        self.level = self.levels[len(self.levels) // 2]
        if bytes_per_second is not None:
            share, seconds = len(left) / len(list(self.cells)), self.deadline - self.clock()
            sizes = [share * float(level.sizes.sum()) for level in self.levels]
            fits = [level for level, size in zip(self.levels, sizes, strict=True) if size <= seconds * bytes_per_second]
            self.level = (*fits, self.levels[-1])[0]


class Steering(Protocol):
    """Decides what is computed and what is streamed."""

    def begin(self, costs: Any, progress: Progress) -> Schedule:
        """The schedule to begin with."""

    def revise(self, schedule: Schedule, progress: Progress, costs: Any) -> Schedule:
        """The schedule to go on with, before each step and while the link is waited for."""


@dataclass(frozen=True)
class WholeStep(ComputeStep):
    """All layers, and nothing before is missing: afterwards the sequence is longer."""


class Steered(HybridPrefill):
    """Counts how often the split changes; without a steering it is a session's own."""

    steering: Steering | None = None
    revisions = 0
    _last: Schedule | None = None

    def plan(self, progress: Progress) -> Schedule:
        """What the steering says."""
        schedule = super().plan(progress) if self.steering is None else self._steer(self.steering, progress)
        self.revisions += self._last is not None and schedule.split != self._last.split
        self._last = schedule
        return schedule

    def _steer(self, steering: Steering, progress: Progress) -> Schedule:
        costs: StreamCosts = self._now()
        schedule = self._last or steering.begin(costs, progress)
        return steering.revise(schedule, progress, costs)

    def next_step(self, schedule: Schedule, progress: Progress) -> ComputeStep | None:
        """The next step of the schedule; None while what it attends to is not here."""
        if self.steering is None:
            return super().next_step(schedule, progress)
        todo, layers = steps(schedule.split, progress), self._cells.layers
        if not todo:
            return None
        chunk, depth = todo[0]
        if depth == layers and self._sequence.length == self._cells.span(chunk).start:
            whole = [following == (chunk + n, layers) for n, following in enumerate(todo)]
            count = min((*whole, False).index(False), self._max_chunks)
            return WholeStep(range(chunk, chunk + count), depth)
        # Every layer of the chunks before it but the step's last.
        ready = all(self._has(before, layer) for before in range(chunk) for layer in range(depth - 1))
        return ComputeStep(range(chunk, chunk + 1), depth) if ready else None

    def row(self, step: ComputeStep, span: Span) -> Row:
        """A whole step needs nothing that is not in the sequence."""
        row = super().row(step, span)
        return replace(row, feeds=(), until=None) if isinstance(step, WholeStep) else row


class SteeredByToken(Steered, WholeTokenPrefill):
    """The same for engines that take whole tokens only."""


def steered(engine: Engine) -> type[Steered]:
    """The executor of sessions with this engine."""
    return Steered if engine.capabilities.layer_feeds else SteeredByToken


def all_compute(costs: LinkCosts, progress: Progress | None = None) -> Schedule:
    """The link is not used."""
    task = SearchTask.of(costs, progress)
    return task.schedule(task.most)


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
