"""The rows of delta bases: which extents a delta is taken from, and where a base could be found."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle.core.keys import BLOCK_TOKENS, NodeKey, layout_text
from rekindle.core.kv import KvLayout
from rekindle.store.catalog import catalog
from rekindle.store.catalog.catalog import Extent, Fresh
from rekindle.store.prefix_index import Piece


@dataclass(frozen=True, slots=True)
class BaseBlocks:
    """The base of a part of a delta: its blocks from number `at` on are those of the extent `base` from `place` on."""

    base: int
    at: int
    place: int
    blocks: int


def bases_of(connection: sqlite3.Connection, id: int) -> tuple[BaseBlocks, ...]:
    """The base of a delta, in order; empty for other extents."""
    rows = connection.execute("SELECT base, at, place, blocks FROM delta_bases WHERE extent=? ORDER BY at", (id,))
    return tuple(BaseBlocks(*row) for row in rows.fetchall())


def add(connection: sqlite3.Connection, id: int, parts: Sequence[BaseBlocks]) -> bool:
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


def sibling_kv_spaces(
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
    return [(int(id), str(digest)) for id, digest in rows.fetchall()]


def whole_run(
    connection: sqlite3.Connection, kv_space: int, keys: Sequence[NodeKey], fresh: Fresh
) -> BaseBlocks | None:
    """The extent, not a delta, that has the first of these blocks, and how many follow in it; None if none has."""
    row = connection.execute(
        "SELECT b.extent, b.place FROM blocks b JOIN extents e ON e.id=b.extent WHERE b.key=? AND b.kv_space=? "
        "AND e.state='live' AND (e.kept BETWEEN ? AND ? OR e.pinned) "
        "AND NOT EXISTS (SELECT 1 FROM delta_bases a WHERE a.extent=e.id)",
        (keys[0], kv_space, fresh.oldest, fresh.newest),
    ).fetchone()
    if row is None:
        return None
    rows = connection.execute(
        "SELECT key FROM blocks WHERE extent=? AND place>=? ORDER BY place LIMIT ?", (*row, len(keys))
    ).fetchall()
    same = [key == wanted for (key,), wanted in zip(rows, keys, strict=False)]
    return BaseBlocks(int(row[0]), 0, int(row[1]), same.index(False) if False in same else len(same))


def codings(connection: sqlite3.Connection, ids: Sequence[int]) -> dict[int, tuple[str, int]]:
    """The coding of those extents that are coded, and about how many tokens each file holds."""
    marks = ",".join("?" * len(ids))
    select = f"SELECT id, coding, blocks FROM extents WHERE coding<>'raw' AND id IN ({marks})"
    return {id: (coding, blocks * BLOCK_TOKENS) for id, coding, blocks in connection.execute(select, list(ids))}


def coded_pieces(pieces: Sequence[Piece], coded: Mapping[int, tuple[str, int]]) -> tuple[Piece, ...]:
    """The pieces with their coding. Losslessly coded KV is decoded as a whole."""
    reported = []
    for piece in pieces:
        coding, tokens = coded.get(piece.extent, ("raw", 0))
        overread = max(0, tokens - len(piece.span)) if coding == "exact" else 0
        reported.append(replace(piece, coding=coding, overread=overread))
    return tuple(reported)
