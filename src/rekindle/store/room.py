"""Room on the disk: bytes are counted before they are written, and until they are really gone.

    reserve (a row, committed)  ->  write, fsync  ->  publish (one transaction)        a keep
    rows freed (committed)      ->  file removed  ->  row removed                      an eviction

So at every moment, also after a crash, files and catalog take at most what the limit says.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rekindle.codec.extent import ExtentPlan
from rekindle.core.kv import LayerKv
from rekindle.core.size import parse_limit
from rekindle.errors import CacheUnusable
from rekindle.store import catalog
from rekindle.store.database import Database
from rekindle.store.evict import rank
from rekindle.store.extents import SUFFIX, Damaged, ExtentFiles
from rekindle.store.settings import StoreSettings
from rekindle.store.writers import Writers

_RANKED = 256  # tails looked at in one go
# What the catalog may grow by until a keep is published; its log is counted apart.
_CATALOG_BYTES, _CATALOG_BYTES_A_BLOCK = 64 << 10, 4 << 10
_CLOCK_STEP_SECONDS = 600.0  # a clock may be put right by so much without anything expiring
_LOG_BYTES_A_BLOCK = 24 << 10  # what freeing a block writes to the log, at worst


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
        self._writers = Writers(folder / "writers", extents.files)
        self._writing: set[tuple[int, int]] = set()  # (process, extent) being written now

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
        return catalog.total_bytes(connection) + self._database.claimed_bytes()

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
            self._writing.discard((os.getpid(), room.extent))

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

    def hold_limit(self) -> None:
        """Evict down to the limit, if it was lowered or the disk has become fuller."""
        with self._database.scanning() as connection:
            used = self.used_bytes(connection)
        self._evict_to(self.limit_bytes(used) - self._database.claimed_bytes())

    def prune(self, target_bytes: int) -> None:
        """Evict until files and catalog take at most so much, as far as that can be."""
        self._evict_to(target_bytes - self._database.size_bytes())

    def _evict_to(self, extent_bytes: int) -> None:
        """Evict until extents take at most so much. The catalog is left out: evicting makes its log grow."""
        while True:
            with self._database.scanning() as connection:
                short = catalog.total_bytes(connection) - extent_bytes
            if short <= 0 or not self._make_room(short, None):
                return

    def sweep(self) -> int:
        """Remove the files that nothing lists any more; how many went. What cannot be removed now, can later."""
        with self._database.scanning() as connection:
            dropping = catalog.extents(connection, "state='dropping' AND state<>'live'")
        gone = []
        for row in dropping:
            with contextlib.suppress(OSError):
                if self._files.remove(self._extents.path(row.name)):
                    gone.append(row.id)
        if gone:
            with self._database.writing() as connection:
                catalog.forget(connection, gone)
        return len(gone)

    def expire(self) -> None:
        """Free what is older than allowed."""
        if self._settings.ttl_seconds is not None:
            with self._database.writing() as connection:
                fresh = self.fresh()
                where = "state='live' AND NOT pinned AND kept NOT BETWEEN ? AND ?"
                for row in catalog.extents(connection, where, (fresh.oldest, fresh.newest)):
                    catalog.cut(connection, row.id, 0)

    def recover(self) -> None:
        """Give back the room of writers that died, of own writes that failed halfway, and of damaged files."""
        with self._database.scanning() as connection:
            others = catalog.extents(connection, "state IN ('writing', 'quarantined') AND state<>'live'")
        lost = [row.id for row in others if row.state == "quarantined" or self._is_lost(row)]
        if lost:
            with self._database.writing() as connection:
                connection.executemany(
                    "UPDATE extents SET state='dropping' WHERE id=? AND state<>'live'", [(id,) for id in lost]
                )
        self._writers.clear()

    def remove_strays(self) -> int:
        """Remove files that no row names; how many went. A row comes before its file, so such a file is nobody's."""
        names = self._files.names(self._extents.folder)
        with self._database.scanning() as connection:
            known = {f"{row[0]}{SUFFIX}" for row in connection.execute("SELECT name FROM extents")}
        strays = [self._extents.folder / name for name in names if name not in known]
        catalogs = [name for name in self._files.names(self._folder) if ".broken-" in name]
        removed = 0
        for path in [*strays, *(self._folder / name for name in catalogs)]:
            with contextlib.suppress(OSError):
                removed += self._files.remove(path)
        return removed

    def compact(self) -> int:
        """Rewrite extents of which less than half is live, if there is room for the copy; how many were."""
        sparse = self._sparse()
        if not sparse:
            return 0
        with self._database.scanning() as connection:
            shelves = dict(connection.execute("SELECT id, digest FROM shelves").fetchall())
        return sum(self._rewrite(row, shelves[row.shelf]) for row in sparse)

    def close(self) -> None:
        """Give up being a writer."""
        self._writers.close()

    def _reserve(self, plan: ExtentPlan, shelf: Callable[[sqlite3.Connection], int], evict: bool) -> Reserved:
        writer = self._writers.own_name()
        self._files.make_folder(self._extents.folder)
        if self._database.fresh:  # whatever files there are, the catalog that named them is lost
            self.remove_strays()
            self._database.fresh = False
        self._database.cut_log()
        need = plan.file_bytes
        if evict:  # otherwise it is a copy, which adds no rows
            need += _CATALOG_BYTES + _CATALOG_BYTES_A_BLOCK * plan.blocks
        recovered = False
        while True:
            with self._database.writing() as connection:
                used = self.used_bytes(connection)
                limit = self.limit_bytes(used)
                self._check_budget(connection, plan.file_bytes)
                if used + need <= limit:
                    number = shelf(connection)
                    id = catalog.reserve(connection, plan.name, number, need, writer)
                    self._writing.add((os.getpid(), id))
                    return Reserved(id, number)
                if used + need - catalog.freeable_bytes(connection) > limit:
                    raise Refused(f"it needs {need:,} bytes, more than can be freed under the limit of {limit:,}")
                holder = self._holder(connection, plan)
            if not recovered:
                self.recover()
                recovered = True
            if not evict:
                raise Refused("there is no room for it")
            if not self._make_room(used + need - limit + limit // 64, holder):
                raise Refused("all room is taken by what is pinned or being written")

    def _make_room(self, short: int, holder: tuple[int, int] | None) -> bool:
        """Do the next thing that gives room back, the cheapest first; whether there was one."""
        if self.sweep() or self.compact():
            return True
        # Where sparse extents find no room for their copy, trimming more would give nothing back: whole ones go.
        return self._free(short, holder, whole=bool(self._sparse()))

    def _sparse(self) -> list[catalog.Extent]:
        with self._database.scanning() as connection:
            return catalog.extents(connection, "state='live' AND live*2<blocks AND live>0")

    def _free(self, short: int, holder: tuple[int, int] | None, whole: bool) -> bool:
        """Free rows worth at least `short` bytes, as far as one transaction should; whether something was freed."""
        with self._database.scanning() as connection:  # ranking may take long, and others may write meanwhile
            policy, most_hits = self._settings.chosen_policy, catalog.most_hits(connection)
            ranked = rank(catalog.tails(connection), policy, self._clock(), most_hits, _RANKED)
        # First what gives bytes back; only if there is nothing, what merely brings an extent closer to that.
        for largest_rest in (0.0, 1.0) if whole else (0.5, 1.0):
            todo, freed = deque(ranked), 0
            while todo and freed < short:
                freed += self._cut_tails(todo, short - freed, holder, largest_rest)
                self._database.cut_log()
            if freed:
                return True
        return False

    def _cut_tails(
        self, todo: deque[catalog.Tail], short: int, holder: tuple[int, int] | None, largest_rest: float
    ) -> int:
        """Free tails, those at the front first, as many as one transaction should; about how many bytes that is."""
        blocks, freed = max(8, self._database.log_limit_bytes // _LOG_BYTES_A_BLOCK), 0
        with self._database.writing() as connection:
            while todo and blocks > 0 and freed < short:
                tail = catalog.tail(connection, todo[0].extent)  # as it is by now
                cut = self._cut_tail(connection, tail, holder, largest_rest, blocks) if tail else 0
                if tail and cut:
                    freed += max(1, tail.size_bytes * cut // tail.blocks)
                if cut < blocks:  # otherwise there may be more of it
                    todo.popleft()
                blocks -= cut
        return freed

    def _cut_tail(
        self,
        connection: sqlite3.Connection,
        tail: catalog.Tail,
        holder: tuple[int, int] | None,
        largest_rest: float,
        most_blocks: int,
    ) -> int:
        """Free a tail, or its last blocks, unless a larger share of its extent would be left; how many blocks."""
        start = catalog.tail_start(connection, tail, by_worth=largest_rest > 0)
        if holder is not None and holder[0] == tail.extent:
            start = max(start, holder[1] + 1)
        if start and start >= largest_rest * tail.blocks and largest_rest < 1:
            return 0
        start = max(start, tail.live - most_blocks)
        if start >= tail.live:
            return 0
        catalog.cut(connection, tail.extent, start)
        return tail.live - start

    def _holder(self, connection: sqlite3.Connection, plan: ExtentPlan) -> tuple[int, int] | None:
        """The block that a new extent will hang on: it must not be evicted for it."""
        row: tuple[int, int] | None = connection.execute(
            "SELECT extent, place FROM blocks b JOIN shelves s ON s.id=b.shelf WHERE key=? AND s.digest=?",
            (plan.parent, plan.shelf),
        ).fetchone()
        return row

    def _check_budget(self, connection: sqlite3.Connection, size_bytes: int) -> None:
        budget = self._settings.write_budget_bytes
        if budget is not None:
            minute = int(self._clock() // 60)
            written = catalog.written_between(connection, minute - 59, minute)
            if written + size_bytes > budget:
                raise Refused(f"the write budget of {budget:,} bytes an hour is spent")

    def _is_lost(self, row: catalog.Extent) -> bool:
        if self._writers.is_own(row.writer):
            return (os.getpid(), row.id) not in self._writing  # a write of ours that failed, and its cleaning too
        return self._writers.is_dead(row.writer)

    def _rewrite(self, row: catalog.Extent, shelf_digest: str) -> bool:
        """Copy the live blocks of an extent into a new one that takes its place."""
        try:
            old = self._extents.open(row, shelf_digest)
            try:
                return self._copy_live(row, old.header.plan, lambda tokens: self._extents.read_all(old, tokens))
            finally:
                self._files.close(old.handle)
        except Damaged as error:
            with self._database.writing() as connection:
                catalog.quarantine(connection, row.id, str(error))
        except (Refused, FileNotFoundError):
            pass  # no room for a copy, or it went meanwhile
        return False

    def _copy_live(self, row: catalog.Extent, plan: ExtentPlan, read: Callable[[int], tuple[LayerKv, ...]]) -> bool:
        with self._database.scanning() as connection:
            tokens = catalog.tokens_of(connection, row.id)
        if not tokens:
            return False
        if tokens != plan.tokens[: len(tokens)]:
            raise Damaged("it holds other tokens than its rows say")
        copy = replace(plan, name=secrets.token_hex(8), tokens=tokens)
        with self.reserved(copy, lambda _: row.shelf, evict=False) as room:
            written = self._extents.write(copy, read(copy.token_count))
            with self._database.writing() as connection:
                now = catalog.extent(connection, row.id)
                if now is None or now.state != "live" or now.live != copy.blocks:
                    raise Refused("it changed meanwhile")
                size = (copy.file_bytes, written.digest, now.depth, copy.blocks, copy.token_count)
                catalog.make_live(connection, room.extent, *size)
                catalog.replace(connection, row.id, room.extent)
                catalog.add_written(connection, int(self._clock() // 60), copy.file_bytes)
        return True
