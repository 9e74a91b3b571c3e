"""Longer contexts than a CPU computes in a bench: the same ways, simulated from what was measured.

Layers take what the fitted model of the measured ones says, slices are as large as the published ones, one after the
other, and the link is as fast as its trace. Nothing is decoded, no request takes time, and nothing else runs on the
machine. Sparkv keeps to its schedule here; the controller runs in the real bench only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines.streaming import DeadlineLadder, all_compute, all_stream, fixed
from benchmarks.stream.modes import KL_BUDGET, LEVEL, StreamMode
from benchmarks.stream.traces import Trace
from benchmarks.waiting.published import published
from benchmarks.waiting.schedule import bidirectional
from benchmarks.waiting.timeline import LinkCosts, simulate
from rekindle.core.cells import Cell, CellGrid, Schedule
from rekindle.remote.ladder import LevelLadder, PricedLevel
from rekindle.remote.latency import MIN_BANDWIDTH, Bandwidth, TransferSample
from rekindle.remote.schedule import Seconds
from rekindle.remote.transfer_queue import AT_A_TIME_SECONDS

_PARTS = 8  # at most this fraction of what is left is asked for at once, as sessions do


@dataclass(frozen=True)
class SimulatedRun:
    """One way over one trace: when the prompt is ready, and the KL that its levels let expect."""

    seconds: float
    kl: float


@dataclass(frozen=True, eq=False)
class Simulation:
    """One context over one trace. `costs` are those at `LEVEL`."""

    cells: CellGrid
    costs: LinkCosts
    levels: Sequence[PricedLevel]  # the best first
    trace: Trace

    def run(self, mode: StreamMode) -> SimulatedRun:
        """The context in one way."""
        if mode.kind == "ours":
            return self._ours(self._ladder(mode.level))
        if mode.kind == "bidirectional":
            return self._meeting()
        schedule, ladder = self._schedule(mode), self._ladder(mode.level)
        if mode.kind == "cachegen":
            local = all_compute(self.costs).seconds
            clock = [0.0]
            ladder = DeadlineLadder(self.levels, self.cells, math.inf, local, deadline=local, clock=lambda: clock[0])
            there = self._carry(schedule.order, ladder, clock)
        else:
            there = self._carry(schedule.order, ladder)
        carried = np.array([there[cell] for cell in schedule.order])
        seconds = simulate(schedule.split, schedule.order, self.costs, carried=carried).seconds
        return SimulatedRun(seconds, ladder.kl(schedule.order))

    def ideal_seconds(self) -> float:
        """Both lanes at full speed until they meet, if chunks could be cut anywhere; and the question."""
        computed = np.concatenate([[0.0], np.cumsum(self.costs.depth_seconds[:, -1])])  # [chunks + 1]
        shares, size = np.linspace(0.0, 1.0, len(computed)), float(self.costs.size_bytes.sum())
        low, high = 0.0, float(computed[-1])
        for _ in range(60):
            middle = (low + high) / 2
            enough = np.interp(middle, computed, shares) + self.trace.carried(0.0, middle) / size >= 1
            low, high = (low, middle) if enough else (middle, high)
        return high + float(self.costs.question_seconds.sum())

    def _schedule(self, mode: StreamMode) -> Schedule:
        usual = self.costs.at(max(self.trace.mean_rate, MIN_BANDWIDTH))
        if mode.kind == "local":
            return all_compute(self.costs)
        if mode.kind == "fixed":
            return fixed(usual, usual.bandwidth)
        if mode.kind == "sparkv":
            return published(usual, bidirectional(usual).seconds)
        return all_stream(self.costs)

    def _ladder(self, level: str | None) -> LevelLadder:
        some = [one for one in self.levels if level in (None, one.name)]
        seconds = float(self.costs.compute_seconds.sum())
        return LevelLadder(some, self.cells, KL_BUDGET, seconds)

    def _carry(self, order: Iterable[Cell], ladder: LevelLadder, clock: list[float] | None = None) -> dict[Cell, float]:
        """When each cell has come."""
        there: dict[Cell, float] = {}
        clock, bandwidth, left = [0.0] if clock is None else clock, Bandwidth(), list(order)
        while left:
            speed = bandwidth.bytes_per_second()
            ladder.adapt(left, speed)
            fits = 0 if speed is None else int(speed * AT_A_TIME_SECONDS / max(1.0, float(ladder.level.sizes.mean())))
            count = max(2, min(fits, len(left) // _PARTS))
            batch, left = left[:count], left[count:]
            ladder.take(batch)
            for cell in batch:
                size = int(ladder.level.sizes[cell])
                stop = self.trace.moment(clock[0], size)
                bandwidth.add(TransferSample(size, stop - clock[0], stop))
                clock[0] = there[cell] = stop
        return there

    def _ours(self, ladder: LevelLadder) -> SimulatedRun:
        """Both lanes go on until they meet: a step ends at the layer above which all has come."""
        costs, there = self.costs, np.zeros((self.cells.chunks, self.cells.layers))
        for cell, stop in self._carry(sorted(self.cells, reverse=True), ladder).items():
            there[cell] = stop
        now, computed = 0.0, [0] * self.cells.chunks
        for chunk in range(self.cells.chunks):
            if there[chunk:].max() <= now:
                break
            for layer in range(self.cells.layers):
                computed[chunk] = layer + 1
                if there[chunk, layer + 1 :].max(initial=0.0) <= now:
                    now += costs.top_seconds[chunk, layer]
                    break
                now += costs.compute_seconds[chunk, layer]
        used = [cell for cell in self.cells if cell.layer >= computed[cell.chunk]]
        return SimulatedRun(now + float(costs.question_seconds.sum()), ladder.kl(used))

    def _meeting(self) -> SimulatedRun:
        """Whole chunks from both ends: a lane that is free takes the next one that the other has not begun."""
        compute, size = self.costs.depth_seconds[:, -1], self.costs.size_bytes.sum(axis=1)
        front, back, computing, carrying = 0, self.cells.chunks, 0.0, 0.0
        while front < back:
            if computing <= carrying:
                computing, front = computing + float(compute[front]), front + 1
            else:
                back -= 1
                carrying = self.trace.moment(carrying, float(size[back]))
        ladder = self._ladder(LEVEL)
        streamed = [cell for cell in self.cells if cell.chunk >= back]
        ladder.take(streamed)
        seconds = max(computing, carrying) + float(self.costs.question_seconds.sum())
        return SimulatedRun(seconds, ladder.kl(streamed))


def tiled(sizes: Seconds, chunks: int) -> NDArray[np.int64]:
    """[chunks, layers] the sizes of a longer context: those that were published, again and again."""
    return np.resize(sizes, (chunks, sizes.shape[1])).astype(np.int64)


def summary(runs: Mapping[str, SimulatedRun], ideal_seconds: float) -> dict[str, Any]:
    """What one case says: times as multiples of ours."""
    ours, at_level = runs["ours"].seconds, runs[f"ours {LEVEL}"].seconds
    allowed = [run for name, run in runs.items() if name == "local" or name.startswith("stream ")]
    single = min(run.seconds for run in allowed if run.kl <= KL_BUDGET)
    versus = {f"vs_{name}": runs[name].seconds / ours for name in ("sparkv", "cachegen", "fixed", "bidirectional")}
    return {
        "ours_s": ours,
        "local_s": runs["local"].seconds,
        "ours_kl": runs["ours"].kl,
        "overlap_efficiency": ideal_seconds / at_level,
        "vs_best_single": single / ours,
        "vs_one_level": at_level / ours,
        **versus,
        "vs_q2": runs["stream q2"].seconds / ours,
        "q2_kl": runs["stream q2"].kl,
        "cachegen_kl": runs["cachegen"].kl,
    }
