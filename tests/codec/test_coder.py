"""Ways of coding: every kind of coded layer comes back, damage is noticed, and a way of coding is a text."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.codec.coder import EXACT, Coder, is_quantized
from rekindle.codec.quantizer import BitPlan, LayerBits, widen
from rekindle.core.kv import KvType, LayerKv, LayerShape, Span
from tests.codec.arrays import SEEDS, SHAPES, SOME, TOKENS, any_bits, decode, same_bits, smooth
from tests.codec.test_delta import TYPES, cut, distance, near

SHAPE = LayerShape(2, 8, 4)
PLAN = BitPlan((LayerBits(8, 8), LayerBits(8, 4), LayerBits(0, 2)))
QUANTIZED = Coder(PLAN, PLAN)
CODERS = {"exact": EXACT, "quantized": QUANTIZED}


def blobs() -> dict[str, tuple[bytes, LayerKv | None]]:
    """A coded layer of every kind, with its anchor."""
    anchor = smooth(SHAPE, 200, "float16")
    kv = near(anchor, "float16")
    coded = {name: (coder.encode(0, kv, anchor, "float16"), anchor) for name, coder in CODERS.items()}
    same = {"same": (EXACT.encode(0, anchor, anchor, "float16"), anchor)}
    return {**coded, **same, "whole": (QUANTIZED.encode(1, kv, None, "float16"), None)}


KINDS = blobs()


@SOME
@given(SHAPES, TOKENS, TYPES, SEEDS)
def test_an_exact_difference_is_undone_whatever_the_bits(
    shape: LayerShape, tokens: int, dtype: KvType, seed: int
) -> None:
    kv, anchor = any_bits(shape, tokens, dtype, seed), any_bits(shape, tokens, dtype, seed + 1)
    assert same_bits(decode(EXACT.encode(0, kv, anchor, dtype), dtype, anchor), kv)


@SOME
@given(SHAPES, st.integers(1, 300), TYPES, SEEDS, st.sampled_from(list(CODERS)), st.data())
def test_some_tokens_are_decoded_as_they_are_among_all(
    shape: LayerShape, tokens: int, dtype: KvType, seed: int, name: str, data: st.DataObject
) -> None:
    anchor = any_bits(shape, tokens, dtype, seed) if dtype == "uint8" else smooth(shape, tokens, dtype, seed)
    kv = any_bits(shape, tokens, dtype, seed + 1) if dtype == "uint8" else near(anchor, dtype, seed=seed)
    coded = CODERS[name].encode(0, kv, anchor, dtype)
    whole = decode(coded, dtype, anchor)
    span = Span(*sorted(data.draw(st.tuples(*[st.integers(0, tokens)] * 2), "span")))
    part = decode(coded, dtype, cut(anchor, span), span)
    assert same_bits(LayerKv(part.keys.copy(), part.values.copy()), cut(whole, span))
    if name == "exact" or dtype == "uint8":
        assert same_bits(whole, kv)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_quantized_delta_is_closer_than_its_base_and_whole_kv_closer_with_more_bits(dtype: KvType) -> None:
    anchor = smooth(SHAPE, 200, dtype)
    kv = near(anchor, dtype)
    back = decode(QUANTIZED.encode(0, kv, anchor, dtype), dtype, anchor)
    assert distance(back, kv, dtype) < 0.1 * distance(anchor, kv, dtype)
    eight, four = (decode(Coder(BitPlan.uniform(1, bits)).encode(0, kv, None, dtype), dtype, None) for bits in (8, 4))
    assert 0 < distance(eight, kv, dtype) < 0.1 * distance(four, kv, dtype)


@pytest.mark.parametrize("coder", CODERS.values(), ids=list(CODERS))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
def test_a_layer_equal_to_its_delta_base_takes_no_room_and_comes_back(coder: Coder, dtype: KvType) -> None:
    anchor = any_bits(SHAPE, 70, dtype, 3)  # NaN too: only bits count
    coded = coder.encode(1, anchor, anchor, dtype)
    assert len(coded) == 4
    assert same_bits(decode(coded, dtype, anchor), anchor)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_zero_and_minus_zero_are_not_the_same_layer(dtype: KvType) -> None:
    zero = LayerKv(np.zeros((1, 3, 2), dtype), np.zeros((1, 3, 2), dtype))
    kv = LayerKv(-zero.keys, zero.values)
    coded = EXACT.encode(0, kv, zero, dtype)
    assert len(coded) > 4 and same_bits(decode(coded, dtype, zero), kv)


def test_one_bit_of_one_value_makes_another_layer() -> None:
    anchor = any_bits(SHAPE, 70, "float16", 3)
    values = anchor.values.copy()
    values.view(np.uint16)[1, 69, 3] ^= 1
    kv = LayerKv(anchor.keys, values)
    coded = EXACT.encode(0, kv, anchor, "float16")
    assert len(coded) > 4 and same_bits(decode(coded, "float16", anchor), kv)


@pytest.mark.parametrize("kind", KINDS)
def test_a_coded_layer_that_is_cut_off_or_goes_on_is_refused(kind: str) -> None:
    data, anchor = KINDS[kind]
    for damaged in (*(data[:stop] for stop in range(0, len(data), max(1, len(data) // 60))), data + b"\0", data + data):
        with pytest.raises(ValueError):
            decode(damaged, "float16", anchor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_gives_an_error_or_kv_of_the_same_shape(kind: str) -> None:
    """What is not noticed here, the digest in the extent's header notices."""
    data, anchor = KINDS[kind]
    rng = random.Random(1)
    shapes = {(2, 200, 8), (2, 200, 4)}
    for place in {*range(min(len(data), 40)), *(rng.randrange(len(data)) for _ in range(150))}:
        damaged = bytearray(data)
        damaged[place] ^= 1 << rng.randrange(8)
        try:
            with np.errstate(over="ignore"):
                back = decode(bytes(damaged), "float16", anchor, Span(0, 200))
        except ValueError:
            continue
        assert {back.keys.shape, back.values.shape} == shapes


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "whole"])
def test_a_delta_without_its_base_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="anchor|difference"):
        decode(KINDS[kind][0], "float16", None)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("whole", "same")])
