"""A cache folder on disk: its catalog, extents and limits together.

System errors (`OSError`, `sqlite3.Error`) pass through: `store/tiered` turns them into a miss or "not kept". Everything
here works without a model and without torch.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rekindle.codec.coder import Coder
from rekindle.codec.digest import digester_for
from rekindle.codec.extent import ExtentHeader, ExtentPlan
from rekindle.core.keys import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, KvSpace, NodeKey, chain
from rekindle.core.kv import Kv, Span
from rekindle.core.scope import AppRef
from rekindle.core.size import parse_limit
from rekindle.errors import CacheUnusable, EntryNotFound
from rekindle.machine import narrow
from rekindle.store.catalog import app_rows, catalog, variant_rows
from rekindle.store.catalog.database import WRITE_TIMEOUT_SECONDS, Connect, Database
from rekindle.store.delta_base import DeltaBase, encode, find_base, open_extent
from rekindle.store.disk_space import DiskSpace, Reservation
from rekindle.store.extents import CodedExtent, Damaged, ExtentFiles, OpenExtent
from rekindle.store.files import Files
from rekindle.store.folder import CATALOG, EXTENTS, CacheFolder
from rekindle.store.limits import NoRoom, Refused, count_seen, remember_seen
from rekindle.store.settings import StoreSettings

OnPublish = Callable[[sqlite3.Connection, int], None]  # with the number of the KV space
_KV_SPACE_BYTES = 16 << 10  # what the catalog may grow by for a KV space
_MIN_LOG_BYTES, _MAX_LOG_BYTES = 2 << 20, 8 << 20


@dataclass(frozen=True)
class Machine:
    """The system a store uses; tests replace its parts by failing ones."""

    files: Files = field(default_factory=Files)
    connect: Connect = sqlite3.connect
    clock: Callable[[], float] = time.time
    write_timeout_seconds: float = WRITE_TIMEOUT_SECONDS


@dataclass(frozen=True, eq=False)
class Written:
    """A published keep."""

    extent: int
    size_bytes: int
    header: ExtentHeader
    coding: str


class DiskStore:
    """The KV of one folder. Thread-safe, and shared by processes.

    Raises `CacheUnusable` if the folder is neither empty nor a cache. Unfinished work of dead processes is cleaned up.
    """

    def __init__(self, folder: Path, settings: StoreSettings, machine: Machine | None = None) -> None:
        machine = machine or Machine()
        self.place = CacheFolder(folder, machine.files)
        self.folder = self.place.path
        self.settings = settings
        self.files = machine.files
        self.clock = machine.clock
        self.digester = digester_for(settings.key)
        self.database = Database(
            self.folder / CATALOG,
            machine.files,
            connect=machine.connect,
            write_timeout_seconds=machine.write_timeout_seconds,
            log_bytes=self._log_bytes(settings),
            claim=self.place.claim,
        )
        narrow(self.folder)
        self.extents = ExtentFiles(self.folder / EXTENTS, machine.files, self.digester)
        self.room = DiskSpace(self.place, settings, self.database, self.extents, machine.clock)

    def kv_space_digest(self, kv_space: KvSpace) -> str:
        """The digest of a KV space in this store: under another key the same KV is in another KV space, not found."""
        return f"{kv_space.digest}:{self.digester.name}"

    @contextmanager
    def view(self, kv_space: KvSpace, lost: Container[str] = ()) -> Iterator[catalog.View | None]:
        """The KV space's rows at one moment; None if nothing was ever kept in it."""
        with self.database.reading() as connection:
            number = catalog.kv_space_id(connection, self.kv_space_digest(kv_space))
            yield None if number is None else catalog.View(connection, number, self.room.fresh(), lost)

    def admit(self, kv_space: KvSpace, keys: Sequence[NodeKey], size_bytes: int, *, last: bool = True) -> int:
        """How many of the chained keys may be written, whose KV takes about `size_bytes`: all; on second use, those
        seen before. Raises `Refused` if none may be.

        `last`: the keys are recorded as seen, and a refusal counts; else more of the same request follows.
        """
        count = len(keys)
        if self.settings.admission == "second-use":
            count = self._count_seen(kv_space, keys, remember=last)
        if not count:
            raise Refused("it was seen for the first time")
        try:
            with self.database.reading() as connection:
                if not self.database.read_only:
                    self.room.check_budget(connection, size_bytes * count // len(keys))
        except Refused:
            if last:
                with self.database.writing() as connection:
                    self.room.add_written(connection, 0, refused=1)
            raise
        return count

    def _count_seen(self, kv_space: KvSpace, keys: Sequence[NodeKey], *, remember: bool) -> int:
        with self.database.writing() as connection:
            known = catalog.kv_space_id(connection, self.kv_space_digest(kv_space)) is not None
            if not known and not self.room.allows(connection, _KV_SPACE_BYTES):
                return 0
            number = catalog.add_kv_space(connection, self.kv_space_digest(kv_space), kv_space)
            seen = count_seen(connection, number, keys)
            if remember:
                max_count = self.room.max_seen(self.room.limit_bytes(self.room.used_bytes(connection)))
                remember_seen(connection, number, keys, self.clock(), max_count)
            return seen

    def keep(
        self,
        kv_space: KvSpace,
        root: NodeKey,
        tokens: bytes,
        kv: Kv,
        *,
        evict: bool = True,
        also: OnPublish | None = None,
        app: AppRef | None = None,
        coder: Coder | None = None,
        base: DeltaBase | None = None,
        lossy: bool = False,
    ) -> Written:
        """Write the KV of `kv.span`, which begins at a block and reaches the end of `tokens`.

        `coder` says how it is coded, None: uncoded; with `base`, as a delta from it; `lossy`: it was quantized before.
        `also` runs in the transaction that makes it visible, and `app` is recorded as its user. Raises `Refused` if
        there is no space for it, or another process kept it first.
        """
        depth = kv.span.start // BLOCK_TOKENS
        keys = chain(root, tokens)
        parent = keys[depth - 1] if depth else root
        digest, part = self.kv_space_digest(kv_space), tokens[depth * BLOCK_BYTES :]
        plan = ExtentPlan(
            secrets.token_hex(8), digest, parent, kv_space.layout, part, self.digester.name, self.digester.width
        )
        coded = None if coder is None else self._encoded(plan, kv, coder, base)
        if coded is not None:
            plan = coded.plan
        if plan.coding is None or plan.coding.base_kv_space is None:
            base = None
        self.room.expire()  # expired KV takes space that can be used
        add = partial(catalog.add_kv_space, digest=digest, kv_space=kv_space)
        with self.room.reserved(plan, add, evict=evict, base=base, lossy=lossy) as room:
            written = self.extents.write(plan, kv.layers) if coded is None else self.extents.write_coded(coded)
            run = catalog.BlockRun(room.kv_space, depth, parent, keys[depth:], part)
            with self.database.writing() as connection:
                self.room.publish(connection, room, run, written, base)
                if app is not None:
                    self._note_user(connection, room, app, plan.blocks - 1)
                if also is not None:
                    also(connection, room.kv_space)
        return Written(room.extent, plan.file_bytes, written.header, "quantized" if lossy else plan.coded_as)

    def keep_first(
        self, kv_space: KvSpace, root: NodeKey, tokens: bytes, kv: Kv, *, base: DeltaBase | None = None, **how: Any
    ) -> Written:
        """`keep`, and where there is no space for all of it, of as many first blocks as there is space for; `how` as
        there. Raises `Refused` if there is none for a single one."""
        while True:
            try:
                return self.keep(kv_space, root, tokens, kv, base=base, **how)
            except NoRoom as refusal:
                if base is not None:  # it may be evicted for it
                    base = None
                    continue
                blocks = -(-len(kv.span) // BLOCK_TOKENS)
                fitting = min(blocks - 1, int(blocks * refusal.share))
                if fitting < 1:
                    raise
                kv = kv.part(Span(kv.span.start, kv.span.start + fitting * BLOCK_TOKENS))
                tokens = tokens[: kv.span.stop * TOKEN_BYTES]

    def _encoded(self, plan: ExtentPlan, kv: Kv, coder: Coder, base: DeltaBase | None) -> CodedExtent | None:
        try:
            return encode(self.database, self.extents, plan, lambda: kv.layers, coder, base)
        except (OSError, Damaged) as error:  # the base cannot be read: keep it whole
            if isinstance(error, Damaged) and error.extent is not None:
                self.lose(error.extent, error)
            return encode(self.database, self.extents, plan, lambda: kv.layers, coder, None)

    def find_base(self, kv_space: KvSpace, root: NodeKey, tokens: bytes, span: Span) -> DeltaBase | None:
        """The base for a delta of the KV of an adapter, which begins at a block."""
        keys = chain(root, tokens[: span.stop * TOKEN_BYTES])[span.start // BLOCK_TOKENS :]
        if kv_space.adapter is None or not keys:
            return None
        digest = self.kv_space_digest(kv_space)
        with self.database.reading() as connection:
            return find_base(connection, digest, kv_space.codec, kv_space.layout, keys, self.room.fresh())

    def open(self, row: catalog.Extent, kv_space_digest: str, *, fresh: bool = False) -> OpenExtent:
        """An extent with its bases; see `open_extent`."""
        return open_extent(self.database, self.extents, row, kv_space_digest, fresh=fresh)

    def _note_user(self, connection: sqlite3.Connection, room: Reservation, app: AppRef, last: int) -> None:
        now, allows = self.clock(), self.room.allows
        if (id := app_rows.record_request(connection, app, now, allows)) is not None:
            app_rows.add_user(connection, app_rows.UsedBlocks(room.extent, room.name, last), id, now, allows)

    def lose(self, name: str, error: Exception) -> None:
        """Stop serving an extent that could not be read: forget it if its file is missing, else quarantine it."""
        with self.database.writing() as connection:
            for row in catalog.extents(connection, "name=? AND state='live'", (name,)):
                if isinstance(error, FileNotFoundError):
                    catalog.cut(connection, row.id, 0)
                else:
                    catalog.quarantine(connection, row.id, str(error))

    def entries(self, names: Sequence[str] = ()) -> list[catalog.Extent]:
        """The extents that begin with these names, or all live ones. Raises `EntryNotFound`."""
        with self.database.reading() as connection:
            rows = sorted(catalog.extents(connection, "state='live'"), key=lambda row: row.id)
        return rows_named(rows, names) if names else rows

    def remove(self, rows: Sequence[catalog.Extent]) -> int:
        """Remove extents and their descendants, also pinned ones; returns the number of files removed."""
        self.room.rebase(rows)
        self.room.cut_all(rows)
        variant_rows.sweep(self.database)
        with self.database.writing() as connection:
            catalog.pin(connection, (), pinned=True)
        return self.room.sweep()

    def evict(self, chosen: Callable[[catalog.Extent], bool]) -> int:
        """Remove the extents for which `chosen` holds, unless they are pinned or continued by others; returns how
        many."""
        # The deepest first, so that nothing continues the next ones.
        going = [row for row in sorted(self.entries(), key=lambda row: -row.depth) if chosen(row) and not row.pinned]
        ids = {row.id for row in going}
        for row in going:
            with self.database.scanning() as connection:
                if catalog.has_children(connection, row.id):
                    continue
            self.room.rebase([row], also=ids)
            with self.database.writing() as connection:
                if not catalog.has_children(connection, row.id):
                    catalog.cut(connection, row.id, 0)
        return self.room.sweep()

    def pin(self, rows: Sequence[catalog.Extent], pinned: bool = True, *, tenant: str | None = None) -> None:
        """Never evict these extents and the extents they need; or allow it again.

        Pinned extents take at most half of the limit, and those of `tenant`, if given, a quarter. Raises `PinRefused`:
        then nothing has changed.
        """
        with self.database.writing() as connection:
            before = catalog.pinned_bytes(connection)
            catalog.pin(connection, [row.id for row in rows], pinned)
            if catalog.pinned_bytes(connection) > before:
                self.room.check_pinned(connection, tenant)

    def tidy(self) -> None:
        """All deferred work: expiry, recovery, removal of files, sparse extents, limits, the log."""
        self.room.recover()
        self.room.expire()
        self.room.expire_killed()
        with self.database.scanning() as connection:
            rests = variant_rows.cut_nonprefix(connection)
        self.room.cut_all(rests)
        self.room.sweep()
        self.room.compact()
        self.room.hold_limit()

    def collect(self) -> int:
        """`tidy`, and also remove stray files and the catalog's free space; returns the number of files removed."""
        self.tidy()
        variant_rows.sweep(self.database)
        removed = self.room.remove_strays()
        with self.database.writing() as connection:
            catalog.sweep_kv_spaces(connection)
        # Longer than the log's limit allows for anyway.
        longer = max(0, self.database.size_bytes() - self.database.log_limit_bytes)
        with self.database.scanning() as connection:
            has_room = self.room.allows(connection, longer)
        self.database.shrink(rewrite=has_room)
        return removed

    def _log_bytes(self, settings: StoreSettings) -> int:
        """The limit of the catalog's log: a small part of a small limit."""
        limit = parse_limit(settings.disk_limit)
        try:
            place = next((folder for folder in (self.folder, *self.folder.parents) if folder.is_dir()), self.folder)
            size_bytes = limit.resolve(self.files.free_bytes(place) if limit.size_bytes is None else 0)
        except OSError as error:
            raise CacheUnusable(f"The cache folder {self.folder} cannot be used: {error}.") from error
        return max(_MIN_LOG_BYTES, min(_MAX_LOG_BYTES, size_bytes // 6))

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.room.close()
        self.extents.close()
        self.database.close()


def check_present(_connection: sqlite3.Connection, _kv_space: int, present: Callable[[], bool] | None) -> None:
    """Raises `Refused` if the source of the KV was removed before the KV becomes visible."""
    if present is not None and not present():
        raise Refused("what it was computed from was removed meanwhile")


def rows_named(rows: Sequence[catalog.Extent], names: Sequence[str]) -> list[catalog.Extent]:
    """The rows that begin with these names, each of which must match exactly one. Raises `EntryNotFound`."""
    chosen = []
    for name in names:
        found = [row for row in rows if name and row.name.startswith(name)]
        if len(found) != 1:
            what = "There is no entry" if not found else f"{len(found)} entries begin with"
            raise EntryNotFound(f"{what} {name!r}. `rekindle cache ls` lists them.")
        chosen += found
    return chosen
