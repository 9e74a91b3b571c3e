"""KV in memory, above the disk: extents as arrays, checked once; the least recently used go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.codec.extent import ExtentHeader
from rekindle.core.kv import LayerKv


@dataclass(frozen=True, eq=False)
class HeldExtent:
    """An extent in memory, checked when it was read."""

    header: ExtentHeader
    layers: tuple[LayerKv, ...]

    @property
    def size_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)


class MemoryTier:
    """Extents by name, never more bytes than the limit. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[str, HeldExtent] = OrderedDict()
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._held)

    def fits(self, size_bytes: int) -> bool:
        """Whether an extent of that size may be held at all."""
        return 0 < size_bytes <= self.limit_bytes

    def holds(self, name: str) -> bool:
        return name in self._held

    def get(self, name: str) -> HeldExtent | None:
        """The extent, which becomes the most recently used."""
        with self._lock:
            held = self._held.get(name)
            if held is not None:
                self._held.move_to_end(name)
            return held

    def put(self, name: str, held: HeldExtent) -> None:
        """Hold an extent; others make room for it first."""
        if not self.fits(held.size_bytes):
            return
        with self._lock:
            self._drop(name)
            while self._size_bytes + held.size_bytes > self.limit_bytes:
                self._drop(next(iter(self._held)))
            self._held[name] = held
            self._size_bytes += held.size_bytes

    def forget(self, names: Iterable[str]) -> None:
        """Drop extents."""
        with self._lock:
            for name in names:
                self._drop(name)

    def names(self) -> list[str]:
        with self._lock:
            return list(self._held)

    def _drop(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            self._size_bytes -= held.size_bytes
