"""Longer contexts by simulation: no way is sooner than it can be, and ours is as on a real link."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.stream.modes import KL_BUDGET, LEVEL, SIMULATED_MODES, StreamMode
from benchmarks.stream.simulated import Simulation, summary, tiled
from benchmarks.stream.traces import MADE, made_trace
from benchmarks.waiting.timeline import LinkCosts
from rekindle.core.cells import CellGrid
from rekindle.remote.ladder import PricedLevel

CELLS = CellGrid(12 * 128, 6)
SIZES = {"raw": 40_000, "q8": 10_000, "q5": 6_000, "q4": 5_000, "q3": 4_000, "q2": 3_000}
KLS = {"raw": 0.0, "q8": 0.0001, "q5": 0.001, "q4": 0.005, "q3": 0.02, "q2": 0.1}
LOCAL = 12 * 6 * 0.1


def simulation(name: str = "constant", ratio: float = 1.0) -> Simulation:
    shape = (CELLS.chunks, CELLS.layers)
    costs = LinkCosts(np.full(shape, 0.1), np.full(shape, 0.02), np.full(shape, 6e3), np.full(6, 0.01), 1.0)
    levels = [PricedLevel(level, KLS[level], 4.0, np.full(shape, SIZES[level])) for level in SIZES]
    trace = made_trace(name, LOCAL / (1 + 1 / ratio), 0).at_ratio(float(costs.size_bytes.sum()), LOCAL, ratio)
    return Simulation(CELLS, costs, levels, trace)


@pytest.mark.parametrize("ratio", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("name", MADE)
def test_ours_stays_within_its_budget_and_is_sooner_than_either_lane(name: str, ratio: float) -> None:
    one = simulation(name, ratio)
    runs = {mode.name: one.run(mode) for mode in SIMULATED_MODES}
    assert runs["local"].seconds == pytest.approx(12 * (5 * 0.1 + 0.02) + 0.06) and runs["local"].kl == 0.0
    assert runs[f"stream {LEVEL}"].seconds == pytest.approx(ratio * LOCAL + 0.06, rel=0.04)
    assert runs["ours"].kl <= KL_BUDGET and runs["ours"].seconds <= 1.01 * runs[f"ours {LEVEL}"].seconds
    found = summary(runs, one.ideal_seconds())
    assert found["vs_best_single"] >= 0.97 and found["vs_bidirectional"] >= 0.97
    assert 0.85 < found["overlap_efficiency"] < 1.01


def test_cachegen_takes_the_best_level_that_comes_in_the_time_of_computing() -> None:
    fast, slow = (simulation(ratio=ratio).run(StreamMode("cachegen")) for ratio in (0.1, 8.0))
    assert fast.kl < 0.001 and slow.kl > 0.09  # the smallest
    assert fast.seconds <= LOCAL


def test_the_sizes_of_a_longer_context_are_those_that_were_published() -> None:
    assert tiled(np.array([[1.0, 2.0], [3.0, 4.0]]), 3).tolist() == [[1, 2], [3, 4], [1, 2]]
