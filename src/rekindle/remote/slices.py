"""Slices: the KV of one chunk in one layer as bytes that can be decoded alone, at some level of quality.

`raw`       lossless: the bit patterns, byte plane by byte plane, compressed
otherwise   quantized, with about that many bits a number (`codec/quantized`)

The bytes themselves say which of the two they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.codec import quantized
from rekindle.codec.packing import Planes, PlanesSpec, read_planes, write_planes
from rekindle.codec.quantized import PRESETS
from rekindle.codec.quantizer import BitPlan, carrier
from rekindle.core.kv import KvLayout, KvType, LayerKv, LayerShape
from rekindle.core.plan import RAW
from rekindle.errors import InvalidSetting, nearest
from rekindle.remote.index import KeyOrder

MAGIC = b"RKr1"
NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
_SLACK_BYTES = 1 << 12  # headers and frames of an incompressible slice


@dataclass(frozen=True)
class Level:
    """A quality level: its name and the bits of every layer; None: lossless."""

    name: str
    plan: BitPlan | None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidSetting(f"{self.name!r} is not the name of a level: use a few small letters and digits.")

    def bits(self, layout: KvLayout) -> float:
        """Bits per number, before compression."""
        return 8.0 * layout.numpy_dtype.itemsize if self.plan is None else round(self.plan.mean_bits, 4)


def level_named(name: str, layout: KvLayout) -> Level:
    """The level of a name: raw, q8, q5, q4, q3, q2. Raises `InvalidSetting` for others and unfitting ones."""
    if name == RAW:
        return Level(RAW, None)
    if name not in PRESETS:
        raise InvalidSetting(f"There is no level {name!r}.{nearest(name, (*PRESETS, RAW))}")
    if layout.dtype == "uint8":
        raise InvalidSetting(f"This engine quantizes KV itself: it can be published as {RAW}, not as {name}.")
    return Level(name, BitPlan.uniform(len(layout.layers), PRESETS[name]))


def encode(level: Level, layout: KvLayout, layer: int, kv: LayerKv) -> bytes:
    """A slice. Raises `ValueError` for KV that the level cannot hold, such as non-finite numbers."""
    if level.plan is not None:
        return quantized.encode(kv, layout.dtype, level.plan.layers[layer])
    return write_planes(MAGIC, Planes(_bits(kv.keys), _bits(kv.values)))


def decode(data: bytes, layout: KvLayout, layer: int, tokens: int, into: KvType | None = None) -> LayerKv:
    """The KV of a slice of `tokens` tokens in the type `into`, by default that of `layout`, the only one for a lossless
    slice. Raises `ValueError` for anything else."""
    into = into or layout.dtype
    if data[:4] == MAGIC:
        if into != layout.dtype:
            raise ValueError(f"it is lossless KV in {layout.dtype}, not in {into}")
        dtype = carrier(layout.dtype)
        planes = read_planes(data, PlanesSpec(MAGIC, np.dtype(f"u{dtype.itemsize}"), layout.layers[layer], tokens))
        return LayerKv(planes.keys.view(dtype), planes.values.view(dtype))
    return quantized.decode(data, layout.layer_spec(layer, tokens), into=into)


def regroup_heads(kv: LayerKv, shape: LayerShape) -> LayerKv:
    """The same numbers of each token `[heads, tokens, dim]`, in another number of heads."""
    if kv.keys.shape[0] == shape.kv_heads:
        return kv
    tokens, heads = kv.keys.shape[1], shape.kv_heads
    keys, values = (part.swapaxes(0, 1).reshape(tokens, heads, -1).swapaxes(0, 1) for part in (kv.keys, kv.values))
    return LayerKv(np.ascontiguousarray(keys), np.ascontiguousarray(values))


def reorder_keys(kv: LayerKv, order: KeyOrder, head_dim: int) -> LayerKv:
    """KV whose keys have the channels of each `head_dim` in another order: their halves interleaved, or back."""
    if order == "same":
        return kv
    pairs = (2, head_dim // 2) if order == "interleaved" else (head_dim // 2, 2)
    turned = kv.keys.reshape(*kv.keys.shape[:2], -1, *pairs).swapaxes(-1, -2)
    return LayerKv(np.ascontiguousarray(turned).reshape(kv.keys.shape), kv.values)


def largest_bytes(layout: KvLayout, layer: int, tokens: int) -> int:
    """Upper bound of a slice of `tokens` tokens, encrypted or not."""
    shape = layout.layers[layer]
    numbers = shape.kv_heads * tokens * (shape.key_dim + shape.value_dim)
    # Scales and zero points of quantized KV are 16-bit: a few per channel, one per token and head.
    aside = 2 * shape.kv_heads * (2 * shape.key_dim + shape.value_dim + tokens + 2)
    return 2 * (numbers * layout.numpy_dtype.itemsize + aside) + _SLACK_BYTES


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    """The same bit patterns as unsigned integers."""
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")
