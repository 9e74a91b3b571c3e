"""How KV is coded on its way to disk: whole, and as a delta from a base. What is coded says itself how.

`whole`   None: as the engine has it; a plan of bits: quantized
`delta`   KV of an adapter, where a base is known: `exact` (bit by bit), a plan of bits (quantized), None: never as a
          delta

A layer that equals its base bit by bit, because an adapter changes nothing up to it, takes no room.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rekindle.codec import delta, quantized
from rekindle.codec.bits import BitPlan
from rekindle.codec.delta import check_alike, decode_exact, decode_quantized, encode_exact, encode_quantized
from rekindle.core.kv import KvType, LayerKv, LayerSpec, Span
from rekindle.safe_read import parse_untrusted_json

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
        if self._is_kindred(layer, kv, base, dtype):
            return SAME_LAYER
        if dtype == "uint8":  # an engine's own quantized bytes have no smaller steps
            return encode_exact(kv, base, dtype)
        return encode_quantized(kv, base, dtype, self.delta.layers[layer])

    def _is_kindred(self, layer: int, kv: LayerKv, base: LayerKv, dtype: KvType) -> bool:
        """Whether the base is this very KV, quantized as it would be: an adapter that changes nothing up to there.

        Looks at the first group, and only then at all of it.
        """
        if self.whole is None or dtype == "uint8":
            return False
        for stop in dict.fromkeys((min(quantized.GROUP_TOKENS, kv.keys.shape[1]), kv.keys.shape[1])):
            part = LayerKv(kv.keys[:, :stop], kv.values[:, :stop])
            data = quantized.encode(part, dtype, self.whole.layers[layer])
            recoded = quantized.decode(data, part.spec(dtype))
            if not same_bits(recoded, LayerKv(base.keys[:, :stop], base.values[:, :stop])):
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


def decode(data: bytes, spec: LayerSpec, base: LayerKv | None, span: Span | None = None) -> LayerKv:
    """A coded layer, which is what `spec` says: of the tokens `span`, to which the base has been cut. All tokens by
    default.

    Raises `ValueError` for damaged bytes, for those that hold anything else, and for a base that is missing or
    cannot be theirs; no memory is taken for what the bytes merely say.
    """
    kind = data[:4]
    if kind == quantized.MAGIC and base is None:
        return quantized.decode(data, spec, span)
    if base is None:
        raise ValueError("a difference needs its base")
    if data == SAME_LAYER:
        return base
    if kind == delta.MAGIC:
        return decode_exact(data, base, spec, span)
    return decode_quantized(data, base, spec, span)


def same_bits(kv: LayerKv, base: LayerKv) -> bool:
    """Whether both are equal bit by bit: NaN is, -0.0 and 0.0 are not."""
    return all(
        np.array_equal(mine.view(f"u{mine.itemsize}"), theirs.view(f"u{theirs.itemsize}"))
        for mine, theirs in ((kv.keys, base.keys), (kv.values, base.values))
    )
