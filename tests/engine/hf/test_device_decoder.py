"""Coded KV that a device restores against what the codec decodes: the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rekindle.codec import quantized
from rekindle.codec.coder import SAME_LAYER, Coder
from rekindle.codec.quantized import GROUP_TOKENS, encode, locate_parts
from rekindle.codec.quantizer import FLOAT_TYPES, BitPlan, LayerBits, narrow
from rekindle.core.kv import CodedPiece, KvType, LayerKv, LayerShape, LayerSpec, Span
from rekindle.engine.hf import device_decoder as module
from rekindle.engine.hf.device_decoder import LayerTensors, SlotMemory, unpack
from rekindle.engine.hf.sequence import TORCH_TYPE, raw_view
from tests.codec.arrays import decode, self_described

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=CUDA)]
BITS = [LayerBits(3, 2.75), LayerBits(0, 4), LayerBits(1.5, 0), LayerBits(8, 6), LayerBits(2, 8)]
PLAN = BitPlan(tuple(BITS))
MARGIN = 5  # tokens around the place of the KV in a buffer


def some_kv(shape: tuple[int, int, int, int], dtype: KvType, seed: int) -> list[LayerKv]:
    """KV of each layer [heads, tokens, dim], with outliers: codes of them become strays."""
    heads, tokens, key_dim, value_dim = shape
    random = np.random.default_rng(seed)

    def half(dim: int, layer: int) -> NDArray[np.generic]:
        numbers = random.standard_normal((heads, tokens, dim), np.float32)
        if layer % 2:
            numbers /= np.sqrt(random.chisquare(3, numbers.shape) / 3)
        numbers[random.random(numbers.shape) < 1 / 1000] *= 8
        return narrow(numbers.astype(np.float32), dtype)

    return [LayerKv(half(key_dim, layer), half(value_dim, layer)) for layer in range(len(BITS))]


def cut(kv: LayerKv, span: Span | None) -> LayerKv:
    part = slice(None) if span is None else slice(span.start, span.stop)
    return LayerKv(kv.keys[:, part], kv.values[:, part])


def places(expected: Sequence[LayerKv], dtype: KvType, device: torch.device) -> list[LayerTensors]:
    """Views into larger buffers, as of a sequence."""

    def place(half: NDArray[np.generic]) -> torch.Tensor:
        heads, tokens, dim = half.shape
        buffer = torch.full((heads, tokens + 2 * MARGIN, dim), 7.0, dtype=TORCH_TYPE[dtype], device=device)
        return buffer[:, MARGIN : MARGIN + tokens]

    return [LayerTensors(place(kv.keys), place(kv.values)) for kv in expected]


def assert_same(out: Sequence[LayerTensors], expected: Sequence[LayerKv]) -> None:
    for ours, theirs in zip(out, expected, strict=True):
        for got, wanted in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert np.ascontiguousarray(raw_view(got.cpu())).tobytes() == np.ascontiguousarray(wanted).tobytes()
            buffer = got._base
            assert buffer is not None
            assert bool((buffer[:, :MARGIN] == 7).all() & (buffer[:, -MARGIN:] == 7).all())


def pieces(blob: bytes, dtype: KvType, anchor: LayerKv | None, span: Span, start: int = 0) -> list[CodedPiece]:
    """What a feed gives of a coded layer: its base first, cut to `span`, which need not be coded."""
    found = []
    if anchor is not None:
        whole = Span(0, len(span))
        found.append(CodedPiece(anchor, anchor.spec(dtype), whole, start, delta=False, owner="base"))
    if anchor is None or blob != SAME_LAYER:
        spec = self_described(blob, dtype, anchor)
        found.append(CodedPiece((blob,), spec, span, start, delta=anchor is not None, owner="own"))
    return found


def restore(found: Sequence[CodedPiece], out: LayerTensors, slot: torch.Tensor | None = None) -> None:
    """As a loader does, which finds damage that shows only on the device at the end."""
    memory = SlotMemory(slot)
    sound = [part.restore() for piece in found for part in unpack(piece, out, memory)]
    if not all(each is None or bool(each) for each in sound):
        raise ValueError("codes are damaged: their strays do not match")


def restore_all(
    blobs: Sequence[bytes],
    out: Sequence[LayerTensors],
    anchor: Sequence[LayerKv] | None,
    span: Span | None,
    dtype: KvType,
) -> None:
    slot = torch.empty(1 << 17, dtype=torch.uint8)[3:]  # too small for some, and not aligned
    for index, (blob, place) in enumerate(zip(blobs, out, strict=True)):
        below = None if anchor is None else anchor[index]
        wanted = Span(0, self_described(blob, dtype, below).tokens) if span is None else span
        restore(pieces(blob, dtype, below, wanted), place, slot)


def check(
    blobs: list[bytes], dtype: KvType, anchor: list[LayerKv] | None, span: Span | None, device: torch.device
) -> None:
    below = None if anchor is None else [cut(kv, span) for kv in anchor]
    expected = [decode(blob, dtype, None if below is None else below[i], span) for i, blob in enumerate(blobs)]
    out = places(expected, dtype, device)
    restore_all(blobs, out, below, span, dtype)
    assert_same(out, expected)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("shape", [(2, 300, 16, 16), (3, 256, 8, 12), (1, 1, 4, 4), (3, 393, 5, 7), (2, 40, 64, 64)])
@pytest.mark.parametrize("kind", ["whole", "difference"])
def test_a_device_restores_the_bits_that_the_codec_decodes(
    kind: str, shape: tuple[int, int, int, int], dtype: KvType, device: torch.device
) -> None:
    kv, anchor = some_kv(shape, dtype, 1), some_kv(shape, dtype, 2) if kind == "difference" else None
    coder = Coder(whole=PLAN, delta=PLAN)
    blobs = [coder.encode(i, kv[i], None if anchor is None else anchor[i], dtype) for i in range(len(kv))]
    tokens = shape[1]
    for span in (None, Span(0, tokens // 2), Span(tokens // 3, tokens), Span(tokens - 1, tokens)):
        check(blobs, dtype, anchor, span, device)


def test_the_shapes_of_these_tests_have_strays_and_every_density() -> None:
    coder = Coder(whole=PLAN)
    blobs = [coder.encode(i, kv, None, "float32") for i, kv in enumerate(some_kv((2, 300, 16, 16), "float32", 1))]
    found = [locate_parts(blob, "whole", self_described(blob, "float32")) for blob in blobs]
    frames = [frame for layer in found for group in layer.groups for frame in group.halves]
    assert {frame.per_byte for frame in frames} == {1, 2, 3, 4}
    assert sum(frame.strays for frame in frames) > 10


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_layers_of_the_delta_base_itself_stand_among_deltas(device: torch.device) -> None:
    anchor = some_kv((2, 150, 8, 8), "bfloat16", 3)
    kv = [own if layer in (0, 3) else other for layer, (own, other) in
          enumerate(zip(anchor, some_kv((2, 150, 8, 8), "bfloat16", 4), strict=True))]  # fmt: skip
    blobs = [Coder(delta=PLAN).encode(i, kv[i], anchor[i], "bfloat16") for i in range(len(kv))]
    assert [blob == SAME_LAYER for blob in blobs] == [True, False, False, True, False]
    for span in (None, Span(20, 140)):
        check(blobs, "bfloat16", anchor, span, device)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_delta_base_may_be_on_the_device_already(device: torch.device) -> None:
    kv, anchor = some_kv((2, 150, 8, 8), "float16", 3), some_kv((2, 150, 8, 8), "float16", 4)
    blobs = [Coder(delta=PLAN).encode(i, kv[i], anchor[i], "float16") for i in range(len(kv))]
    expected = [decode(blob, "float16", anchor[i]) for i, blob in enumerate(blobs)]
    out = places(expected, "float16", device)
    for blob, place, below in zip(blobs, out, anchor, strict=True):
        for half, theirs in zip(place.halves, (below.keys, below.values), strict=True):
            half.copy_(torch.from_numpy(theirs))
        restore(pieces(blob, "float16", below, Span(0, 150))[1:], place)
    assert_same(out, expected)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_long_layer_is_restored_in_several_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_NUMBERS", 2 * 2 * 2 * 128 * 8)
    kv, anchor = some_kv((2, 600, 8, 8), "float16", 5), some_kv((2, 600, 8, 8), "float16", 6)
    blobs = [Coder(delta=PLAN).encode(i, kv[i], anchor[i], "float16") for i in range(len(kv))]
    coded = pieces(blobs[0], "float16", anchor[0], Span(0, 600))[1]
    assert len(unpack(coded, places(kv, "float16", device)[0], SlotMemory(None))) == 3
    for span in (None, Span(100, 590), Span(127, 257)):
        check(blobs, "float16", anchor, span, device)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_codes_that_follow_each_other_are_restored_at_once(
    groups: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of a prompt, each coded alone, with other numbers of bits."""
    count, tokens = 5, groups * GROUP_TOKENS
    kv = some_kv((2, count * tokens, 8, 12), "bfloat16", 5)[1]
    slices = [cut(kv, Span(n * tokens, (n + 1) * tokens)) for n in range(count)]
    blobs = tuple(encode(part, "bfloat16", bits) for part, bits in zip(slices, BITS, strict=True))
    spec = LayerSpec("bfloat16", LayerShape(2, 8, 12), tokens)
    decoded = [decode(blob, "bfloat16", None) for blob in blobs]
    whole = LayerKv(
        *(np.concatenate(halves, axis=1) for halves in zip(*((d.keys, d.values) for d in decoded), strict=True))
    )
    for batch, most in ((module._BATCH_NUMBERS, 1), (2 * 20 * GROUP_TOKENS * 2, 6), (1, 11)):
        monkeypatch.setattr(module, "_BATCH_NUMBERS", batch)
        for span in (Span(0, count * tokens), Span(tokens, 3 * tokens), Span(tokens + 7, count * tokens - 5)):
            expected = [cut(whole, span)]
            piece = CodedPiece(blobs, spec, span, 0, delta=False, owner="origin")
            out = places(expected, "bfloat16", device)
            assert 1 <= len(unpack(piece, out[0], SlotMemory(None))) <= most
            restore([piece], out[0])
            assert_same(out, expected)


