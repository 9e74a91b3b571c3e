"""Differences from an anchor: exact ones, near ones, and those of the source."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.codec import mobilora
from rekindle.codec.bits import LayerBits
from rekindle.codec.delta import decode_exact, decode_near, encode_exact, encode_near
from rekindle.codec.numbers import FLOAT_TYPES, carrier, narrow, widen
from rekindle.codec.quantized import decode, encode
from rekindle.core.kv import KvType, LayerKv, LayerShape, Span
from tests.codec.arrays import SEEDS, SHAPES, SOME, TOKENS, any_bits, same_bits, smooth

SHAPE = LayerShape(3, 16, 8)
TYPES = st.sampled_from(["float32", "float16", "bfloat16", "uint8"])
FLOATS = st.sampled_from(FLOAT_TYPES)


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
    assert same_bits(decode_exact(encode_exact(kv, anchor, dtype), anchor, dtype), kv)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_minus_zero_infinity_and_every_nan_come_back_bit_by_bit(dtype: KvType) -> None:
    width = carrier(dtype).itemsize
    top = 1 << (8 * width - 1)
    patterns = [0, top, top - 1, 2 * top - 1, 1, top + 1, top >> 1]
    array = np.array(patterns, f"u{width}").view(carrier(dtype)).reshape(1, -1, 1)
    kv, anchor = LayerKv(array, array[:, ::-1]), LayerKv(array[:, ::-1], array)
    assert same_bits(decode_exact(encode_exact(kv, anchor, dtype), anchor, dtype), kv)


@SOME
@given(st.data(), TYPES, SEEDS)
def test_some_tokens_can_be_decoded_alone(data: st.DataObject, dtype: KvType, seed: int) -> None:
    tokens = data.draw(st.integers(1, 300))
    span = Span(*sorted(data.draw(st.tuples(*[st.integers(0, tokens)] * 2))))
    kv, anchor = any_bits(SHAPE, tokens, dtype, seed), any_bits(SHAPE, tokens, dtype, seed + 1)
    part = decode_exact(encode_exact(kv, anchor, dtype), cut(anchor, span), dtype, span)
    assert same_bits(part, cut(kv, span))


@pytest.mark.parametrize("dtype", [*FLOAT_TYPES, "uint8"])
def test_a_layer_equal_to_its_anchor_costs_next_to_nothing(dtype: KvType) -> None:
    kv = any_bits(LayerShape(3, 64, 64), 512, dtype, 1)
    assert len(encode_exact(kv, kv, dtype)) < 200


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_a_layer_equal_to_its_anchor_costs_next_to_nothing_when_quantized_too(dtype: KvType) -> None:
    kv = smooth(LayerShape(3, 64, 64), 512, dtype)
    data = encode_near(kv, kv, dtype, LayerBits(3, 3))
    assert len(data) * 8 < 0.02 * (kv.keys.size + kv.values.size)
    assert same_bits(decode_near(data, kv), kv)


def test_integer_kv_is_differenced_without_loss_in_the_published_way_too() -> None:
    anchor = any_bits(SHAPE, 200, "uint8", 1)
    kv = LayerKv(anchor.keys + np.uint8(1), anchor.values - np.uint8(1))
    data = mobilora.encode(kv, anchor, "uint8")
    assert same_bits(mobilora.decode(data, anchor, "uint8"), kv)
    assert len(data) < 0.05 * (kv.keys.size + kv.values.size)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_a_similar_layer_is_smaller_as_a_difference_without_loss(dtype: KvType) -> None:
    anchor = smooth(LayerShape(3, 64, 64), 256, dtype)
    kv = near(anchor, dtype, 0.01)
    unlike = smooth(LayerShape(3, 64, 64), 256, dtype, seed=77)
    assert len(encode_exact(kv, anchor, dtype)) < 0.85 * len(encode_exact(kv, unlike, dtype))


@SOME
@given(SHAPES, TOKENS, FLOATS, SEEDS, st.floats(1, 8), st.floats(1e-3, 10))
def test_a_near_difference_is_never_further_than_the_difference_itself_needs(
    shape: LayerShape, tokens: int, dtype: KvType, seed: int, bits: float, share: float
) -> None:
    anchor = smooth(shape, tokens, dtype, seed)
    kv = near(anchor, dtype, share, seed)
    back = decode_near(encode_near(kv, anchor, dtype, LayerBits(bits, bits)), anchor)
    assert (back.keys.dtype, back.keys.shape, back.values.shape) == (kv.keys.dtype, kv.keys.shape, kv.values.shape)
    for mine, theirs, got in ((kv.keys, anchor.keys, back.keys), (kv.values, anchor.values, back.values)):
        if mine.size:
            change = np.abs(widen(mine, dtype) - widen(theirs, dtype)).max()
            rounding = 2.0**-7 * np.abs(widen(mine, dtype)).max()  # of the coarsest type
            assert np.abs(widen(mine, dtype) - widen(got, dtype)).max() <= 2.0 ** (3 - bits) * change + 2 * rounding


def test_a_near_difference_is_far_closer_than_whole_kv_of_the_same_size() -> None:
    anchor = smooth(LayerShape(3, 64, 64), 256, "float32")
    kv, bits = near(anchor, "float32"), LayerBits(3, 3)
    difference, whole = encode_near(kv, anchor, "float32", bits), encode(kv, "float32", bits)
    assert len(difference) < 1.1 * len(whole)
    assert 5 * distance(decode_near(difference, anchor), kv, "float32") < distance(decode(whole), kv, "float32")


def test_an_anchor_that_was_quantized_itself_adds_no_error() -> None:
    exact = smooth(LayerShape(3, 64, 64), 256, "float32")
    coarse = decode(encode(exact, "float32", LayerBits(4, 4)))
    kv, bits = near(exact, "float32"), LayerBits(6, 6)
    from_exact = decode_near(encode_near(kv, exact, "float32", bits), exact)
    from_coarse = decode_near(encode_near(kv, coarse, "float32", bits), coarse)
    crossed = decode_near(encode_near(kv, exact, "float32", bits), coarse)
    right = distance(from_exact, kv, "float32")
    assert distance(from_coarse, kv, "float32") < 4 * right < distance(crossed, kv, "float32")


def test_no_bits_mean_the_anchor_itself() -> None:
    anchor = smooth(SHAPE, 200, "float16")
    kv = near(anchor, "float16")
    back = decode_near(encode_near(kv, anchor, "float16", LayerBits(0, 0)), anchor)
    assert same_bits(back, anchor)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e31])
def test_numbers_that_cannot_be_quantized_are_refused(bad: float) -> None:
    anchor = smooth(SHAPE, 8, "float32")
    keys = anchor.keys.copy()
    keys[1, 2, 3] = bad
    with pytest.raises(ValueError, match="keep it raw"):
        encode_near(replace(anchor, keys=keys), anchor, "float32", LayerBits(3, 3))
    if bad != 1e31:
        with pytest.raises(ValueError, match="keep it raw"):
            mobilora.encode(replace(anchor, keys=keys), anchor, "float32")


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_another_anchor_is_refused(dtype: KvType) -> None:
    kv = smooth(SHAPE, 40, dtype)
    exact, close = encode_exact(kv, kv, dtype), encode_near(kv, kv, dtype, LayerBits(3, 3))
    published = mobilora.encode(kv, kv, dtype)
    other = "float16" if dtype == "float32" else "float32"
    for anchor in (smooth(SHAPE, 39, dtype), smooth(LayerShape(2, 16, 8), 40, dtype), smooth(SHAPE, 40, other)):
        with pytest.raises(ValueError):
            decode_exact(exact, anchor, dtype)
        with pytest.raises(ValueError):
            decode_near(close, anchor)
        with pytest.raises(ValueError):
            mobilora.decode(published, anchor, dtype)
        with pytest.raises(ValueError):
            encode_exact(kv, anchor, dtype)


@SOME
@given(SHAPES, TOKENS, FLOATS, SEEDS, st.floats(1e-3, 3))
def test_the_published_error_bound_holds(
    shape: LayerShape, tokens: int, dtype: KvType, seed: int, share: float
) -> None:
    anchor = smooth(shape, tokens, dtype, seed)
    kv = near(anchor, dtype, share, seed)
    back = mobilora.decode(mobilora.encode(kv, anchor, dtype), anchor, dtype)
    for mine, got in ((kv.keys, back.keys), (kv.values, back.values)):
        wide = widen(mine, dtype)
        spare = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype] * (np.abs(wide) + 1)
        assert (np.abs(wide - widen(got, dtype)) <= np.log1p(1e-2) * 1.001 + spare).all()


def test_the_published_bound_follows_the_similarity_of_a_token() -> None:
    anchor = LayerKv(np.ones((1, 3, 64), np.float32), np.ones((1, 3, 64), np.float32))
    noise = np.random.default_rng(0).normal(0, 1, (1, 3, 64)) * np.array([0.05, 0.4, 2.0])[:, None]
    kv = LayerKv((anchor.keys + noise).astype(np.float32), anchor.values)
    back = mobilora.decode(mobilora.encode(kv, anchor, "float32"), anchor, "float32")
    errors = np.abs(back.keys - kv.keys).max((0, 2))
    for error, bound in zip(errors, mobilora.BOUNDS, strict=True):
        assert bound / 2 < error <= np.log1p(bound) * 1.01
    assert np.array_equal(back.values, kv.values)


@SOME
@given(st.data(), SEEDS, st.sampled_from(["exact", "near", "mobilora"]))
def test_damaged_bytes_are_refused_or_decoded_but_nothing_else_happens(
    data: st.DataObject, seed: int, codec: str
) -> None:
    anchor = smooth(SHAPE, 140, "float16", seed)
    kv = near(anchor, "float16")
    encoded = {
        "exact": lambda: encode_exact(kv, anchor, "float16"),
        "near": lambda: encode_near(kv, anchor, "float16", LayerBits(3, 2)),
        "mobilora": lambda: mobilora.encode(kv, anchor, "float16"),
    }[codec]()
    damaged = bytearray(encoded[: data.draw(st.integers(0, len(encoded)))])
    head = st.integers(0, min(64, len(damaged) - 1)) if damaged else st.nothing()
    places = data.draw(st.lists(head | st.integers(0, len(damaged) - 1), max_size=4)) if damaged else []
    for place in places:
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        back = {
            "exact": lambda: decode_exact(bytes(damaged), anchor, "float16"),
            "near": lambda: decode_near(bytes(damaged), anchor),
            "mobilora": lambda: mobilora.decode(bytes(damaged), anchor, "float16"),
        }[codec]()
    except ValueError:
        return
    assert back.keys.shape == kv.keys.shape and back.values.shape == kv.values.shape
