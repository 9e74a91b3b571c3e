"""KV in memory, above the disk: extents as arrays, checked once, least recently used go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.codec.extent import ExtentHeader
from rekindle.core.kv import LayerKv


@dataclass(frozen=True, eq=False)
class HeldExtent:
    """An extent in memory. Its bytes were checked when it came."""

    header: ExtentHeader
    layers: tuple[LayerKv, ...]

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)


class MemoryTier:
    """Extents by number, never more bytes than the limit. Used from several threads."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[int, HeldExtent] = OrderedDict()
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """What all of them take."""
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._held)

    def fits(self, size_bytes: int) -> bool:
        """Whether an extent of that size may be held at all."""
        return 0 < size_bytes <= self.limit_bytes

    def get(self, id: int) -> HeldExtent | None:
        """The extent, which becomes the most recently used."""
        with self._lock:
            held = self._held.get(id)
            if held is not None:
                self._held.move_to_end(id)
            return held

    def put(self, id: int, held: HeldExtent) -> None:
        """Hold an extent; others make room for it first."""
        if not self.fits(held.size_bytes):
            return
        with self._lock:
            self._drop(id)
            while self._size_bytes + held.size_bytes > self.limit_bytes:
                self._drop(next(iter(self._held)))
            self._held[id] = held
            self._size_bytes += held.size_bytes

    def forget(self, ids: Iterable[int]) -> None:
        """Let go of extents that are no longer listed."""
        with self._lock:
            for id in ids:
                self._drop(id)

    def ids(self) -> list[int]:
        """What is held."""
        with self._lock:
            return list(self._held)

    def _drop(self, id: int) -> None:
        held = self._held.pop(id, None)
        if held is not None:
            self._size_bytes -= held.size_bytes
