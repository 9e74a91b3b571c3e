"""Block-sparse attention is dense attention where every block is kept, and what its bench says follows from it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from benchmarks import charts
from benchmarks.base import BenchOptions
from benchmarks.sparse import bench, schedules
from benchmarks.sparse.attention import (
    CUDA_KEYS,
    KEYS,
    QUERIES,
    AttentionInputs,
    BlockRule,
    attend_tiles,
    causal_blocks,
    choose_blocks,
    estimate_mass,
    flex_blocks,
)
from benchmarks.waiting.published import published
from benchmarks.waiting.schedule import lower_bound
from benchmarks.waiting.timeline import SearchTask
from rekindle.remote.schedule import meet_in_the_middle
from tests.benchmarks.streams import KINDS, plain_costs, some_costs
from tests.tiny import tiny_engine

TOKENS = 4 * QUERIES


@pytest.fixture
def inputs() -> AttentionInputs:
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, TOKENS, 16, generator=random) for heads in (6, 2, 2))
    return AttentionInputs(query, key, value, 0.25)


def dense(inputs: AttentionInputs, seen: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(
        inputs.query, inputs.key, inputs.value, attn_mask=seen, scale=inputs.scaling, enable_gqa=True
    )


def kept_of(inputs: AttentionInputs, keys: int, rule: BlockRule) -> torch.Tensor:
    causal = causal_blocks(TOKENS, keys, torch.device("cpu"))
    return choose_blocks(estimate_mass(inputs, causal), causal, rule)


def as_mask(kept: torch.Tensor, keys: int) -> torch.Tensor:
    """[1, heads, tokens, tokens] what a query sees: kept blocks, nothing behind itself."""
    seen = kept.repeat_interleave(QUERIES, 1).repeat_interleave(keys, 2)
    return (seen & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())[None]


@pytest.mark.parametrize("rule", [BlockRule(density=1.0), BlockRule(density=0.5), BlockRule(mass=0.9)], ids=str)
def test_tiles_attend_to_kept_blocks_and_to_nothing_else(inputs: AttentionInputs, rule: BlockRule) -> None:
    kept = kept_of(inputs, KEYS, rule)
    found, seconds = attend_tiles(inputs, kept)
    torch.testing.assert_close(found, dense(inputs, as_mask(kept, KEYS)))
    assert len(seconds) == TOKENS // QUERIES and all(one > 0 for one in seconds)


@pytest.mark.parametrize("rule", [BlockRule(density=1.0), BlockRule(density=0.75)], ids=str)
def test_flex_attention_gets_the_kept_blocks_and_masks_those_on_the_diagonal(
    inputs: AttentionInputs, rule: BlockRule
) -> None:
    causal = causal_blocks(TOKENS, CUDA_KEYS, torch.device("cpu"))
    kept = kept_of(inputs, CUDA_KEYS, rule)
    blocks = flex_blocks(kept, causal)
    assert blocks.to_dense()[0].bool().equal(kept) and blocks.seq_lengths == (TOKENS, TOKENS)
    assert blocks.full_kv_num_blocks is not None and blocks.full_kv_indices is not None
    for head, row in product(range(len(kept)), range(len(causal))):
        masked = blocks.kv_indices[0, head, row, : blocks.kv_num_blocks[0, head, row]].tolist()
        whole = blocks.full_kv_indices[0, head, row, : blocks.full_kv_num_blocks[0, head, row]].tolist()
        assert masked == [row] and row not in whole


def test_the_first_block_and_the_diagonal_are_always_kept_and_nothing_behind_it(inputs: AttentionInputs) -> None:
    causal = causal_blocks(TOKENS, KEYS, torch.device("cpu"))
    for rule in (BlockRule(density=0.0), BlockRule(mass=0.0), BlockRule(density=0.6)):
        kept = kept_of(inputs, KEYS, rule)
        assert kept[..., 0].all() and kept[:, causal == 2].all() and not kept[:, causal == 0].any()
    assert causal.tolist()[1] == [1, 1, 2, 2, 0, 0, 0, 0]


def test_a_density_is_a_share_of_the_layer_and_heads_share_it_by_mass() -> None:
    causal = causal_blocks(TOKENS, KEYS, torch.device("cpu"))
    even = torch.where(causal > 0, 1.0, 0.0).expand(2, -1, -1) / (causal > 0).sum(-1, keepdim=True)
    steep = even.clone()
    steep[1] = 0.0
    steep[1, :, 0] = 1.0  # a head that looks at the beginning only
    kept = choose_blocks(steep, causal, BlockRule(density=0.8))
    assert int(kept.sum()) == round(0.8 * 2 * int((causal > 0).sum()))
    assert kept[0].sum() > kept[1].sum()


def test_a_share_of_the_mass_takes_the_fewest_blocks_that_hold_it() -> None:
    causal = causal_blocks(TOKENS, KEYS, torch.device("cpu"))
    mass = torch.zeros(1, *causal.shape)
    mass[0, -1] = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.125, 0.125, 0.0, 0.0])
    last = {share: choose_blocks(mass, causal, BlockRule(mass=share))[0, -1].tolist() for share in (0.5, 0.75, 0.8)}
    assert last[0.5] == [True, True, False, False, False, False, True, True]
    assert last[0.75] == [True, True, False, True, False, False, True, True]
    assert sum(last[0.8]) == 6, "one of two that have as much"


def test_published_priorities_end_no_sooner_than_anything_can() -> None:
    for kind, seed in product(KINDS, range(3)):
        costs = some_costs(kind, seed, 7, 5)
        meeting, least = meet_in_the_middle(SearchTask.of(costs, None)).seconds, lower_bound(costs) * (1 - 1e-9)
        assert meeting >= least and published(costs, meeting).seconds >= least


def test_published_priorities_stream_everything_over_a_fast_link() -> None:
    costs = plain_costs(4, 3)
    assert published(costs.at(1e9), 0.01).seconds < 1.01 * costs.compute_seconds[0, 0]
    asking = replace(costs, question_seconds=np.ones(3))
    assert published(asking.at(1e9), 3.0).seconds == pytest.approx(3, rel=0.4)


def test_a_bench_of_a_tiny_model_says_what_was_kept_and_how_near_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "load", lambda options: tiny_engine("llama"))
    monkeypatch.setattr(bench, "QUICK_SIZES", {2 * QUERIES: 3})
    report = bench.run(BenchOptions(quick=True), lambda part: None)
    rows = report.fields["rows"]
    assert [row["rule"] for row in rows] == [str(rule) for rule in bench.QUICK_RULES]
    assert all(0 < row["kept"] <= 1 and row["kl"] >= -1e-6 and row["interval"][0] <= row["ratio"] for row in rows)
    assert rows[-1]["kl"] < 1e-2, "nearly everything is kept"
    found = report.fields["schedules"]
    assert found["matrices"] == 3 * len(bench.QUICK_RULES) * len(schedules.RATIOS)
    assert found["bound_least"] <= 1 and found["published_best"] >= found["bound_least"]
    charts.save_chart(report.as_json() | {"device": "cpu"}, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 0
