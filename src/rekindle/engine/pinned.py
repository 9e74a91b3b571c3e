"""Memory of the host that a CUDA device reads by itself: KV that waits there costs the processor nothing to bring.

Copying 1 GB through a staging buffer was measured to take one core 120 ms; the device fetches it in 20.
torch rounds such memory up to powers of two and copies strided parts in two steps, so the runtime is called directly.
Where it cannot be, everything works as on other devices, only slower.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rekindle.core.kv import Span

_ALIGNED_BYTES = 256
_TO_DEVICE = 1


class Copy(NamedTuple):
    """Rows to copy: addresses, bytes from row to row, bytes of a row, and how many rows. As the runtime wants it."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    rows: int

    @classmethod
    def of(cls, source: NDArray[Any], span: Span, target: Tensor, place: int) -> Copy:
        """The tokens `span` of `source` [heads, tokens, dim] to `place` in `target` [1, heads, capacity, dim]."""
        token_bytes = source.strides[1]
        address = source.__array_interface__["data"][0] + span.start * token_bytes
        pitch = target.stride(1) * target.element_size()
        goal = target.data_ptr() + place * token_bytes
        return cls(goal, pitch, address, source.strides[0], len(span) * token_bytes, source.shape[0])


class Pinned:
    """Allocates such memory and copies from it. Used from several threads."""

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._runtime = runtime
        size, place = ctypes.c_size_t, ctypes.c_void_p
        runtime.cudaMemcpy2DAsync.argtypes = [place, size, place, size, size, size, ctypes.c_int, place]
        self._lock = threading.RLock()  # memory may be freed while it is being allocated
        self._starts: list[int] = []  # addresses of what is allocated, sorted
        self._stops: dict[int, int] = {}

    def arrays(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[NDArray[Any]] | None:
        """Arrays of these shapes, freed when the last of them is gone; None if there is no memory for them."""
        sizes = [-(-int(np.prod(shape)) * dtype.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES for shape in shapes]
        address = ctypes.c_void_p()
        if self._runtime.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(sum(sizes)), 0) or not address.value:
            self._runtime.cudaGetLastError()  # else the next call would report it
            return None
        start, total = address.value, sum(sizes)
        memory = (ctypes.c_uint8 * total).from_address(start)
        weakref.finalize(memory, self._free, start).atexit = False  # the system frees it then
        with self._lock:
            bisect.insort(self._starts, start)
            self._stops[start] = start + total
        whole, places = np.ctypeslib.as_array(memory), np.cumsum([0, *sizes]).tolist()
        return [
            whole[place : place + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
            for shape, place in zip(shapes, places, strict=False)
        ]

    def holds(self, array: NDArray[Any]) -> bool:
        """Whether an array lies in such memory."""
        address = array.ctypes.data
        with self._lock:
            index = bisect.bisect_right(self._starts, address) - 1
            return index >= 0 and address < self._stops[self._starts[index]]

    def copy(self, copies: Sequence[Copy], device: torch.device) -> None:
        """Have the device fetch, on the current stream. Returns at once: the memory must stay until that is through.

        Raises `RuntimeError`.
        """
        stream, call = torch.cuda.current_stream(device).cuda_stream, self._runtime.cudaMemcpy2DAsync
        for copy in copies:
            if failed := call(*copy, _TO_DEVICE, stream):
                raise RuntimeError(f"The device could not fetch KV from memory (error {failed}).")

    def _free(self, start: int) -> None:
        with self._lock:
            self._starts.remove(start)
            del self._stops[start]
        self._runtime.cudaFreeHost(ctypes.c_void_p(start))


@functools.cache
def pinned() -> Pinned | None:
    """The one of this process; None where there is no CUDA runtime to call."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    try:
        return Pinned(ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}"))
    except (OSError, AttributeError):
        return None
