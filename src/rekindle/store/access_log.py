"""Uses of KV, buffered until the catalog is updated: a request must not wait for that."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rekindle.store.catalog import catalog
from rekindle.store.catalog.database import Database

log = logging.getLogger("rekindle.store")

_A_TRANSACTION = 16
_MOST = 10_000  # remembered while the catalog cannot be written


class Access(Protocol):
    """A use to be written to the catalog."""

    def write(self, connection: sqlite3.Connection) -> None:
        """Change the rows it is about, if they are still the same."""


@dataclass(frozen=True)
class BlockAccess:
    """An extent's blocks up to and with `last` were used, and what that saved."""

    extent: int
    name: str
    last: int
    at: float
    saved_ms: float

    def write(self, connection: sqlite3.Connection) -> None:
        catalog.touch(connection, self.extent, self.name, self.last, self.at, self.saved_ms)


class AccessLog:
    """Uses in the order they came, bounded in number. Used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Access] = []

    def add(self, accesses: Sequence[Access]) -> None:
        """Remember them. Cheap."""
        with self._lock:
            self._waiting += accesses

    def drop(self) -> None:
        with self._lock:
            self._waiting = []

    def flush(self, database: Database) -> None:
        """Write them to the catalog, a few in one transaction. Raises as it does; what was not written is kept.

        What no catalog could take, whatever its state, is dropped: it would block all others.
        """
        with self._lock:
            accesses, self._waiting = self._waiting, []
        try:
            while accesses:
                with database.writing() as connection:
                    for access in accesses[:_A_TRANSACTION]:
                        _write(connection, access)
                del accesses[:_A_TRANSACTION]
        except BaseException:
            with self._lock:
                self._waiting = accesses[-_MOST:] + self._waiting
            raise


def _write(connection: sqlite3.Connection, access: Access) -> None:
    try:
        access.write(connection)
    except (TypeError, ValueError, OverflowError) as error:  # a value that SQLite has no type for, or cannot encode
        log.debug("a use was not recorded: %s", error)
