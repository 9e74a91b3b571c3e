"""How good schedules are by their own account, and how long they take to find: ours against the best there is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.base import Advance, repeat
from benchmarks.waiting.schedule import greedy
from benchmarks.waiting.timeline import LinkCosts

_CHUNKS, _LAYERS = 6, 10  # of what the solver is given: larger ones take it minutes
_MAX_SECONDS = 30.0
_ROUNDS = 5


def coarse(costs: LinkCosts, chunks: int, layers: int) -> LinkCosts:
    """The first chunks, their layers taken together in groups: a size that a solver can solve."""
    chunks, layers = min(chunks, costs.chunks), min(layers, costs.layers)
    groups = np.array_split(np.arange(costs.layers), layers)

    def together(matrix: Any) -> Any:
        return np.stack([matrix[..., group].sum(axis=-1) for group in groups], axis=-1)

    ends = [group[-1] for group in groups]
    whole = costs.compute_seconds[:chunks]
    top = together(whole) - whole[:, ends] + costs.top_seconds[:chunks, ends]
    return LinkCosts(
        together(whole), top, together(costs.size_bytes[:chunks]), together(costs.question_seconds), costs.bandwidth
    )


def compare(costs: LinkCosts, bandwidths: Sequence[float], advance: Advance) -> dict[str, Any]:
    """The fields about schedules, from the costs that were measured, at several bandwidths."""
    cases, greedy_seconds = [], []
    for bandwidth in bandwidths:
        advance("schedules, ours and the exact one")
        greedy_seconds.append(_timed(costs.at(bandwidth)))
        cases.append(_case(coarse(costs, _CHUNKS, _LAYERS).at(bandwidth)))
    solved = [case for case in cases if "reason" not in case]
    reason = next((case["reason"] for case in cases if "reason" in case), None)
    result: dict[str, Any] = {
        "greedy_vs_exact": max((case["greedy_s"] / case["exact_s"] for case in solved), default=None),
        "schedule_ms": statistics.median(greedy_seconds) * 1e3,
        "schedule_cells": costs.chunks * costs.layers,
        "exact_ms": statistics.median(case["exact_ms"] for case in solved) if solved else None,
        "exact_cells": min(_CHUNKS, costs.chunks) * min(_LAYERS, costs.layers),
        "exact_cases": cases,
    }
    return result if reason is None else {**result, "exact_reason": reason}


def _timed(costs: LinkCosts) -> float:
    return repeat(lambda: greedy(costs), _ROUNDS).median


def _case(costs: LinkCosts) -> dict[str, Any]:
    """Both on the same small costs."""
    result = {"bandwidth": costs.bandwidth, "greedy_s": greedy(costs).seconds, "greedy_ms": _timed(costs) * 1e3}
    try:
        from benchmarks.waiting.exact import NotSolved, exact
    except ImportError:
        return {**result, "reason": "scipy is not installed (rekindle-llm[bench])"}
    started = time.perf_counter()
    try:
        found = exact(costs, _MAX_SECONDS)
    except NotSolved as failed:
        return {**result, "reason": f"the solver did not end in {_MAX_SECONDS:.0f} s: {failed}"}
    return {**result, "exact_s": found.schedule.seconds, "exact_ms": (time.perf_counter() - started) * 1e3}
