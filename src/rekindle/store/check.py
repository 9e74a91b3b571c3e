"""Is everything in a cache folder what it should be? Every promise of the catalog and every byte of the files."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rekindle.core.keys import BLOCK_BYTES, TOKEN_BYTES, Namespace, NodeKey, child_key
from rekindle.core.kv import Span
from rekindle.errors import CacheUnusable
from rekindle.store import catalog, variant_rows
from rekindle.store.disk import CATALOG, DiskStore
from rekindle.store.extents import SUFFIX
from rekindle.store.opened import Damaged

_ATTEMPTS = 4
# What reading a catalog gives whose bits were flipped: SQLite's own complaints, and rows of the wrong types.
_SENSELESS = (sqlite3.DatabaseError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
_NUMBERS = ("size_bytes", "depth", "blocks", "live", "tokens", "pinned", "kept", "used", "hits", "saved_ms")

Kind = Literal["catalog", "totals", "chain", "missing", "damaged", "quarantined", "stray", "rights"]


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be, and whose it is."""

    kind: Kind
    entry: str
    what: str


@dataclass(frozen=True)
class Checked:
    """What a check found: nothing is good. Entries under another key are counted, not read."""

    entries: int
    size_bytes: int
    under_other_keys: int
    problems: tuple[Problem, ...]


def check(store: DiskStore, *, fix: bool = False, progress: Callable[[int, int], None] | None = None) -> Checked:
    """Read and verify everything. With `fix`, remove what is wrong: what is left is sound, what went is computed again.

    Entries that come or go meanwhile are no problem. Raises `CacheUnusable` if the catalog is locked.
    """
    try:
        found = _examine(store, progress)
    except _SENSELESS as error:
        if "locked" in str(error):
            raise CacheUnusable(f"The catalog of {store.folder} is locked by another program.") from error
        found = Checked(0, 0, 0, (Problem("catalog", CATALOG, f"it cannot be made sense of: {error}"),))
    if fix and found.problems:
        _fix(store, found.problems)
    return found


def _examine(store: DiskStore, progress: Callable[[int, int], None] | None) -> Checked:
    if not store.database.read_only:
        store.room.recover()
        store.room.sweep()
        variant_rows.sweep(store.database)  # eviction leaves such rows behind: that is no problem
    found = list(_catalog_problems(store))
    with store.database.reading() as connection:
        rows = catalog.extents(connection, "state IN ('live', 'quarantined')")
        shelves = dict(connection.execute("SELECT id, digest FROM shelves").fetchall())
    others = 0
    for number, row in enumerate(rows):
        if row.state == "quarantined":
            found.append(Problem("quarantined", row.name, row.reason or "unknown"))
        else:
            found += _entry_problems(store, row)
            if shelves.get(row.shelf, "").endswith(f":{store.digester.name}"):
                found += _file_problems(store, row, shelves[row.shelf])
            else:
                others += 1
        if progress is not None:
            progress(number + 1, len(rows))
    found += _stray_problems(store)
    return Checked(len(rows), sum(row.size_bytes for row in rows), others, tuple(found))


def _catalog_problems(store: DiskStore) -> Iterator[Problem]:
    with store.database.reading() as connection:
        for (text,) in connection.execute("PRAGMA integrity_check"):
            if text != "ok":
                yield Problem("catalog", CATALOG, str(text))
        total = int(connection.execute("SELECT coalesce(sum(bytes), 0) FROM extents").fetchone()[0])
        if total != catalog.total_bytes(connection):
            yield Problem("totals", CATALOG, f"the extents take {total:,} bytes, the total says otherwise")
        homeless = connection.execute(
            "SELECT DISTINCT extent FROM blocks WHERE extent NOT IN (SELECT id FROM extents WHERE state='live')"
        )
        for (id,) in homeless:
            yield Problem("chain", f"#{id}", "blocks of an extent that is not live")
        baseless = connection.execute(
            "SELECT DISTINCT a.extent FROM anchors a LEFT JOIN extents e ON e.id=a.anchor "
            "WHERE e.id IS NULL OR e.state<>'live' OR e.live<a.place+a.blocks"
        )
        for (id,) in baseless:
            yield Problem("chain", _name(connection, id), "what it is a difference from is gone")
        strangers = "SELECT count(*) FROM users WHERE extent NOT IN (SELECT id FROM extents)"
        if connection.execute(strangers).fetchone()[0]:
            yield Problem("chain", CATALOG, "uses by apps of extents that are gone")


def _name(connection: sqlite3.Connection, id: int) -> str:
    row = catalog.extent(connection, id)
    return f"#{id}" if row is None else row.name


def _entry_problems(store: DiskStore, row: catalog.Extent) -> Iterator[Problem]:
    with store.database.reading() as connection:
        now = catalog.extent(connection, row.id)
        if now is None or now.state != "live":
            return
        if not all(isinstance(getattr(now, field), (int, float)) for field in _NUMBERS):
            yield Problem("chain", row.name, "a number of its row is none")
            return
        reason = _broken_chain(connection, now)
    if reason is not None:
        yield Problem("chain", row.name, reason)


