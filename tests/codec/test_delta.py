"""Deltas from a base: exact ones and quantized ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.codec.coder import encode_exact, encode_quantized
from rekindle.codec.quantized import encode
from rekindle.codec.quantizer import FLOAT_TYPES, LayerBits, carrier, narrow, widen
from rekindle.core.kv import KvType, LayerKv, LayerShape, Span
from tests.codec import arrays
from tests.codec.arrays import SEEDS, SHAPES, SOME, TOKENS, any_bits, same_bits, smooth

SHAPE = LayerShape(3, 16, 8)
TYPES = st.sampled_from(["float32", "float16", "bfloat16", "uint8"])
FLOATS = st.sampled_from(FLOAT_TYPES)


def decode_any(data: bytes, anchor: LayerKv, dtype: KvType, span: Span | None = None) -> LayerKv:
    return arrays.decode(data, dtype, anchor, span)


def decode_quantized(data: bytes, anchor: LayerKv) -> LayerKv:
    return arrays.decode(data, "float32", anchor)


def decode(data: bytes) -> LayerKv:
    return arrays.decode(data, "float32", None)


def near(anchor: LayerKv, dtype: KvType, share: float = 0.1, seed: int = 9) -> LayerKv:
    """What another adapter might have where one has `anchor`."""
    random = np.random.default_rng(seed)
    halves = []
    for wide in (widen(anchor.keys, dtype), widen(anchor.values, dtype)):
        channel = np.abs(wide).sum(1, keepdims=True) / max(1, wide.shape[1])
        halves.append(narrow((wide + random.normal(0, share, wide.shape) * channel).astype(np.float32), dtype))
    return LayerKv(halves[0], halves[1])


def cut(kv: LayerKv, span: Span) -> LayerKv:
    at = slice(span.start, span.stop)
    return LayerKv(kv.keys[:, at], kv.values[:, at])


def distance(one: LayerKv, other: LayerKv, dtype: KvType) -> float:
    return sum(
        float(np.square(widen(a, dtype) - widen(b, dtype)).mean())
        for a, b in ((one.keys, other.keys), (one.values, other.values))
    )


@SOME
@given(SHAPES, TOKENS, TYPES, SEEDS)
def test_an_exact_difference_gives_back_any_bits(shape: LayerShape, tokens: int, dtype: KvType, seed: int) -> None:
    kv, anchor = any_bits(shape, tokens, dtype, seed), any_bits(shape, tokens, dtype, seed + 1)
    assert same_bits(decode_any(encode_exact(kv, anchor, dtype), anchor, dtype), kv)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_minus_zero_infinity_and_every_nan_come_back_bit_by_bit(dtype: KvType) -> None:
    width = carrier(dtype).itemsize
    top = 1 << (8 * width - 1)
    patterns = [0, top, top - 1, 2 * top - 1, 1, top + 1, top >> 1]
    array = np.array(patterns, f"u{width}").view(carrier(dtype)).reshape(1, -1, 1)
    kv, anchor = LayerKv(array, array[:, ::-1]), LayerKv(array[:, ::-1], array)
    assert same_bits(decode_any(encode_exact(kv, anchor, dtype), anchor, dtype), kv)


@SOME
@given(st.data(), TYPES, SEEDS)
def test_some_tokens_can_be_decoded_alone(data: st.DataObject, dtype: KvType, seed: int) -> None:
    tokens = data.draw(st.integers(1, 300))
    span = Span(*sorted(data.draw(st.tuples(*[st.integers(0, tokens)] * 2))))
    kv, anchor = any_bits(SHAPE, tokens, dtype, seed), any_bits(SHAPE, tokens, dtype, seed + 1)
    part = decode_any(encode_exact(kv, anchor, dtype), cut(anchor, span), dtype, span)
    assert same_bits(part, cut(kv, span))


@pytest.mark.parametrize("dtype", [*FLOAT_TYPES, "uint8"])
def test_a_layer_equal_to_its_delta_base_costs_next_to_nothing(dtype: KvType) -> None:
    kv = any_bits(LayerShape(3, 64, 64), 512, dtype, 1)
    assert len(encode_exact(kv, kv, dtype)) < 200


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_a_layer_equal_to_its_delta_base_costs_next_to_nothing_when_quantized_too(dtype: KvType) -> None:
    kv = smooth(LayerShape(3, 64, 64), 512, dtype)
    data = encode_quantized(kv, kv, dtype, LayerBits(3, 3))
    assert len(data) * 8 < 0.02 * (kv.keys.size + kv.values.size)
    assert same_bits(decode_quantized(data, kv), kv)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_a_similar_layer_is_smaller_as_a_difference_without_loss(dtype: KvType) -> None:
    anchor = smooth(LayerShape(3, 64, 64), 256, dtype)
    kv = near(anchor, dtype, 0.01)
    unlike = smooth(LayerShape(3, 64, 64), 256, dtype, seed=77)
    assert len(encode_exact(kv, anchor, dtype)) < 0.85 * len(encode_exact(kv, unlike, dtype))


@SOME
@given(SHAPES, TOKENS, FLOATS, SEEDS, st.floats(1, 8), st.floats(1e-3, 10))
def test_a_quantized_delta_is_never_further_off_than_the_delta_itself_needs(
    shape: LayerShape, tokens: int, dtype: KvType, seed: int, bits: float, share: float
) -> None:
    anchor = smooth(shape, tokens, dtype, seed)
    kv = near(anchor, dtype, share, seed)
    back = decode_quantized(encode_quantized(kv, anchor, dtype, LayerBits(bits, bits)), anchor)
    assert (back.keys.dtype, back.keys.shape, back.values.shape) == (kv.keys.dtype, kv.keys.shape, kv.values.shape)
    for mine, theirs, got in ((kv.keys, anchor.keys, back.keys), (kv.values, anchor.values, back.values)):
        if mine.size:
            change = np.abs(widen(mine, dtype) - widen(theirs, dtype)).max()
            rounding = 2.0**-7 * np.abs(widen(mine, dtype)).max()  # of the coarsest type
            assert np.abs(widen(mine, dtype) - widen(got, dtype)).max() <= 2.0 ** (3 - bits) * change + 2 * rounding


def test_a_quantized_delta_is_far_closer_than_whole_kv_of_the_same_size() -> None:
    anchor = smooth(LayerShape(3, 64, 64), 256, "float32")
    kv, bits = near(anchor, "float32"), LayerBits(3, 3)
    difference, whole = encode_quantized(kv, anchor, "float32", bits), encode(kv, "float32", bits)
    assert len(difference) < 1.1 * len(whole)
    assert 5 * distance(decode_quantized(difference, anchor), kv, "float32") < distance(decode(whole), kv, "float32")


def test_a_delta_base_that_was_quantized_itself_adds_no_error() -> None:
    exact = smooth(LayerShape(3, 64, 64), 256, "float32")
    coarse = decode(encode(exact, "float32", LayerBits(4, 4)))
    kv, bits = near(exact, "float32"), LayerBits(6, 6)
    from_exact = decode_quantized(encode_quantized(kv, exact, "float32", bits), exact)
    from_coarse = decode_quantized(encode_quantized(kv, coarse, "float32", bits), coarse)
    crossed = decode_quantized(encode_quantized(kv, exact, "float32", bits), coarse)
    right = distance(from_exact, kv, "float32")
    assert distance(from_coarse, kv, "float32") < 4 * right < distance(crossed, kv, "float32")


def test_no_bits_mean_the_delta_base_itself() -> None:
    anchor = smooth(SHAPE, 200, "float16")
    kv = near(anchor, "float16")
    back = decode_quantized(encode_quantized(kv, anchor, "float16", LayerBits(0, 0)), anchor)
    assert same_bits(back, anchor)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e31])
def test_numbers_that_cannot_be_quantized_are_refused(bad: float) -> None:
    anchor = smooth(SHAPE, 8, "float32")
    keys = anchor.keys.copy()
    keys[1, 2, 3] = bad
    with pytest.raises(ValueError, match="keep it raw"):
        encode_quantized(replace(anchor, keys=keys), anchor, "float32", LayerBits(3, 3))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_another_delta_base_is_refused(dtype: KvType) -> None:
    kv = smooth(SHAPE, 40, dtype)
    exact, close = encode_exact(kv, kv, dtype), encode_quantized(kv, kv, dtype, LayerBits(3, 3))
    other = "float16" if dtype == "float32" else "float32"
    for anchor in (smooth(SHAPE, 39, dtype), smooth(LayerShape(2, 16, 8), 40, dtype), smooth(SHAPE, 40, other)):
        with pytest.raises(ValueError):
            decode_any(exact, anchor, dtype)
        with pytest.raises(ValueError):
            decode_quantized(close, anchor)
        with pytest.raises(ValueError):
            encode_exact(kv, anchor, dtype)


@SOME
@given(st.data(), SEEDS, st.sampled_from(["exact", "quantized"]))
def test_damaged_bytes_are_refused_or_decoded_but_nothing_else_happens(
    data: st.DataObject, seed: int, codec: str
) -> None:
    anchor = smooth(SHAPE, 140, "float16", seed)
    kv = near(anchor, "float16")
    encoded = {
        "exact": lambda: encode_exact(kv, anchor, "float16"),
        "quantized": lambda: encode_quantized(kv, anchor, "float16", LayerBits(3, 2)),
    }[codec]()
    damaged = bytearray(encoded[: data.draw(st.integers(0, len(encoded)))])
    head = st.integers(0, min(64, len(damaged) - 1)) if damaged else st.nothing()
    places = data.draw(st.lists(head | st.integers(0, len(damaged) - 1), max_size=4)) if damaged else []
    for place in places:
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        back = {
            "exact": lambda: decode_any(bytes(damaged), anchor, "float16"),
            "quantized": lambda: decode_quantized(bytes(damaged), anchor),
        }[codec]()
    except ValueError:
        return
    assert back.keys.shape == kv.keys.shape and back.values.shape == kv.values.shape
