"""A cache folder: its catalog, its extents, its limits, together.

Errors of the system (`OSError`, `sqlite3.Error`) pass through: `store/tiered` is the place where they become a miss
or "not kept". Everything here works without a model and without torch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rekindle.codec.coder import Coder
from rekindle.codec.digest import digester_for
from rekindle.codec.extent import ExtentHeader, ExtentPlan
from rekindle.core.app import Asker
from rekindle.core.keys import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, NodeKey, Shelf, chain
from rekindle.core.kv import Kv, Span
from rekindle.core.size import parse_limit
from rekindle.errors import CacheUnusable, EntryNotFound
from rekindle.store import accounts, app_rows, catalog, variant_rows
from rekindle.store.anchors import Anchor, encode, find, open_extent
from rekindle.store.database import WRITE_TIMEOUT_SECONDS, Connect, Database
from rekindle.store.extents import ExtentFiles
from rekindle.store.files import Files
from rekindle.store.opened import CodedExtent, Damaged, OpenExtent
from rekindle.store.policy import NOBODY
from rekindle.store.room import Reserved, Room
from rekindle.store.settings import StoreSettings

CATALOG = "catalog.sqlite"
EXTENTS = "extents"
LIBRARIES = "knowledge"  # a folder of documents may stand in that of the cache, and be there first
Also = Callable[[sqlite3.Connection, int], None]  # with the number of the shelf
_LEAST_LOG_BYTES, _MOST_LOG_BYTES = 2 << 20, 8 << 20


@dataclass(frozen=True)
class Machine:
    """What a store stands on; tests put failing parts here."""

    files: Files = field(default_factory=Files)
    connect: Connect = sqlite3.connect
    clock: Callable[[], float] = time.time
    write_timeout_seconds: float = WRITE_TIMEOUT_SECONDS


@dataclass(frozen=True, eq=False)
class Written:
    """A keep that is published."""

    extent: int
    size_bytes: int
    header: ExtentHeader
    coding: str


class DiskStore:
    """The KV of one folder. Used from several threads and processes at once.

    Raises `CacheUnusable` if the folder cannot be one; what other processes left unfinished is tidied.
    """

    def __init__(self, folder: Path, settings: StoreSettings, machine: Machine | None = None) -> None:
        machine = machine or Machine()
        self.folder = folder.expanduser().absolute()
        _check_folder(self.folder)
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
        )
        self._narrow()
        self.extents = ExtentFiles(self.folder / EXTENTS, machine.files, self.digester)
        self.room = Room(self.folder, settings, self.database, self.extents, machine.clock)

    def shelf_digest(self, shelf: Shelf) -> str:
        """A shelf's name here: under another key the same KV is on another shelf, and simply not found."""
        return f"{shelf.digest}:{self.digester.name}"

    @contextmanager
    def view(self, shelf: Shelf, lost: Container[str] = ()) -> Iterator[catalog.View | None]:
        """The shelf's rows, as of one moment; None if nothing was ever kept on it."""
        with self.database.reading() as connection:
            number = catalog.shelf_id(connection, self.shelf_digest(shelf))
            yield None if number is None else catalog.View(connection, number, self.room.fresh(), lost)

    def admit(self, shelf: Shelf, keys: Sequence[NodeKey]) -> int:
        """How many of the chained keys were met before, for admission on second use; all are remembered."""
        with self.database.writing() as connection:
            number = catalog.add_shelf(connection, self.shelf_digest(shelf), shelf)
            most = self.room.most_seen(self.room.limit_bytes(self.room.used_bytes(connection)))
            return accounts.seen_before(connection, number, keys, self.clock(), most)

    def keep(
        self,
        shelf: Shelf,
        root: NodeKey,
        tokens: bytes,
        kv: Kv,
        *,
        evict: bool = True,
        also: Also | None = None,
        app: Asker | None = None,
        coder: Coder | None = None,
        anchor: Anchor | None = None,
        lossy: bool = False,
    ) -> Written:
        """Write the KV of `kv.span`, which begins at a block and reaches the end of `tokens`.

        `coder` is how, None: as it is; with `anchor`, as a difference from that; `lossy`: it had been
        quantized before. `also` is done in the transaction that makes it visible, and `app` noted as its user. Raises
        `Refused` if there is no room for it, or others were faster.
        """
        depth = kv.span.start // BLOCK_TOKENS
        keys = chain(root, tokens)
        parent = keys[depth - 1] if depth else root
        digest, part = self.shelf_digest(shelf), tokens[depth * BLOCK_BYTES :]
        plan = ExtentPlan(
            secrets.token_hex(8), digest, parent, shelf.layout, part, self.digester.name, self.digester.width
        )
        coded = None if coder is None else self._encoded(plan, kv, coder, anchor)
        if coded is not None:
            plan = coded.plan
        if plan.coding is None or plan.coding.anchor is None:
            anchor = None
        self.room.expire()  # what is too old to be found would be in the way
        add = partial(catalog.add_shelf, digest=digest, shelf=shelf)
        crowd = NOBODY
        if app is not None:
            with self.database.scanning() as connection:
                crowd = app_rows.crowd_of(connection, app)
        with self.room.reserved(plan, add, evict=evict, crowd=crowd, anchor=anchor, lossy=lossy) as room:
            written = self.extents.write(plan, kv.layers) if coded is None else self.extents.write_coded(coded)
            run = catalog.Run(room.shelf, depth, parent, keys[depth:], part)
            with self.database.writing() as connection:
                self.room.publish(connection, room, run, written, anchor)
                if app is not None:
                    self._note_user(connection, room, app, plan.blocks - 1)
                if also is not None:
                    also(connection, room.shelf)
        return Written(room.extent, plan.file_bytes, written.header, "near" if lossy else plan.coded_as)

    def _encoded(self, plan: ExtentPlan, kv: Kv, coder: Coder, anchor: Anchor | None) -> CodedExtent | None:
        try:
            return encode(self.database, self.extents, plan, lambda: kv.layers, coder, anchor)
        except (OSError, Damaged) as error:  # the anchor cannot be read: then it is kept whole
            if isinstance(error, Damaged) and error.extent is not None:
                self.lose(error.extent, error)
            return encode(self.database, self.extents, plan, lambda: kv.layers, coder, None)

    def anchor(self, shelf: Shelf, root: NodeKey, tokens: bytes, span: Span) -> Anchor | None:
        """What the KV of an adapter, of tokens from a block's beginning on, could be a difference from."""
        keys = chain(root, tokens[: span.stop * TOKEN_BYTES])[span.start // BLOCK_TOKENS :]
        if shelf.adapter is None or not keys:
            return None
        digest = self.shelf_digest(shelf)
        with self.database.reading() as connection:
            return find(connection, digest, shelf.codec, shelf.layout, keys, self.room.fresh())

    def open(self, row: catalog.Extent, shelf_digest: str, *, fresh: bool = False) -> OpenExtent:
        """An extent, with what it stands on; see `open_extent`."""
        return open_extent(self.database, self.extents, row, shelf_digest, fresh=fresh)

    def _note_user(self, connection: sqlite3.Connection, room: Reserved, app: Asker, last: int) -> None:
        now, allows = self.clock(), self.room.allows
        if (id := app_rows.see(connection, app, now, allows)) is not None:
            app_rows.add_user(connection, app_rows.Place(room.extent, room.name, last), id, now, allows)

    def lose(self, name: str, error: Exception) -> None:
        """Stop serving an extent that could not be read: forget it if its file is gone, else quarantine it."""
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
        return named(rows, names) if names else rows

    def remove(self, rows: Sequence[catalog.Extent]) -> int:
        """Remove extents and what hangs on them; how many files went. Pinned ones too: they were named."""
        self.room.rebase(rows)
        self.room.cut_all(rows)
        variant_rows.sweep(self.database)
        with self.database.writing() as connection:
            catalog.pin(connection, (), pinned=True)
        return self.room.sweep()

    def evict(self, chosen: Callable[[catalog.Extent], bool]) -> int:
        """Remove the extents for which `chosen` holds, unless they are pinned or others hang on them; how many."""
        # The deepest first, so that nothing hangs any more on what goes next.
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

    def pin(self, rows: Sequence[catalog.Extent], pinned: bool = True) -> None:
        """Never evict these extents and what they hang on; or allow it again."""
        with self.database.writing() as connection:
            catalog.pin(connection, [row.id for row in rows], pinned)

    def tidy(self) -> None:
        """Everything that may wait: expiry, what died halfway, files to remove, sparse extents, limits, the log."""
        self.room.recover()
        self.room.expire()
        self.room.expire_killed()
        with self.database.scanning() as connection:
            rests = variant_rows.loose_rests(connection)
        self.room.cut_all(rests)
        self.room.sweep()
        self.room.compact()
        self.room.hold_limit()

    def collect(self) -> int:
        """`tidy`, and also remove stray files, and give the catalog's free space back; how many files went."""
        self.tidy()
        variant_rows.sweep(self.database)
        removed = self.room.remove_strays()
        self.database.shrink()
        return removed

    def _log_bytes(self, settings: StoreSettings) -> int:
        """How long the catalog's log may become: a small part of a small limit."""
        limit = parse_limit(settings.disk_limit)
        place = next((folder for folder in (self.folder, *self.folder.parents) if folder.is_dir()), self.folder)
        try:
            size_bytes = limit.resolve(self.files.free_bytes(place) if limit.size_bytes is None else 0)
        except OSError as error:
            raise CacheUnusable(f"The cache folder {self.folder} cannot be used: {error}.") from error
        return max(_LEAST_LOG_BYTES, min(_MOST_LOG_BYTES, size_bytes // 6))

    def _narrow(self) -> None:
        """Take the rights of others away from a folder that was there before."""
        with contextlib.suppress(OSError):  # not ours to change: then it is as private as its owner wants it
            if os.name == "posix" and self.folder.stat().st_mode & 0o077:
                self.folder.chmod(0o700)

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.room.close()
        self.extents.close()
        self.database.close()


def named(rows: Sequence[catalog.Extent], names: Sequence[str]) -> list[catalog.Extent]:
    """Of the rows those that begin with these names, each of which must mean one. Raises `EntryNotFound`."""
    chosen = []
    for name in names:
        found = [row for row in rows if name and row.name.startswith(name)]
        if len(found) != 1:
            what = "There is no entry" if not found else f"{len(found)} entries begin with"
            raise EntryNotFound(f"{what} {name!r}. `rekindle cache ls` lists them.")
        chosen += found
    return chosen


def _check_folder(folder: Path) -> None:
    try:
        if folder.exists() and not folder.is_dir():
            raise CacheUnusable(f"{folder} is a file. Choose a folder for the cache.")
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise CacheUnusable(f"The cache folder {folder} cannot be read: {error}.") from error
    if names and not any(name.startswith(CATALOG) for name in names) and not names <= {EXTENTS, "writers", LIBRARIES}:
        raise CacheUnusable(f"{folder} holds other things than a cache. Choose an empty or new folder.")
