"""The executor of sessions, steered by somebody else: a schedule is followed, in place of going on until lanes meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from rekindle.core.cells import Progress, Schedule, steps
from rekindle.core.kv import Span
from rekindle.engine.base import Row
from rekindle.remote.hybrid_prefill import ComputeStep, HybridPrefill
from rekindle.remote.schedule import StreamCosts


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
