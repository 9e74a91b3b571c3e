"""Feeds whose KV lies in memory that a CUDA device reads by itself: copies by the device, layer by layer.

Where to copy from and to is worked out for all layers at once. While a step runs, every microsecond of Python in the
thread that fills is one in which no kernel is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rekindle.core.kv import Held, LayerKv, Span
from rekindle.engine.base import HeldFeed, KvFeed
from rekindle.engine.pinned import Copy, Pinned, pinned
from rekindle.engine.sequence import Buffers, TorchSequence


@dataclass(frozen=True, eq=False)
class Fetch:
    """The copies of one sequence in one step. Holds on to the buffers, should the sequence go on in others."""

    memory: Pinned
    buffers: Buffers
    held: Sequence[Held]
    copies: Sequence[Sequence[Copy]]  # by layer

    @classmethod
    def of(cls, sequence: TorchSequence, feeds: Sequence[KvFeed], layers: int) -> Fetch | None:
        """The copies that do what the feeds would; None if not all of it lies in such memory."""
        memory = pinned()
        if memory is None or any(feed.layers != range(layers) for feed in feeds):
            return None
        found: list[tuple[int, Held]] = []  # where each piece goes
        for feed in feeds:
            pieces = feed.held() if isinstance(feed, HeldFeed) else None
            if pieces is None:
                return None
            place = feed.span.start
            for piece in pieces:
                found.append((place, piece))
                place += len(piece.span)
        if not all(memory.holds(kv.keys) and memory.holds(kv.values) for _, piece in found for kv in piece.layers[:1]):
            return None
        buffers = sequence.buffers
        copies = [
            [
                copy
                for place, piece in found
                for copy in _copies(piece.layers[layer], piece.span, place, buffers.keys[layer], buffers.values[layer])
            ]
            for layer in range(layers)
        ]
        return cls(memory, buffers, [piece for _, piece in found], copies)

    def fetch(self, layer: int) -> Tensor:
        """Begin to bring a layer, on the current stream; its keys `[kv_heads, capacity, key_dim]`."""
        keys = self.buffers.keys[layer][0]
        self.memory.copy(self.copies[layer], keys.device)
        return keys


def _copies(held: LayerKv, span: Span, place: int, keys: Tensor, values: Tensor) -> list[Copy]:
    return [Copy.of(half, span, target, place) for half, target in ((held.keys, keys), (held.values, values))]
