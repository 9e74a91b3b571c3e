"""How KV is coded on its way to disk: whole, and as a difference from an anchor. What is coded says itself how.

`whole`   None: as the engine has it; a plan of bits: quantized
`delta`   KV of an adapter, where an anchor is known: `exact` (bit by bit), a plan of bits (quantized), `mobilora` (as
          published), None: never as a difference

A layer that is the anchor's own, bit by bit, because an adapter changes nothing up to it, takes no room.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rekindle.codec import delta, mobilora, quantized
from rekindle.codec.bits import BitPlan
from rekindle.codec.delta import check_alike, decode_exact, decode_near, encode_exact, encode_near
from rekindle.core.kv import KvType, LayerKv, Span

Named = Literal["exact", "mobilora"]
SAME_LAYER = b"RKs1"  # in place of a layer that is the anchor's own


@dataclass(frozen=True)
class Coder:
    """One way of coding."""

    whole: BitPlan | None = None
    delta: BitPlan | Named | None = "exact"

    @property
    def exact(self) -> bool:
        """Whether nothing is lost."""
        return self.whole is None and self.delta in ("exact", None)

    def encode(self, layer: int, kv: LayerKv, anchor: LayerKv | None, dtype: KvType) -> bytes:
        """A layer, coded. Raises `ValueError` for KV that this cannot code (numbers that are not finite, say)."""
        if anchor is None:
            assert self.whole is not None, "KV that stays as it is needs no coding"
            return quantized.encode(kv, dtype, self.whole.layers[layer])
        assert self.delta is not None, "there are no differences here"
        check_alike(kv, anchor, dtype)
        if _same_bits(kv, anchor):
            return SAME_LAYER
        if self.delta == "exact":
            return encode_exact(kv, anchor, dtype)
        if self.delta == "mobilora":
            return mobilora.encode(kv, anchor, dtype)
        if self._is_kindred(layer, kv, anchor, dtype):
            return SAME_LAYER
        if dtype == "uint8":  # an engine's own quantized bytes have no smaller steps
            return encode_exact(kv, anchor, dtype)
        return encode_near(kv, anchor, dtype, self.delta.layers[layer])

    def _is_kindred(self, layer: int, kv: LayerKv, anchor: LayerKv, dtype: KvType) -> bool:
        """Whether the anchor is this very KV, quantized as it would be: an adapter that changes nothing up to there.

        Looks at the first group, and only then at all of it.
        """
        if self.whole is None or dtype == "uint8":
            return False
        for stop in dict.fromkeys((min(quantized.GROUP_TOKENS, kv.keys.shape[1]), kv.keys.shape[1])):
            part = LayerKv(kv.keys[:, :stop], kv.values[:, :stop])
            recoded = quantized.decode(quantized.encode(part, dtype, self.whole.layers[layer]))
            if not _same_bits(recoded, LayerKv(anchor.keys[:, :stop], anchor.values[:, :stop])):
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
            whole, delta = json.loads(text)
        except (TypeError, RecursionError) as error:
            raise ValueError("not a way of coding") from error
        if not all(part is None or isinstance(part, str) for part in (whole, delta)):
            raise ValueError("not a way of coding")
        named = delta if delta in (None, "exact", "mobilora") else BitPlan.from_json(delta)
        return cls(None if whole is None else BitPlan.from_json(whole), named)


EXACT = Coder()
NEAR = "near"  # the codec of a shelf whose KV may have lost something


def is_near(codec: str) -> bool:
    """Whether a shelf of that codec may hold KV that lost something."""
    return codec.split("/")[0] == NEAR


def decode(data: bytes, dtype: KvType, anchor: LayerKv | None, span: Span | None = None) -> LayerKv:
    """A coded layer: of the tokens `span`, to which the anchor has been cut. All tokens by default.

    Raises `ValueError` for damaged bytes, and for an anchor that is missing or cannot be theirs.
    """
    kind = data[:4]
    if kind == quantized.MAGIC and anchor is None:
        return quantized.decode(data, span)
    if anchor is None:
        raise ValueError("a difference needs its anchor")
    if data == SAME_LAYER:
        return anchor
    if kind == delta.MAGIC:
        return decode_exact(data, anchor, dtype, span)
    if kind == mobilora.MAGIC:
        return mobilora.decode(data, anchor, dtype, span)
    return decode_near(data, anchor, span)


def _same_bits(kv: LayerKv, anchor: LayerKv) -> bool:
    """Whether both are equal bit by bit: NaN is, -0.0 and 0.0 are not."""
    return all(
        np.array_equal(mine.view(f"u{mine.itemsize}"), theirs.view(f"u{theirs.itemsize}"))
        for mine, theirs in ((kv.keys, anchor.keys), (kv.values, anchor.values))
    )
