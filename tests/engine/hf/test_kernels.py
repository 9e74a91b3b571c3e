"""Kernels of our own against what torch computes, on a CUDA device, where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rekindle.core.kv import Held, LayerKv, Span
from rekindle.engine.base import MovedFeed, Row
from rekindle.engine.hf import kernels, kv_kernels
from rekindle.engine.hf.attention import ScoreParams, attend, cut_tiles
from rekindle.engine.hf.device import choose_placement, pinned_memory
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.hf.hooks import AttentionMapRecorder, KvDriftCorrection, read_attention
from rekindle.engine.hf.layer_loader import DeviceFetch
from rekindle.engine.hooks import AttentionMap, KvDrift, Probe
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
    got.append(kernels.attend_split(query, address_of(keys, values), places, scores.scaling, window)[0])
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
    kv_kernels.write_rows(address_of(keys, values), places, *new)
    for half, old, rows in zip((keys, values), kept, new, strict=True):
        old[:, :, before : before + count] = rows
        assert torch.equal(half, old)
    tiles = cut_tiles(places.cpu().numpy(), None, torch.float32, DEVICE)
    expected = attend(query.float(), keys.float(), values.float(), tiles, ScoreParams(dim**-0.5, None, None))
    got = kernels.attend_split(query, address_of(keys, values), places, dim**-0.5)[0].float()
    assert float((got - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("window", [None, 65])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 9, 3), (80, 4, 4), (128, 32, 8)])
@pytest.mark.parametrize(("first", "stop", "padding"), [(0, 1, 0), (10, 90, 38), (0, 200, 0)])
def test_received_attention(
    window: int | None, dim: int, heads: int, kv_heads: int, first: int, stop: int, padding: int
) -> None:
    """What a recorder of attention maps collects over one layer, also where positions repeat at the end."""
    dtype, length = torch.bfloat16, 900
    positions = np.sort(RANDOM.choice(length, stop, replace=False))
    keys, values = (torch.randn(1, kv_heads, length + 60, dim, device=DEVICE, dtype=dtype) for _ in range(2))
    query = 3 * torch.randn(1, heads, stop, dim, device=DEVICE, dtype=dtype)
    seen: list[np.ndarray] = []
    scores = ScoreParams(dim**-0.5, None, window)
    recorder = AttentionMapRecorder(AttentionMap(Span(int(positions[first]), int(positions[-1]) + 1), seen.append))
    recorder.look(0, positions, query, keys, values, scores)
    recorder.report()
    end = int(positions[-1]) + 1
    keys[:, :, end:] = values[:, :, end:] = float("nan")
    places = torch.from_numpy(np.pad(positions, (0, padding), mode="edge")).to(DEVICE)
    query = torch.cat([query, query[:, :, -1:].repeat(1, 1, padding, 1)], dim=2)
    kept = address_of(keys, values)
    _, sums = kernels.attend_split(query, kept, places, scores.scaling, window)
    out = kernels.ReceivedAttention(torch.zeros(1024, device=DEVICE), torch.zeros(16, device=DEVICE))
    asked = torch.tensor([first, stop], device=DEVICE)
    kernels.attention_received(query, kept, places, sums, asked, out, scores.scaling, window)
    got = out.seen[:end] / (out.norms.sum() / (kv_heads * end))
    np.testing.assert_allclose(got.cpu().numpy(), seen[0], rtol=5e-2, atol=1e-4)  # that one rounds products to half


@pytest.mark.parametrize("window", [None, 65])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 9, 3), (128, 32, 8)])
@pytest.mark.parametrize("count", [1, 70, 900])
def test_probes_read_the_same_by_kernel(
    window: int | None, dim: int, heads: int, kv_heads: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, length = torch.bfloat16, 900
    positions = np.sort(RANDOM.choice(length, count, replace=False))
    keys = torch.randn(1, kv_heads, length + 60, dim, device=DEVICE, dtype=dtype)
    query = torch.randn(1, count, heads, dim, device=DEVICE, dtype=dtype).transpose(1, 2)
    segments = tuple(Span(start, start + 20) for start in range(0, 800, 25))
    probe = Probe(print, queries=Span(int(positions[count // 2]), length), segments=segments)
    scores = ScoreParams(dim**-0.5, None, window)
    readings = []
    monkeypatch.setattr(kernels, "_RECEIVED_BYTES", 4 * 15 * length * 4)  # a few heads at a time
    for by_kernel in (True, False):
        monkeypatch.setattr(kernels, "supports", lambda *_, by_kernel=by_kernel: by_kernel)
        tiles = cut_tiles(positions, window, dtype, DEVICE)
        readings.append(read_attention(probe, 0, positions, query, keys, tiles, scores, None)())
    for name in ("received", "received_most", "sent"):
        ours, theirs = (getattr(reading, name) for reading in readings)
        np.testing.assert_allclose(ours, theirs, rtol=5e-2, atol=2e-4, err_msg=name)


def test_padding_is_not_written() -> None:
    keys, values = (torch.zeros(1, 2, 100, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    new = torch.arange(1, 6, device=DEVICE, dtype=torch.bfloat16)[None, None, :, None].expand(1, 2, 5, 64).contiguous()
    kv_kernels.write_rows(address_of(keys, values), torch.tensor([3, 40, 50, 50, 50], device=DEVICE), new, 2 * new)
    for half, factor in ((keys, 1), (values, 2)):
        assert half[0, 0, :, 0].nonzero()[:, 0].tolist() == [3, 40, 50]
        assert half[0, 1, [3, 40, 50], 63].tolist() == [factor * number for number in (1, 2, 3)]


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_the_rest_of_a_span_follows_its_recomputed_tokens(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = (Span(10, 100), Span(100, 140), Span(150, 160), Span(200, 700))
    positions = np.sort(RANDOM.choice(np.r_[0:150, 160:800], 300, replace=False))  # none in the third
    buffer = torch.randn(1, 3, 800, dim, device=DEVICE, dtype=torch.bfloat16)
    rows = torch.randn(1, 300, 3, dim, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
    correction = KvDriftCorrection(KvDrift(spans, 0.5), positions, DEVICE)
    moved = [buffer.clone(), buffer.clone()]
    correction.move(moved[0], rows)
    monkeypatch.setattr(kernels, "fits_split", lambda *_: False)
    correction.move(moved[1], rows)
    assert not torch.equal(moved[0], buffer)
    torch.testing.assert_close(moved[0], moved[1], atol=2e-2, rtol=2e-2)
    assert torch.equal(moved[0][0, :, positions], buffer[0, :, positions])


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
