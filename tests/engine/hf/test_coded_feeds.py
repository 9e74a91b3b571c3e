"""Quantized KV from the store, decoded where the engine computes: the same bits as the store decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from rekindle import Session
from rekindle.codec.packing import squeeze
from rekindle.codec.quantized import describe, locate_parts
from rekindle.core.keys import KvSpace
from rekindle.core.kv import CodedPiece, Kv, LayerKv, LayerSpec, Span
from rekindle.engine.base import KvFeed, MovedFeed
from rekindle.engine.hf import device_decoder, layer_loader
from rekindle.engine.hf.device import choose_placement
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.hf.layer_loader import LayerLoader, PinnedSlots
from rekindle.engine.hf.sequence import BufferPool, TorchSequence
from rekindle.errors import KvLost
from rekindle.store.extents import ExtentFiles
from rekindle.store.feed import StoredFeed
from rekindle.store.tiered import TieredStore
from tests.store.test_delta_base import BASE, LATE, ONE, ROOMY, fetch, is_same, keep, quantized, rows_of
from tests.tiny import byte_tokenizer, tiny_model
from tests.unmeasured_costs import UnmeasuredCosts

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=CUDA)]
T = list(range(1000, 1500))
SPACES = [quantized(BASE), quantized(ONE), quantized(LATE)]


@pytest.fixture(autouse=True)
def decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_loader, "decodes_on", lambda _: True)  # on a CPU, too


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    return request.param


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore(tmp_path / "c", ROOMY) as opened:
        yield opened


def keep_in_two(store: TieredStore) -> None:
    """Each KV space has two extents, the second from the middle of a group on."""
    for kv_space in SPACES:
        for tokens in (T[:192], T):
            assert keep(store, tokens, kv_space).outcome == "kept"
    assert [len(rows_of(store, kv_space)) for kv_space in SPACES] == [2, 2, 2]
    assert {row.coding for row in store.disk.entries()} == {"quantized"}


def opened(store: TieredStore, kv_space: KvSpace, count: int) -> StoredFeed:
    match = store.lookup(kv_space, T[:count])
    assert match.length == count
    return store.load(kv_space, match, 60.0)


def loaded(feed: KvFeed, kv_space: KvSpace, device: torch.device) -> Kv:
    """What a step brings into a sequence."""
    sequence = TorchSequence(BufferPool(kv_space.layout, device), 600, "plain", 600)
    layers, slots = len(kv_space.layout.layers), PinnedSlots() if device.type == "cuda" else None
    with LayerLoader([(sequence, feed)], layers, device, slots=slots) as loader:
        loader.wait_until(layers, None)
    sequence.extend(feed.span.stop)
    return sequence.export(feed.span)


@pytest.mark.parametrize("kv_space", SPACES, ids=lambda kv_space: kv_space.adapter or "base")
def test_whole_kv_and_deltas_are_decoded_to_the_same_bits(
    store: TieredStore, kv_space: KvSpace, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_in_two(store)
    expected = {count: fetch(store, T[:count], kv_space) for count in (77, 192, 300, 500)}
    refuse_host_decoding(monkeypatch)
    for count, kv in expected.items():
        feed = opened(store, kv_space, count)
        assert is_same(loaded(feed, kv_space, device), kv)
        assert feed.busy_seconds > 0
        moved = MovedFeed(opened(store, kv_space, count), 40, 0)
        assert is_same(loaded(moved, kv_space, device), Kv(Span(40, 40 + count), kv.layout, kv.layers))


def refuse_host_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("decoded on the host")

    monkeypatch.setattr(ExtentFiles, "_read_coded", refuse)


def test_exact_kv_is_read_as_before(store: TieredStore, device: torch.device) -> None:
    for kv_space in (BASE, ONE):
        assert keep(store, T, kv_space).outcome == "kept"
        feed = opened(store, kv_space, 500)
        assert not feed.coded
        assert is_same(loaded(feed, kv_space, device), fetch(store, T, kv_space))


def cut_off(data: bytes) -> bytes:
    return data[:-1]


def with_a_stray_too_many(data: bytes) -> bytes:
    """A symbol of the first frame marks a stray that is not there: only the decoded codes show that."""
    coded = describe(data)
    places = locate_parts(data, coded.kind, LayerSpec(coded.dtype, coded.shape, coded.tokens))
    first = places.groups[0].halves[0]
    symbols = bytearray(zstandard.ZstdDecompressor().decompress(data[first.start : first.stop]))
    symbols[0] = 215 if first.per_byte == 3 else 255
    frame = squeeze(bytes(symbols))
    return data[:28] + len(frame).to_bytes(4, "little") + data[32 : first.start] + frame + data[first.stop :]


@pytest.mark.parametrize("damage", [cut_off, with_a_stray_too_many])
@pytest.mark.parametrize("whose", ["own", "base"])
def test_damage_that_no_digest_shows_is_lost_and_never_found_again(
    store: TieredStore,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[bytes], bytes],
    whose: str,
) -> None:
    base, one = quantized(BASE), quantized(ONE)
    for kv_space in (base, one):
        assert keep(store, T[:192], kv_space).outcome == "kept"
    at_fault = rows_of(store, base if whose == "base" else one)[0].name
    read = ExtentFiles.read_code

    def spoiled(files: ExtentFiles, extent: Any, layer: int) -> bytes:
        data = read(files, extent, layer)
        return damage(data) if extent.header.plan.name == at_fault and layer == 1 else data

    monkeypatch.setattr(ExtentFiles, "read_code", spoiled)
    with pytest.raises(KvLost, match="layer 1"):
        loaded(opened(store, one, 192), one, device)
    assert store.lookup(one, T[:192]).length == 0
    assert (store.lookup(base, T[:192]).length == 0) == (whose == "base")


def test_a_changed_byte_is_lost(store: TieredStore, device: torch.device) -> None:
    one = quantized(ONE)
    for kv_space in (quantized(BASE), one):
        assert keep(store, T[:192], kv_space).outcome == "kept"
    path = store.disk.extents.path(rows_of(store, one)[0].name)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(KvLost, match="digest"):
        loaded(opened(store, one, 192), one, device)
    assert store.lookup(one, T[:192]).length == 0


def test_coded_feeds_stand_among_others(store: TieredStore, device: torch.device) -> None:
    """One sequence with KV in memory around what is coded; the copy of the outer ones covers the gap."""
    kv_space = quantized(BASE)
    assert keep(store, T[:192], kv_space).outcome == "kept"
    expected = fetch(store, T[:192], kv_space)

    class Constant:
        layers = range(len(kv_space.layout.layers))

        def __init__(self, span: Span) -> None:
            self.span = span

        def fill(self, layer: int, out: LayerKv) -> None:
            out.keys[:], out.values[:] = 7, 3

    feeds = [Constant(Span(0, 10)), MovedFeed(opened(store, kv_space, 192), 10, 0), Constant(Span(202, 230))]
    sequence = TorchSequence(BufferPool(kv_space.layout, device), 230, "plain", 600)
    with LayerLoader([(sequence, feed) for feed in feeds], 2, device) as loader:
        loader.wait_until(2, None)
    sequence.extend(230)
    found = sequence.export(Span(10, 202))
    assert is_same(found, Kv(found.span, expected.layout, expected.layers))
    for span in (Span(0, 10), Span(202, 230)):
        assert all((kv.keys == 7).all() and (kv.values == 3).all() for kv in sequence.export(span).layers)


def test_pieces_that_do_not_fit_into_a_slot_take_other_memory(store: TieredStore, device: torch.device) -> None:
    kv_space = quantized(ONE)
    for each in (quantized(BASE), kv_space):
        assert keep(store, T, each).outcome == "kept"
    expected = fetch(store, T, kv_space)
    sequence = TorchSequence(BufferPool(kv_space.layout, device), 500, "plain", 600)
    for slot_bytes in (0, 4096, 1 << 20):
        feed = opened(store, kv_space, 500)
        for layer in range(2):
            memory = device_decoder.SlotMemory(torch.empty(slot_bytes, dtype=torch.uint8))
            staging = device_decoder.CodedStaging(feed, feed.span, sequence, layer, memory)
            staging.run()
            assert all(bool(check.sound) for check in staging.commit())
        sequence.extend(500)
        assert is_same(sequence.export(feed.span), expected)


@CUDA
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_session_on_cuda_replies_as_with_kv_decoded_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))
    placement = choose_placement("cuda", dtype)
    model = tiny_model("llama", max_position_embeddings=2048).to(placement.device, placement.dtype)
    engine = HfEngine(model, byte_tokenizer(), name="tiny", placement=placement)
    tokens = np.random.default_rng(4).integers(3, 250, 700).tolist()
    pieces: list[CodedPiece] = []
    unpack = device_decoder.unpack

    def counting(piece: CodedPiece, *rest: Any) -> Any:
        pieces.append(piece)
        return unpack(piece, *rest)

    monkeypatch.setattr(device_decoder, "unpack", counting)
    with Session(engine, cache=str(tmp_path / "c"), memory_limit="0", reuse="quantized", codec="q8") as session:
        session.generate(tokens, max_tokens=1)
        texts = []
        for decodes in (False, True):
            monkeypatch.setattr(layer_loader, "decodes_on", lambda _, decodes=decodes: decodes)
            session.flush()
            session.cache.unpark()
            session.cache.kv.costs = UnmeasuredCosts()
            reply = session.generate([*tokens[:690], 5, 6, 7], max_tokens=20)
            assert reply.reuse.quantized >= 640
            assert bool(pieces) == decodes
            texts.append(reply.text)
    assert texts[0] == texts[1]
