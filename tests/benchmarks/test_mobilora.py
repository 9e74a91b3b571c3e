"""Differences as published: bounded, refused where they cannot be, and never wrong when damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines import mobilora
from benchmarks.baselines.mobilora import PublishedCoder
from rekindle.codec.coder import SAME_LAYER
from rekindle.codec.quantizer import FLOAT_TYPES, widen
from rekindle.core.kv import KvType, LayerKv, LayerShape, Span
from rekindle.engine.fake import FakeEngine
from tests.codec.arrays import SEEDS, SHAPES, SOME, TOKENS, any_bits, same_bits, smooth
from tests.codec.test_delta import FLOATS, SHAPE, cut, distance, near
from tests.lora import fake_pairs, save_lora
from tests.session.test_quantized import ask, codings


def decode_any(data: bytes, anchor: LayerKv, dtype: KvType, span: Span | None = None) -> LayerKv:
    shape = LayerShape(*anchor.keys.shape[::2], anchor.values.shape[2])
    tokens = anchor.keys.shape[1] if span is None else TOTAL
    return mobilora.coder.decode(data, mobilora.LayerSpec(dtype, shape, tokens), anchor, span)


TOTAL = 200


def test_integer_kv_is_differenced_without_loss_in_the_published_way_too() -> None:
    anchor = any_bits(SHAPE, 200, "uint8", 1)
    kv = LayerKv(anchor.keys + np.uint8(1), anchor.values - np.uint8(1))
    data = mobilora.encode(kv, anchor, "uint8")
    assert same_bits(decode_any(data, anchor, "uint8"), kv)
    assert len(data) < 0.05 * (kv.keys.size + kv.values.size)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_have_no_bounded_difference_are_refused(bad: float) -> None:
    anchor = smooth(SHAPE, 8, "float32")
    keys = anchor.keys.copy()
    keys[1, 2, 3] = bad
    with pytest.raises(ValueError, match="keep it raw"):
        mobilora.encode(replace(anchor, keys=keys), anchor, "float32")


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_another_delta_base_is_refused(dtype: KvType) -> None:
    kv = smooth(SHAPE, 40, dtype)
    published = mobilora.encode(kv, kv, dtype)
    other = "float16" if dtype == "float32" else "float32"
    for anchor in (smooth(SHAPE, 39, dtype), smooth(LayerShape(2, 16, 8), 40, dtype), smooth(SHAPE, 40, other)):
        with pytest.raises(ValueError):
            decode_any(published, anchor, dtype)


@SOME
@given(SHAPES, TOKENS, FLOATS, SEEDS, st.floats(1e-3, 3))
def test_the_published_error_bound_holds(
    shape: LayerShape, tokens: int, dtype: KvType, seed: int, share: float
) -> None:
    anchor = smooth(shape, tokens, dtype, seed)
    kv = near(anchor, dtype, share, seed)
    back = decode_any(mobilora.encode(kv, anchor, dtype), anchor, dtype)
    for mine, got in ((kv.keys, back.keys), (kv.values, back.values)):
        wide = widen(mine, dtype)
        spare = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype] * (np.abs(wide) + 1)
        assert (np.abs(wide - widen(got, dtype)) <= np.log1p(1e-2) * 1.001 + spare).all()


def test_the_published_bound_follows_the_similarity_of_a_token() -> None:
    anchor = LayerKv(np.ones((1, 3, 64), np.float32), np.ones((1, 3, 64), np.float32))
    noise = np.random.default_rng(0).normal(0, 1, (1, 3, 64)) * np.array([0.05, 0.4, 2.0])[:, None]
    kv = LayerKv((anchor.keys + noise).astype(np.float32), anchor.values)
    back = decode_any(mobilora.encode(kv, anchor, "float32"), anchor, "float32")
    errors = np.abs(back.keys - kv.keys).max((0, 2))
    for error, bound in zip(errors, mobilora.BOUNDS, strict=True):
        assert bound / 2 < error <= np.log1p(bound) * 1.01
    assert np.array_equal(back.values, kv.values)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_coder_gives_layers_of_the_delta_base_and_deltas_close_to_the_truth(dtype: KvType) -> None:
    anchor = smooth(SHAPE, TOTAL, dtype)
    kv = near(anchor, dtype)
    assert PublishedCoder(1).encode(0, anchor, anchor, dtype) == SAME_LAYER
    data = PublishedCoder(1).encode(0, kv, anchor, dtype)
    back = decode_any(data, anchor, dtype)
    assert distance(back, kv, dtype) < 0.1 * distance(anchor, kv, dtype)
    span = Span(33, 140)
    assert same_bits(decode_any(data, cut(anchor, span), dtype, span), cut(back, span))


@SOME
@given(st.data(), SEEDS)
def test_damaged_bytes_are_refused_or_decoded_but_nothing_else_happens(data: st.DataObject, seed: int) -> None:
    anchor = smooth(SHAPE, 140, "float16", seed)
    kv = near(anchor, "float16")
    encoded = mobilora.encode(kv, anchor, "float16")
    damaged = bytearray(encoded[: data.draw(st.integers(0, len(encoded)))])
    head = st.integers(0, min(64, len(damaged) - 1)) if damaged else st.nothing()
    for place in data.draw(st.lists(head | st.integers(0, len(damaged) - 1), max_size=4)) if damaged else []:
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        back = decode_any(bytes(damaged), anchor, "float16")
    except ValueError:
        return
    assert back.keys.shape == kv.keys.shape and back.values.shape == kv.values.shape


@pytest.mark.usefixtures("published_policies")
def test_a_session_as_published_codes_differences_so(tmp_path: Path) -> None:
    folder = save_lora(tmp_path / "lora", fake_pairs(1))
    with mobilora.opened(FakeEngine(), cache=str(tmp_path / "cache"), memory_limit="0") as session:
        session.adapters.load("writer", folder)
        ask(session)
        ask(session, adapter="writer")
        assert codings(session) == {"raw", "quantized"}
        assert ask(session, adapter="writer").level == "quantized"
