"""KV of one layer for the tests of codecs: of any type and shape, smooth like a model's or any bits at all."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from rekindle.codec import coder, quantized
from rekindle.codec.quantizer import carrier, narrow
from rekindle.core.kv import KvType, LayerKv, LayerShape, LayerSpec, Span

SHAPES = st.builds(LayerShape, st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
TOKENS = st.integers(0, 300)
SOME = settings(max_examples=40)  # many examples of arrays say little more than some
SEEDS = st.integers(0, 2**32 - 1)


def smooth(shape: LayerShape, tokens: int, dtype: KvType, seed: int = 0, size: float = 1.0) -> LayerKv:
    """Numbers as a model has them: channels of different size and centre, tokens of different size."""
    random = np.random.default_rng(seed)
    halves = []
    for dim in (shape.key_dim, shape.value_dim):
        channel = random.lognormal(0, 1, (shape.kv_heads, 1, dim))
        token = random.lognormal(0, 0.5, (1, tokens, 1))
        centre = random.normal(0, 2, (shape.kv_heads, 1, dim))
        numbers = (random.normal(0, 1, (shape.kv_heads, tokens, dim)) * token + centre) * channel * size
        halves.append(narrow(numbers.astype(np.float32), dtype))
    return LayerKv(halves[0], halves[1])


def any_bits(shape: LayerShape, tokens: int, dtype: KvType, seed: int) -> LayerKv:
    """Arbitrary bit patterns: NaN of every kind, infinities, -0.0, subnormal numbers, all of them."""
    random = np.random.default_rng(seed)
    halves = []
    for dim in (shape.key_dim, shape.value_dim):
        data = random.bytes(shape.kv_heads * tokens * dim * carrier(dtype).itemsize)
        halves.append(np.frombuffer(data, carrier(dtype)).reshape(shape.kv_heads, tokens, dim))
    return LayerKv(halves[0], halves[1])


def same_bits(one: LayerKv, other: LayerKv) -> bool:
    """Whether both have the same type, shape and bit patterns."""
    pairs = ((one.keys, other.keys), (one.values, other.values))
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


def self_described(data: bytes, dtype: KvType, anchor: LayerKv | None = None) -> LayerSpec:
    """What coded bytes say of themselves: for readers that do not know what to expect. No reader of the package is."""
    if data[:4] == quantized.MAGIC:
        coded = quantized.describe(data)
        return LayerSpec(coded.dtype, coded.shape, coded.tokens)
    if data[:4] == coder.DELTA_MAGIC and len(data) >= 23:
        _, _, heads, tokens, key_dim, value_dim, _ = struct.unpack_from("<4sBHIIII", data)
        return LayerSpec(dtype, LayerShape(heads, key_dim, value_dim), tokens)
    shape = (1, 1, 1) if anchor is None else (*anchor.keys.shape[::2], anchor.values.shape[2])
    return LayerSpec(dtype, LayerShape(*shape), 0 if anchor is None else anchor.keys.shape[1])


def decode(data: bytes, dtype: KvType, anchor: LayerKv | None, span: Span | None = None) -> LayerKv:
    """A coded layer that is believed to be what it says."""
    return coder.decode(data, self_described(data, dtype, anchor), anchor, span)
