"""Room on the disk: bytes are counted before they are written, and until they are really gone.

    reserve (a row, committed)  ->  write, fsync  ->  publish (one transaction)        a keep
    rows freed (committed)      ->  file removed  ->  row removed                      an eviction

So at every moment, also after a crash, the files take at most what the rows say.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle.codec.extent import ExtentPlan
from rekindle.core.size import parse_limit
from rekindle.errors import CacheUnusable
from rekindle.store import catalog
from rekindle.store.database import Database
from rekindle.store.evict import rank
from rekindle.store.extents import SUFFIX, Damaged, ExtentFiles
from rekindle.store.files import Handle
from rekindle.store.settings import StoreSettings

_RANKED = 64  # tails looked at in one go
# What the catalog and its log may grow by until a keep is published; counted while the keep is under way.
_CATALOG_BYTES, _CATALOG_BYTES_A_BLOCK = 256 << 10, 4 << 10


class Refused(Exception):
    """Something is not kept, for a reason that is no error."""


@dataclass(frozen=True)
class Reserved:
    """Room for an extent that is about to be written: its number and its shelf's."""

    extent: int
    shelf: int


class Room:
    """The limits of a folder, and what is done to hold them."""

    def __init__(
        self,
        folder: Path,
        settings: StoreSettings,
        database: Database,
        extents: ExtentFiles,
        clock: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._database = database
        self._extents = extents
        self._files = extents.files
        self._clock = clock
        self._limit = parse_limit(settings.disk_limit)
        self._writers = folder / "writers"
        self._writer: tuple[str, Handle] | None = None
        self._writer_lock = threading.Lock()
        self._writing: set[int] = set()  # extents that this process is writing now
        self._process = os.getpid()

    def oldest(self) -> float:
        """Extents kept before this are expired."""
        ttl = self._settings.ttl_seconds
        return float("-inf") if ttl is None else self._clock() - ttl

    def limit_bytes(self, used_bytes: int) -> int:
        """What files and catalog may take together, as the disk is now."""
        if self._limit.size_bytes is not None:
            return self._limit.size_bytes
        return self._limit.resolve(self._files.free_bytes(self._folder) + used_bytes)

    def used_bytes(self, connection: sqlite3.Connection) -> int:
        """What files and catalog take, with what is reserved."""
        return catalog.total_bytes(connection) + self._database.size_bytes()

    @contextmanager
    def reserved(
        self, plan: ExtentPlan, shelf: Callable[[sqlite3.Connection], int], *, evict: bool = True
    ) -> Iterator[Reserved]:
        """Room for a file, until it is published; if the block fails, the file is removed and the room given back.

        Raises `Refused` if there is none and none can be made.
        """
        room = self._reserve(plan, shelf, evict)
        try:
            yield room
        except BaseException:
            # If this fails too, the row stays "writing", counted, and the next `recover` of this process removes it.
            with contextlib.suppress(OSError, sqlite3.Error, CacheUnusable):
                if self._files.remove(self._extents.path(plan.name)):
                    with self._database.writing() as connection:
                        catalog.forget(connection, [room.extent])
            raise
        finally:
            self._writing.discard(room.extent)

    def publish(
        self, connection: sqlite3.Connection, room: Reserved, run: catalog.Run, size_bytes: int, digest: bytes
    ) -> None:
        """Make a written extent visible, and count what it cost. Raises `Refused` if others were busy meanwhile."""
        row = catalog.extent(connection, room.extent)
        if row is None or row.state != "writing":
            raise Refused("its room was taken away meanwhile")
        if reason := catalog.clashes(connection, run):
            raise Refused(reason)
        catalog.publish(connection, room.extent, run, size_bytes, digest, self._clock())
        catalog.add_written(connection, int(self._clock() // 60), size_bytes)

    def prune(self, target_bytes: int) -> None:
        """Evict until files and catalog take at most so much, as far as that can be."""
        while True:
            with self._database.writing() as connection:
                short = self.used_bytes(connection) - target_bytes
                freed = short > 0 and self._free(connection, short, protected=None)
            if not (self.sweep() or freed) and not (short > 0 and self.compact()):
                return

    def sweep(self) -> int:
        """Remove the files that nothing lists any more; how many went."""
        with self._database.reading() as connection:
            dropping = catalog.extents(connection, "state='dropping'")
        gone = [row.id for row in dropping if self._files.remove(self._extents.path(row.name))]
        if gone:
            with self._database.writing() as connection:
                catalog.forget(connection, gone)
        return len(gone)

    def expire(self) -> None:
        """Free what is older than allowed."""
        if self._settings.ttl_seconds is None:
            return
        with self._database.writing() as connection:
            for row in catalog.extents(connection, "state='live' AND NOT pinned AND kept<?", (self.oldest(),)):
                catalog.cut(connection, row.id, 0)

    def recover(self) -> None:
        """Give back the room of writers that died, and of own writes that failed halfway."""
        with self._database.reading() as connection:
            writing = catalog.extents(connection, "state='writing'")
        dead = {writer: self._is_dead(writer) for writer in {row.writer for row in writing}}
        lost = [row.id for row in writing if dead[row.writer] and row.id not in self._writing]
        if lost:
            with self._database.writing() as connection:
                marks = ",".join("?" * len(lost))
                connection.execute(
                    f"UPDATE extents SET state='dropping' WHERE state='writing' AND id IN ({marks})", lost
                )
        for writer in self._files.names(self._writers):
            if writer not in dead or dead[writer]:
                self._clear_writer(writer)

    def remove_strays(self) -> int:
        """Remove files that no row names; how many went. A row comes before its file, so such a file is nobody's."""
        names = [name for name in self._files.names(self._extents.folder) if name.endswith(SUFFIX)]
        with self._database.reading() as connection:
            known = {row[0] for row in connection.execute("SELECT name FROM extents")}
        strays = [name for name in names if name.removesuffix(SUFFIX) not in known]
        return sum(self._files.remove(self._extents.folder / name) for name in strays)

    def compact(self) -> int:
        """Rewrite extents of which less than half is live, if there is room for the copy; how many were."""
        with self._database.reading() as connection:
            sparse = catalog.extents(connection, "state='live' AND live*2<blocks AND live>0")
            shelves = dict(connection.execute("SELECT id, digest FROM shelves").fetchall())
        return sum(self._rewrite(row, shelves[row.shelf]) for row in sparse)

    def close(self) -> None:
        """Give up being a writer."""
        with self._writer_lock:
            if self._writer is not None:
                name, handle = self._writer
                self._writer = None
                with contextlib.suppress(OSError):
                    self._files.remove(self._writers / name)
                self._files.close(handle)

    def _reserve(self, plan: ExtentPlan, shelf: Callable[[sqlite3.Connection], int], evict: bool) -> Reserved:
        writer = self._writer_name()
        self._files.make_folder(self._extents.folder)
        need = plan.file_bytes + _CATALOG_BYTES + _CATALOG_BYTES_A_BLOCK * plan.blocks
        log_was_cut = False
        while True:
            with self._database.writing() as connection:
                used = self.used_bytes(connection)
                limit = self.limit_bytes(used)
                self._check_budget(connection, plan.file_bytes)
                if used + need <= limit:
                    number = shelf(connection)
                    id = catalog.reserve(connection, plan.name, number, need, writer)
                    self._writing.add(id)
                    return Reserved(id, number)
            if need > limit:
                raise Refused(f"it needs {need:,} bytes, the limit is {limit:,}")
            if not log_was_cut:  # the catalog's log is the cheapest thing to let go
                self._database.checkpoint()
                log_was_cut = True
                continue
            if not evict:
                raise Refused("there is no room for it")
            with self._database.writing() as connection:
                short = self.used_bytes(connection) + need - limit
                freed = short > 0 and self._free(connection, short + limit // 64, self._holder(connection, plan))
            if short > 0 and not (self.sweep() or freed) and not self.compact():
                raise Refused("all room is taken by what is pinned or being written")

    def _free(self, connection: sqlite3.Connection, short: int, protected: int | None) -> bool:
        """Free rows worth at least `short` bytes, as far as there are any; whether something was freed."""
        changed = connection.execute("UPDATE extents SET state='dropping' WHERE state='quarantined'").rowcount > 0
        most_hits = connection.execute("SELECT coalesce(max(hits), 0) FROM extents WHERE state='live'").fetchone()[0]
        tails = catalog.tails(connection, protected)
        for tail in rank(tails, self._settings.chosen_policy, self._clock(), most_hits, _RANKED):
            start = catalog.tail_start(connection, tail)
            catalog.cut(connection, tail.extent, start)
            changed = True
            if start * 2 < tail.blocks:  # dropped, or worth rewriting
                short -= tail.size_bytes * (tail.blocks - start) // tail.blocks
            if short <= 0:
                break
        return changed

    def _holder(self, connection: sqlite3.Connection, plan: ExtentPlan) -> int | None:
        """The extent that a new one will hang on: it must not be evicted for it."""
        row = connection.execute(
            "SELECT extent FROM blocks b JOIN shelves s ON s.id=b.shelf WHERE key=? AND s.digest=?",
            (plan.parent, plan.shelf),
        ).fetchone()
        return None if row is None else int(row[0])

    def _check_budget(self, connection: sqlite3.Connection, size_bytes: int) -> None:
        budget = self._settings.write_budget_bytes
        if budget is not None:
            written = catalog.written_since(connection, int(self._clock() // 60) - 59)
            if written + size_bytes > budget:
                raise Refused(f"the write budget of {budget:,} bytes an hour is spent")

    def _rewrite(self, row: catalog.Extent, shelf_digest: str) -> bool:
        """Copy the live blocks of an extent into a new one that takes its place."""
        try:
            old = self._extents.open(row, shelf_digest)
        except (OSError, Damaged):
            return False  # whoever reads it finds out and reports it
        try:
            plan = old.header.plan
            with self._database.reading() as connection:
                parts = connection.execute("SELECT tokens FROM blocks WHERE extent=? ORDER BY place", (row.id,))
                tokens = b"".join(part for (part,) in parts)
            if not tokens or tokens != plan.tokens[: len(tokens)]:
                return False
            name = secrets.token_hex(8)
            copy = ExtentPlan(name, plan.shelf, plan.parent, plan.layout, tokens, plan.digest_name, plan.digest_width)
            with self.reserved(copy, lambda _: row.shelf, evict=False) as room:
                written = self._extents.write(copy, self._extents.read_all(old, copy.token_count))
                with self._database.writing() as connection:
                    self._replace(connection, row, room, copy, written.digest)
        except (Refused, Damaged):
            return False
        finally:
            self._files.close(old.handle)
        return self.sweep() > 0

    def _replace(
        self, connection: sqlite3.Connection, row: catalog.Extent, room: Reserved, copy: ExtentPlan, digest: bytes
    ) -> None:
        now = catalog.extent(connection, row.id)
        if now is None or now.state != "live" or now.live != copy.blocks:
            raise Refused("it changed meanwhile")
        connection.execute("UPDATE blocks SET extent=? WHERE extent=?", (room.extent, row.id))
        connection.execute(
            "UPDATE extents SET state='live', bytes=?, digest=?, depth=?, blocks=?, live=?, tokens=?, pinned=?, kept=?,"
            " used=?, hits=?, saved_ms=? WHERE id=?",
            (
                *(copy.file_bytes, digest, now.depth, copy.blocks, copy.blocks, copy.token_count, now.pinned),
                *(now.kept, now.used, now.hits, now.saved_ms, room.extent),
            ),
        )
        connection.execute("UPDATE extents SET state='dropping', live=0, tokens=0 WHERE id=?", (row.id,))
        catalog.add_written(connection, int(self._clock() // 60), copy.file_bytes)

    def _writer_name(self) -> str:
        """This store's name among the writers; others see by its lock whether it lives."""
        with self._writer_lock:
            if self._process != os.getpid():  # forked: the name, and what is under way, are the parent's
                self._process = os.getpid()
                self._writing = set()
                self._writer = None
            if self._writer is None or not (self._writers / self._writer[0]).exists():
                self._files.make_folder(self._writers)
                name = secrets.token_hex(8)
                handle = self._files.try_lock(self._writers / name)
                if handle is None:
                    raise OSError(f"cannot lock {self._writers / name}")
                if self._writer is not None:
                    self._files.close(self._writer[1])
                self._writer = name, handle
            return self._writer[0]

    def _is_dead(self, writer: str) -> bool:
        if self._writer is not None and writer == self._writer[0] and self._process == os.getpid():
            return True  # of its own rows, only those under way are alive
        path = self._writers / writer
        if not path.exists():
            return True
        handle = self._files.try_lock(path)
        if handle is None:
            return False
        self._files.close(handle)
        return True

    def _clear_writer(self, writer: str) -> None:
        if self._writer is None or writer != self._writer[0]:
            handle = self._files.try_lock(self._writers / writer)
            if handle is not None:
                self._files.remove(self._writers / writer)
                self._files.close(handle)
