"""Quantized KV of a layer."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rekindle.codec import quantized
from rekindle.codec.packing import Packed, expand, pack, squeeze, unpack
from rekindle.codec.quantized import PRESETS, describe, encode, open_layer
from rekindle.codec.quantizer import (
    FLOAT_TYPES,
    LayerBits,
    dequantize_keys,
    dequantize_values,
    narrow,
    quantize_keys,
    quantize_values,
    steps_of,
    widen,
)
from rekindle.core.kv import KvType, LayerKv, LayerShape, Span
from tests.codec.arrays import SEEDS, SHAPES, SOME, TOKENS, any_bits, same_bits, self_described, smooth

SHAPE = LayerShape(3, 16, 8)


def decode(data: bytes, span: Span | None = None) -> LayerKv:
    return quantized.decode(data, self_described(data, "float32"), span)


FLOATS = st.sampled_from(FLOAT_TYPES)
BITS = st.floats(1, 8)
NUMBERS = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(1, 5)),
    elements=st.floats(-(2.0**99), 2.0**99, width=32) | st.floats(-4, 4, width=32),
)


@SOME
@given(NUMBERS, BITS)
def test_no_number_is_further_off_than_its_step_allows(numbers: np.ndarray, bits: float) -> None:
    reach = (0.6 if bits < 2.5 else 0.5) + 0.01
    keys, values = quantize_keys(numbers, bits), quantize_values(numbers, bits)
    rounding = 2.0**-22 * np.abs(numbers).max()
    off = np.abs(dequantize_keys(keys) - numbers.astype(np.float64))
    assert (off <= reach * steps_of(keys.exponents)[:, None].astype(np.float64) + rounding).all()
    off = np.abs(dequantize_values(values) - numbers.astype(np.float64))
    assert (off <= reach * steps_of(values.exponents >> 1)[:, :, None].astype(np.float64) + rounding).all()


@SOME
@given(SHAPES, TOKENS, FLOATS, SEEDS, BITS, BITS)
def test_kv_comes_back_in_its_type_and_shape_and_close(
    shape: LayerShape, tokens: int, dtype: KvType, seed: int, key_bits: float, value_bits: float
) -> None:
    kv = smooth(shape, tokens, dtype, seed)
    data = encode(kv, dtype, LayerBits(key_bits, value_bits))
    back = decode(data)
    coded = describe(data)
    assert (coded.kind, coded.dtype, coded.shape, coded.tokens) == ("whole", dtype, shape, tokens)
    for mine, got, bits in ((kv.keys, back.keys, key_bits), (kv.values, back.values, value_bits)):
        assert (got.dtype, got.shape) == (mine.dtype, mine.shape)
        if mine.size:
            wide = widen(mine, dtype)
            bound = 2.0 ** (3 - bits) * np.ptp(wide) + 2.0**-6 * np.abs(wide).max()
            assert np.abs(widen(got, dtype) - wide).max() <= bound


@SOME
@given(st.data(), FLOATS, SEEDS)
def test_some_tokens_can_be_decoded_alone(data: st.DataObject, dtype: KvType, seed: int) -> None:
    tokens = data.draw(st.integers(1, 400))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, tokens)] * 2)))
    coded = encode(smooth(SHAPE, tokens, dtype, seed), dtype, LayerBits(4, 3))
    whole, part = decode(coded), decode(coded, Span(start, stop))
    assert same_bits(part, LayerKv(whole.keys[:, start:stop], whole.values[:, start:stop]))


def test_only_the_groups_of_the_wanted_tokens_are_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    coded = encode(smooth(SHAPE, 400, "float16"), "float16", LayerBits(4, 3))
    counts: list[int] = []
    monkeypatch.setattr(quantized, "unpack", lambda packed, out: (counts.append(out.size), unpack(packed, out)))
    decode(coded, Span(130, 260))
    group = SHAPE.kv_heads * quantized.GROUP_TOKENS
    assert counts == [group * SHAPE.key_dim] * 2 + [group * SHAPE.value_dim] * 2


def test_groups_that_are_restored_together_are_those_restored_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in FLOAT_TYPES:
        coded = encode(smooth(SHAPE, 700, dtype), dtype, LayerBits(4, 2))
        together = [decode(coded, span) for span in (None, Span(5, 700), Span(128, 640), Span(100, 110))]
        with monkeypatch.context() as patch:
            patch.setattr(quantized, "_BATCH_NUMBERS", 0)
            alone = [decode(coded, span) for span in (None, Span(5, 700), Span(128, 640), Span(100, 110))]
        assert all(map(same_bits, together, alone))


def test_more_bits_are_closer_and_longer() -> None:
    kv = smooth(LayerShape(3, 64, 64), 256, "float32")
    coded = [encode(kv, "float32", LayerBits(bits, bits)) for bits in sorted(PRESETS.values())]
    errors = [float(np.square(decode(data).keys - kv.keys).mean()) for data in coded]
    assert [len(data) for data in coded] == sorted(len(data) for data in coded)
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("bits", PRESETS.values())
def test_a_number_costs_about_its_bits(bits: float) -> None:
    kv = smooth(LayerShape(3, 64, 64), 512, "float32")
    cost = len(encode(kv, "float32", LayerBits(bits, bits))) * 8 / (kv.keys.size + kv.values.size)
    assert bits - 0.5 < cost < bits + 0.25


def test_one_outlier_does_not_make_its_neighbours_coarse() -> None:
    kv = smooth(SHAPE, 128, "float32")
    keys, values = kv.keys.copy(), kv.values.copy()
    keys[0, 0, 0], values[0, 0, 0] = 1e4, 1e4
    back = decode(encode(LayerKv(keys, values), "float32", LayerBits(5, 5)))
    for mine, got in ((keys, back.keys), (values, back.values)):
        far = np.abs(got - mine)
        assert far[0, 0, 0] < 100 and far[0, 1:, 0].max() < 20  # the range in 2**5 steps would be 312 apart


def test_a_small_token_keeps_its_precision_among_large_values() -> None:
    values = smooth(SHAPE, 64, "float32").values + np.float32(5)
    values[:, 0] = np.float32(1e-3) * np.arange(1, 9)
    back = decode(encode(LayerKv(values, values), "float32", LayerBits(5, 5))).values
    assert np.abs(back[:, 0] - values[:, 0]).max() < 1e-3


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_constant_kv_comes_back_nearly_exact(dtype: KvType) -> None:
    array = narrow(np.full((2, 70, 4), 3.0, np.float32), dtype)
    back = decode(encode(LayerKv(array, array), dtype, LayerBits(2, 2)))
    assert np.allclose(widen(back.keys, dtype), 3, rtol=1e-3) and np.allclose(widen(back.values, dtype), 3, rtol=1e-3)


def test_zeros_cost_next_to_nothing_and_stay_zero() -> None:
    array = np.zeros((3, 512, 64), np.float16)
    data = encode(LayerKv(array, array), "float16", LayerBits(4, 4))
    assert len(data) < 1000 and same_bits(decode(data), LayerKv(array, array))


@pytest.mark.parametrize("half", ["keys", "values"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_with_advice(half: str, bad: float) -> None:
    kv = smooth(SHAPE, 5, "float16")
    array = getattr(kv, half).copy()
    array[1, 2, 3] = bad
    with pytest.raises(ValueError, match="keep it raw"):
        encode(replace(kv, **{half: array}), "float16", LayerBits(4, 4))


def test_the_largest_halves_do_not_become_infinite() -> None:
    array = np.full((1, 40, 4), 65504, np.float16)
    array[0, ::3] = -65504
    back = decode(encode(LayerKv(array, array), "float16", LayerBits(1, 1)))
    assert np.isfinite(back.keys).all() and np.isfinite(back.values).all()


@pytest.mark.parametrize(("dtype", "carried"), [("uint8", "uint8"), ("float16", "float32"), ("bfloat16", "float16")])
def test_arrays_of_another_type_are_refused(dtype: KvType, carried: str) -> None:
    array = np.zeros((1, 2, 3), carried)
    with pytest.raises(ValueError, match=r"keep it raw|carried as"):
        encode(LayerKv(array, array), dtype, LayerBits(4, 4))


def test_a_layer_without_numbers_or_with_unequal_halves_is_refused() -> None:
    array = np.zeros((1, 2, 3), np.float32)
    for keys, values in ((array, array[:, :1]), (array[:, :, :0], array), (array[0], array[0])):
        with pytest.raises(ValueError):
            encode(LayerKv(keys, values), "float32", LayerBits(4, 4))


@SOME
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_brain_float_is_the_nearest_one(number: float) -> None:
    wide = np.array([number], np.float32)
    nearest = narrow(wide, "bfloat16")
    around = widen(np.clip(nearest.astype(int) + np.arange(-1, 2), 0, 0xFFFF).astype(np.uint16), "bfloat16")
    finite = around[np.isfinite(around)].astype(np.float64)
    off = abs(float(widen(nearest, "bfloat16")[0]) - number)
    assert off <= np.abs(finite - number).min()
    assert narrow(widen(nearest, "bfloat16"), "bfloat16") == nearest


@SOME
@given(arrays.arrays(np.int16, st.integers(0, 700), elements=st.integers(-16000, 16000) | st.integers(-3, 3)))
def test_codes_come_back(codes: np.ndarray) -> None:
    back = np.empty((2, len(codes)), np.float32)
    unpack([pack(codes)] * 2, back)
    assert np.array_equal(back, [codes, codes])


@pytest.mark.parametrize(("largest", "per_byte"), [(0, 4), (1, 4), (2, 3), (7, 2), (100, 1)])
def test_small_codes_share_a_byte(largest: int, per_byte: int) -> None:
    codes = np.random.default_rng(0).integers(-largest, largest + 1, 5000).astype(np.int16)
    assert pack(codes).per_byte == per_byte


def test_codes_that_do_not_match_their_strays_are_refused() -> None:
    packed = pack(np.array([300, 1, 2, 90] * 50, np.int16))
    for strays in (packed.strays[1:], np.append(packed.strays, np.int16(1))):
        with pytest.raises(ValueError, match="strays"):
            unpack([Packed(packed.per_byte, packed.symbols, strays)], np.empty((1, 200), np.float32))


def test_a_header_that_lies_takes_no_memory() -> None:
    data = bytearray(encode(smooth(SHAPE, 40, "float16"), "float16", LayerBits(4, 4)))
    frame = bytearray(squeeze(bytes(1000)))
    huge = squeeze(bytes(1 << 27))[:40]
    tracemalloc.start()
    for place in (8, 12, 16):  # tokens, then the dims
        lying = data.copy()
        struct.pack_into("<I", lying, place, 0xFFFFFFF0)
        with pytest.raises(ValueError):
            decode(bytes(lying))
    with pytest.raises(ValueError, match="too short"):
        expand([bytes(frame)], 1 << 40)
    with pytest.raises(ValueError, match="instead of"):
        expand([huge], 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


@SOME
@given(st.data(), SEEDS)
def test_damaged_bytes_are_refused_or_decoded_but_nothing_else_happens(data: st.DataObject, seed: int) -> None:
    kv = smooth(SHAPE, 140, "bfloat16", seed)
    damaged = bytearray(encode(kv, "bfloat16", LayerBits(3, 2)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 80) | st.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    shape = describe(bytes(damaged)).shape if damaged[:4] == b"RKq1" and _is_header(bytes(damaged)) else None
    try:
        back = decode(bytes(damaged))
    except ValueError:
        return
    assert shape is not None and back.keys.shape[2] == shape.key_dim and back.values.shape[2] == shape.value_dim


@SOME
@given(st.data())
def test_bytes_that_end_early_or_late_are_refused(data: st.DataObject) -> None:
    coded = encode(smooth(SHAPE, 140, "float32"), "float32", LayerBits(3, 2))
    for other in (coded[: data.draw(st.integers(0, len(coded) - 1))], coded + data.draw(st.binary(min_size=1))):
        with pytest.raises(ValueError):
            decode(other)


@SOME
@given(st.binary(max_size=200))
def test_bytes_of_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


def test_a_difference_is_not_taken_for_whole_kv() -> None:
    coded = encode(smooth(SHAPE, 40, "float32"), "float32", LayerBits(3, 2))
    with pytest.raises(ValueError, match="whole"):
        open_layer(coded, "difference", self_described(coded, "float16"))


def test_tokens_beyond_the_last_are_refused() -> None:
    coded = encode(smooth(SHAPE, 40, "float32"), "float32", LayerBits(3, 2))
    with pytest.raises(ValueError, match="40 tokens"):
        decode(coded, Span(0, 41))


def test_every_bit_pattern_of_finite_floats_is_read_and_written_unchanged() -> None:
    for dtype in FLOAT_TYPES:
        kv = any_bits(SHAPE, 50, dtype, 3)
        wide = widen(kv.keys, dtype)
        finite = np.isfinite(wide)
        assert np.array_equal(narrow(np.where(finite, wide, 0), dtype)[finite], kv.keys[finite])


def _is_header(data: bytes) -> bool:
    try:
        describe(data)
    except ValueError:
        return False
    return True