def test_codes_that_do_not_follow_each_other_are_refused() -> None:
    kv = some_kv((2, 2 * GROUP_TOKENS, 8, 8), "float16", 5)[0]
    one, other = (encode(cut(kv, Span(0, n)), "float16", BITS[3]) for n in (GROUP_TOKENS, GROUP_TOKENS - 1))
    for blobs, tokens, wanted in (((one, other), GROUP_TOKENS, 250), ((other, other), GROUP_TOKENS - 1, 250),
                                  ((one, one[:20]), GROUP_TOKENS, 250), ((one,), GROUP_TOKENS, 129)):  # fmt: skip
        spec = LayerSpec("float16", LayerShape(2, 8, 8), tokens)
        piece = CodedPiece(blobs, spec, Span(0, wanted), 0, delta=False, owner="origin")
        with pytest.raises(ValueError, match=r".+"):
            unpack(piece, places([cut(kv, Span(0, wanted))], "float16", torch.device("cpu"))[0], SlotMemory(None))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("into", FLOAT_TYPES)
def test_whole_kv_is_restored_in_any_type(into: KvType, device: torch.device) -> None:
    """KV of an origin that computes in another type."""
    kv = some_kv((2, 140, 8, 8), "bfloat16", 6)[1]
    blob, spec = encode(kv, "bfloat16", BITS[3]), LayerSpec("bfloat16", LayerShape(2, 8, 8), 140)
    expected = [quantized.decode(blob, spec, into=into)]
    out = places(expected, into, device)
    restore([CodedPiece((blob,), spec, Span(0, 140), 0, delta=False, owner="origin")], out[0])
    assert_same(out, expected)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_numbers_beyond_the_type_become_its_largest(device: torch.device) -> None:
    kv = some_kv((1, 130, 4, 4), "float16", 7)
    far = [LayerKv(half.keys.copy(), half.values.copy()) for half in kv]
    for each in far:
        each.keys[0, 5], each.values[0, 6] = 65504, -65504
    blobs = [Coder(whole=PLAN).encode(i, each, None, "float16") for i, each in enumerate(far)]
    assert any(np.abs(decode(blob, "float16", None).keys).max() == 65504 for blob in blobs)
    check(blobs, "float16", None, None, device)


