"""KV of one context in torch buffers, and the pool they come from."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rekindle.core.kv import Kv, KvLayout, LayerKv, Span
from rekindle.engine.base import SpansOnly
from rekindle.engine.hf.device import pinned_memory
from rekindle.errors import Closed, StepRefused

Slots = slice | Tensor  # positions of rows in a buffer: a run, or an index

TORCH_TYPE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_ROUND_TOKENS = 256  # capacities are rounded up to this, so that buffers fit more than one prompt
_FREE_BUFFERS = 4
_WARM_BYTES = 128 << 20
_WARM_TOKENS = 2048


class Buffers:
    """Keys and values of every layer, `[1, kv_heads, capacity, dim]` each."""

    def __init__(self, layout: KvLayout, capacity: int, device: torch.device) -> None:
        dtype = TORCH_TYPE[layout.dtype]
        self.capacity = capacity
        self.keys = [torch.empty(1, s.kv_heads, capacity, s.key_dim, dtype=dtype, device=device) for s in layout.layers]
        self.values = [
            torch.empty(1, s.kv_heads, capacity, s.value_dim, dtype=dtype, device=device) for s in layout.layers
        ]

    @cached_property
    def addresses(self) -> NDArray[np.int64]:
        """See `kernels.LayerAddress`."""
        halves = (*self.keys, *self.values)
        return np.array([*(half.data_ptr() for half in halves), self.keys[0].stride(1)], dtype=np.int64)


class BufferPool:
    """Buffers for sequences. Freed ones are reused: their pages are mapped, fresh ones cost a page fault each."""

    def __init__(self, layout: KvLayout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self._free: list[Buffers] = []
        self._kept = _FREE_BUFFERS
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Allocate buffers whose pages are mapped: loading the first 1,000 tokens of SmolLM2 into fresh ones took 29 ms
        instead of 7."""
        if self.device.type != "cpu":
            return
        most = min(_WARM_TOKENS, _WARM_BYTES // self.layout.token_bytes)
        for tokens in (most, most // 4):
            if tokens >= _ROUND_TOKENS:
                buffers = Buffers(self.layout, tokens // _ROUND_TOKENS * _ROUND_TOKENS, self.device)
                for tensor in (*buffers.keys, *buffers.values):
                    tensor.zero_()
                self.give(buffers)

    def take(self, capacity: int) -> Buffers:
        """Buffers for at least `capacity` tokens."""
        wanted = -(-capacity // _ROUND_TOKENS) * _ROUND_TOKENS
        with self._lock:
            fitting = [b for b in self._free if wanted <= b.capacity <= 4 * wanted]
            if fitting:
                best = min(fitting, key=lambda b: b.capacity)
                self._free.remove(best)
                return best
        try:
            return Buffers(self.layout, wanted, self.device)
        except torch.OutOfMemoryError:
            self._trim(0)  # free unused buffers
            return Buffers(self.layout, wanted, self.device)

    def give(self, buffers: Buffers) -> None:
        """Take buffers back for the next sequence."""
        with self._lock:
            self._free.append(buffers)
        self._trim(self._kept)

    def close(self) -> None:
        """Free all memory not in use, now and when buffers come back."""
        self._kept = 0
        self._trim(0)

    def _trim(self, kept: int) -> None:
        with self._lock:
            del self._free[: max(0, len(self._free) - kept)]


class TorchSequence(SpansOnly):
    """A sequence whose slots are positions. See `EngineSequence` for the contract."""

    def __init__(self, pool: BufferPool, capacity: int, regime: str, longest: int, adapter: str | None = None) -> None:
        """`longest`: the model's context in tokens; `adapter`: digest of the adapter it is computed with."""
        self.pool = pool
        self.adapter = adapter
        self._longest = longest
        self._buffers: Buffers | None = pool.take(capacity)
        self._length = 0
        self.capacity = capacity
        self.regime = regime

    @property
    def buffers(self) -> Buffers:
        """Its KV buffers. Raises `Closed` after `close`."""
        if self._buffers is None:
            raise Closed("The sequence was closed. Open a new one.")
        return self._buffers

    @property
    def length(self) -> int:
        """Number of positions present, from 0 on."""
        return self._length if self.buffers is not None else 0

    @property
    def size_bytes(self) -> int:
        """Size of its buffers."""
        return self.buffers.capacity * self.pool.layout.token_bytes

    def keys(self, layer: int) -> Tensor:
        """The whole key buffer of a layer, `[1, kv_heads, capacity, key_dim]`."""
        return self.buffers.keys[layer]

    def values(self, layer: int) -> Tensor:
        """The whole value buffer of a layer, `[1, kv_heads, capacity, value_dim]`."""
        return self.buffers.values[layer]

    def extend(self, length: int) -> None:
        """Count the positions below `length` as present."""
        self._length = max(self._length, length)

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        if not 0 <= length <= self.length:
            raise StepRefused(f"Cannot truncate to {length}: {self.length} positions are present.")
        self._length = length

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions; what is present stays."""
        if capacity > self._longest:
            raise StepRefused(f"A capacity of {capacity} does not fit the context of {self._longest} tokens.")
        if capacity > self.buffers.capacity:
            self._move(capacity)
        self.capacity = max(self.capacity, capacity)

    def leave_buffers(self) -> None:
        """Move to other buffers: a thread may still write to these."""
        self._move(self.capacity, give_back=False)

    def _move(self, capacity: int, *, give_back: bool = True) -> None:
        old, new = self.buffers, self.pool.take(capacity)
        for ours, theirs in zip((*new.keys, *new.values), (*old.keys, *old.values), strict=True):
            ours[:, :, : self._length].copy_(theirs[:, :, : self._length])
        self._buffers = new
        if give_back:
            self.pool.give(old)

    def export(self, span: Span) -> Kv:
        """A copy of the KV of `span`."""
        if span.stop > self.length:
            raise StepRefused(f"Cannot export up to {span.stop}: {self.length} positions are present.")
        buffers = self.buffers
        parts = [
            buffer[0, :, span.start : span.stop]
            for pair in zip(buffers.keys, buffers.values, strict=True)
            for buffer in pair
        ]
        copies = _fetch(parts, self.pool.layout)
        layers = tuple(map(LayerKv, copies[::2], copies[1::2]))
        return Kv(span, self.pool.layout, layers)

    def close(self) -> None:
        """Give the buffers back."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            self.pool.give(buffers)

    def __enter__(self) -> TorchSequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LayerStaging:
    """Where feeds write a layer: directly into the buffer on a CPU, into pinned memory elsewhere.

    Off the CPU all spans go in one copy, with the gaps between them, which must not hold anything.
    """

    def __init__(self, sequence: TorchSequence, layer: int, spans: Sequence[Span], slot: Tensor | None = None) -> None:
        """`spans` do not overlap and are in order. `slot` is pinned memory, a tensor of bytes; None: take some."""
        start, stop = spans[0].start, spans[-1].stop
        self._targets = [buffer[:, start:stop] for buffer in (sequence.keys(layer)[0], sequence.values(layer)[0])]
        on_host = self._targets[0].device.type == "cpu"
        self._staged = None if on_host else _stage(self._targets, slot)
        keys, values = (raw_view(t) for t in (self._staged or self._targets))
        places = [slice(span.start - start, span.stop - start) for span in spans]
        self.outs = [LayerKv(keys[:, place], values[:, place]) for place in places]

    @property
    def size_bytes(self) -> int:
        """Bytes that are staged."""
        return sum(staged.numel() * staged.element_size() for staged in self._staged or ())

    def commit(self) -> None:
        """Copy what the feeds wrote to the device."""
        for target, staged in zip(self._targets, self._staged or [], strict=False):
            target.copy_(staged, non_blocking=True)


def _stage(targets: Sequence[Tensor], slot: Tensor | None) -> list[Tensor]:
    """Tensors like these in pinned memory."""
    sizes = [target.numel() * target.element_size() for target in targets]
    if slot is None or sum(sizes) > slot.numel():
        return [torch.empty_like(target, device="cpu", pin_memory=True) for target in targets]
    places = np.cumsum([0, *sizes]).tolist()
    parts = [slot[place : place + size] for place, size in zip(places, sizes, strict=False)]
    return [part.view(target.dtype).view(target.shape) for part, target in zip(parts, targets, strict=True)]


def raw_view(tensor: Tensor) -> NDArray[Any]:
    """A numpy view of a tensor in host memory; brain floats as raw bits."""
    view = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return view.numpy()


def _fetch(parts: Sequence[Tensor], layout: KvLayout) -> list[NDArray[Any]]:
    """Copies of tensors in host memory; pinned if they come from a CUDA device."""
    memory = pinned_memory() if parts[0].device.type == "cuda" else None
    copies = None if memory is None else memory.arrays([tuple(part.shape) for part in parts], layout.numpy_dtype)
    if copies is None:
        return [_to_numpy(part) for part in parts]
    for copy, part in zip(copies, parts, strict=True):
        raw = part.view(torch.uint16) if part.dtype == torch.bfloat16 else part
        torch.from_numpy(copy).copy_(raw)
    return copies


def _to_numpy(tensor: Tensor) -> NDArray[Any]:
    # On a CPU .contiguous() copies a slice, but a full slice would be a view: always copy.
    host = tensor.detach().to("cpu", copy=True).contiguous()
    return np.ascontiguousarray(raw_view(host))
