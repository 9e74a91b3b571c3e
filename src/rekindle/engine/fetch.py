"""Feeds whose KV lies in memory that a CUDA device reads by itself: it fetches layer after layer.

Where to copy from and to is worked out for all layers at once. While a step runs, every microsecond of Python is one
in which nothing else is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rekindle.core.kv import Held, LayerKv
from rekindle.engine import kernels
from rekindle.engine.base import HeldFeed, KvFeed
from rekindle.engine.pinned import Pinned, pinned
from rekindle.engine.sequence import Buffers, TorchSequence


@dataclass(frozen=True, eq=False)
class Fetch:
    """What is fetched for one sequence in one step. Holds on to the buffers, should the sequence go on in others."""

    buffers: Buffers
    held: Sequence[Held]
    pieces: Tensor  # [layers, pieces, 4]: see `kernels.fetch`
    blocks: Tensor  # [blocks, 2], the same in all layers

    @classmethod
    def of(cls, sequence: TorchSequence, feeds: Sequence[KvFeed], layers: int) -> Fetch | None:
        """What does as the feeds would; None if not all of it lies in such memory, or lies over each other."""
        memory, buffers = pinned(), sequence.buffers
        device = buffers.keys[0].device
        if memory is None or not kernels.works(device) or any(feed.layers != range(layers) for feed in feeds):
            return None
        spans = sorted((feed.span for feed in feeds), key=lambda span: span.start)
        if any(first.stop > second.start for first, second in pairwise(spans)):
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
        alike = len({(half.shape, half.dtype) for half in (*buffers.keys, *buffers.values)}) == 1
        token_bytes = buffers.keys[0].stride(2) * buffers.keys[0].element_size()
        if not found or not alike or token_bytes % kernels.WORD_BYTES:
            return None
        sources = _Sources(memory)
        if not all(sources.readable(piece.layers[0]) for _, piece in found):
            return None
        table = np.empty((layers, 2, len(found), 4), dtype=np.int64)
        for index, (place, piece) in enumerate(found):
            table[:, :, index, 0] = sources.addresses(piece.layers) + piece.span.start * token_bytes
            table[:, :, index, 1] = piece.layers[0].keys.strides[0]
            table[:, :, index, 2] = place * token_bytes
            table[:, :, index, 3] = len(piece.span) * token_bytes // kernels.WORD_BYTES
        targets = [[key.data_ptr(), value.data_ptr()] for key, value in zip(buffers.keys, buffers.values, strict=True)]
        table[..., 2] += np.array(targets)[:, :, None]
        blocks = kernels.fetch_blocks(table[0, :, :, 3].reshape(-1))
        moved = (torch.from_numpy(numbers).to(device) for numbers in (table.reshape(layers, -1, 4), blocks))
        return cls(buffers, [piece for _, piece in found], *moved)

    def fetch(self, layer: int) -> Tensor:
        """Begin to bring a layer, on the current stream; its keys `[kv_heads, capacity, key_dim]`."""
        keys = self.buffers.keys[layer][0]
        kernels.fetch(self.pieces[layer], self.blocks, keys.shape[0], keys.stride(0) * keys.element_size())
        return keys


class _Sources:
    """Where KV lies; several pieces come from one extent."""

    def __init__(self, memory: Pinned) -> None:
        self._memory = memory
        self._known: dict[int, NDArray[np.int64]] = {}

    def readable(self, kv: LayerKv) -> bool:
        """Whether the device can read it, heads of the same length behind each other."""
        return self._memory.holds(kv.keys) and self._memory.holds(kv.values) and kv.keys.strides == kv.values.strides

    def addresses(self, layers: Sequence[LayerKv]) -> NDArray[np.int64]:
        """Of keys and values in each layer, `[layers, 2]`."""
        known = self._known.get(id(layers))
        if known is None:
            known = np.array([[_address(kv.keys), _address(kv.values)] for kv in layers])
            self._known[id(layers)] = known
        return known


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])
