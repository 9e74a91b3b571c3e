"""What a folder may take and has taken: on the disk, within an hour, and how old its KV may be."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from rekindle.core.size import parse_limit
from rekindle.store import accounts, catalog
from rekindle.store.database import Database
from rekindle.store.files import Files
from rekindle.store.settings import StoreSettings

_CLOCK_STEP_SECONDS = 600.0  # a clock may be put right by so much without anything expiring
_SEEN_ROWS, _BYTES_A_SEEN_ROW, _LIMIT_BYTES_A_SEEN_ROW = 50_000, 100, 8000


class Refused(Exception):
    """Something is not kept, for a reason that is no error."""


class Limits:
    """The limits of a folder."""

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
        return catalog.Fresh(self._clock() - ttl, self._clock() + _CLOCK_STEP_SECONDS)

    def limit_bytes(self, used_bytes: int) -> int:
        """What files and catalog may take together, as the disk is now."""
        if self._limit.size_bytes is not None:
            return self._limit.size_bytes
        return self._limit.resolve(self._files.free_bytes(self._folder) + used_bytes)

    def used_bytes(self, connection: sqlite3.Connection) -> int:
        """What files and catalog take, with all that is reserved."""
        seen = 0
        if self._settings.admission == "second-use":
            seen = _SEEN_ROWS if self._limit.size_bytes is None else self.most_seen(self._limit.size_bytes)
        return catalog.total_bytes(connection) + self._database.claimed_bytes() + seen * _BYTES_A_SEEN_ROW

    def most_seen(self, limit_bytes: int) -> int:
        """How many keys of second-use admission are remembered."""
        return min(_SEEN_ROWS, limit_bytes // _LIMIT_BYTES_A_SEEN_ROW)

    def allows(self, connection: sqlite3.Connection, size_bytes: int) -> bool:
        """Whether the catalog may grow by so much."""
        used = self.used_bytes(connection)
        return used + size_bytes <= self.limit_bytes(used)

    def check_budget(self, connection: sqlite3.Connection, size_bytes: int) -> None:
        """Raises `Refused` if so much more may not be written now."""
        budget = self._settings.write_budget_bytes
        if budget is not None:
            minute = int(self._clock() // 60)
            written = accounts.written_between(connection, minute - 59, minute)
            if written + size_bytes > budget:
                raise Refused(f"the write budget of {budget:,} bytes an hour is spent")
