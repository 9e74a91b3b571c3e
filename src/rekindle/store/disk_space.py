"""Disk space: bytes are counted before they are written, and until they are really removed.

    reserve (a row, committed)  ->  write, fsync  ->  publish (one transaction)        a keep
    rows freed (committed)      ->  file removed  ->  row removed                      an eviction

So at every moment, also after a crash, files and catalog take at most what the limit says.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from rekindle.codec.extent import ExtentPlan
from rekindle.errors import CacheUnusable
from rekindle.store.catalog import catalog
from rekindle.store.catalog.database import Database
from rekindle.store.delta_base import (
    DeltaBase,
    add_base,
    base_of_copy,
    deltas_of,
    encode,
    open_extent,
    with_descendants,
)
from rekindle.store.evict import Eviction, blocks_a_transaction, is_believed
from rekindle.store.extents import SUFFIX, Damaged, ExtentFiles, OpenExtent, WrittenExtent
from rekindle.store.files import NO_LOCKS, Files, Handle
from rekindle.store.folder import EXTENTS, WRITERS, CacheFolder, is_own_name
from rekindle.store.limits import Limits, LimitTooSmall, NoRoom, Refused
from rekindle.store.settings import StoreSettings

ROOMY_SHARE = 0.5  # of the limit: a folder that takes less has room for what killed apps left
_ATTEMPTS = 20


class Writers:
    """The processes that write into a folder, and whether they live.

    Each holds a locked file, which the system unlocks when the process dies.
    """

    def __init__(self, place: CacheFolder, files: Files) -> None:
        self._place = place
        self._folder = place.path / WRITERS
        self._files = files
        self._lock = threading.Lock()
        self._own: tuple[str, Handle] | None = None
        self._process = os.getpid()

    def own_name(self) -> str:
        """This writer's name; locked from the first call on."""
        with self._lock:
            if self._process != os.getpid():  # forked: the name is the parent's
                self._own, self._process = None, os.getpid()
            if self._own is None or not (self._folder / self._own[0]).exists():
                self._place.make_part(WRITERS)
                taken = self._take_name()
                self._release()
                self._own = taken
            return self._own[0]

    def is_own(self, name: str) -> bool:
        return self._own is not None and self._own[0] == name and self._process == os.getpid()

    def is_dead(self, name: str) -> bool:
        """Whether that writer has died. Its file, if any, is removed."""
        if self.is_own(name):
            return False
        if not is_own_name(WRITERS, name) or not (self._folder / name).exists():
            return True
        try:
            handle = self._files.try_lock(self._folder / name)
        except OSError as error:  # not a file of a writer; without locks nobody can know, so it counts as alive
            return error.errno not in NO_LOCKS
        if handle is None:
            return False
        self._remove(name, handle)
        return True

    def clear(self) -> None:
        """Remove what dead writers left."""
        for name in self._place.own_files(WRITERS):
            self.is_dead(name)

    def close(self) -> None:
        """Give up this writer's name. Idempotent; a forked child leaves its parent's name alone."""
        with self._lock:
            if self._process == os.getpid():
                self._release()

    def _take_name(self) -> tuple[str, Handle]:
        for _ in range(_ATTEMPTS):
            name = secrets.token_hex(8)
            handle = self._files.try_lock(self._folder / name)
            if handle is not None:
                return name, handle
            # A process that looks for dead writers locked it between its creation and our lock.
        raise OSError(f"cannot lock a file in {self._folder}")

    def _release(self) -> None:
        if self._own is not None:
            (name, handle), self._own = self._own, None
            self._remove(name, handle)

    def _remove(self, name: str, handle: Handle) -> None:
        if self._files.sharing_violations:  # an open file cannot be removed there
            self._close(handle)
        with contextlib.suppress(OSError, CacheUnusable):
            self._place.remove(WRITERS, name)
        if not self._files.sharing_violations:
            self._close(handle)

    def _close(self, handle: Handle) -> None:
        with contextlib.suppress(OSError):
            self._files.close(handle)


# What the catalog may grow by until a keep is published; its log is counted separately.
_CATALOG_BYTES, _CATALOG_BYTES_A_BLOCK = 64 << 10, 4 << 10


@dataclass(frozen=True)
class Reservation:
    """Space for an extent that is about to be written: its number, its name, and its KV space's number."""

    extent: int
    name: str
    kv_space: int


@dataclass(frozen=True)
class Compacted:
    """The number of extents that were rewritten, and of those without space for it."""

    done: int
    no_room: int


def _sharing(refusal: NoRoom, need_bytes: int, short_bytes: int) -> NoRoom:
    refusal.share = max(0, need_bytes - short_bytes) / need_bytes
    return refusal


