"""Kernels of our own against what torch computes, on a CUDA device, where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rekindle.core.kv import Held, LayerKv, Span
from rekindle.engine.base import MovedFeed, Row
from rekindle.engine.hf import kernels
from rekindle.engine.hf.attention import ScoreParams, attend, cut_tiles
from rekindle.engine.hf.device import choose_placement, pinned_memory
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.hf.layer_loader import DeviceFetch
from tests.engine.contract import Stored
from tests.tiny import byte_tokenizer, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda", 0)
RANDOM = np.random.default_rng(6)


def test_kernels_work_here() -> None:
    assert kernels.are_available(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 65, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 8, 128), (2, 1, 256)])
@pytest.mark.parametrize(("count", "length"), [(1, 1), (2, 900), (64, 64), (200, 900), (899, 900)])
def test_scattered_attention(
    dtype: torch.dtype, window: int | None, heads: int, kv_heads: int, dim: int, count: int, length: int
) -> None:
    positions = np.sort(RANDOM.choice(length, count, replace=False))
    query = torch.randn(1, count, heads, dim, device=DEVICE, dtype=dtype).transpose(1, 2)
    keys, values = (torch.randn(1, kv_heads, length + 60, dim, device=DEVICE, dtype=dtype) for _ in range(2))
    for half in (keys, values):
        half[:, :, int(positions[-1]) + 1 :] = float("nan")  # what nobody may read
    scores = ScoreParams(dim**-0.5, None, window)
    wide = cut_tiles(positions, window, torch.float32, DEVICE)
    expected = attend(query.float(), keys.float(), values.float(), wide, scores)
    assert kernels.supports(query, keys, values)
    places = torch.from_numpy(positions).to(DEVICE)
    got = [kernels.attend_scattered(query, keys, values, places, scores.scaling, window)]
    got.append(kernels.attend_split(query, address_of(keys, values), places, scores.scaling, window))
    for found in got:
        assert float((found.float() - expected).norm() / expected.norm()) < 1e-2


def address_of(keys: torch.Tensor, values: torch.Tensor) -> kernels.LayerAddress:
    """The second of three layers."""
    other = torch.zeros(1, device=DEVICE).data_ptr()
    table = [other, keys.data_ptr(), other, other, values.data_ptr(), other, keys.stride(1)]
    return kernels.LayerAddress(torch.tensor(table, device=DEVICE), 1, keys.shape[1])


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(16, 4, 1), (32, 4, 4), (80, 6, 2), (96, 8, 8), (128, 32, 8)])
@pytest.mark.parametrize("count", [1, 5, 64])
def test_split_attention_and_writes_of_any_head_size(dim: int, heads: int, kv_heads: int, count: int) -> None:
    before, dtype = 1000, torch.bfloat16
    keys, values = (torch.randn(1, kv_heads, 1100, dim, device=DEVICE, dtype=dtype) for _ in range(2))
    new = [torch.randn(1, count, kv_heads, dim, device=DEVICE, dtype=dtype).transpose(1, 2) for _ in range(2)]
    query = torch.randn(1, count, heads, dim, device=DEVICE, dtype=dtype).transpose(1, 2)
    places = torch.arange(before, before + count, device=DEVICE)
    kept = [half.clone() for half in (keys, values)]
    kernels.write_rows(address_of(keys, values), places, *new)
    for half, old, rows in zip((keys, values), kept, new, strict=True):
        old[:, :, before : before + count] = rows
        assert torch.equal(half, old)
    tiles = cut_tiles(places.cpu().numpy(), None, torch.float32, DEVICE)
    expected = attend(query.float(), keys.float(), values.float(), tiles, ScoreParams(dim**-0.5, None, None))
    got = kernels.attend_split(query, address_of(keys, values), places, dim**-0.5).float()
    assert float((got - expected).norm() / expected.norm()) < 1e-2


def test_fetched_and_turned_as_feeds_would_bring_it() -> None:
    """The same pieces, from memory the device reads and through feeds: the same bits, and turned the same."""
    placement = choose_placement("cuda", "bfloat16")
    model = tiny_model("llama", max_position_embeddings=2048).to(placement.device, placement.dtype)
    engine = HfEngine(model, byte_tokenizer(), name="x", placement=placement)
    tokens = RANDOM.integers(3, 250, 400).tolist()
    with engine.open(400, "plain") as first:
        engine.step([Row.following(first, tokens, logits="none")])
        kv = first.export(Span(0, 400))
    memory = pinned_memory()
    assert memory is not None and memory.holds(kv.layers[0].keys)
    moves = [(Span(0, 30), 0), (Span(200, 290), 40), (Span(31, 150), 140)]  # where from, and where to
    brought = []
    for held in (True, False):
        feeds = []
        for span, start in moves:
            stored = HeldStored(kv, span) if held else Stored(kv, span)
            feeds.append(MovedFeed(stored, start, start - span.start))
        with engine.open(400, "plain") as second:
            assert (DeviceFetch.of(second, feeds, len(engine.layout.layers)) is not None) == held
            gaps = [30, *range(31, 40), *range(130, 140), 259]
            engine.step([Row(second, [tokens[p] for p in gaps], gaps, logits="none", feeds=tuple(feeds))])
            brought.append([second.export(Span(s, s + len(span))) for span, s in moves])
    for one, other in zip(*brought, strict=True):
        for ours, theirs in zip(one.layers, other.layers, strict=True):
            np.testing.assert_array_equal(ours.values, theirs.values)
            keys = [torch.from_numpy(half.keys).view(torch.bfloat16).float() for half in (ours, theirs)]
            torch.testing.assert_close(keys[0], keys[1], atol=2e-2, rtol=2e-2)
    np.testing.assert_array_equal(brought[0][0].layers[0].keys, kv.layers[0].keys[:, :30])  # no shift: no bit changes


class HeldStored(Stored):
    """A feed that tells where its KV is in memory."""

    def held(self) -> list[Held]:
        return [Held([LayerKv(layer.keys, layer.values) for layer in self.kv.layers], self.span)]
