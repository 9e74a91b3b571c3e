"""The schedule that no other beats, for small cases: a mixed-integer program, solved by HiGHS through scipy.

Unknown are x[t, l], whether a cell is computed, and for every streamed cell and every chunk whether a step up to that
chunk needs it. The link works in the order of the need, which is the best for any split: all slices that a place of
the compute lane or an earlier one needs are there once their seconds have passed. So for every place

    end  >=  seconds of all slices needed up to here  +  work of the compute lane from here on

and the largest right side is the end. A place where nothing runs repeats what an earlier one says. Decoding counts as
a second link, its last slice as nothing: with decoding `bound_seconds` is a little below what can be done.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from benchmarks.waiting.timeline import LinkCosts, SearchTask
from rekindle.core.cells import Schedule, Split

_GAP = 1e-6  # how near to the optimum the solver goes


class NotSolved(RuntimeError):
    """The solver ran out of time."""


@dataclass(frozen=True)
class Exact:
    """The best schedule, and what no schedule takes less than."""

    schedule: Schedule
    bound_seconds: float


def exact(costs: LinkCosts, max_seconds: float = 60.0) -> Exact:
    """The best schedule from the start on. Raises `NotSolved`."""
    program = _Program(costs)
    answer = milp(
        program.objective,
        constraints=program.constraints,
        integrality=program.integrality,
        bounds=Bounds(0.0, program.upper_bounds),
        options={"mip_rel_gap": _GAP, "time_limit": max_seconds},
    )
    if not answer.success:
        raise NotSolved(answer.message)
    cells = costs.chunks * costs.layers
    computed = np.rint(answer.x[:cells]).reshape(costs.chunks, costs.layers).sum(axis=1)
    split = Split(costs.layers, tuple(int(count) for count in computed))
    task = SearchTask.of(costs, None)
    return Exact(task.schedule(task.depths(split)), float(answer.mip_dual_bound))


class _Program:
    """The program: x of all cells, then the needs, then the end, in one row of unknowns."""

    def __init__(self, costs: LinkCosts) -> None:
        self._costs = costs
        self._chunks, self._layers = costs.chunks, costs.layers
        cells = self._chunks * self._layers
        # need[t, l, by] for t < by < chunks; the question needs whatever is not computed, so it has no unknowns.
        self._need = {
            (t, layer, by): cells + n
            for n, (t, layer, by) in enumerate(
                (t, layer, by)
                for t in range(self._chunks)
                for layer in range(self._layers - 1)
                for by in range(t + 1, self._chunks)
            )
        }
        self._end = cells + len(self._need)
        self._rows: list[dict[int, float]] = []
        self._least: list[float] = []
        self.objective = np.zeros(self._end + 1)
        self.objective[self._end] = 1.0
        self.integrality = np.zeros(self._end + 1)
        self.integrality[:cells] = 1
        self.upper_bounds = np.ones(self._end + 1)
        self.upper_bounds[self._end] = np.inf
        self._prefixes()
        self._needs()
        for seconds in (costs.link_seconds, costs.decode_seconds):
            if seconds.any():
                self._places(seconds)
        self._min_end(*self._work_from(0, 0))

    @property
    def constraints(self) -> LinearConstraint:
        """All rows: each sum at least what is beside it."""
        triples = [(r, column, value) for r, row in enumerate(self._rows) for column, value in row.items()]
        rows, columns, values = zip(*triples, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), self._end + 1))
        return LinearConstraint(matrix, np.asarray(self._least), np.inf)

    def _at_least(self, row: dict[int, float], least: float) -> None:
        self._rows.append(row)
        self._least.append(least)

    def _cell(self, chunk: int, layer: int) -> int:
        return chunk * self._layers + layer

    def _prefixes(self) -> None:
        """A computed layer stands on a computed layer."""
        for t in range(self._chunks):
            for layer in range(1, self._layers):
                self._at_least({self._cell(t, layer - 1): 1.0, self._cell(t, layer): -1.0}, 0.0)

    def _needs(self) -> None:
        """A step goes through a layer as a whole if it computes the next one, and then needs it of all before."""
        for (t, layer, by), need in self._need.items():
            self._at_least({need: 1.0, self._cell(by, layer + 1): -1.0, self._cell(t, layer): 1.0}, 0.0)
            if by > t + 1:
                self._at_least({need: 1.0, self._need[t, layer, by - 1]: -1.0}, 0.0)

    def _work_from(self, chunk: int, layer: int) -> tuple[dict[int, float], float]:
        """The work of the compute lane from a place on: what unknowns add, and what is sure."""
        costs, row = self._costs, dict[int, float]()
        for t in range(chunk, self._chunks):
            for at in range(layer if t == chunk else 0, self._layers):
                cell = self._cell(t, at)
                row[cell] = row.get(cell, 0.0) + costs.top_seconds[t, at]
                if at + 1 < self._layers:
                    row[cell + 1] = row.get(cell + 1, 0.0) + costs.compute_seconds[t, at] - costs.top_seconds[t, at]
        asked = costs.question_seconds[layer if chunk == self._chunks else 0 :]
        return row, float(asked.sum())

    def _places(self, seconds: NDArray[np.float64]) -> None:
        """The end, as every place of the compute lane sees it."""
        for by in range(self._chunks + 1):
            for layer in range(self._layers):
                work, sure = self._work_from(by, layer)
                if by < self._chunks:
                    self._add_needed(work, by, layer, seconds)
                else:
                    sure += self._add_asked(work, layer, seconds)
                self._min_end(work, sure)

    def _add_needed(self, work: dict[int, float], by: int, layer: int, seconds: NDArray[np.float64]) -> None:
        """What steps up to this place need."""
        for t in range(by):
            for at in range(self._layers - 1):
                need = self._need.get((t, at, by if at <= layer else by - 1))
                if need is not None:
                    work[need] = work.get(need, 0.0) + seconds[t, at]

    def _add_asked(self, work: dict[int, float], layer: int, seconds: NDArray[np.float64]) -> float:
        """What steps need, and the question up to this layer: of those layers everything that is not computed."""
        sure = 0.0
        for t in range(self._chunks):
            for at in range(self._layers):
                need = self._need.get((t, at, self._chunks - 1))
                if at <= layer:
                    cell = self._cell(t, at)
                    work[cell] = work.get(cell, 0.0) - seconds[t, at]
                    sure += float(seconds[t, at])
                elif need is not None:
                    work[need] = work.get(need, 0.0) + seconds[t, at]
        return sure

    def _min_end(self, work: dict[int, float], sure: float) -> None:
        self._at_least({**{column: -value for column, value in work.items()}, self._end: 1.0}, sure)
