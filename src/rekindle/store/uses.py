"""What was used, until the catalog is told: a request must not wait for that."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rekindle.store import catalog
from rekindle.store.database import Database

log = logging.getLogger("rekindle.store")

_A_TRANSACTION = 16
_MOST = 10_000  # remembered while the catalog cannot be written


class Use(Protocol):
    """Something to be told to the catalog."""

    def write(self, connection: sqlite3.Connection) -> None:
        """Change the rows it is about, if they are still the same."""


@dataclass(frozen=True)
class BlockUse:
    """An extent's blocks up to and with `last` were used, and what that saved."""

    extent: int
    name: str
    last: int
    at: float
    saved_ms: float

    def write(self, connection: sqlite3.Connection) -> None:
        """Count it."""
        catalog.touch(connection, self.extent, self.name, self.last, self.at, self.saved_ms)


class Uses:
    """Uses in the order they came, of which only the last are remembered. Used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Use] = []

    def add(self, uses: Sequence[Use]) -> None:
        """Remember them. Cheap."""
        with self._lock:
            self._waiting += uses

    def flush(self, database: Database) -> None:
        """Tell the catalog, a few in one transaction. Raises as it does; what it was not told is remembered.

        What no catalog could be told, whatever its state, is dropped: it would be in the way of all others.
        """
        with self._lock:
            uses, self._waiting = self._waiting, []
        try:
            while uses:
                with database.writing() as connection:
                    for use in uses[:_A_TRANSACTION]:
                        _write(connection, use)
                del uses[:_A_TRANSACTION]
        except BaseException:
            with self._lock:
                self._waiting = uses[-_MOST:] + self._waiting
            raise


def _write(connection: sqlite3.Connection, use: Use) -> None:
    try:
        use.write(connection)
    except (TypeError, ValueError, OverflowError) as error:  # a value that SQLite has no type for, or cannot encode
        log.debug("a use was not noted: %s", error)
