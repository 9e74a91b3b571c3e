"""How KV is coded on its way to disk: whole, or as a delta from a base. Coded bytes begin with a mark of their kind.

`whole`   None: as the engine has it; a plan of bits: quantized
`delta`   KV of an adapter whose base is stored: `exact` (bit by bit), a plan of bits (quantized), None: no delta

A base is KV of the same tokens under the base model or another adapter; two adapters of one model see nearly the same
KV. The exact delta is a difference of bit patterns, ordered like the numbers they represent, and is undone bit by bit.
The quantized delta is coded like whole KV (`codec/quantized`), but its steps follow the difference, which is several
times smaller: at the same size it is much closer. Both are taken from the base as it will be read back, so a base that
was quantized itself adds no error.

A layer that equals its base bit by bit, because an adapter changes nothing up to it, takes no space.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rekindle.codec import quantized
from rekindle.codec.packing import OpenPlanes, Planes, PlanesSpec, fold, open_planes, unfold, write_planes
from rekindle.codec.quantized import FloatKv, encode_floats, open_layer
from rekindle.codec.quantizer import BitPlan, LayerBits, carrier, widen
from rekindle.core.kv import KvType, LayerKv, LayerSpec, Span
from rekindle.safe_read import parse_untrusted_json

DELTA_MAGIC = b"RKx1"


def encode_exact(kv: LayerKv, base: LayerKv, dtype: KvType) -> bytes:
    """The difference from the base, without loss, for any bit patterns (NaN and -0.0 too) and for quantized bytes.

    Raises `ValueError` if the two do not have the same shape or are not of that type.
    """
    check_alike(kv, base, dtype)
    keys, values = (
        fold(_ordered(mine, dtype) - _ordered(theirs, dtype))
        for mine, theirs in ((kv.keys, base.keys), (kv.values, base.values))
    )
    return write_planes(DELTA_MAGIC, Planes(keys, values))


def encode_quantized(kv: LayerKv, base: LayerKv, dtype: KvType, bits: LayerBits) -> bytes:
    """The delta from the base with about `bits` bits a number; with 0 bits the base is used instead.

    Raises `ValueError` as `encode_exact` does, and for numbers that are not finite.
    """
    check_alike(kv, base, dtype)
    with np.errstate(invalid="ignore", over="ignore"):  # refused below, as numbers that are not finite
        keys = widen(kv.keys, dtype) - widen(base.keys, dtype)
        values = widen(kv.values, dtype) - widen(base.values, dtype)
    return encode_floats(FloatKv(keys, values), dtype, "difference", bits)


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


def _ordered(array: NDArray[Any], dtype: KvType) -> NDArray[Any]:
    """The bit patterns as signed integers that rise with the numbers: a small difference of numbers is a small one
    of these. Every pattern has its own; differences wrap around, and so lose nothing."""
    signed: NDArray[Any] = array.view(f"i{array.itemsize}")
    return signed if dtype == "uint8" else _turn_negative(signed)


def _turn_negative(signed: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
    """All bits but the sign inverted where the sign is set: its own inverse, and without a branch for each number."""
    inverted = signed >> (8 * signed.itemsize - 1)
    inverted &= np.iinfo(signed.dtype).max
    turned: NDArray[Any] = np.bitwise_xor(signed, inverted, out=out)
    return turned


SAME_LAYER = b"RKs1"  # in place of a layer that is the base's own


@dataclass(frozen=True)
class Coder:
    whole: BitPlan | None = None
    delta: BitPlan | Literal["exact"] | None = "exact"

    @property
    def exact(self) -> bool:
        """Whether nothing is lost."""
        return self.whole is None and self.delta in ("exact", None)

    def encode(self, layer: int, kv: LayerKv, base: LayerKv | None, dtype: KvType) -> bytes:
        """A layer, coded. Raises `ValueError` for KV that this cannot code (numbers that are not finite, say)."""
        if base is None:
            assert self.whole is not None, "KV that stays as it is needs no coding"
            return quantized.encode(kv, dtype, self.whole.layers[layer])
        assert self.delta is not None, "there are no differences here"
        check_alike(kv, base, dtype)
        if same_bits(kv, base):
            return SAME_LAYER
        if self.delta == "exact":
            return encode_exact(kv, base, dtype)
        if self._equals_quantized_base(layer, kv, base, dtype):
            return SAME_LAYER
        if dtype == "uint8":  # an engine's own quantized bytes have no smaller steps
            return encode_exact(kv, base, dtype)
        return encode_quantized(kv, base, dtype, self.delta.layers[layer])

    def _equals_quantized_base(self, layer: int, kv: LayerKv, base: LayerKv, dtype: KvType) -> bool:
        """Whether the base is this very KV, quantized as it would be: an adapter that changes nothing up to there.

        Looks at the first group, and only then at all of it.
        """
        if self.whole is None or dtype == "uint8":
            return False
        for stop in dict.fromkeys((min(quantized.GROUP_TOKENS, kv.keys.shape[1]), kv.keys.shape[1])):
            part = kv.window(0, stop)
            data = quantized.encode(part, dtype, self.whole.layers[layer])
            recoded = quantized.decode(data, part.spec(dtype))
            if not same_bits(recoded, base.window(0, stop)):
                return False
        return True

    def to_json(self) -> str:
        """As text; the same way always as the same text."""
        delta = self.delta.to_json() if isinstance(self.delta, BitPlan) else self.delta
        return json.dumps([None if self.whole is None else self.whole.to_json(), delta], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Coder:
        """The way of such a text. Raises `ValueError` for any other."""
        try:
            whole, delta = parse_untrusted_json(text)
        except TypeError as error:
            raise ValueError("not a way of coding") from error
        if not all(part is None or isinstance(part, str) for part in (whole, delta)):
            raise ValueError("not a way of coding")
        named = delta if delta in (None, "exact") else BitPlan.from_json(delta)
        return cls(None if whole is None else BitPlan.from_json(whole), named)


EXACT = Coder()
QUANTIZED = "quantized"  # the codec of a KV space whose KV may have lost something


def is_quantized(codec: str) -> bool:
    """Whether a KV space of that codec may hold KV that lost something."""
    return codec.split("/")[0] == QUANTIZED


Both = Callable[[Callable[[], None], Callable[[], None]], None]  # runs two pieces of work, in any order


def in_turn(first: Callable[[], None], second: Callable[[], None]) -> None:
    """One after the other."""
    first()
    second()


def decode(data: bytes, spec: LayerSpec, base: LayerKv | None, span: Span | None = None) -> LayerKv:
    """A coded layer, which is what `spec` says: of the tokens `span`, to which the base has been cut. All tokens by
    default.

    Raises `ValueError` for damaged bytes, for those that hold anything else, and for a base that is missing or
    cannot be theirs; no memory is taken for what the bytes merely say.
    """
    if base is None:
        if data[:4] != quantized.MAGIC:
            raise ValueError("a difference needs its base")
        return quantized.decode(data, spec, span)
    out = base.copy()
    decode_into(data, spec, out, span, delta=True)
    return out


def decode_into(
    data: bytes, spec: LayerSpec, out: LayerKv, span: Span | None = None, *, delta: bool, both: Both = in_turn
) -> None:
    """Write a coded layer, or its tokens `span`, to `out`, which holds the base of a delta. `both` runs the two halves.

    Raises `ValueError` as `decode` does; `out` then holds anything.
    """
    check_base(out, spec, span)
    if delta and data == SAME_LAYER:
        return
    if delta and data[:4] == DELTA_MAGIC:
        number = np.dtype(f"u{carrier(spec.dtype).itemsize}")
        planes = open_planes(data, PlanesSpec(DELTA_MAGIC, number, spec.shape, spec.tokens), span)
        both(lambda: _add_exact(planes, 0, out.keys, spec.dtype), lambda: _add_exact(planes, 1, out.values, spec.dtype))
        return
    layer = open_layer(data, "difference" if delta else "whole", spec, span)
    both(
        lambda: layer.restore(0, out.keys, spec.dtype, delta=delta),
        lambda: layer.restore(1, out.values, spec.dtype, delta=delta),
    )


def _add_exact(planes: OpenPlanes, half: int, out: NDArray[Any], dtype: KvType) -> None:
    """Add a lossless difference to the base in `out`."""
    for at, folded in planes.groups(half):
        signed = out[:, at.start : at.stop].view(f"i{out.itemsize}")
        if dtype != "uint8":
            _turn_negative(signed, signed)
        signed += unfold(folded)
        if dtype != "uint8":
            _turn_negative(signed, signed)


def same_bits(kv: LayerKv, base: LayerKv) -> bool:
    """Whether both are equal bit by bit: NaN is, -0.0 and 0.0 are not."""
    return all(
        np.array_equal(mine.view(f"u{mine.itemsize}"), theirs.view(f"u{theirs.itemsize}"))
        for mine, theirs in ((kv.keys, base.keys), (kv.values, base.values))
    )
