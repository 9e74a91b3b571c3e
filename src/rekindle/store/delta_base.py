"""Deltas and their bases: KV of the same tokens under the base model, or under another adapter.

    KV space of the base   [block][block][block][block]      whole: the delta base
    KV space of an adapter [    delta     ][ whole ...]      the part that the base covers, and the rest

All adapters of a namespace have the same nodes, so a base is found by the keys of its blocks. A base is never a delta
itself: to read a delta, one other extent is read per place, never a chain of them. Eviction leaves the base of a delta
alone; if it must go, the delta is re-based before, or goes with it (`catalog.cut` guarantees that).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from rekindle.codec.coder import Coder
from rekindle.codec.extent import ExtentPlan
from rekindle.core.keys import BLOCK_TOKENS, NodeKey, chain, layout_text
from rekindle.core.kv import KvLayout, LayerKv
from rekindle.store.catalog import catalog
from rekindle.store.catalog.catalog import Extent, Fresh
from rekindle.store.catalog.database import Database
from rekindle.store.extents import BaseFile, CodedExtent, ExtentFiles, OpenBase, OpenExtent
from rekindle.store.prefix_index import Piece


@dataclass(frozen=True, slots=True)
class BaseBlocks:
    """The base of a part of a delta: its blocks from number `at` on are those of the extent `base` from `place` on."""

    base: int
    at: int
    place: int
    blocks: int


@dataclass(frozen=True)
class DeltaBase:
    """The KV space, by its digest, and the extents in it that cover the first `blocks` blocks of a run."""

    kv_space: str
    parts: tuple[BaseBlocks, ...]

    @property
    def blocks(self) -> int:
        """The number of blocks of the run that it covers, from the first on."""
        return self.parts[-1].at + self.parts[-1].blocks if self.parts else 0

    def until(self, blocks: int) -> DeltaBase:
        """The same for the first `blocks` blocks only."""
        parts = [replace(p, blocks=min(p.blocks, blocks - p.at)) for p in self.parts if p.at < blocks]
        return DeltaBase(self.kv_space, tuple(parts))


def find_base(
    connection: sqlite3.Connection,
    kv_space: str,
    codec: str,
    layout: KvLayout,
    keys: Sequence[NodeKey],
    fresh: Fresh,
    without: Container[int] = (),
) -> DeltaBase | None:
    """The base of which a run of blocks with these keys, in that KV space, could be a delta; None if there is none.

    KV of the base model before an adapter's; among adapters the oldest, unless another covers more.
    """
    best: DeltaBase | None = None
    for number, digest in _sibling_kv_spaces(connection, kv_space, codec, layout, keys[0]):
        found = DeltaBase(digest, _cover(connection, number, keys, fresh, without))
        if found.blocks > (best.blocks if best else 0):
            best = found
    return best


def base_of_copy(
    connection: sqlite3.Connection,
    row: Extent,
    plan: ExtentPlan,
    tokens: bytes,
    fresh: Fresh,
    without: Container[int] | None,
) -> DeltaBase | None:
    """The base of a copy of an extent's live tokens: the same as before, unless that is about to go."""
    if plan.coding is None or plan.coding.base_kv_space is None or not tokens:
        return None
    keys = chain(plan.parent, tokens)
    if without is None:
        return DeltaBase(plan.coding.base_kv_space, bases_of(connection, row.id)).until(len(keys))
    (codec,) = connection.execute("SELECT codec FROM kv_spaces WHERE id=?", (row.kv_space,)).fetchone()
    found = find_base(connection, plan.kv_space, codec, plan.layout, keys, fresh, without)
    return found if found is not None and found.blocks == len(keys) else None


def encode(
    database: Database,
    extents: ExtentFiles,
    plan: ExtentPlan,
    layers: Callable[[], Iterable[LayerKv]],
    coder: Coder,
    base: DeltaBase | None,
) -> CodedExtent | None:
    """The KV as it will be written; None if it is written uncoded, by choice or because it cannot be coded.

    Raises as reading does if the base cannot be read.
    """
    if base is None:
        if coder.whole is None:
            return None
        opened: tuple[OpenBase, ...] = ()
    else:
        with database.reading() as connection:
            files = base_files(connection, base.parts)
        opened = extents.open_bases(files, plan)
    try:
        return extents.encode(plan, layers(), coder, None if base is None else base.kv_space, opened)
    except ValueError:  # numbers that are not finite
        return None
    finally:
        for part in opened:
            extents.release(part.extent)


def _sibling_kv_spaces(
    connection: sqlite3.Connection, kv_space: str, codec: str, layout: KvLayout, key: NodeKey
) -> list[tuple[int, str]]:
    """KV spaces, by number and digest, that differ only in the adapter and contain the node `key`.

    The base model's first, then in the order in which they kept it.
    """
    rows = connection.execute(
        "SELECT s.id, s.digest FROM blocks b JOIN kv_spaces s ON s.id=b.kv_space WHERE b.key=:key AND s.digest<>:own "
        "AND s.codec=:codec AND s.layout=:layout "
        "AND substr(s.digest, instr(s.digest, ':'))=substr(:own, instr(:own, ':')) "
        "ORDER BY s.adapter IS NOT NULL, b.extent",
        {"key": key, "own": kv_space, "codec": codec, "layout": layout_text(layout)},
    )
    return rows.fetchall()


