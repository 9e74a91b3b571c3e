"""What a bench of block-sparse prefill found, as fields and table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.base import BenchOptions, Report, TableRow, interval
from benchmarks.sparse.attention import BlockRule

MAX_KL, MIN_TOP1 = 0.015, 0.95  # the quality that quantized KV has to have as well
_SAMPLES = 2000  # of the bootstrap


@dataclass
class RuleRun:
    """One prompt in one way. Lists have an item for each layer; costs of cells are measured on a CPU only."""

    rule: BlockRule | None  # None: dense
    layer_seconds: list[float] = field(default_factory=list)
    attention_seconds: list[float] = field(default_factory=list)
    question_seconds: list[float] = field(default_factory=list)
    top_seconds: list[float] = field(default_factory=list)  # K and V alone
    tile_seconds: list[list[float]] = field(default_factory=list)  # of each block of queries
    kept: list[Any] = field(default_factory=list)  # [heads, query blocks] number of kept blocks
    slice_bytes: list[list[int]] = field(default_factory=list)  # of each chunk, as an origin sends it
    log_probabilities: Any = None  # [positions, vocabulary]


@dataclass(frozen=True)
class PromptRun:
    """One prompt in every way, the dense one first. `blocks`: how many there are to keep, in a head of a layer."""

    text: str
    tokens: int
    blocks: int
    ways: tuple[RuleRun, ...]


@dataclass(frozen=True)
class SparseRow:
    """One rule at one size. Intervals are 95 %, by resampling layers of prompts and positions."""

    tokens: int
    rule: str
    prompts: int
    kept: float  # share of the blocks
    kept_by_layer: tuple[float, float]  # of the layers that keep least and most
    dense_s: float  # a prompt
    sparse_s: float
    ratio: float  # sparse / dense
    interval: tuple[float, float]
    attention_ratio: float
    attention_share: float  # of dense prefill
    kl: float | None
    kl_interval: tuple[float, float] | None
    top1: float | None
    wins: bool | None  # certainly sooner, and near enough


def add_rows(report: Report, runs: Sequence[PromptRun], options: BenchOptions) -> None:
    """The fields and rows of every rule at every size."""
    rows = []
    for size in dict.fromkeys(run.tokens for run in runs):
        own = [run for run in runs if run.tokens == size]
        rows += [_row(own, way, np.random.default_rng(options.seed)) for way in range(1, len(own[0].ways))]
    report.fields |= {
        "shape": options.shape,
        "texts": list(dict.fromkeys(run.text for run in runs)),
        "max_kl": MAX_KL,
        "min_top1": MIN_TOP1,
        "rows": [asdict(row) for row in rows],
        "wins": sum(bool(row.wins) for row in rows) if options.shape is None else None,
    }
    if options.shape is not None:
        report.fields["wins_reason"] = "random weights: time only"
    report.rows += [_table_row(row) for row in rows]


def _row(runs: Sequence[PromptRun], way: int, random: np.random.Generator) -> SparseRow:
    dense, sparse = [run.ways[0] for run in runs], [run.ways[way] for run in runs]
    pairs = np.array([[one.layer_seconds for one in dense], [one.layer_seconds for one in sparse]]).reshape(2, -1)
    ratios = [float(some[1].sum() / some[0].sum()) for some in _resampled(pairs, random)]
    attending = [sum(sum(one.attention_seconds) for one in some) for some in (dense, sparse)]
    shares = [[float(kept.sum()) / kept.shape[0] / run.blocks for kept in run.ways[way].kept] for run in runs]
    ratio, certain = float(pairs[1].sum() / pairs[0].sum()), interval(ratios)
    kl = kl_interval = top1 = wins = None
    if dense[0].log_probabilities is not None:
        expected, found = (np.concatenate([one.log_probabilities for one in some]) for some in (dense, sparse))
        nats = (np.exp(expected) * (expected - found)).sum(-1)  # [positions]
        kl, top1 = float(nats.mean()), float((expected.argmax(-1) == found.argmax(-1)).mean())
        kl_interval = interval([float(some.mean()) for some in _resampled(nats, random)])
        wins = certain[1] < 1 and kl <= MAX_KL and top1 >= MIN_TOP1
    return SparseRow(
        tokens=runs[0].tokens,
        rule=str(sparse[0].rule),
        prompts=len(runs),
        kept=float(np.mean(shares)),
        kept_by_layer=(float(np.mean(shares, axis=0).min()), float(np.mean(shares, axis=0).max())),
        dense_s=float(pairs[0].sum()) / len(runs),
        sparse_s=float(pairs[1].sum()) / len(runs),
        ratio=ratio,
        interval=certain,
        attention_ratio=attending[1] / attending[0],
        attention_share=attending[0] / float(pairs[0].sum()),
        kl=kl,
        kl_interval=kl_interval,
        top1=top1,
        wins=wins,
    )


def _resampled(values: Any, random: np.random.Generator) -> list[Any]:
    """Drawn along the last axis, with repetition."""
    count = values.shape[-1]
    return [values[..., random.integers(0, count, count)] for _ in range(_SAMPLES)]


def _table_row(row: SparseRow) -> TableRow:
    quality = "" if row.kl is None else f", KL {row.kl:.4f}, top-1 {row.top1:.3f}"
    return TableRow(
        f"{row.tokens:,} tokens, {row.rule}",
        f"{row.sparse_s:,.2f} s, {row.kept:.0%} of the blocks{quality}",
        f"{row.dense_s:,.2f} s",
        f"{row.ratio:.3f} ({row.interval[0]:.3f}-{row.interval[1]:.3f})",
        f"< 1, KL <= {MAX_KL}, top-1 >= {MIN_TOP1}" + (", met" if row.wins else ""),
    )
