"""A place for objects that several servers share: what the store needs of Redis, of S3, or of another one.

An object is written whole and never changed; it is visible when all of it is. It may vanish at any time: evicted,
expired, or removed by another server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rekindle.core.plan import SharedTierName

Buffer = bytes | bytearray | memoryview
MAX_SMALL_BYTES = 1 << 20  # of an object that `get_many` reads: writers of a tier are not trusted


class TierFailed(OSError):
    """A shared tier does not answer, or refuses. To a request that is a miss."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes `[start, stop)` of an object."""

    key: str
    start: int
    stop: int


class ObjectStore(Protocol):
    """Objects by key: `/` between the parts of a key. Thread-safe. Everything raises `TierFailed`, within seconds."""

    @property
    def tier(self) -> SharedTierName:
        """What replies and metrics call it."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Small objects, in one round trip or in parallel; None for one that does not exist, is empty, or is
        larger than `MAX_SMALL_BYTES`: not much more than that is read of it."""

    def get_ranges(self, wanted: Sequence[ByteRange]) -> list[bytes | None]:
        """Parts of objects, in one round trip or in parallel; None where the object does not have all of the range."""

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Which objects exist."""

    def put(self, key: str, data: Buffer) -> bool:
        """Write an object; False if it does not fit into the limit. Older objects leave for it."""

    def claim(self, key: str, seconds: float) -> bool:
        """Whether the caller is the first to claim a key; the claim ends after that many seconds."""

    def release(self, key: str) -> None:
        """End a claim."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, where they exist."""

    def remove_under(self, folder: str) -> int:
        """Remove all objects whose keys begin with `folder` and a slash; returns how many."""

    def used_bytes(self) -> int:
        """Bytes of all objects, as far as this server can tell."""

    def close(self) -> None:
        """Close the connections. Idempotent."""
