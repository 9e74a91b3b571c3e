"""Checks every invariant of the catalog and every byte of the files, and repairs what it can."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rekindle.core.keys import BLOCK_BYTES, TOKEN_BYTES, Namespace, NodeKey, child_key
from rekindle.core.kv import Span
from rekindle.errors import CacheUnusable
from rekindle.store.catalog import catalog, variant_rows
from rekindle.store.disk import DiskStore
from rekindle.store.extents import SUFFIX, Damaged
from rekindle.store.folder import CATALOG, EXTENTS

_ATTEMPTS = 4
# What reading a damaged catalog may raise: SQLite's own errors, and rows of the wrong types.
_SENSELESS = (sqlite3.DatabaseError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
_NUMBERS = ("size_bytes", "depth", "blocks", "live", "tokens", "pinned", "kept", "used", "hits", "saved_ms")

Kind = Literal["catalog", "totals", "chain", "missing", "damaged", "quarantined", "stray", "rights"]


@dataclass(frozen=True)
class CacheProblem:
    """A problem, and the entry or file it is about."""

    kind: Kind
    entry: str
    what: str


@dataclass(frozen=True)
class CheckResult:
    """The result of a check. Entries under another key are counted, not read.

    `foreign` names other files among the entries: they are no problem, and never touched.
    """

    entries: int
    size_bytes: int
    under_other_keys: int
    problems: tuple[CacheProblem, ...]
    foreign: tuple[str, ...] = ()


def check(store: DiskStore, *, fix: bool = False, progress: Callable[[int, int], None] | None = None) -> CheckResult:
    """Read and verify everything. With `fix`, remove what is wrong: the rest is consistent, what was removed is
    recomputed.

    Entries that other processes add or remove meanwhile are no problem. Raises `CacheUnusable` if the catalog is
    locked.
    """
    try:
        found = _examine(store, progress)
    except _SENSELESS as error:
        if "locked" in str(error):
            raise CacheUnusable(f"The catalog of {store.folder} is locked by another program.") from error
        found = CheckResult(0, 0, 0, (CacheProblem("catalog", CATALOG, f"it cannot be made sense of: {error}"),))
    if fix and found.problems:
        _fix(store, found.problems)
    return found


def _examine(store: DiskStore, progress: Callable[[int, int], None] | None) -> CheckResult:
    if not store.database.read_only:
        store.room.recover()
        store.room.sweep()
        variant_rows.sweep(store.database)  # eviction leaves such rows: no problem
    found = list(_catalog_problems(store))
    with store.database.reading() as connection:
        rows = catalog.extents(connection, "state IN ('live', 'quarantined')")
        kv_spaces = dict(connection.execute("SELECT id, digest FROM kv_spaces").fetchall())
    others = 0
    for number, row in enumerate(rows):
        if row.state == "quarantined":
            found.append(CacheProblem("quarantined", row.name, row.reason or "unknown"))
        else:
            found += _entry_problems(store, row)
            if kv_spaces.get(row.kv_space, "").endswith(f":{store.digester.name}"):
                found += _file_problems(store, row, kv_spaces[row.kv_space])
            else:
                others += 1
        if progress is not None:
            progress(number + 1, len(rows))
    found += _stray_problems(store)
    foreign = tuple(sorted(store.place.foreign(EXTENTS)))
    return CheckResult(len(rows), sum(row.size_bytes for row in rows), others, tuple(found), foreign)


def _catalog_problems(store: DiskStore) -> Iterator[CacheProblem]:
    with store.database.reading() as connection:
        for (text,) in connection.execute("PRAGMA integrity_check"):
            if text != "ok":
                yield CacheProblem("catalog", CATALOG, str(text))
        total = int(connection.execute("SELECT coalesce(sum(bytes), 0) FROM extents").fetchone()[0])
        if total != catalog.total_bytes(connection):
            yield CacheProblem("totals", CATALOG, f"the extents take {total:,} bytes, the total says otherwise")
        homeless = connection.execute(
            "SELECT DISTINCT extent FROM blocks WHERE extent NOT IN (SELECT id FROM extents WHERE state='live')"
        )
        for (id,) in homeless:
            yield CacheProblem("chain", f"#{id}", "blocks of an extent that is not live")
        baseless = connection.execute(
            "SELECT DISTINCT a.extent FROM delta_bases a LEFT JOIN extents e ON e.id=a.base "
            "WHERE e.id IS NULL OR e.state<>'live' OR e.live<a.place+a.blocks"
        )
        for (id,) in baseless:
            yield CacheProblem("chain", _name(connection, id), "its delta base is missing")
        strangers = "SELECT count(*) FROM app_uses WHERE extent NOT IN (SELECT id FROM extents)"
        if connection.execute(strangers).fetchone()[0]:
            yield CacheProblem("chain", CATALOG, "uses by apps of extents that do not exist")


def _name(connection: sqlite3.Connection, id: int) -> str:
    row = catalog.extent(connection, id)
    return f"#{id}" if row is None else row.name


def _entry_problems(store: DiskStore, row: catalog.Extent) -> Iterator[CacheProblem]:
    with store.database.reading() as connection:
        now = catalog.extent(connection, row.id)
        if now is None or now.state != "live":
            return
        if not all(isinstance(getattr(now, field), (int, float)) for field in _NUMBERS):
            yield CacheProblem("chain", row.name, "a number in its row is invalid")
            return
        reason = _broken_chain(connection, now)
    if reason is not None:
        yield CacheProblem("chain", row.name, reason)


def _broken_chain(connection: sqlite3.Connection, row: catalog.Extent) -> str | None:
    blocks = connection.execute(
        "SELECT place, kv_space, key, parent, tokens FROM blocks WHERE extent=? ORDER BY place", (row.id,)
    ).fetchall()
    kv_space = connection.execute("SELECT identity, tenant, salt FROM kv_spaces WHERE id=?", (row.kv_space,)).fetchone()
    if [block[0] for block in blocks] != list(range(row.live)) or not blocks:
        return f"{len(blocks)} blocks are listed, {row.live} should be"
    if kv_space is None or any(block[1] != row.kv_space for block in blocks):
        return "its blocks are on another kv_space"
    above: NodeKey = blocks[0][3]
    if row.depth == 0:
        above = Namespace(*kv_space).root
    elif (
        connection.execute("SELECT 1 FROM blocks WHERE key=? AND kv_space=?", (above, row.kv_space)).fetchone() is None
    ):
        return "its prefix is missing"
    for place, _, key, parent, tokens in blocks:
        if parent != above or key != child_key(above, tokens):
            return f"block {place} has another key than its tokens give"
        if not tokens or (len(tokens) != BLOCK_BYTES and place != len(blocks) - 1):
            return f"block {place} is not a full block"
        above = key
    return None


def _file_problems(store: DiskStore, row: catalog.Extent, kv_space_digest: str) -> Iterator[CacheProblem]:
    try:
        _read_all(store, row, kv_space_digest)
    except FileNotFoundError:
        if _still_live(store, row):
            yield CacheProblem("missing", row.name, "its file is gone")
        return
    except (OSError, Damaged) as error:
        if _still_live(store, row):
            yield CacheProblem("damaged", row.name, str(error))
        return
    about = store.files.status(store.extents.path(row.name))
    if os.name == "posix" and about is not None and stat.S_ISREG(about.st_mode) and about.st_mode & 0o077:
        if about.st_nlink > 1:  # changing its permissions would change a file elsewhere: it goes instead
            yield CacheProblem("damaged", row.name, "others may read its file, which is also a file somewhere else")
        else:
            yield CacheProblem("rights", row.name, "others may read its file")


def _read_all(store: DiskStore, row: catalog.Extent, kv_space_digest: str) -> None:
    extent = store.open(row, kv_space_digest, fresh=True)
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


def _stray_problems(store: DiskStore) -> Iterator[CacheProblem]:
    names = store.place.own_files(EXTENTS)
    with store.database.reading() as connection:
        known = {row[0] + SUFFIX for row in connection.execute("SELECT name FROM extents")}
    for name in names:
        if name not in known and (store.extents.folder / name).exists():
            yield CacheProblem("stray", name, "no entry names this file")
    for name in store.place.own_files(""):
        yield CacheProblem("stray", name, "a catalog that was set aside")


def _fix(store: DiskStore, problems: Sequence[CacheProblem]) -> None:
    """Fix what can be fixed, repeatedly, since a fix may uncover something else; an unusable catalog is set aside."""
    try:
        for _ in range(_ATTEMPTS):
            _fix_once(store, problems)
            problems = _examine(store, None).problems
            if not problems:
                return
    except _SENSELESS:
        pass  # rows that can neither be read nor removed
    store.database.discard()
    store.collect()


def _fix_once(store: DiskStore, problems: Sequence[CacheProblem]) -> None:
    if any(problem.kind == "catalog" for problem in problems):
        with store.database.writing() as connection:
            connection.execute("REINDEX")
    with store.database.writing() as connection:
        for problem in problems:
            if problem.kind in ("chain", "missing", "damaged", "quarantined"):
                for row in catalog.extents(connection, "name=?", (problem.entry,)):
                    catalog.cut(connection, row.id, 0)
        connection.execute("DELETE FROM blocks WHERE extent NOT IN (SELECT id FROM extents WHERE state='live')")
        for table in ("app_uses", "delta_bases"):
            connection.execute(f"DELETE FROM {table} WHERE extent NOT IN (SELECT id FROM extents)")
        connection.execute("DELETE FROM totals")
        connection.execute("INSERT INTO totals (one, bytes) SELECT 1, coalesce(sum(bytes), 0) FROM extents")
    for problem in problems:
        if problem.kind == "rights":
            store.files.make_private(store.extents.path(problem.entry))
    store.collect()
