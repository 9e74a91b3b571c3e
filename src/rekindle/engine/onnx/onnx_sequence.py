"""One sequence of a graph."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.engine.base import Engine, SpansOnly
from rekindle.engine.onnx.kv_buffers import PackedKv, SlabKv
from rekindle.errors import Closed, StepRefused


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
            part = slice(span.start, span.stop)
            layers = (LayerKv(layer.keys[:, part].copy(), layer.values[:, part].copy()) for layer in self.kv.layers)
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
