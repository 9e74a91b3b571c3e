"""One sequence of a graph, and its keys and values, in memory that the graph reads and writes.

SlabKv     for graphs that append to the buffer they read: past and present are the same memory, and nothing is copied.
           Several sequences lie side by side, so that adjacent ones can be computed in one run:

               slab [slots, kv_heads, capacity, dim]     slot 0 [kept kept kept ....]   slot 1 [kept .........]

PackedKv   for graphs that concatenate: past has exactly the tokens that are present, and present is another buffer.
           The two change places after each run.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from rekindle.core.kv import Kv, KvLayout, LayerKv, Span
from rekindle.engine.base import Engine, SpansOnly
from rekindle.errors import Closed, OutOfMemory, StepRefused

MAX_SLOTS = 8  # of a slab
_SLAB_SHARE = 8  # a slab of several slots takes at most this part of the memory
_SMALLEST_TOKENS = 256

Halves = tuple[NDArray[Any], NDArray[Any]]  # keys and values of a layer


class Slab:
    """Buffers of several sequences of one capacity. Their pages are taken when they are first written."""

    def __init__(self, layout: KvLayout, capacity: int) -> None:
        share = int(psutil.virtual_memory().total) // _SLAB_SHARE
        self.capacity = capacity
        self.slots = max(1, min(MAX_SLOTS, share // (capacity * layout.token_bytes)))
        self.free = list(range(self.slots))
        self.layers = _allocate(layout, capacity, self.slots)

    def slot(self, place: int) -> list[LayerKv]:
        """The buffers of one slot."""
        return [LayerKv(keys[place], values[place]) for keys, values in self.layers]


class SlabPool:
    """The slabs of an engine. Thread-safe."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self._slabs: list[Slab] = []
        self._lock = threading.Lock()

    def take(self, capacity: int) -> tuple[Slab, int]:
        """A slot for `capacity` tokens and one more: the first free one, so that sequences are adjacent."""
        wanted = max(_SMALLEST_TOKENS, 1 << capacity.bit_length())
        with self._lock:
            slab = next((slab for slab in self._slabs if slab.capacity == wanted and slab.free), None)
            if slab is None:
                slab = Slab(self._layout, wanted)
                self._slabs.append(slab)
            return slab, slab.free.pop(0)

    def give(self, slab: Slab, place: int) -> None:
        """Take a slot back. One empty slab stays, with its pages, for the next request."""
        with self._lock:
            bisect.insort(slab.free, place)
            for other in [slab for slab in self._slabs if len(slab.free) == slab.slots][:-1]:
                self._slabs.remove(other)


class SlabKv:
    """A slot of a slab: a place in its buffers is a position."""

    def __init__(self, pool: SlabPool, capacity: int) -> None:
        self._pool = pool
        self.slab, self.place = pool.take(capacity)

    @property
    def layers(self) -> list[LayerKv]:
        """The buffers of each layer."""
        return self.slab.slot(self.place)

    def is_before(self, other: SlabKv) -> bool:
        """Whether the other one has the next slot of the same slab."""
        return self.slab is other.slab and self.place + 1 == other.place

    def make_room(self, length: int, stop: int) -> None:
        """Let `layers` take positions from `length` to `stop`, which they always do."""

    def renew(self, capacity: int, length: int) -> Callable[[], None]:
        """Move the first `length` tokens to other buffers; returns what frees the old ones."""
        slab, place = self._pool.take(capacity)
        _copy(self.layers, slab.slot(place), length)
        free = self.close
        self.slab, self.place = slab, place
        return free

    @property
    def close(self) -> Callable[[], None]:
        """What gives the slot back."""
        return partial(self._pool.give, self.slab, self.place)


class PackedKv:
    """Two buffers of each layer, in turn the past and the present of a run, without room between the heads."""

    def __init__(self, layout: KvLayout, capacity: int) -> None:
        self._layout = layout
        self._both = [_allocate(layout, capacity + 1), _allocate(layout, capacity + 1)]  # past, present
        self._stored = 0  # tokens of the past

    @property
    def layers(self) -> list[LayerKv]:
        """The past of each layer: exactly the tokens that are stored."""
        return self._packed(self._both[0], self._stored)

    def present(self, new_tokens: int) -> list[LayerKv]:
        """Where a run writes the KV of what is stored, and of new tokens."""
        return self._packed(self._both[1], self._stored + new_tokens)

    def advance(self, new_tokens: int) -> None:
        """Make the present the past."""
        self._both.reverse()
        self._stored += new_tokens

    def make_room(self, length: int, stop: int) -> None:
        """Let `layers` have exactly `stop` places, the first `length` as they are."""
        if self._stored != stop:
            _copy(self.layers, self.present(stop - self._stored), length)
            self.advance(stop - self._stored)

    def renew(self, capacity: int, length: int) -> Callable[[], None]:
        """Move the first `length` tokens to other buffers. Nothing frees the old ones but their last user."""
        old, self._both = self.layers, [_allocate(self._layout, capacity + 1), _allocate(self._layout, capacity + 1)]
        self._stored = length
        _copy(old, self.layers, length)
        return self.close

    def close(self) -> None:
        """Nothing to give back."""

    def _packed(self, buffers: Sequence[Halves], tokens: int) -> list[LayerKv]:
        return [
            LayerKv(
                _first(keys, shape.kv_heads, tokens, shape.key_dim),
                _first(values, shape.kv_heads, tokens, shape.value_dim),
            )
            for (keys, values), shape in zip(buffers, self._layout.layers, strict=True)
        ]


