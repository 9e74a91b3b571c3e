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
from rekindle.core.kv import KvLayout, KvType, LayerKv
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


def reorder_keys(kv: LayerKv, order: KeyOrder) -> LayerKv:
    """KV whose keys `[heads, tokens, dim]` have their channels in another order: the halves of a head interleaved, or
    the other way round."""
    heads, tokens, dim = kv.keys.shape
    if order == "same" or dim % 2:
        return kv
    pairs = (2, dim // 2) if order == "interleaved" else (dim // 2, 2)
    turned = kv.keys.reshape(heads, tokens, *pairs).swapaxes(-1, -2)
    return LayerKv(np.ascontiguousarray(turned).reshape(heads, tokens, dim), kv.values)


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
