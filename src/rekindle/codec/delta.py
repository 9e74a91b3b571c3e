"""KV of an adapter as its delta from a base: KV of the same tokens under the base model or another adapter.

Two adapters of one model see nearly the same KV. The exact difference is one of bit patterns, ordered as the numbers
they stand for are: it is undone bit by bit, whatever the patterns mean. The near difference is quantized like whole KV
(`codec/quantized`), but its steps follow the difference, which is several times smaller: at the same size it is much
closer. Both are differences from the base as it will be read back, so a base that was quantized itself adds no
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.codec.bits import LayerBits
from rekindle.codec.dtypes import carrier, widen
from rekindle.codec.planes import Planes, PlanesSpec, fold, read, unfold, write
from rekindle.codec.quantized import FloatKv, assemble, decode_floats, encode_floats
from rekindle.core.kv import KvType, LayerKv, LayerSpec, Span

MAGIC = b"RKx1"


def encode_exact(kv: LayerKv, base: LayerKv, dtype: KvType) -> bytes:
    """The difference from the base, without loss, for any bit patterns (NaN and -0.0 too) and for quantized bytes.

    Raises `ValueError` if the two do not have the same shape or are not of that type.
    """
    check_alike(kv, base, dtype)
    keys, values = (
        fold(_ordered(mine, dtype) - _ordered(theirs, dtype))
        for mine, theirs in ((kv.keys, base.keys), (kv.values, base.values))
    )
    return write(MAGIC, Planes(keys, values))


def decode_exact(data: bytes, base: LayerKv, spec: LayerSpec, span: Span | None = None) -> LayerKv:
    """What was encoded, bit by bit: of the tokens `span`, to which the base has been cut. All tokens by default.

    Raises `ValueError` for damaged bytes and for a base of another shape, type or number of tokens.
    """
    check_base(base, spec, span)
    dtype = spec.dtype
    folded = read(data, PlanesSpec(MAGIC, np.dtype(f"u{carrier(dtype).itemsize}"), spec.shape, spec.tokens), span)
    keys, values = (
        _pattern(_ordered(theirs, dtype) + unfold(mine), dtype)
        for mine, theirs in ((folded.keys, base.keys), (folded.values, base.values))
    )
    return LayerKv(keys, values)


def encode_quantized(kv: LayerKv, base: LayerKv, dtype: KvType, bits: LayerBits) -> bytes:
    """The delta from the base with about `bits` bits a number; with 0 bits the base is used instead.

    Raises `ValueError` as `encode_exact` does, and for numbers that are not finite.
    """
    check_alike(kv, base, dtype)
    with np.errstate(invalid="ignore", over="ignore"):  # refused below, as numbers that are not finite
        keys = widen(kv.keys, dtype) - widen(base.keys, dtype)
        values = widen(kv.values, dtype) - widen(base.values, dtype)
    return encode_floats(FloatKv(keys, values), dtype, "difference", bits)


def decode_quantized(data: bytes, base: LayerKv, spec: LayerSpec, span: Span | None = None) -> LayerKv:
    """KV of the tokens `span`, to which the base has been cut, in the base's type. All tokens by default.

    Raises `ValueError` for damaged bytes and for a base of another shape, type or number of tokens.
    """
    check_base(base, spec, span)
    parts = _added(decode_floats(data, "difference", spec, span), base, spec.dtype)
    return assemble(spec, base.keys.shape[1], parts)


def check_alike(kv: LayerKv, base: LayerKv, dtype: KvType) -> None:
    """Raises `ValueError` unless both are of that type and of one shape."""
    arrays = (kv.keys, kv.values, base.keys, base.values)
    if any(array.dtype != carrier(dtype) for array in arrays):
        raise ValueError(f"{dtype} KV is carried as {carrier(dtype)}, not as {sorted({str(a.dtype) for a in arrays})}")
    if kv.keys.shape != base.keys.shape or kv.values.shape != base.values.shape:
        raise ValueError("KV and its base must have the same heads, tokens and dims")
    if kv.keys.ndim != 3 or kv.values.ndim != 3 or kv.keys.shape[:2] != kv.values.shape[:2]:
        raise ValueError("keys and values of a layer have the same heads and tokens: [kv_heads, tokens, dim]")


def check_base(base: LayerKv, spec: LayerSpec, span: Span | None) -> None:
    """Raises `ValueError` unless the base is KV of the tokens `span`, all by default, of such a layer."""
    check_alike(base, base, spec.dtype)
    tokens, shape = spec.tokens if span is None else len(span), spec.shape
    wanted = (shape.kv_heads, tokens, shape.key_dim), (shape.kv_heads, tokens, shape.value_dim)
    if (base.keys.shape, base.values.shape) != wanted:
        raise ValueError("the base has another shape or another number of tokens than the difference")


def _added(parts: Iterator[tuple[Span, FloatKv]], base: LayerKv, dtype: KvType) -> Iterator[tuple[Span, FloatKv]]:
    """Each part of a difference on top of its part of the base."""
    for at, difference in parts:
        keys, values = difference.keys, difference.values
        keys += widen(base.keys[:, at.start : at.stop], dtype)
        values += widen(base.values[:, at.start : at.stop], dtype)
        yield at, FloatKv(keys, values)


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
