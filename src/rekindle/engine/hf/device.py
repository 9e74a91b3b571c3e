"""Where a model runs and in which dtype; a stable oneDNN; host memory that a GPU reads by itself."""

from __future__ import annotations

import bisect
import ctypes
import functools
import platform
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch.backends import mkldnn

from rekindle.errors import InvalidSetting
from rekindle.machine import free_memory

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEVICES = ("cpu", "cuda", "mps")


@dataclass(frozen=True, slots=True)
class Placement:
    """A device and a dtype, and why they were chosen."""

    device: torch.device
    dtype: torch.dtype
    reason: str

    @property
    def dtype_name(self) -> str:
        """The number type's plain name."""
        return str(self.dtype).removeprefix("torch.")


def choose_placement(device: str = "auto", dtype: str = "auto", stored: torch.dtype = torch.float32) -> Placement:
    """Choose where a model with weights of type `stored` runs; raises `InvalidSetting` for a device that is missing."""
    chosen = _choose_device(device)
    if dtype != "auto":
        if dtype not in DTYPES:
            raise InvalidSetting(f"dtype={dtype!r} is unknown. Use auto, {', '.join(DTYPES)}.")
        return Placement(chosen, DTYPES[dtype], "as set")
    picked, reason = _choose_dtype(chosen, stored)
    return Placement(chosen, picked, reason)


def total_memory(device: torch.device) -> int:
    """All memory of a device."""
    return int(torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total)


def free_memory_on(device: torch.device) -> int:
    """The memory of a device that is free now."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()


def cpu_computes_bfloat16() -> bool:
    """Whether this CPU has brain-float arithmetic; without it bfloat16 is emulated and far slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    words = set(flags.split())
    return "amx_bf16" in words or "avx512_bf16" in words or (platform.machine() == "aarch64" and "bf16" in words)


def _choose_device(device: str) -> torch.device:
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in DEVICES or (index and not index.isdigit()):
        raise InvalidSetting(f"device={device!r} is unknown. Use auto, {', '.join(DEVICES)}, or cuda:1 and the like.")
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(kind, 1)
    if int(index or 0) >= count:
        raise InvalidSetting(
            f"device={device!r} is not available: this torch ({torch.__version__}) sees {count} of {kind}. "
            "Use device='cpu'."
        )
    return torch.device(device)


def _choose_dtype(device: torch.device, stored: torch.dtype) -> tuple[torch.dtype, str]:
    name = str(stored).removeprefix("torch.")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            if stored == torch.float16:
                return stored, "the weights are float16"
            return torch.bfloat16, "this GPU computes bfloat16"
        return torch.float16, "this GPU has no bfloat16 arithmetic"
    if device.type == "mps":
        return (stored if stored == torch.bfloat16 else torch.float16), "half the memory traffic on this GPU"
    if stored == torch.bfloat16 and cpu_computes_bfloat16():
        return stored, "the weights are bfloat16 and this CPU computes it"
    if stored == torch.float32:
        return stored, "the weights are float32"
    return torch.float32, f"the weights are {name}, which this CPU only emulates"


class DeviceStopwatch:
    """Times what a CUDA device computes by its own events, from one launch to the other: nobody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._begin.record(self._stream)
        self._stopped = False

    def stop(self) -> None:
        self._end.record(self._stream)
        self._stopped = True

    @property
    def seconds(self) -> float | None:
        """None until the device has come to the end."""
        if not self._stopped or not self._end.query():  # type: ignore[no-untyped-call]
            return None
        return float(self._begin.elapsed_time(self._end)) / 1e3


class LayerPace:
    """Keeps who launches layers at most one ahead of a CUDA device that computes them: who decides after each layer
    whether to go on would else decide long before the layer is computed."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._last: torch.cuda.Event | None = None

    def keep(self) -> None:
        """All of a layer was launched: wait until the one before it is computed."""
        launched = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        launched.record(self._stream)
        if self._last is not None:
            self._last.synchronize()
        self._last = launched


_WANTED = bool(mkldnn.is_available() and mkldnn.enabled)  # type: ignore[no-untyped-call]
_TRIED = 64  # rows and columns: torch does not use oneDNN for much smaller products


@contextmanager
def stable_matmul(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, oneDNN is on for this dtype exactly if it supports it here.

    Where one of its products fails, as half precision does on many CPUs, torch disables it for the whole process. From
    then on float32 has other last bits than before, and than in other processes: KV would no longer be equal.
    """
    if device.type != "cpu":
        yield
        return
    with _switched(on=_multiplies(dtype)):
        yield


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype here: tried once."""
    if not _WANTED or dtype == torch.float32:
        return _WANTED
    with _switched(on=True), warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        square = torch.ones(_TRIED, _TRIED, dtype=dtype)
        torch.nn.functional.linear(square, square)
        return bool(mkldnn.enabled)


@contextmanager
def _switched(*, on: bool) -> Iterator[None]:
    before = mkldnn.enabled
    mkldnn.enabled = on  # type: ignore[assignment]
    try:
        yield
    finally:
        mkldnn.enabled = before


_ALIGNED_BYTES = 256


class PinnedMemory:
    """Pinned host memory, which a CUDA device reads without the processor's help. Thread-safe.

    Copying 1 GB through a staging buffer takes one core 120 ms; the device fetches it in 20. torch rounds pinned memory
    up to powers of two, so the runtime is called directly.
    """

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._runtime = runtime
        self._lock = threading.RLock()  # memory may be freed during an allocation
        self._starts: list[int] = []  # addresses of what is allocated, sorted
        self._stops: dict[int, int] = {}

    def arrays(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[NDArray[Any]] | None:
        """Arrays of these shapes, freed when the last of them is gone; None if there is no memory for them."""
        sizes = [-(-int(np.prod(shape)) * dtype.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES for shape in shapes]
        address = ctypes.c_void_p()
        if self._runtime.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(sum(sizes)), 0) or not address.value:
            self._runtime.cudaGetLastError()  # clears the error, else the next call reports it
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
        """Whether an array lies in this memory."""
        address = array.ctypes.data
        with self._lock:
            index = bisect.bisect_right(self._starts, address) - 1
            return index >= 0 and address < self._stops[self._starts[index]]

    def _free(self, start: int) -> None:
        with self._lock:
            self._starts.remove(start)
            del self._stops[start]
        self._runtime.cudaFreeHost(ctypes.c_void_p(start))


@functools.cache
def pinned_memory() -> PinnedMemory | None:
    """The allocator of this process; None where there is no CUDA runtime."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    try:
        return PinnedMemory(ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}"))
    except (OSError, AttributeError):
        return None