def test_a_delta_base_of_another_shape_type_or_length_is_refused(kind: str) -> None:
    data = KINDS[kind][0]
    for anchor in (
        smooth(LayerShape(2, 4, 8), 200, "float16"),
        smooth(LayerShape(1, 8, 4), 200, "float16"),
        smooth(SHAPE, 199, "float16"),
        smooth(SHAPE, 200, "float32"),
    ):
        with pytest.raises(ValueError):
            decode(data, "float16", anchor)


def test_whole_kv_is_no_difference_and_a_difference_not_whole() -> None:
    anchor = KINDS["exact"][1]
    with pytest.raises(ValueError):
        decode(KINDS["whole"][0], "float16", anchor)
    with pytest.raises(ValueError):
        decode(KINDS["quantized"][0], "float16", None)


@pytest.mark.parametrize("coder", CODERS.values(), ids=list(CODERS))
def test_a_delta_base_that_is_not_alike_cannot_be_coded_against(coder: Coder) -> None:
    kv = smooth(SHAPE, 40, "float16")
    for anchor in (smooth(SHAPE, 39, "float16"), smooth(LayerShape(2, 8, 8), 40, "float16")):
        with pytest.raises(ValueError):
            coder.encode(0, kv, anchor, "float16")


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_unless_nothing_may_be_lost(number: float) -> None:
    anchor = smooth(SHAPE, 40, "float32")
    keys = anchor.keys.copy()
    keys[1, 20, 3] = number
    kv = LayerKv(keys, anchor.values)
    for coded, stands_on in ((kv, anchor), (anchor, kv), (kv, None)):
        with pytest.raises(ValueError):
            QUANTIZED.encode(0, coded, stands_on, "float32")
    assert same_bits(decode(EXACT.encode(0, kv, anchor, "float32"), "float32", anchor), kv)


def test_quantized_bytes_are_differenced_without_loss_by_every_coder() -> None:
    kv, anchor = any_bits(SHAPE, 70, "uint8", 1), any_bits(SHAPE, 70, "uint8", 2)
    for coder in CODERS.values():
        assert same_bits(decode(coder.encode(0, kv, anchor, "uint8"), "uint8", anchor), kv)
    with pytest.raises(ValueError):
        QUANTIZED.encode(0, kv, None, "uint8")


def test_each_layer_has_its_own_bits() -> None:
    anchor = smooth(SHAPE, 200, "float16")
    kv = near(anchor, "float16")
    sizes = [len(QUANTIZED.encode(layer, kv, anchor, "float16")) for layer in range(3)]
    assert sizes[0] > sizes[1] > sizes[2]
    back = decode(QUANTIZED.encode(2, kv, anchor, "float16"), "float16", anchor)
    assert np.array_equal(back.keys, widen(anchor.keys, "float16").astype(np.float16))  # 0 bits: the anchor stands in


PLANS = st.none() | st.lists(st.builds(LayerBits, *[st.just(0.0) | st.floats(1, 8)] * 2), min_size=0, max_size=4).map(
    lambda layers: BitPlan(tuple(layers))
)


@given(PLANS, PLANS | st.just("exact"))
def test_a_way_of_coding_is_a_text_and_back(whole: BitPlan | None, delta: BitPlan | str | None) -> None:
    coder = Coder(whole, delta)  # type: ignore[arg-type]
    assert Coder.from_json(coder.to_json()) == coder
    assert Coder.from_json(coder.to_json()).to_json() == coder.to_json()
    assert coder.exact == (whole is None and delta in (None, "exact"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "1",
        "{}",
        "null",
        "[]",
        "[null]",
        "[null,null,null]",
        '[null,"lossy"]',
        '["exact","exact"]',
        "[null,1]",
        "[[],null]",
        '[null,"[[9,1]]"]',
        '[null,"[[NaN,1]]"]',
        '[null,"[[1]]"]',
        '[null,"[[true,1]]"]',
        '{"whole":1,"delta":2}',
        pytest.param(f'[null,"[[1{"0" * 400},1]]"]', id="huge"),
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_any_other_text_is_no_way_of_coding(text: str) -> None:
    with pytest.raises(ValueError):
        Coder.from_json(text)


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr))
def test_no_text_gives_anything_but_a_way_of_coding_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(Coder.from_json(text), Coder)


def test_the_codec_of_a_kv_space_says_whether_something_may_be_lost() -> None:
    assert is_quantized("quantized") and is_quantized("quantized/q8")
    assert not is_quantized("raw") and not is_quantized("nearly")
