"""Computing and streaming with the costs of block-sparse prefill: published priorities against meeting in the middle.

A cell is a chunk of 128 tokens, a block of queries, in a layer. It costs attention by the number of its kept blocks,
fitted to the measured seconds of all tiles, and an equal part of the rest of the median layer: that the machine paused
in one layer says nothing about the next prompt. An origin sends it at level q5, over links so fast that streaming
everything takes from a quarter of computing everything to four times as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.base import Report, TableRow
from benchmarks.sparse.attention import QUERIES
from benchmarks.sparse.report import PromptRun, RuleRun
from benchmarks.waiting.published import published
from benchmarks.waiting.schedule import greedy, lower_bound
from benchmarks.waiting.timeline import LinkCosts, SearchTask
from rekindle.core.kv import KvLayout, LayerKv
from rekindle.remote.schedule import meet_in_the_middle
from rekindle.remote.slices import encode, level_named

LEVEL = "q5"
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)  # streaming everything / computing everything
SOONER = 0.99  # of the time of meeting in the middle: less of a difference counts as none


def slice_bytes(layout: KvLayout, layer: int, key: torch.Tensor, value: torch.Tensor) -> list[int]:
    """[chunks] the bytes that an origin sends of a layer."""
    level, (keys, values) = level_named(LEVEL, layout), (one[0].cpu().numpy() for one in (key, value))
    starts = range(0, keys.shape[1], QUERIES)
    chunks = [LayerKv(keys[:, at : at + QUERIES], values[:, at : at + QUERIES]) for at in starts]
    return [len(encode(level, layout, layer, chunk)) for chunk in chunks]


def costs_of(way: RuleRun, sizes: NDArray[np.float64], ratio: float, fitted: bool = True) -> LinkCosts:
    """What the cells of a prompt cost, or took when they were timed once; `sizes` are [chunks, layers] bytes."""
    tiles = np.array(way.tile_seconds).T  # [chunks, layers]
    blocks = np.array([kept.sum(0).tolist() for kept in way.kept]).T  # [chunks, layers] of all heads
    slope, least = np.polyfit(blocks.ravel(), tiles.ravel(), 1)
    rest = np.median(np.array(way.layer_seconds) - tiles.sum(axis=0)) / len(tiles)
    compute = np.maximum(least + slope * blocks, tiles.min()) + rest
    if not fitted:
        compute = tiles + (np.array(way.layer_seconds) - tiles.sum(axis=0)) / len(tiles)
    top = np.full(tiles.shape, np.median(way.top_seconds) / len(tiles))
    question = np.full(tiles.shape[1], np.median(way.question_seconds))
    return LinkCosts(compute, top, sizes, question, float(sizes.sum() / compute.sum() / ratio))


@dataclass(frozen=True)
class _Comparison:
    """One matrix of costs. Times are multiples of that of meeting in the middle."""

    tokens: int
    rule: str
    ratio: float
    published: float
    potential: float
    bound: float  # no schedule can be sooner
    spread: float  # the layer that keeps most blocks of a chunk / the one that keeps least: the median chunk


def _compared(runs: Sequence[PromptRun]) -> Iterator[_Comparison]:
    for run in runs:
        sizes = np.array(run.ways[0].slice_bytes, np.float64).T
        for way in run.ways[1:]:
            blocks = np.array([kept.sum(0).tolist() for kept in way.kept])  # [layers, chunks]
            spread = float(np.median(blocks.max(axis=0) / blocks.min(axis=0)))
            for ratio in RATIOS:
                costs = costs_of(way, sizes, ratio)
                meeting = meet_in_the_middle(SearchTask.of(costs, None)).seconds
                source, potential, bound = published(costs, meeting).seconds, greedy(costs).seconds, lower_bound(costs)
                shares = source / meeting, potential / meeting, bound / meeting
                yield _Comparison(run.tokens, str(way.rule), ratio, *shares, spread)


def add_rows(report: Report, runs: Sequence[PromptRun]) -> None:
    """The fields and rows about schedules."""
    found = list(_compared(runs))
    rows = []
    for tokens in dict.fromkeys(one.tokens for one in found):
        for rule in dict.fromkeys(one.rule for one in found):
            own = [one for one in found if (one.tokens, one.rule) == (tokens, rule)]
            rows.append({"tokens": tokens, "rule": rule} | _summary(own))
    overall = _summary(found)
    report.fields |= {"schedules": overall, "schedule_rows": rows, "schedules_as_timed": as_timed(runs)}
    report.rows.append(
        TableRow(
            f"schedules of {overall['matrices']} cost matrices, published priorities / meeting in the middle",
            f"sooner in {overall['published_sooner']}, by potential in {overall['potential_sooner']}",
            f"at best {overall['published_best']:.3f}, by potential {overall['potential_best']:.3f}",
            f"{overall['published_median']:.3f}",
            f"no schedule under {overall['bound_least']:.3f}",
        )
    )


def as_timed(runs: Sequence[PromptRun]) -> dict[str, Any]:
    """The search by potential on the seconds of single cells, pauses of the machine included."""
    shares = []
    for run in runs:
        sizes = np.array(run.ways[0].slice_bytes, np.float64).T
        for way, ratio in product(run.ways[1:], RATIOS):
            costs = costs_of(way, sizes, ratio, fitted=False)
            shares.append(greedy(costs).seconds / meet_in_the_middle(SearchTask.of(costs, None)).seconds)
    sooner = sum(share < SOONER for share in shares)
    return {"matrices": len(shares), "potential_sooner": sooner, "potential_best": min(shares)}


def _summary(found: Sequence[_Comparison]) -> dict[str, Any]:
    return {
        "matrices": len(found),
        "published_sooner": sum(one.published < SOONER for one in found),
        "published_best": min(one.published for one in found),
        "published_median": statistics.median(one.published for one in found),
        "published_worst": max(one.published for one in found),
        "potential_sooner": sum(one.potential < SOONER for one in found),
        "potential_best": min(one.potential for one in found),
        "bound_least": min(one.bound for one in found),
        "bound_median": statistics.median(one.bound for one in found),
        "spread_median": statistics.median(one.spread for one in found),
    }