def test_no_tokens_are_nothing_to_do() -> None:
    blobs = [
        Coder(whole=PLAN).encode(i, kv, None, "float32") for i, kv in enumerate(some_kv((2, 0, 4, 4), "float32", 1))
    ]
    check(blobs, "float32", None, None, torch.device("cpu"))
    blobs = [
        Coder(whole=PLAN).encode(i, kv, None, "float32") for i, kv in enumerate(some_kv((2, 9, 4, 4), "float32", 1))
    ]
    check(blobs, "float32", None, Span(3, 3), torch.device("cpu"))


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_damaged_bytes_are_refused_or_decode_as_in_the_codec(device: torch.device) -> None:
    """Not all damage shows: then it is the same numbers as the codec's. Nothing else may come of it."""
    kv = some_kv((2, 140, 4, 4), "float32", 8)
    blobs = [Coder(whole=PLAN).encode(i, each, None, "float32") for i, each in enumerate(kv)]
    sound = [decode(blob, "float32", None) for blob in blobs]
    random = np.random.default_rng(9)
    refused = 0
    for turn in range(150):
        layer = turn % len(blobs)
        broken = bytearray(blobs[layer])
        for place in random.integers(0, 140 if turn % 2 else len(broken), 1 + turn % 3):
            broken[place] ^= 1 << int(random.integers(0, 8))
        damaged = [bytes(broken) if index == layer else blob for index, blob in enumerate(blobs)]
        out = places(sound, "float32", device)
        try:
            expected = [decode(blob, "float32", None) for blob in damaged]
        except ValueError:
            refused += 1
            expected = []
        if [kv.keys.shape for kv in expected] == [kv.keys.shape for kv in sound]:
            restore_all(damaged, out, None, None, "float32")
            assert_same(out, expected)
        else:
            with pytest.raises(ValueError, match=r".+"):
                restore_all(damaged, out, None, None, "float32")
    assert refused > 50