class DiskSpace(Limits):
    """The limits of a folder, and the operations that enforce them."""

    def __init__(
        self,
        folder: CacheFolder,
        settings: StoreSettings,
        database: Database,
        extents: ExtentFiles,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(folder.path, settings, database, extents.files, clock)
        self._place = folder
        self._extents = extents
        self.eviction = Eviction(database, settings.chosen_policy, clock)
        self._writers = Writers(folder, extents.files)
        self._writing: set[tuple[int, int]] = set()  # (process, extent) being written now
        self.evicted_bytes: Counter[str] = Counter()  # by reason: new, limit, expired, killed

    @contextmanager
    def reserved(
        self,
        plan: ExtentPlan,
        kv_space: Callable[[sqlite3.Connection], int],
        *,
        evict: bool = True,
        copy: bool = False,
        base: DeltaBase | None = None,
        lossy: bool = False,
    ) -> Iterator[Reservation]:
        """Reserve space for a file until it is published; if the block fails, the file is removed and the space
        released.

        A copy adds no rows to the catalog. `base` is not evicted for it. `lossy`: its numbers were quantized once,
        however it is written. Raises `Refused` if there is no space and none can be freed.
        """
        need = plan.file_bytes
        if not copy:
            need += _CATALOG_BYTES + _CATALOG_BYTES_A_BLOCK * plan.blocks
        apart = set() if base is None else {part.base for part in base.parts}
        coding = "quantized" if lossy else plan.coded_as
        room = self._reserve(plan, need, kv_space, evict, apart, coding)
        try:
            yield room
        except BaseException:
            # If this fails too, the row stays "writing", counted, and the next `recover` of this process removes it.
            with contextlib.suppress(OSError, sqlite3.Error, CacheUnusable):
                if self._place.remove(EXTENTS, f"{plan.name}{SUFFIX}"):
                    with self._database.writing() as connection:
                        catalog.forget(connection, [plan.name])
            raise
        finally:
            self._writing.discard((os.getpid(), room.extent))

    def publish(
        self,
        connection: sqlite3.Connection,
        room: Reservation,
        run: catalog.BlockRun,
        written: WrittenExtent,
        base: DeltaBase | None = None,
    ) -> None:
        """Make a written extent visible, and count what it cost. Raises `Refused` if other processes interfered."""
        self._check_reserved(connection, room)
        if reason := catalog.clashes(connection, run):
            raise Refused(reason)
        size_bytes = written.header.plan.file_bytes
        catalog.publish(connection, room.extent, run, size_bytes, written.digest, self._clock())
        self._add_base(connection, room, base)
        self.add_written(connection, size_bytes)

    def _add_base(self, connection: sqlite3.Connection, room: Reservation, base: DeltaBase | None) -> None:
        if base is not None and not add_base(connection, room.extent, base.parts):
            raise Refused("its delta base was evicted meanwhile")

    def _check_reserved(self, connection: sqlite3.Connection, room: Reservation) -> None:
        row = catalog.extent(connection, room.extent)
        if row is None or row.state != "writing" or row.name != room.name:
            raise Refused("its reserved space was released meanwhile")

    def hold_limit(self, spare_bytes: int = 0) -> None:
        """Evict down to the limit, and `spare_bytes` further, if the limit was lowered or the disk became fuller."""
        with self._database.scanning() as connection:
            used = self.used_bytes(connection)
        self._evict_to(self.limit_bytes(used) - self._database.claimed_bytes() - spare_bytes)

    def prune(self, target_bytes: int) -> None:
        """Evict until files and catalog take at most `target_bytes`, as far as possible."""
        self._evict_to(target_bytes - self._database.size_bytes())

    def _evict_to(self, extent_bytes: int) -> None:
        """Evict until extents take at most `extent_bytes`. The catalog is left out: evicting makes its log grow."""
        while True:
            with self._database.scanning() as connection:
                short = catalog.total_bytes(connection) - extent_bytes
            if short <= 0 or not self._make_room(short, None, "limit"):
                return

    def sweep(self) -> int:
        """Remove the files of dropped extents; returns how many. Files that cannot be removed now are tried later."""
        with self._database.scanning() as connection:
            dropping = catalog.extents(connection, "state='dropping' AND state<>'live'")
        removed = []
        for row in dropping:
            with contextlib.suppress(OSError):
                if self._place.remove(EXTENTS, f"{row.name}{SUFFIX}"):
                    removed.append(row.name)
        if removed:
            try:
                self._files.sync_folder(self._extents.folder)
            except OSError:  # a power loss could bring them back: they count until that is certain
                return 0
            with self._database.writing() as connection:
                catalog.forget(connection, removed)
        return len(removed)

    def expire(self) -> None:
        """Free KV older than allowed, unless the clock is in doubt: then it is only not served."""
        believed = is_believed(self._database, self._clock())  # recorded also for a TTL that is set later
        if self._settings.ttl_seconds is None or not believed:
            return
        fresh = self.fresh()
        with self._database.scanning() as connection:
            where = "state='live' AND NOT pinned AND (kept<? OR kept>?)"
            expired = catalog.extents(connection, where, (fresh.oldest, fresh.newest))
        self.rebase(expired)
        self.cut_all(expired, unless=lambda row: bool(row.pinned))
        self.evicted_bytes["expired"] += sum(row.size_bytes for row in expired)

    def expire_killed(self) -> None:
        """Free KV that only apps killed longer ago than allowed used, until `ROOMY_SHARE` of the limit is taken."""
        after = self._settings.killed_ttl_seconds
        if after is None:
            return
        with self._database.scanning() as connection:
            used = self.used_bytes(connection)
        short = used - int(self.limit_bytes(used) * ROOMY_SHARE)
        if short > 0:
            self.evicted_bytes["killed"] += self.eviction.free_killed(self._clock() - after, short)

    def cut_all(self, rows: Sequence[catalog.Extent], unless: Callable[[catalog.Extent], bool] | None = None) -> None:
        """Free extents and their descendants, in transactions of bounded size; replaced rows stay."""
        todo = deque(rows)
        while todo:
            blocks = blocks_a_transaction(self._database)
            with self._database.writing() as connection:
                while todo and blocks > 0:
                    row = todo.popleft()
                    now = catalog.extent(connection, row.id)
                    if now is None or (now.name, now.state) != (row.name, "live") or (unless and unless(now)):
                        continue
                    catalog.cut(connection, row.id, 0)
                    blocks -= now.live

    def recover(self) -> None:
        """Release the space of dead writers, of own writes that failed halfway, and of damaged files."""
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
        """Remove our files that no row names; returns how many. Rows are created before files, so these are unused."""
        names = self._place.own_files(EXTENTS)
        with self._database.scanning() as connection:
            known = {f"{row[0]}{SUFFIX}" for row in connection.execute("SELECT name FROM extents")}
        strays = [(EXTENTS, name) for name in names if name not in known]
        removed = 0
        for part, name in [*strays, *(("", name) for name in self._place.own_files(""))]:
            with contextlib.suppress(OSError):
                removed += self._place.remove(part, name)
        if removed:
            self._files.sync_folder(self._extents.folder)
            self._files.sync_folder(self._folder)
        return removed

    def sweep_once(self) -> None:
        """Once in the life of a catalog: remove files of an earlier one, which are not counted."""
        with self._database.reading() as connection:
            swept = connection.execute("SELECT swept FROM totals").fetchone()[0]
        if not swept:
            self.remove_strays()
            with self._database.writing() as connection:
                connection.execute("UPDATE totals SET swept=1")

    def compact(self) -> Compacted:
        """Rewrite extents of which less than half is live, if there is space for the copy."""
        with self._database.scanning() as connection:
            sparse = catalog.sparse(connection, self._extents.digester.name)
        done = no_room = 0
        for row, kv_space_digest in sparse:
            try:
                done += self.rewrite(row, kv_space_digest)
            except Refused:
                no_room += 1
        return Compacted(done, no_room)

    def rebase(self, going: Sequence[catalog.Extent], also: Container[int] = ()) -> None:
        """Give deltas of extents that are about to go another base, except those that go `also`.

        If there is no other base, the most recently used delta becomes whole, and is the base of the others. Deltas
        without space for that go with their base.
        """
        with self._database.scanning() as connection:
            ids = with_descendants(connection, [row.id for row in going])  # all of these go
            rows = deltas_of(connection, ids)
            digests = dict(connection.execute("SELECT id, digest FROM kv_spaces").fetchall())
        for row in rows:
            stays = row.id not in ids and row.id not in also
            if stays and digests[row.kv_space].endswith(f":{self._extents.digester.name}"):
                with contextlib.suppress(Refused):
                    self.rewrite(row, digests[row.kv_space], without=ids)

    def rewrite(
        self, row: catalog.Extent, kv_space_digest: str, *, evict: bool = False, without: Container[int] | None = None
    ) -> bool:
        """Copy the live blocks of an extent into a new one that replaces it; False if it cannot be read.

        A delta stays one; with `without`, none of these extents is its base any more. Raises `Refused` if there is no
        space for the copy, or the extent changed meanwhile.
        """
        try:
            old = open_extent(self._database, self._extents, row, kv_space_digest)
            try:
                done = self._copy_live(row, old, evict, without)
            finally:
                self._extents.release(old)
        except FileNotFoundError:
            self.cut_all([row])
            return False
        except Damaged as error:
            with self._database.writing() as connection:
                catalog.quarantine(connection, row.id, str(error))
            return False
        except OSError:
            return False  # the next reader reports why
        self.sweep()  # the old one at once, so that space is never needed for more than one copy
        return done

    def close(self) -> None:
        self._writers.close()

    def _reserve(
        self,
        plan: ExtentPlan,
        need: int,
        kv_space: Callable[[sqlite3.Connection], int],
        evict: bool,
        apart: Container[int],
        coding: str,
    ) -> Reservation:
        writer = self._writers.own_name()
        self._place.make_part(EXTENTS)
        self.sweep_once()
        recovered = False
        while True:
            with self._database.writing() as connection:
                used = self.used_bytes(connection)
                limit = self.limit_bytes(used)
                self.check_budget(connection, plan.file_bytes)
                if used + need <= limit:
                    number = kv_space(connection)
                    id = catalog.reserve(connection, plan.name, number, need, writer, coding)
                    self._writing.add((os.getpid(), id))
                    return Reservation(id, plan.name, number)
                least = used + need - catalog.freeable_bytes(connection)
                if least > limit:
                    raise _sharing(LimitTooSmall(least, self._limit, limit), need, least - limit)
                holder = self._holder(connection, plan)
            if not recovered:
                self.recover()
                recovered = True
            if not evict:
                raise Refused("there is no room for it")
            if not self._make_room(used + need - limit + limit // 64, holder, "new", apart):
                refusal = NoRoom("all space is taken by extents that are pinned, being written, or continued by it")
                raise _sharing(refusal, need, used + need - limit)

    def _make_room(self, short: int, holder: tuple[int, int] | None, reason: str, apart: Container[int] = ()) -> bool:
        """Do the next thing that frees space, the cheapest first; whether there was one."""
        if self.sweep():
            return True
        compacted = self.compact()
        if compacted.done > 0:
            return True
        # If sparse extents have no space for a copy, trimming more would free nothing: whole extents go.
        freed_bytes = self.eviction.free(short, holder, compacted.no_room > 0, apart)
        self.evicted_bytes[reason] += freed_bytes
        return freed_bytes > 0

    def _holder(self, connection: sqlite3.Connection, plan: ExtentPlan) -> tuple[int, int] | None:
        """The parent block of a new extent: it must not be evicted for it."""
        row: tuple[int, int] | None = connection.execute(
            "SELECT extent, place FROM blocks b JOIN kv_spaces s ON s.id=b.kv_space WHERE key=? AND s.digest=?",
            (plan.parent, plan.kv_space),
        ).fetchone()
        return row

    def _is_lost(self, row: catalog.Extent) -> bool:
        if self._writers.is_own(row.writer):
            return (os.getpid(), row.id) not in self._writing  # our own write failed, and so did its cleanup
        return self._writers.is_dead(row.writer)

    def _copy_live(self, row: catalog.Extent, old: OpenExtent, evict: bool, without: Container[int] | None) -> bool:
        plan, coding = old.header.plan, old.header.plan.coding
        with self._database.scanning() as connection:
            tokens = catalog.tokens_of(connection, row.id)
            base = base_of_copy(connection, row, plan, tokens, self.fresh(), without)
            stood_on = deltas_of(connection, [row.id])
        if not tokens:
            return False
        if tokens != plan.tokens[: len(tokens)]:
            raise Damaged("it holds other tokens than its rows say")
        copy = replace(plan, name=secrets.token_hex(8), tokens=tokens, coding=None)
        layers = partial(self._extents.layers, old, copy.token_count)
        coded = None
        if coding is not None and not stood_on:  # coded again, it would have other numbers than its deltas need
            try:
                coded = encode(self._database, self._extents, copy, layers, coding.coder, base)
            except FileNotFoundError as error:
                raise Refused("its delta base changed meanwhile") from error
        copy, base = (copy, None) if coded is None else (coded.plan, base)
        lossy = row.coding == "quantized"
        with self.reserved(copy, lambda _: row.kv_space, evict=evict, copy=True, lossy=lossy) as room:
            written = self._extents.write(copy, layers()) if coded is None else self._extents.write_coded(coded)
            with self._database.writing() as connection:
                now = catalog.extent(connection, row.id)
                self._check_reserved(connection, room)
                if now is None or (now.name, now.state, now.live) != (row.name, "live", copy.blocks):
                    raise Refused("it changed meanwhile")
                if coded is not None and deltas_of(connection, [row.id]):
                    raise Refused("another entry depends on it now")
                size = (copy.file_bytes, written.digest, now.depth, copy.blocks, copy.token_count)
                catalog.make_live(connection, room.extent, *size)
                catalog.replace(connection, row.id, room.extent)
                self._add_base(connection, room, base)
                self.add_written(connection, copy.file_bytes)
        return True
