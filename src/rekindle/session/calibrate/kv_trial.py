"""A prompt whose KV is exchanged for another, time and again, and a continuation that the model is made to follow.

Only the KV of the prompt differs, never the text: what the model says then tells what coding the KV does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rekindle.codec.coder import Coder, decode
from rekindle.codec.quantizer import MAX_BITS, MIN_BITS
from rekindle.core.kv import Kv, KvLayout, KvType, LayerKv, Span
from rekindle.engine.base import Engine, HeldKv, Logits, Row
from rekindle.session.calibrate.nearness import Nearness, nearness

Layers = Sequence[LayerKv]  # of one prompt, every layer
_SEARCHES = 9  # halvings of the range of bits: to a hundredth of a bit


class Trial:
    """A prompt under an adapter, or none: its exact KV, and what the model says after KV that stands in for it."""

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        forced: Sequence[int],
        adapter: str | None = None,
        kv: Kv | None = None,
    ) -> None:
        """Computes the prompt unless its exact `kv` is given. The adapter of that digest is loaded already."""
        capacity = len(prompt) + len(forced)
        self._engine = engine
        self._sequence = engine.open(capacity, engine.regime(capacity), adapter=adapter)
        self.prompt, self.forced = tuple(prompt), tuple(forced)
        self.kv: Kv = self._computed() if kv is None else kv
        self.exact = self.after(self.kv.layers)

    def _computed(self) -> Kv:
        for start in range(0, len(self.prompt), self._engine.prefill_tokens):
            part = list(self.prompt[start : start + self._engine.prefill_tokens])
            self._engine.step([Row.following(self._sequence, part, logits="none")])
        return self._sequence.export(Span(0, len(self.prompt)))

    @property
    def layout(self) -> KvLayout:
        """The shape and type of its KV."""
        return self.kv.layout

    def after(self, layers: Layers) -> Logits:
        """The logits `[forced tokens, vocabulary]` of the continuation, after this KV in place of the prompt's own."""
        length = len(self.prompt)
        self._sequence.truncate(0)
        positions = np.arange(length, length + len(self.forced), dtype=np.int64)
        feeds = (HeldKv(Kv(Span(0, length), self.layout, tuple(layers))),)
        (logits,) = self._engine.step([Row(self._sequence, self.forced, positions, "all", feeds, replay=False)])
        return logits

    def near(self, layers: Layers) -> Nearness:
        """How near that comes to what it says after its own KV."""
        return nearness(self.exact, self.after(layers))

    def close(self) -> None:
        """Give the engine's memory back."""
        self._sequence.close()

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def size_bits(blobs: Sequence[bytes], layers: Layers) -> float:
    """Bits a number that coded layers take."""
    numbers = sum(layer.keys.size + layer.values.size for layer in layers)
    return 8 * sum(map(len, blobs)) / numbers


def encode(coder: Coder, layers: Layers, anchor: Layers | None, dtype: KvType) -> list[bytes]:
    """Every layer, coded; whole without an anchor."""
    anchors = [None] * len(layers) if anchor is None else anchor
    return [coder.encode(at, *pair, dtype) for at, pair in enumerate(zip(layers, anchors, strict=True))]


def read_back(coder: Coder, layers: Layers, anchor: Layers | None, dtype: KvType) -> list[LayerKv]:
    """The KV as it is after it was coded."""
    return decode_layers(encode(coder, layers, anchor, dtype), layers, anchor, dtype)


def fitted(make: Callable[[float], Coder], max_bits: float, size: Callable[[Coder], float]) -> Coder:
    """The coder of the most nominal bits whose real size is at most that many bits a number, to a hundredth of a bit.

    The smallest one if even that is larger.
    """
    low, high = MIN_BITS, MAX_BITS
    if size(make(high)) <= max_bits:
        return make(high)
    for _ in range(_SEARCHES):
        middle = (low + high) / 2
        low, high = (middle, high) if size(make(middle)) <= max_bits else (low, middle)
    return make(low)


def decode_layers(blobs: Sequence[bytes], layers: Layers, anchor: Layers | None, dtype: KvType) -> list[LayerKv]:
    anchors = [None] * len(blobs) if anchor is None else anchor
    return [decode(blob, kv.spec(dtype), one) for blob, kv, one in zip(blobs, layers, anchors, strict=True)]