def _broken_chain(connection: sqlite3.Connection, row: catalog.Extent) -> str | None:
    blocks = connection.execute(
        "SELECT place, shelf, key, parent, tokens FROM blocks WHERE extent=? ORDER BY place", (row.id,)
    ).fetchall()
    shelf = connection.execute("SELECT identity, tenant, salt FROM shelves WHERE id=?", (row.shelf,)).fetchone()
    if [block[0] for block in blocks] != list(range(row.live)) or not blocks:
        return f"{len(blocks)} blocks are listed, {row.live} should be"
    if shelf is None or any(block[1] != row.shelf for block in blocks):
        return "its blocks are on another shelf"
    above: NodeKey = blocks[0][3]
    if row.depth == 0:
        above = Namespace(*shelf).root
    elif connection.execute("SELECT 1 FROM blocks WHERE key=? AND shelf=?", (above, row.shelf)).fetchone() is None:
        return "what it hangs on is gone"
    for place, _, key, parent, tokens in blocks:
        if parent != above or key != child_key(above, tokens):
            return f"block {place} has another key than its tokens give"
        if not tokens or (len(tokens) != BLOCK_BYTES and place != len(blocks) - 1):
            return f"block {place} is not a full block"
        above = key
    return None


def _file_problems(store: DiskStore, row: catalog.Extent, shelf_digest: str) -> Iterator[Problem]:
    try:
        _read_all(store, row, shelf_digest)
    except FileNotFoundError:
        if _still_live(store, row):
            yield Problem("missing", row.name, "its file is gone")
        return
    except (OSError, Damaged) as error:
        if _still_live(store, row):
            yield Problem("damaged", row.name, str(error))
        return
    with contextlib.suppress(FileNotFoundError):  # removed in this moment
        if os.name == "posix" and store.extents.path(row.name).stat().st_mode & 0o077:
            yield Problem("rights", row.name, "others may read its file")


def _read_all(store: DiskStore, row: catalog.Extent, shelf_digest: str) -> None:
    extent = store.open(row, shelf_digest, fresh=True)
    try:
        plan = extent.header.plan
        with store.database.reading() as connection:
            tokens = catalog.tokens_of(connection, row.id)
        if tokens != plan.tokens[: len(tokens)]:
            raise Damaged("it holds other tokens than its rows say")
        count = len(tokens) // TOKEN_BYTES
        for layer in range(len(plan.layout.layers)):
            store.extents.read(extent, layer, Span(0, count), plan.empty(layer, count))
    finally:
        store.extents.release(extent)


def _still_live(store: DiskStore, row: catalog.Extent) -> bool:
    with store.database.reading() as connection:
        now = catalog.extent(connection, row.id)
    return now is not None and now.state == "live"


def _stray_problems(store: DiskStore) -> Iterator[Problem]:
    names = store.files.names(store.extents.folder)
    with store.database.reading() as connection:
        known = {row[0] + SUFFIX for row in connection.execute("SELECT name FROM extents")}
    for name in names:
        if name not in known and (store.extents.folder / name).exists():
            yield Problem("stray", name, "no entry names this file")
    for name in store.files.names(store.folder):
        if name.startswith(f"{CATALOG}.broken-"):
            yield Problem("stray", name, "a catalog that was set aside")


def _fix(store: DiskStore, problems: Sequence[Problem]) -> None:
    """Mend what can be mended, as often as that uncovers something else; a catalog that cannot be is set aside."""
    try:
        for _ in range(_ATTEMPTS):
            _fix_once(store, problems)
            problems = _examine(store, None).problems
            if not problems:
                return
    except _SENSELESS:
        pass  # rows that cannot even be read or removed
    store.database.discard()
    store.collect()


def _fix_once(store: DiskStore, problems: Sequence[Problem]) -> None:
    if any(problem.kind == "catalog" for problem in problems):
        with store.database.writing() as connection:
            connection.execute("REINDEX")
    with store.database.writing() as connection:
        for problem in problems:
            if problem.kind in ("chain", "missing", "damaged", "quarantined"):
                for row in catalog.extents(connection, "name=?", (problem.entry,)):
                    catalog.cut(connection, row.id, 0)
        connection.execute("DELETE FROM blocks WHERE extent NOT IN (SELECT id FROM extents WHERE state='live')")
        for table in ("users", "anchors"):
            connection.execute(f"DELETE FROM {table} WHERE extent NOT IN (SELECT id FROM extents)")
        connection.execute("DELETE FROM totals")
        connection.execute("INSERT INTO totals (one, bytes) SELECT 1, coalesce(sum(bytes), 0) FROM extents")
    for problem in problems:
        if problem.kind == "rights":
            store.extents.path(problem.entry).chmod(0o600)
    store.collect()