def _cover(
    connection: sqlite3.Connection, kv_space: int, keys: Sequence[NodeKey], fresh: Fresh, without: Container[int]
) -> tuple[BaseBlocks, ...]:
    """The extents, not deltas, that hold the first of these blocks without a gap."""
    parts: list[BaseBlocks] = []
    at = 0
    while at < len(keys):
        row = connection.execute(
            "SELECT b.extent, b.place FROM blocks b JOIN extents e ON e.id=b.extent WHERE b.key=? AND b.kv_space=? "
            "AND e.state='live' AND (e.kept BETWEEN ? AND ? OR e.pinned) "
            "AND NOT EXISTS (SELECT 1 FROM delta_bases a WHERE a.extent=e.id)",
            (keys[at], kv_space, fresh.oldest, fresh.newest),
        ).fetchone()
        if row is None or row[0] in without:
            break
        following = connection.execute(
            "SELECT key FROM blocks WHERE extent=? AND place>=? ORDER BY place LIMIT ?", (*row, len(keys) - at)
        ).fetchall()
        same = [key == wanted for (key,), wanted in zip(following, keys[at:], strict=False)]
        parts.append(BaseBlocks(row[0], at, row[1], same.index(False) if False in same else len(same)))
        at += parts[-1].blocks
    return tuple(parts)


def open_extent(
    database: Database, extents: ExtentFiles, row: Extent, kv_space_digest: str, *, fresh: bool = False
) -> OpenExtent:
    """Open an extent with its bases. Release it. Raises `Damaged` or `OSError`."""
    if row.coding == "raw":
        return extents.open(row, kv_space_digest, fresh=fresh)
    for last in (False, True):
        with database.reading() as connection:
            stands_on = base_files(connection, bases_of(connection, row.id))
        try:
            return extents.open(row, kv_space_digest, stands_on, fresh=fresh)
        except FileNotFoundError:  # its base may have been rewritten meanwhile
            if last:
                raise
    raise AssertionError("it was opened, or could not be")


def base_files(connection: sqlite3.Connection, parts: Sequence[BaseBlocks]) -> list[BaseFile]:
    """The files of parts of a base. Raises `FileNotFoundError` if one is no longer listed."""
    files = []
    for part in parts:
        row = catalog.extent(connection, part.base)
        if row is None or row.state != "live" or row.live < part.place + part.blocks:
            raise FileNotFoundError("its delta base was evicted meanwhile")
        (digest,) = connection.execute("SELECT digest FROM kv_spaces WHERE id=?", (row.kv_space,)).fetchone()
        files.append(BaseFile(row, digest, part.at, part.place, part.blocks))
    return files


def bases_of(connection: sqlite3.Connection, id: int) -> tuple[BaseBlocks, ...]:
    """The base of a delta, in order; empty for other extents."""
    rows = connection.execute("SELECT base, at, place, blocks FROM delta_bases WHERE extent=? ORDER BY at", (id,))
    return tuple(BaseBlocks(*row) for row in rows.fetchall())


def add_base(connection: sqlite3.Connection, id: int, parts: Sequence[BaseBlocks]) -> bool:
    """Record the base of a delta; False if the base was removed."""
    for part in parts:
        row = catalog.extent(connection, part.base)
        if row is None or row.state != "live" or row.live < part.place + part.blocks:
            return False
        connection.execute(
            "INSERT INTO delta_bases (extent, base, at, place, blocks) VALUES (?,?,?,?,?)",
            (id, part.base, part.at, part.place, part.blocks),
        )
    return True


def deltas_of(connection: sqlite3.Connection, ids: Iterable[int]) -> list[Extent]:
    """The deltas from any of these extents, most recently used first."""
    rows: dict[int, Extent] = {}
    for id in ids:  # one by one: the number of variables of a statement is limited
        found = catalog.extents(connection, "id IN (SELECT extent FROM delta_bases WHERE base=?)", (id,))
        rows.update((row.id, row) for row in found)
    return sorted(rows.values(), key=lambda row: (-row.used, row.id))


def with_descendants(connection: sqlite3.Connection, ids: Iterable[int]) -> set[int]:
    """Extents and all their descendants."""
    found = set(ids)
    todo = list(found)
    while todo:
        below = connection.execute(
            "SELECT DISTINCT c.extent FROM blocks b JOIN blocks c ON c.parent=b.key AND c.kv_space=b.kv_space "
            "WHERE b.extent=? AND c.extent<>b.extent",
            (todo.pop(),),
        ).fetchall()
        new = {id for (id,) in below} - found
        found |= new
        todo += new
    return found


def reaching(connection: sqlite3.Connection, base: int, place: int) -> dict[int, int]:
    """The deltas based on an extent's blocks from `place` on, each with its first block that depends on them."""
    rows = connection.execute(
        "SELECT extent, min(at+max(0, :place-place)) FROM delta_bases WHERE base=:base AND place+blocks>:place "
        "GROUP BY extent",
        {"base": base, "place": place},
    )
    return dict(rows.fetchall())


def coded_pieces(connection: sqlite3.Connection, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The pieces with their coding. Losslessly coded KV is decoded as a whole."""
    marks = ",".join("?" * len(pieces))
    select = f"SELECT id, coding, blocks FROM extents WHERE coding<>'raw' AND id IN ({marks})"
    coded = {id: rest for id, *rest in connection.execute(select, [piece.extent for piece in pieces])}
    reported = []
    for piece in pieces:
        coding, blocks = coded.get(piece.extent, ("raw", 0))
        overread = max(0, blocks * BLOCK_TOKENS - len(piece.span)) if coding == "exact" else 0
        reported.append(replace(piece, coding=coding, overread=overread) if coding != "raw" else piece)
    return tuple(reported)
