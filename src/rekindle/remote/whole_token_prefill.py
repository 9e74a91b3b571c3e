"""The same for engines that take only whole tokens, all layers at once (llama.cpp).

    compute   [chunks 0 and 1][chunk 2 ...  given up: all of it has arrived][question]
    link      [chunk 5][chunk 4][chunk 3][chunk 2 ...]

Lanes meet between two chunks. The chunk where they would meet is computed and fetched at the same time, and whichever
ends first is used: a step is cancelled as soon as everything from its first token on has arrived.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rekindle.core.cells import Cell, Progress, Schedule, Split, TransferOrder
from rekindle.core.kv import Span
from rekindle.engine.base import Row
from rekindle.errors import Cancelled
from rekindle.remote.hybrid_prefill import ComputeStep, HybridPrefill
from rekindle.remote.schedule import RemainingWork


class WholeTokenPrefill(HybridPrefill):
    """Hybrid prefill that computes all layers of a chunk or none."""

    def plan(self, progress: Progress) -> Schedule:
        """The number of chunks from the front to compute so that both lanes end soonest, and the others backwards."""
        task = RemainingWork.of(self._now(), progress)
        layers, here = self._cells.layers, [self._top(chunk) == 0 for chunk in range(self._cells.chunks)]
        compute = np.where(here, 0.0, task.costs.compute_seconds.sum(axis=1))
        link = task.slice_seconds.sum(axis=1)
        computing = np.concatenate([[0.0], np.cumsum(compute)])
        fetching = link.sum() - np.concatenate([[0.0], np.cumsum(link)])
        if fetching[0] > 0:
            fetching += progress.link_busy_seconds
        ends = np.maximum(computing, fetching)
        count = int(np.argmin(ends))
        split = Split(layers, (layers,) * count + (0,) * (self._cells.chunks - count))
        order = TransferOrder(layers, tuple(np.flatnonzero(task.missing)[::-1].tolist()))
        return Schedule(split, order, float(ends[count] + task.costs.question_seconds.sum()))

    def next_step(self, schedule: Schedule, progress: Progress) -> ComputeStep | None:  # noqa: ARG002
        """The next chunks, even if they are expected to arrive sooner, since a step can be given up; None if all that
        is missing is being received."""
        layers, computed = self._cells.layers, schedule.split.computed
        front = next((chunk for chunk in range(self._cells.chunks) if self._top(chunk)), None)
        if front is None or not schedule.order.numbers:
            return None
        far = sum(count == layers for count in computed[front:])
        return ComputeStep(range(front, front + max(1, min(int(self._step_share * far), self._max_chunks))), layers)

    def row(self, step: ComputeStep, span: Span) -> Row:
        """All layers, behind what has arrived before."""
        return replace(super().row(step, span), feeds=self._feeds(step.chunks[0], step.depth), until=None)

    def _compute(self, step: ComputeStep) -> None:
        try:
            super()._compute(step)
        except Cancelled:
            self._check_cancelled()  # else everything has arrived

    def _stops(self, step: ComputeStep) -> bool:
        """Whether a running step shall end."""
        arrived = not any(map(self._missing, range(step.chunks[0], self._cells.chunks)))
        return arrived or super()._stops(step)

    def _missing(self, chunk: int) -> bool:
        return any(Cell(chunk, layer) not in self._link.arrived for layer in range(self._cells.layers))