def test_bytes_that_are_cut_off_or_go_on_are_refused() -> None:
    kv, anchor = some_kv((2, 140, 4, 4), "float16", 8), some_kv((2, 140, 4, 4), "float16", 9)
    blobs = [Coder(delta=PLAN).encode(i, kv[i], anchor[i], "float16") for i in range(len(kv))]
    out = places(kv, "float16", torch.device("cpu"))
    sizes = [0, 3, 4, 20, 40, 100, len(blobs[1]) // 2, len(blobs[1]) - 1]
    for broken in [*(blobs[1][:size] for size in sizes), blobs[1] + b"\0", SAME_LAYER + b"\0"]:
        with pytest.raises(ValueError, match=r".+"):
            restore(pieces(broken, "float16", anchor[1], Span(0, 140)), out[1])


def test_strays_that_do_not_match_are_refused() -> None:
    """A stray more or fewer than there are marks, in a frame that is otherwise sound."""
    kv = some_kv((2, 300, 16, 16), "float32", 1)
    blobs = [Coder(whole=PLAN).encode(i, each, None, "float32") for i, each in enumerate(kv)]
    out = places(kv, "float32", torch.device("cpu"))
    # Two groups' counts are exchanged: as many strays in all, but not where they belong.
    size = np.dtype([("bytes", "<u4", 2), ("strays", "<u4", 2), ("per_byte", "u1", 2)])
    for layer, (a, b) in itertools.product(range(len(blobs)), [(0, 1), (0, 2)]):
        data = bytearray(blobs[layer])
        sizes = np.frombuffer(data, size, 3, 28)
        if sizes["strays"][a, 0] == sizes["strays"][b, 0]:
            continue
        sizes["strays"][[a, b], 0] = sizes["strays"][[b, a], 0]
        with pytest.raises(ValueError, match="strays"):
            decode(bytes(data), "float32", None)
        with pytest.raises(ValueError, match="strays"):
            restore(pieces(bytes(data), "float32", None, Span(0, 300)), out[layer])
        return
    pytest.fail("no two groups of these have different numbers of strays")


def test_what_does_not_fit_together_is_refused() -> None:
    kv, anchor = some_kv((2, 30, 4, 4), "float16", 1), some_kv((2, 30, 4, 4), "float16", 2)
    deltas = [Coder(delta=PLAN).encode(i, kv[i], anchor[i], "float16") for i in range(len(kv))]
    wholes = [Coder(whole=PLAN).encode(i, kv[i], None, "float16") for i in range(len(kv))]
    exact = [Coder(delta="exact").encode(i, kv[i], anchor[i], "float16") for i in range(len(kv))]
    device = torch.device("cpu")
    out = places(kv, "float16", device)
    wide = [LayerKv(each.keys.astype(np.float32), each.values.astype(np.float32)) for each in anchor]
    short = [cut(each, Span(0, 29)) for each in anchor]
    narrower = [LayerKv(each.keys[..., :3], each.values[..., :3]) for each in anchor]
    whole = Span(0, 30)
    for layers, room, below, span, start in (
        (deltas, out, None, whole, 0),
        (wholes, out, anchor, whole, 0),
        (exact, out, anchor, whole, 0),
        (deltas, out, wide, whole, 0),
        (deltas, out, short, whole, 0),
        (deltas, out, narrower, whole, 0),
        (deltas, places(wide, "float32", device), None, whole, 0),
        (wholes, places(narrower, "float16", device), None, whole, 0),
        (wholes, out, None, Span(0, 29), 2),
        (wholes, out, None, Span(10, 40), 0),
    ):
        for index, blob in enumerate(layers):
            spec = LayerSpec("float16", LayerShape(2, 4, 4), 30)
            with pytest.raises(ValueError, match=r".+"):
                for piece in pieces(blob, "float16", None if below is None else below[index], span, start):
                    restore([replace(piece, spec=replace(spec, tokens=piece.spec.tokens))], room[index])
