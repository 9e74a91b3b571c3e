"""Where the KV of pieces comes from: memory, or else a file; and what becomes of files that cannot be read."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence

from rekindle.core.keys import Shelf
from rekindle.errors import KvLost
from rekindle.index.prefix import Piece
from rekindle.store import catalog
from rekindle.store.disk import DiskStore
from rekindle.store.failures import FAILURES, Failures
from rekindle.store.feed import Source, StoredFeed
from rekindle.store.memory import HeldExtent, MemoryTier
from rekindle.store.opened import Damaged

Fits = Callable[[Source], bool]


class Sources:
    """Both tiers of a store, to read from. Used from several threads."""

    def __init__(self, disk: DiskStore, memory: MemoryTier, failures: Failures) -> None:
        self.bad: dict[str, Exception] = {}  # extents that could not be read, until the catalog knows
        self._disk = disk
        self._memory = memory
        self._failures = failures
        self._lock = threading.Lock()
        self._wanted: dict[str, None] = {}  # extents read from disk, to be held in memory when there is time

    def add(self, opened: list[Source], shelf: Shelf, piece: Piece, fits: Fits) -> None:
        """Open the source of a piece. `fits` says whether the extent itself holds what the catalog says it does.

        Raises `KvLost` if it is not there any more, or is damaged; then all that were opened are closed.
        """
        try:
            opened.append(self._open(shelf, piece, fits))
        except (*FAILURES, Damaged) as error:
            for source in opened:
                source.close(self._disk.extents)
            self.lost(piece, error)
            raise KvLost(f"KV from the cache could not be read ({error}); it is computed instead.") from error

    def feed(self, shelf: Shelf, opened: Sequence[Source]) -> StoredFeed:
        """A feed over sources that tile a span, in order."""
        return StoredFeed(shelf.layout, tuple(opened), self._disk.extents, self.lost)

    def lost(self, piece: Piece, error: Exception) -> None:
        """An extent that was found could not be read: never find it again. The catalog learns of it off the path."""
        counts = self._failures.counts
        counts.read_failures += 1
        blamed = [error.extent] if isinstance(error, Damaged) and error.extent else []  # what it is a difference from
        self._memory.forget([piece.name, *blamed])
        # A file that is gone was most likely evicted by another process: that is nothing to worry about.
        level = logging.DEBUG if isinstance(error, FileNotFoundError) else logging.WARNING
        self._failures.log_once("KV from the cache is lost and will be computed again", error, level)
        if isinstance(error, (Damaged, FileNotFoundError)):  # anything else may be gone by the next time
            counts.quarantined += isinstance(error, Damaged)
            with self._lock:
                self.bad |= dict.fromkeys([piece.name, *blamed], error)

    def settle(self) -> None:
        """Tell the catalog what could not be read. Raises as it does."""
        with self._lock:
            bad = dict(self.bad)
        for name, error in bad.items():
            self._disk.lose(name, error)
            with self._lock:
                self.bad.pop(name, None)

    def promote(self) -> None:
        """Hold in memory what was read from disk last, as far as it fits; let go of what is not listed any more."""
        with self._lock:
            wanted, self._wanted = list(self._wanted), {}
        with self._disk.database.scanning() as connection:
            shelves = dict(connection.execute("SELECT id, digest FROM shelves").fetchall())
            listed = {name: _live(connection, name) for name in {*wanted, *self._memory.names()}}
        self._memory.forget([name for name in self._memory.names() if listed.get(name) is None])
        room = self._memory.limit_bytes
        for row in filter(None, (listed[name] for name in reversed(wanted))):
            try:
                extent = self._disk.open(row, shelves[row.shelf])
                try:
                    plan = extent.header.plan
                    room -= plan.token_count * plan.layout.token_bytes
                    if room < 0:
                        break
                    layers = tuple(self._disk.extents.layers(extent, plan.token_count))
                finally:
                    self._disk.extents.release(extent)
            except (OSError, Damaged) as error:
                self._failures.log_once("KV could not be taken into memory", error)
            else:
                self._memory.put(row.name, HeldExtent(extent.header, layers))

    def _open(self, shelf: Shelf, piece: Piece, fits: Fits) -> Source:
        """Where the KV of a piece comes from. Raises `Damaged` or `OSError`."""
        held = self._memory.get(piece.name)
        if held is not None:
            source = Source(piece, held)
            if fits(source):
                return source
            self._memory.forget([piece.name])
        with self._disk.database.reading() as connection:
            row = catalog.extent(connection, piece.extent)
        if row is None or row.state != "live" or row.name != piece.name:
            raise FileNotFoundError("it was evicted meanwhile")
        source = Source(piece, self._disk.open(row, self._disk.shelf_digest(shelf)))
        if not fits(source):
            source.close(self._disk.extents)
            raise Damaged("it holds other tokens than its row says")
        if row.coding != "near":  # small already, and what is decoded is as large as any
            with self._lock:
                self._wanted[piece.name] = None
        return source


def _live(connection: sqlite3.Connection, name: str) -> catalog.Extent | None:
    found = catalog.extents(connection, "name=? AND state='live'", (name,))
    return found[0] if found else None
