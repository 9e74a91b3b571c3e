"""One sequence of a llama.cpp context."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.engine.llamacpp.kv_buffer import KvBuffer
from rekindle.engine.llamacpp.state import HEAD_BYTES, StateLayout, UnknownLayout
from rekindle.errors import Closed, KvLost, StepRefused

_HEAD = struct.Struct("<8s16sQQ16s")  # magic, owner, tokens, bytes, their digest
_MAGIC = b"rksnap01"


@dataclass(frozen=True)
class SequenceModel:
    """What the sequences of an engine share.

    layout    of their states; None for a model whose state is not plain KV
    attention  of the attention layers in states that have other parts; None if there is no such layout
    longest   the longest context
    window    tokens that layers with a sliding window see; 0 if it has none
    moves     whether its keys can be rotated
    owner     16 bytes that identify whose snapshots it can restore
    """

    cells: KvBuffer
    layout: StateLayout | None
    attention: StateLayout | None
    regime: str
    longest: int
    window: int
    moves: bool
    owner: Callable[[], bytes]


class LlamaSequence:
    """See `EngineSequence` for the contract."""

    def __init__(self, model: SequenceModel, capacity: int, adapter: str | None = None) -> None:
        self.adapter = adapter
        self.cells = cells = model.cells
        self._model = model
        self._layout = model.layout
        self.regime = model.regime
        self.number: int | None = cells.open(capacity)
        self.capacity = capacity
        self._length = 0

    @property
    def length(self) -> int:
        self._open()
        return self._length

    @property
    def size_bytes(self) -> int:
        """Bytes of its cells; without plain KV, of its state."""
        number = self._open()
        if self._layout is not None:
            return self.capacity * self._layout.kv.token_bytes
        return _HEAD.size + self.cells.size_bytes_of(number) if self._length else 0

    def set_length(self, length: int) -> None:
        """Mark exactly the positions below `length` as present."""
        self._length = length

    def reserve(self, capacity: int) -> None:
        self._open()
        if capacity > self._model.longest:
            raise StepRefused(f"A capacity of {capacity} does not fit the context of {self._model.longest} tokens.")
        if capacity > self.capacity:
            self.cells.reserve(capacity - self.capacity)
            self.capacity = capacity

    def export(self, span: Span) -> Kv:
        number, layout = self._open(), self._layout or self._model.attention
        if layout is None:
            raise StepRefused("This model has no plain KV to export. Take a snapshot.")
        if span.stop > self.length:
            raise StepRefused(f"Cannot export up to {span.stop}: {self.length} positions are present.")
        if not len(span):
            nothing = np.empty(layout.size_bytes(0), np.uint8)
            return Kv(span, layout.kv, tuple(layout.views(nothing, 0)))
        # A state has of layers with a window only what the window sees from the end of the state.
        longest = self._model.window or len(span)
        parts = [Span(start, min(start + longest, span.stop)) for start in range(span.start, span.stop, longest)]
        return _joined([self._part(number, part, layout) for part in parts])

    def _part(self, number: int, span: Span, layout: StateLayout) -> Kv:
        size_bytes = layout.size_bytes(len(span))
        beside = 0 if self._layout is not None else self.cells.partial_size_bytes_of(number)
        try:
            return layout.parse(self.cells.state_of(number, span, size_bytes + beside)[:size_bytes], span)
        except UnknownLayout as error:
            raise KvLost(f"llama.cpp handed out something else than the KV of {span} ({error}).") from error

    def append(self, kv: Kv) -> None:
        start, number = self.length, self._open()
        if self._layout is None or not self._model.moves:
            raise StepRefused("This model's keys cannot be moved. Compute the tokens instead.")
        if kv.layout != self._layout.kv:
            raise StepRefused("The KV is of another model, or of another type.")
        if start + len(kv.span) > self.capacity:
            raise StepRefused(f"{len(kv.span)} tokens more are beyond the sequence's capacity of {self.capacity}.")
        state = self._layout.join(kv, np.zeros(HEAD_BYTES, np.uint8))
        if not self.cells.put_behind(number, state, kv.span, start):
            raise KvLost("llama.cpp does not take the KV.")
        self._length = start + len(kv.span)

    def truncate(self, length: int) -> None:
        """Drop every position from `length` on; without plain KV, all or none."""
        if not 0 <= length <= self.length:
            raise StepRefused(f"Cannot truncate to {length}: {self.length} positions are present.")
        if length == self._length:
            return
        if length and self._layout is None:
            raise StepRefused(f"This model cannot forget a part of its context: not {length} of {self._length} tokens.")
        whole = self.cells.remove(self._open(), length)
        self._length = length
        if not whole:
            raise KvLost(f"llama.cpp has dropped a part of the first {length} tokens. Compute them again.")

    def snapshot(self) -> bytes:
        number = self._open()
        if self._layout is not None:
            raise StepRefused("This model has plain KV: export a span.")
        split = self._model.attention is not None
        state = self.cells.partial_state_of(number) if split else self.cells.whole_state_of(number)
        digest = xxhash.xxh3_128_digest(state.data)
        return _HEAD.pack(_MAGIC, self._model.owner(), self._length, len(state), digest) + state.tobytes()

    def restore(self, snapshot: bytes | memoryview, length: int, kv: Kv | None = None) -> None:
        number, attention = self._open(), self._model.attention
        if self._layout is not None:
            raise StepRefused("This model has plain KV: feed a span.")
        if self._length:
            raise StepRefused(f"Only an empty sequence can be restored: {self._length} positions are present.")
        if not 0 < length <= self.capacity:
            raise StepRefused(f"{length} tokens do not fit the sequence's capacity of {self.capacity}.")
        if not self._is_whole(snapshot, length):  # llama.cpp would trust the data, and crash
            raise KvLost("This is no snapshot of this model at that length; its tokens are computed instead.")
        state = np.frombuffer(snapshot, np.uint8, offset=_HEAD.size)
        if attention is not None:
            if kv is None or kv.span != Span(0, length) or kv.layout != attention.kv:
                raise StepRefused(f"This state is split: restore it with the KV of all {length} tokens.")
            state = attention.join(kv, state)
        if not self.cells.put(number, state):
            self.cells.remove(number, 0)
            raise KvLost("llama.cpp does not take the snapshot; its tokens are computed instead.")
        self._length = length

    def _is_whole(self, snapshot: bytes | memoryview, length: int) -> bool:
        if len(snapshot) < _HEAD.size:
            return False
        magic, owner, tokens, size, digest = _HEAD.unpack_from(snapshot)
        ours = (magic, owner, tokens, size) == (_MAGIC, self._model.owner(), length, len(snapshot) - _HEAD.size)
        return bool(ours and digest == xxhash.xxh3_128_digest(memoryview(snapshot)[_HEAD.size :]))

    def close(self) -> None:
        number, self.number = self.number, None
        if number is not None:
            self.cells.close_sequence(number, self.capacity)

    def _open(self) -> int:
        if self.number is None:
            raise Closed("The sequence was closed. Open a new one.")
        return self.number


def _joined(parts: Sequence[Kv]) -> Kv:
    """Parts that follow each other as one."""
    if len(parts) == 1:
        return parts[0]
    layers = (
        LayerKv(np.concatenate([layer.keys for layer in one], 1), np.concatenate([layer.values for layer in one], 1))
        for one in zip(*(part.layers for part in parts), strict=True)
    )
    return Kv(Span(parts[0].span.start, parts[-1].span.stop), parts[0].layout, tuple(layers))
