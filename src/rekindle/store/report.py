"""What a cache folder holds, for people and programs; of one scope, or of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.core.keys import parse_layout
from rekindle.core.scope import Scope
from rekindle.store.catalog.catalog import Extent
from rekindle.store.disk import DiskStore, rows_named

_COLUMNS = ("model", "identity", "tenant", "adapter", "codec", "layout")
_FIELDS = ("name", "coding", "depth", "tokens", "blocks", "live", "hits", "saved_ms", "kept", "used")


@dataclass(frozen=True)
class KvSpaceInfo:
    """A KV space: its tenant, model and layout."""

    model: str
    identity: str
    tenant: str
    adapter: str | None
    codec: str
    layout: str

    @property
    def title(self) -> str:
        """The model's name; the beginning of its identity if it has none."""
        return self.model or self.identity[:8]

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV of a token."""
        return parse_layout(self.layout).token_bytes

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {name: getattr(self, name) for name in _COLUMNS if name != "layout"}


@dataclass(frozen=True)
class CacheEntry:
    """An extent and its KV space."""

    extent: Extent
    kv_space: KvSpaceInfo

    def as_dict(self) -> dict[str, Any]:
        about = {field: getattr(self.extent, field) for field in _FIELDS}
        return {**about, "bytes": self.extent.size_bytes, "pinned": bool(self.extent.pinned), **self.kv_space.as_dict()}


def kv_spaces(disk: DiskStore, scope: Scope | None = None) -> dict[int, KvSpaceInfo]:
    """The KV spaces of a scope, or all, by their number."""
    select = f"SELECT id, {', '.join(_COLUMNS)} FROM kv_spaces WHERE :tenant IS NULL OR (tenant=:tenant AND salt=:salt)"
    whose = {"tenant": None, "salt": None} if scope is None else {"tenant": scope.tenant, "salt": scope.salt}
    with disk.database.reading() as connection:
        rows = connection.execute(select, whose).fetchall()
    return {row[0]: KvSpaceInfo(*row[1:]) for row in rows}


def entries(disk: DiskStore, names: Sequence[str] = (), scope: Scope | None = None) -> list[CacheEntry]:
    """The entries whose names begin with `names`, or all; with `scope` only its own. Raises `EntryNotFound`."""
    known = kv_spaces(disk, scope)
    rows = [row for row in disk.entries() if row.kv_space in known]
    return [CacheEntry(row, known[row.kv_space]) for row in (rows_named(rows, names) if names else rows)]


@dataclass(frozen=True)
class EntryPlace:
    """Where an entry stands in the tree of prefixes, the tokens of its first two blocks, and the apps that used it."""

    parent: str | None
    tokens: bytes
    apps: list[str]


def places(disk: DiskStore) -> dict[int, EntryPlace]:
    """The places of all entries, by the number of their extent."""
    select = (
        "SELECT b.extent, p.name, b.tokens, c.tokens FROM extents e JOIN blocks b ON b.extent=e.id AND b.place=0 "
        "LEFT JOIN blocks c ON c.extent=e.id AND c.place=1 "
        "LEFT JOIN blocks a ON a.key=b.parent AND a.kv_space=b.kv_space LEFT JOIN extents p ON p.id=a.extent"
    )
    with disk.database.reading() as connection:
        rows = connection.execute(select)
        found = {id: EntryPlace(parent, first + (second or b""), []) for id, parent, first, second in rows}
        uses = "SELECT u.extent, a.name FROM app_uses u JOIN apps a ON a.id=u.app ORDER BY u.used DESC"
        for id, name in connection.execute(uses):
            if id in found:
                found[id].apps.append(name)
    return found


def used_bytes(disk: DiskStore) -> int:
    with disk.database.reading() as connection:
        return disk.room.used_bytes(connection)


def written(disk: DiskStore, day_bytes: int | None) -> dict[str, Any]:
    """Bytes written lately, and what a write budget of `day_bytes` a day leaves; None: there is none.

    Nothing of a folder that can only be read: its catalog may be of a version that did not count.
    """
    with disk.database.reading() as connection:
        counts = {} if disk.database.read_only else disk.room.written(connection)
        left = None if day_bytes is None or not counts else disk.room.budget_left(connection, day_bytes)
    return {
        **dict.fromkeys(("written_hour_bytes", "written_day_bytes", "refused_day_writes"), 0),
        **counts,
        "write_budget_left_bytes": None if left is None else max(0, left),
    }


def summary(disk: DiskStore, scope: Scope | None = None) -> dict[str, Any]:
    """Entries, tokens, bytes, hits and time saved."""
    rows = [entry.extent for entry in entries(disk, scope=scope)]
    return {
        "entries": len(rows),
        "tokens": sum(row.tokens for row in rows),
        "bytes": sum(row.size_bytes for row in rows),
        "hits": sum(row.hits for row in rows),
        "saved_ms": sum(row.saved_ms for row in rows),
        "pinned": sum(bool(row.pinned) for row in rows),
    }


def by_kv_space(disk: DiskStore, scope: Scope | None = None) -> list[dict[str, Any]]:
    """The same for each KV space that has any, with its description."""
    own = entries(disk, scope=scope)
    reported = []
    for kv_space in dict.fromkeys(entry.kv_space for entry in own):
        rows = [entry.extent for entry in own if entry.kv_space == kv_space]
        reported.append(
            {
                **kv_space.as_dict(),
                "token_bytes": kv_space.token_bytes,
                "entries": len(rows),
                "tokens": sum(row.tokens for row in rows),
                "bytes": sum(row.size_bytes for row in rows),
                "saved_ms": sum(row.saved_ms for row in rows),
            }
        )
    return reported
