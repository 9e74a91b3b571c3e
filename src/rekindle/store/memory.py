"""KV in memory, above the disk: extents, checked once. What goes first is the store's policy.

Exact KV is held as arrays, ready to be copied. Quantized KV is held as it is on disk, whole or as differences from its
base: it takes a fraction of the memory, and is decoded at every use.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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


@dataclass(frozen=True, eq=False)
class HeldCode:
    """The coded bytes of each layer of an extent, checked when they were read."""

    layers: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.layers))


LeavingOrder = Callable[[Sequence[str]], Sequence[str]]


class MemoryTier:
    """Extents by name, never more bytes than the limit. `order` says which leave first; those that a queued request
    has claimed leave last. Thread-safe."""

    def __init__(self, limit_bytes: int, order: LeavingOrder = list) -> None:
        self.limit_bytes = limit_bytes
        self._order = order
        self._lock = threading.Lock()
        self._held: dict[str, HeldExtent | HeldCode] = {}
        self._size_bytes = 0
        self._claims: Counter[str] = Counter()  # by name: the number of queued requests that will read it

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._held)

    def fits(self, size_bytes: int) -> bool:
        """Whether an extent of that size may be held at all."""
        return 0 < size_bytes <= self.limit_bytes

    def holds(self, name: str) -> bool:
        """Whether an extent is held ready to be copied."""
        return isinstance(self._held.get(name), HeldExtent)

    def get(self, name: str) -> HeldExtent | HeldCode | None:
        return self._held.get(name)

    def put(self, name: str, held: HeldExtent | HeldCode) -> None:
        """Hold an extent; others make room for it first."""
        if not self.fits(held.size_bytes):
            return
        full = self._size_bytes + held.size_bytes > self.limit_bytes
        leaving = list(self._order(self.names())) if full else []  # it reads the catalog: not under the lock
        with self._lock:
            self._drop(name)
            others = [*leaving, *self._held]  # then any that came meanwhile
            for other in sorted(others, key=self._claims.__contains__):
                if self._size_bytes + held.size_bytes <= self.limit_bytes:
                    break
                self._drop(other)
            self._held[name] = held
            self._size_bytes += held.size_bytes

    def claim(self, names: Iterable[str]) -> None:
        """A queued request will read these extents, whether they are held or not. `release` them afterwards."""
        with self._lock:
            self._claims.update(names)

    def release(self, names: Iterable[str]) -> None:
        """One request does not wait for these extents any more."""
        with self._lock:
            self._claims.subtract(names)
            self._claims = +self._claims

    @property
    def unclaimed_bytes(self) -> int:
        """The part of the limit that extents with a claim leave to others."""
        with self._lock:
            held = (self._held.get(name) for name in self._claims)
            return self.limit_bytes - sum(one.size_bytes for one in held if one is not None)

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
