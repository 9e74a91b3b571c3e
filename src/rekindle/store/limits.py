"""The limits of a folder: bytes on disk, bytes written a day, the age of KV, and admission on second use.

The write budget is a cap: what all processes write within any 24 hours, counted in the catalog, stays within it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rekindle.core.keys import NodeKey
from rekindle.core.size import Limit, human_bytes, parse_limit
from rekindle.errors import PinRefused
from rekindle.store.catalog import catalog
from rekindle.store.catalog.database import Database
from rekindle.store.evict import BEHIND_SECONDS
from rekindle.store.files import Files
from rekindle.store.settings import StoreSettings

_SEEN_ROWS, _BYTES_A_SEEN_ROW, _LIMIT_BYTES_A_SEEN_ROW = 50_000, 100, 8000
# What pinned extents may take of the limit, all of them and those of one tenant: others must find something to evict.
_PINNED_SHARE, _PINNED_SHARE_A_TENANT = 0.5, 0.25
_DAY_MINUTES, _BEHIND_MINUTES = 1440, int(BEHIND_SECONDS // 60)


class Refused(Exception):
    """Something is not kept, for a reason that is no error."""


class NoRoom(Refused):
    """Not all of it fits: of the bytes that it needs, only `share` of them."""

    share = 0.0


class LimitTooSmall(NoRoom):
    """It does not fit under the disk limit, whatever is evicted."""

    def __init__(self, least_bytes: int, limit: Limit, limit_bytes: int) -> None:
        super().__init__(
            f"with what cannot be evicted it needs {human_bytes(least_bytes)}, and the disk limit ({limit}) allows "
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
        self._last_limit_bytes: int | None = None  # when it was last asked for

    def fresh(self) -> catalog.Fresh:
        """When extents must have been kept not to be expired."""
        ttl = self._settings.ttl_seconds
        if ttl is None:
            return catalog.Fresh(float("-inf"), float("inf"))
        return catalog.Fresh(self._clock() - ttl, self._clock() + BEHIND_SECONDS)

    def limit_bytes(self, used_bytes: int) -> int:
        """What files and catalog may take together, as the disk is now."""
        size_bytes = self._limit.size_bytes
        if size_bytes is None:
            size_bytes = self._limit.resolve(self._files.free_bytes(self._folder) + used_bytes)
        self._last_limit_bytes = size_bytes
        return size_bytes

    def is_over(self, size_bytes: int) -> bool:
        """Whether so much is above the limit as it was when something was last written. Asks nobody."""
        return self._last_limit_bytes is not None and size_bytes > self._last_limit_bytes

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

    def budget_left(self, connection: sqlite3.Connection, day_bytes: int) -> int:
        """What a write budget of that size leaves beside what is being written; below 0 if there was none before."""
        writing = "SELECT coalesce(sum(bytes), 0) FROM extents WHERE state='writing' AND state<>'live'"
        (busy,) = connection.execute(writing).fetchone()
        return day_bytes - self.written(connection)["written_day_bytes"] - int(busy)

    def check_budget(self, connection: sqlite3.Connection, size_bytes: int) -> None:
        """Raises `Refused` if, with `size_bytes` more, a day would have more than the write budget."""
        day_bytes = self._settings.write_budget_bytes
        if day_bytes is None or (excess := size_bytes - self.budget_left(connection, day_bytes)) <= 0:
            return
        name = f"the write budget ({human_bytes(day_bytes)} a day)"
        if size_bytes > day_bytes:
            raise Refused(f"it takes {human_bytes(size_bytes)}, and {name} never allows that much")
        raise Refused(f"{name} is spent until about {self._until(connection, excess)}")

    def _until(self, connection: sqlite3.Connection, excess: int) -> str:
        """The time of day when so much was written more than a day ago, with the weekday if it is not today."""
        now = last = self._minute(connection)
        rows = "SELECT minute, bytes FROM bytes_written WHERE minute BETWEEN ? AND ? ORDER BY minute"
        for minute, size_bytes in connection.execute(rows, (now - _DAY_MINUTES + 1, now)):
            excess -= size_bytes
            if excess <= 0:
                last = minute
                break
        today, then = time.localtime(now * 60), time.localtime((last + _DAY_MINUTES) * 60)
        return time.strftime("%H:%M" if today[:3] == then[:3] else "%a %H:%M", then)

    def add_written(self, connection: sqlite3.Connection, size_bytes: int, *, refused: int = 0) -> None:
        """Count bytes written now, and writes that the budget refused."""
        minute = self._minute(connection)
        connection.execute(
            "INSERT INTO bytes_written (minute, bytes, refused) VALUES (?,?,?) ON CONFLICT (minute) DO UPDATE "
            "SET bytes=bytes+excluded.bytes, refused=refused+excluded.refused",
            (minute, size_bytes, refused),
        )
        outside = "DELETE FROM bytes_written WHERE minute NOT BETWEEN ? AND ?"
        connection.execute(outside, (minute - _DAY_MINUTES + 1, minute))

    def written(self, connection: sqlite3.Connection) -> dict[str, int]:
        """Bytes written within the last hour and day, and writes that the budget refused within the day."""
        minute = self._minute(connection)
        select = (
            "SELECT coalesce(sum(CASE WHEN minute>? THEN bytes END), 0), coalesce(sum(bytes), 0), "
            "coalesce(sum(refused), 0) FROM bytes_written WHERE minute BETWEEN ? AND ?"
        )
        found = connection.execute(select, (minute - 60, minute - _DAY_MINUTES + 1, minute)).fetchone()
        return dict(zip(("written_hour_bytes", "written_day_bytes", "refused_day_writes"), found, strict=True))

    def _minute(self, connection: sqlite3.Connection) -> int:
        """The minute by the clock. One that was set back a little stands still: else what it wrote would not count.
        What one that was far ahead wrote does not: it would count for ever."""
        minute = int(self._clock() // 60)
        latest = "SELECT max(minute) FROM bytes_written WHERE minute<=?"
        (known,) = connection.execute(latest, (minute + _BEHIND_MINUTES,)).fetchone()
        return minute if known is None else max(minute, int(known))


def count_seen(connection: sqlite3.Connection, kv_space: int, keys: Sequence[NodeKey]) -> int:
    """How many of the chained keys were met before."""
    select = "SELECT 1 FROM seen_keys WHERE key=? AND kv_space=?"
    unseen = (place for place, key in enumerate(keys) if connection.execute(select, (key, kv_space)).fetchone() is None)
    return next(unseen, len(keys))


def remember_seen(
    connection: sqlite3.Connection, kv_space: int, keys: Sequence[NodeKey], now: float, max_rows: int
) -> None:
    """Remember keys; the oldest others are forgotten."""
    connection.executemany("INSERT OR REPLACE INTO seen_keys VALUES (?,?,?)", [(key, kv_space, now) for key in keys])
    excess = int(connection.execute("SELECT count(*) FROM seen_keys").fetchone()[0]) - max_rows
    if excess > 0:
        oldest = "SELECT key, kv_space FROM seen_keys ORDER BY at LIMIT ?"
        connection.execute(f"DELETE FROM seen_keys WHERE (key, kv_space) IN ({oldest})", (excess,))
