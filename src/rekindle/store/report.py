"""What a cache folder holds, for people and programs. Of one tenant, or of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.core.keys import parse_layout
from rekindle.store.catalog import Extent
from rekindle.store.disk import DiskStore, named

_COLUMNS = ("model", "identity", "tenant", "adapter", "codec", "layout")
_FIELDS = ("name", "coding", "depth", "tokens", "blocks", "live", "hits", "saved_ms", "kept", "used")


@dataclass(frozen=True)
class ShelfInfo:
    """Whose KV, of which model. `layout` is how large a token's is."""

    model: str
    identity: str
    tenant: str
    adapter: str | None
    codec: str
    layout: str

    @property
    def title(self) -> str:
        """The model's name for people; the beginning of its identity, if it has none."""
        return self.model or self.identity[:8]

    @property
    def token_bytes(self) -> int:
        """What the KV of a token takes."""
        return parse_layout(self.layout).token_bytes

    def as_dict(self) -> dict[str, Any]:
        """What programs want to know of it."""
        return {name: getattr(self, name) for name in _COLUMNS if name != "layout"}


@dataclass(frozen=True)
class Entry:
    """An extent and the shelf it stands on."""

    extent: Extent
    shelf: ShelfInfo

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        about = {field: getattr(self.extent, field) for field in _FIELDS}
        return {**about, "bytes": self.extent.size_bytes, "pinned": bool(self.extent.pinned), **self.shelf.as_dict()}


def shelves(disk: DiskStore) -> dict[int, ShelfInfo]:
    """All shelves, by their number."""
    with disk.database.reading() as connection:
        rows = connection.execute(f"SELECT id, {', '.join(_COLUMNS)} FROM shelves").fetchall()
    return {row[0]: ShelfInfo(*row[1:]) for row in rows}


def entries(disk: DiskStore, names: Sequence[str] = (), tenant: str | None = None) -> list[Entry]:
    """The entries whose names begin so, or all; with `tenant` only theirs. Raises `EntryNotFound`."""
    known = shelves(disk)
    rows = [row for row in disk.entries() if row.shelf in known and tenant in (None, known[row.shelf].tenant)]
    return [Entry(row, known[row.shelf]) for row in (named(rows, names) if names else rows)]


def used_bytes(disk: DiskStore) -> int:
    """What files and catalog take."""
    with disk.database.reading() as connection:
        return disk.room.used_bytes(connection)


def summary(disk: DiskStore, tenant: str | None = None) -> dict[str, Any]:
    """Entries, tokens, bytes, hits and time saved."""
    rows = [entry.extent for entry in entries(disk, tenant=tenant)]
    return {
        "entries": len(rows),
        "tokens": sum(row.tokens for row in rows),
        "bytes": sum(row.size_bytes for row in rows),
        "hits": sum(row.hits for row in rows),
        "saved_ms": sum(row.saved_ms for row in rows),
        "pinned": sum(bool(row.pinned) for row in rows),
    }


def by_shelf(disk: DiskStore, tenant: str | None = None) -> list[dict[str, Any]]:
    """The same for each shelf that has any, with what it is."""
    own = entries(disk, tenant=tenant)
    told = []
    for shelf in dict.fromkeys(entry.shelf for entry in own):
        rows = [entry.extent for entry in own if entry.shelf == shelf]
        told.append(
            {
                **shelf.as_dict(),
                "token_bytes": shelf.token_bytes,
                "entries": len(rows),
                "tokens": sum(row.tokens for row in rows),
                "bytes": sum(row.size_bytes for row in rows),
                "saved_ms": sum(row.saved_ms for row in rows),
            }
        )
    return told
