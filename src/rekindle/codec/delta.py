"""KV of an adapter as its difference from an anchor: KV of the same tokens under the base model or another adapter.

Two adapters of one model see nearly the same KV. The exact difference is one of bit patterns, ordered as the numbers
they stand for are: it is undone bit by bit, whatever the patterns mean. The near difference is quantized like whole KV
(`codec/quantized`), but its steps follow the difference, which is several times smaller: at the same size it is much
closer. Both are differences from the anchor as it will be read back, so an anchor that was quantized itself adds no
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.codec.bits import LayerBits
from rekindle.codec.numbers import carrier, widen
from rekindle.codec.planes import Planes, fold, read, unfold, write
from rekindle.codec.quantized import Numbers, assemble, decode_numbers, describe, encode_numbers
from rekindle.core.kv import KvType, LayerKv, LayerShape, Span

MAGIC = b"RKx1"


def encode_exact(kv: LayerKv, anchor: LayerKv, dtype: KvType) -> bytes:
    """The difference from the anchor, without loss, for any bit patterns (NaN and -0.0 too) and for quantized bytes.

    Raises `ValueError` if the two do not have the same shape or are not of that type.
    """
    check_alike(kv, anchor, dtype)
    keys, values = (
        fold(_ordered(mine, dtype) - _ordered(theirs, dtype))
        for mine, theirs in ((kv.keys, anchor.keys), (kv.values, anchor.values))
    )
    return write(MAGIC, Planes(keys, values))


def decode_exact(data: bytes, anchor: LayerKv, dtype: KvType, span: Span | None = None) -> LayerKv:
    """What was encoded, bit by bit: of the tokens `span`, to which the anchor has been cut. All tokens by default.

    Raises `ValueError` for damaged bytes and for an anchor of another shape, type or number of tokens.
    """
    check_alike(anchor, anchor, dtype)
    folded = read(MAGIC, data, shape_of(anchor), np.dtype(f"u{carrier(dtype).itemsize}"), span)
    if folded.keys.shape[1] != anchor.keys.shape[1]:
        raise ValueError(f"the anchor has {anchor.keys.shape[1]} tokens, the difference {folded.keys.shape[1]}")
    keys, values = (
        _pattern(_ordered(theirs, dtype) + unfold(mine), dtype)
        for mine, theirs in ((folded.keys, anchor.keys), (folded.values, anchor.values))
    )
    return LayerKv(keys, values)


def encode_near(kv: LayerKv, anchor: LayerKv, dtype: KvType, bits: LayerBits) -> bytes:
    """The difference from the anchor with about so many bits a number; 0 bits: the anchor stands in for it.

    Raises `ValueError` as `encode_exact` does, and for numbers that are not finite.
    """
    check_alike(kv, anchor, dtype)
    with np.errstate(invalid="ignore", over="ignore"):  # refused below, as numbers that are not finite
        keys = widen(kv.keys, dtype) - widen(anchor.keys, dtype)
        values = widen(kv.values, dtype) - widen(anchor.values, dtype)
    return encode_numbers(Numbers(keys, values), dtype, "difference", bits)


def decode_near(data: bytes, anchor: LayerKv, span: Span | None = None) -> LayerKv:
    """KV of the tokens `span`, to which the anchor has been cut, in the anchor's type. All tokens by default.

    Raises `ValueError` for damaged bytes and for an anchor of another shape, type or number of tokens.
    """
    coded = describe(data)
    check_alike(anchor, anchor, coded.dtype)
    tokens = coded.tokens if span is None else len(span)
    if shape_of(anchor) != coded.shape or anchor.keys.shape[1] != tokens:
        raise ValueError("the anchor has another shape or another number of tokens than the difference")
    return assemble(coded, tokens, _added(decode_numbers(data, "difference", span), anchor, coded.dtype))


def check_alike(kv: LayerKv, anchor: LayerKv, dtype: KvType) -> None:
    """Raises `ValueError` unless both are of that type and of one shape."""
    arrays = (kv.keys, kv.values, anchor.keys, anchor.values)
    if any(array.dtype != carrier(dtype) for array in arrays):
        raise ValueError(f"{dtype} KV is carried as {carrier(dtype)}, not as {sorted({str(a.dtype) for a in arrays})}")
    if kv.keys.shape != anchor.keys.shape or kv.values.shape != anchor.values.shape:
        raise ValueError("KV and its anchor must have the same heads, tokens and dims")
    if kv.keys.ndim != 3 or kv.values.ndim != 3 or kv.keys.shape[:2] != kv.values.shape[:2]:
        raise ValueError("keys and values of a layer have the same heads and tokens: [kv_heads, tokens, dim]")


def shape_of(kv: LayerKv) -> LayerShape:
    """The shape of one token of these."""
    return LayerShape(kv.keys.shape[0], kv.keys.shape[2], kv.values.shape[2])


def _added(parts: Iterator[tuple[Span, Numbers]], anchor: LayerKv, dtype: KvType) -> Iterator[tuple[Span, Numbers]]:
    """Each part of a difference on top of its part of the anchor."""
    for at, difference in parts:
        keys, values = difference.keys, difference.values
        keys += widen(anchor.keys[:, at.start : at.stop], dtype)
        values += widen(anchor.values[:, at.start : at.stop], dtype)
        yield at, Numbers(keys, values)


def _ordered(array: NDArray[Any], dtype: KvType) -> NDArray[Any]:
    """The bit patterns as signed integers that rise with the numbers: a small difference of numbers is a small one
    of these. Every pattern has its own; differences wrap around, and so lose nothing."""
    signed: NDArray[Any] = array.view(f"i{array.itemsize}")
    return signed if dtype == "uint8" else _turn_negative(signed)


def _pattern(ordered: NDArray[Any], dtype: KvType) -> NDArray[Any]:
    signed: NDArray[Any] = ordered if dtype == "uint8" else _turn_negative(ordered)
    return signed.view(carrier(dtype))


def _turn_negative(signed: NDArray[Any]) -> NDArray[Any]:
    """All bits but the sign inverted where the sign is set: its own inverse, and without a branch for each number."""
    turned: NDArray[Any] = signed ^ ((signed >> (8 * signed.itemsize - 1)) & np.iinfo(signed.dtype).max)
    return turned
