"""The limits of a folder: bytes on disk, bytes written within an hour, the age of KV, and admission on second use."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from rekindle.core.keys import NodeKey
from rekindle.core.size import Limit, human_bytes, parse_limit
from rekindle.errors import PinRefused
from rekindle.store.catalog import catalog
from rekindle.store.catalog.database import Database
from rekindle.store.evict import BEHIND_SECONDS, is_believed
from rekindle.store.files import Files
from rekindle.store.settings import StoreSettings

_SEEN_ROWS, _BYTES_A_SEEN_ROW, _LIMIT_BYTES_A_SEEN_ROW = 50_000, 100, 8000
# What pinned extents may take of the limit, all of them and those of one tenant: others must find something to evict.
_PINNED_SHARE, _PINNED_SHARE_A_TENANT = 0.5, 0.25


class Refused(Exception):
    """Something is not kept, for a reason that is no error."""


class LimitTooSmall(Refused):
    """It does not fit under the disk limit, whatever is evicted."""

    def __init__(self, need_bytes: int, limit: Limit, limit_bytes: int) -> None:
        super().__init__(
            f"with what cannot be evicted it needs {human_bytes(need_bytes)}, and the disk limit ({limit}) allows "
            f"{human_bytes(limit_bytes)}. Set a larger disk_limit (--disk-limit 2GB), put the cache on another disk, "
            "or make room on this one"
        )


class Limits:
    def __init__(
        self, folder: Path, settings: StoreSettings, database: Database, files: Files, clock: Callable[[], float]
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._database = database
        self._files = files
        self._clock = clock
        self._limit = parse_limit(settings.disk_limit)

    def fresh(self) -> catalog.Fresh:
        """When extents must have been kept not to be expired."""
        ttl = self._settings.ttl_seconds
        if ttl is None:
            return catalog.Fresh(float("-inf"), float("inf"))
        return catalog.Fresh(self._clock() - ttl, self._clock() + BEHIND_SECONDS)

    def is_clock_believed(self) -> bool:
        """Whether things may be deleted because they are old."""
        return is_believed(self._database, self._clock())

    def limit_bytes(self, used_bytes: int) -> int:
        """What files and catalog may take together, as the disk is now."""
        if self._limit.size_bytes is not None:
            return self._limit.size_bytes
        return self._limit.resolve(self._files.free_bytes(self._folder) + used_bytes)

    def used_bytes(self, connection: sqlite3.Connection) -> int:
        """What files and catalog take, with all that is reserved."""
        seen = 0
        if self._settings.admission == "second-use":
            seen = _SEEN_ROWS if self._limit.size_bytes is None else self.max_seen(self._limit.size_bytes)
        return catalog.total_bytes(connection) + self._database.claimed_bytes() + seen * _BYTES_A_SEEN_ROW

    def max_seen(self, limit_bytes: int) -> int:
        """How many keys of second-use admission are remembered."""
        return min(_SEEN_ROWS, limit_bytes // _LIMIT_BYTES_A_SEEN_ROW)

    def allows(self, connection: sqlite3.Connection, size_bytes: int) -> bool:
        """Whether the catalog may grow by `size_bytes`."""
        used = self.used_bytes(connection)
        return used + size_bytes <= self.limit_bytes(used)

    def check_pinned(self, connection: sqlite3.Connection, tenant: str | None) -> None:
        """Raises `PinRefused` if what is pinned takes too much of the limit, or what `tenant` has pinned of it."""
        used = self.used_bytes(connection)
        room = self.limit_bytes(used) - used + catalog.total_bytes(connection)  # for extents, beside the catalog
        if tenant is not None and catalog.pinned_bytes(connection, tenant) > room * _PINNED_SHARE_A_TENANT:
            raise PinRefused(
                "What a tenant pins takes at most a quarter of the cache's limit. Unpin other entries first."
            )
        if catalog.pinned_bytes(connection) > room * _PINNED_SHARE:
            raise PinRefused("What is pinned takes at most half of the cache's limit. Unpin other entries first.")

    def check_budget(self, connection: sqlite3.Connection, size_bytes: int) -> None:
        """Raises `Refused` if writing `size_bytes` more would exceed the write budget."""
        budget = self._settings.write_budget_bytes
        if budget is not None:
            minute = int(self._clock() // 60)
            # What a clock that was ahead wrote later does not count.
            select = "SELECT coalesce(sum(bytes), 0) FROM bytes_written WHERE minute BETWEEN ? AND ?"
            (written,) = connection.execute(select, (minute - 59, minute)).fetchone()
            if written + size_bytes > budget:
                raise Refused(f"the write budget of {budget:,} bytes an hour is spent")


def seen_before(
    connection: sqlite3.Connection, kv_space: int, keys: Sequence[NodeKey], now: float, max_rows: int
) -> int:
    """How many of the chained keys were met before; all are remembered now, the oldest others forgotten."""
    select = "SELECT 1 FROM seen_keys WHERE key=? AND kv_space=?"
    seen = [connection.execute(select, (key, kv_space)).fetchone() is not None for key in keys]
    connection.executemany("INSERT OR REPLACE INTO seen_keys VALUES (?,?,?)", [(key, kv_space, now) for key in keys])
    excess = int(connection.execute("SELECT count(*) FROM seen_keys").fetchone()[0]) - max_rows
    if excess > 0:
        oldest = "SELECT key, kv_space FROM seen_keys ORDER BY at LIMIT ?"
        connection.execute(f"DELETE FROM seen_keys WHERE (key, kv_space) IN ({oldest})", (excess,))
    return seen.index(False) if False in seen else len(seen)


def add_written(connection: sqlite3.Connection, minute: int, size_bytes: int) -> None:
    """Count bytes written now; what is older than two hours is forgotten."""
    connection.execute(
        "INSERT INTO bytes_written VALUES (?,?) ON CONFLICT (minute) DO UPDATE SET bytes=bytes+excluded.bytes",
        (minute, size_bytes),
    )
    connection.execute("DELETE FROM bytes_written WHERE minute<?", (minute - 120,))