def _allocate(layout: KvLayout, capacity: int, slots: int = 1) -> list[Halves]:
    """Keys and values `[slots, kv_heads, capacity, dim]` of each layer. Raises `OutOfMemory`."""
    try:
        return [
            (
                np.zeros((slots, shape.kv_heads, capacity, shape.key_dim), layout.numpy_dtype),
                np.zeros((slots, shape.kv_heads, capacity, shape.value_dim), layout.numpy_dtype),
            )
            for shape in layout.layers
        ]
    except MemoryError as error:
        raise OutOfMemory(
            f"There is no memory left for a context of {capacity:,} tokens. Ask for fewer at once, or use a shorter "
            "context."
        ) from error


def _first(buffer: NDArray[Any], *shape: int) -> NDArray[Any]:
    """The first numbers of a buffer, in a shape."""
    return buffer.reshape(-1)[: math.prod(shape)].reshape(shape)


def _copy(old: Sequence[LayerKv], new: Sequence[LayerKv], length: int) -> None:
    for ours, theirs in zip(new, old, strict=True):
        ours.keys[:, :length] = theirs.keys[:, :length]
        ours.values[:, :length] = theirs.values[:, :length]


class OnnxSequence(SpansOnly):
    """See `EngineSequence` for the contract."""

    adapter = None

    def __init__(self, owner: Engine, kv: SlabKv | PackedKv, capacity: int, regime: str) -> None:
        self.owner = owner
        self._kv: SlabKv | PackedKv | None = kv
        self._layout = owner.layout
        self._length = 0
        self._lock = threading.Lock()  # an export may read while the buffers are exchanged
        self.capacity = capacity
        self.regime = regime

    @property
    def length(self) -> int:
        self.kv  # noqa: B018  (raises)
        return self._length

    @property
    def size_bytes(self) -> int:
        copies = 2 if isinstance(self.kv, PackedKv) else 1
        return copies * self.capacity * self._layout.token_bytes

    @property
    def kv(self) -> SlabKv | PackedKv:
        """Its buffers. Raises `Closed`."""
        if self._kv is None:
            raise Closed("The sequence was closed. Open a new one.")
        return self._kv

    def set_length(self, length: int) -> None:
        """Mark exactly the positions below `length` as present."""
        self._length = length

    def reserve(self, capacity: int) -> None:
        kv, longest = self.kv, self.owner.context_tokens
        if capacity > longest:
            raise StepRefused(f"A capacity of {capacity} does not fit the context of {longest} tokens.")
        if capacity > self.capacity:
            with self._lock:
                kv.renew(capacity, self._length)()
            self.capacity = capacity

    def export(self, span: Span) -> Kv:
        if span.stop > self.length:
            raise StepRefused(f"Cannot export up to {span.stop}: {self.length} positions are present.")
        with self._lock:
            layers = (layer.window(span.start, span.stop).copy() for layer in self.kv.layers)
            return Kv(span, self._layout, tuple(layers))

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise StepRefused(f"Cannot truncate to {length}: {self.length} positions are present.")
        self._length = length

    def make_room(self, stop: int) -> list[LayerKv]:
        """The buffers of each layer, in which positions from `length` to `stop` can be written."""
        with self._lock:
            self.kv.make_room(self._length, stop)
        return self.kv.layers

    def bound(self, new_tokens: int) -> list[tuple[LayerKv, LayerKv]]:
        """Past and present of each layer for a run of new tokens, `[1, kv_heads, tokens, dim]`."""
        kv = self.kv
        past = [LayerKv(layer.keys[None], layer.values[None]) for layer in kv.layers]
        if isinstance(kv, SlabKv):
            return [(layer, layer) for layer in past]
        present = (LayerKv(layer.keys[None], layer.values[None]) for layer in kv.present(new_tokens))
        return list(zip(past, present, strict=True))

    def advance(self, new_tokens: int) -> None:
        """A run has written new tokens to the present."""
        if isinstance(kv := self.kv, PackedKv):
            with self._lock:
                kv.advance(new_tokens)

    def leave_buffers(self) -> Callable[[], None]:
        """Move what is present to other buffers: a thread may still write to these. Returns what frees them."""
        with self._lock:
            return self.kv.renew(self.capacity, self._length)

    def close(self) -> None:
        with self._lock:
            kv, self._kv = self._kv, None
        if kv is not None:
            kv.close()
