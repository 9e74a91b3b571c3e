"""The rows of anchors: which extent a difference stands on, and where such an extent could be found."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle.core.keys import BLOCK_TOKENS, NodeKey, layout_text
from rekindle.core.kv import KvLayout
from rekindle.index.prefix import Piece
from rekindle.store import catalog
from rekindle.store.catalog import Extent, Fresh


@dataclass(frozen=True, slots=True)
class Anchoring:
    """What a part of a difference stands on: its blocks from number `at` on are those of `anchor` from `place` on."""

    anchor: int
    at: int
    place: int
    blocks: int


def of(connection: sqlite3.Connection, id: int) -> tuple[Anchoring, ...]:
    """What a difference stands on, in order; of anything else, nothing."""
    rows = connection.execute("SELECT anchor, at, place, blocks FROM anchors WHERE extent=? ORDER BY at", (id,))
    return tuple(Anchoring(*row) for row in rows.fetchall())


def add(connection: sqlite3.Connection, id: int, parts: Sequence[Anchoring]) -> bool:
    """Note what a difference stands on; False if that is not there any more."""
    for part in parts:
        row = catalog.extent(connection, part.anchor)
        if row is None or row.state != "live" or row.live < part.place + part.blocks:
            return False
        connection.execute(
            "INSERT INTO anchors (extent, anchor, at, place, blocks) VALUES (?,?,?,?,?)",
            (id, part.anchor, part.at, part.place, part.blocks),
        )
    return True


def standing_on(connection: sqlite3.Connection, ids: Iterable[int]) -> list[Extent]:
    """The differences that stand on any of these extents, those used last first."""
    rows: dict[int, Extent] = {}
    for id in ids:  # one by one: a statement has room for so many numbers only
        found = catalog.extents(connection, "id IN (SELECT extent FROM anchors WHERE anchor=?)", (id,))
        rows.update((row.id, row) for row in found)
    return sorted(rows.values(), key=lambda row: (-row.used, row.id))


def with_descendants(connection: sqlite3.Connection, ids: Iterable[int]) -> set[int]:
    """Extents, and all that hang on them, on those again, and so on."""
    found = set(ids)
    todo = list(found)
    while todo:
        below = connection.execute(
            "SELECT DISTINCT c.extent FROM blocks b JOIN blocks c ON c.parent=b.key AND c.shelf=b.shelf "
            "WHERE b.extent=? AND c.extent<>b.extent",
            (todo.pop(),),
        ).fetchall()
        new = {id for (id,) in below} - found
        found |= new
        todo += new
    return found


def reaching(connection: sqlite3.Connection, anchor: int, place: int) -> dict[int, int]:
    """The differences that stand on an extent's blocks from `place` on, and with which block first."""
    rows = connection.execute(
        "SELECT extent, min(at+max(0, ?2-place)) FROM anchors WHERE anchor=?1 AND place+blocks>?2 GROUP BY extent",
        (anchor, place),
    )
    return dict(rows.fetchall())


def kindred(
    connection: sqlite3.Connection, shelf: str, codec: str, layout: KvLayout, key: NodeKey
) -> list[tuple[int, str]]:
    """Shelves, by number and digest, that differ from that one in the adapter alone and know a node; the base model's
    first, then in the order in which they came to know it."""
    rows = connection.execute(
        "SELECT s.id, s.digest FROM blocks b JOIN shelves s ON s.id=b.shelf WHERE b.key=?1 AND s.digest<>?2 "
        "AND s.codec=?3 AND s.layout=?4 AND substr(s.digest, instr(s.digest, ':'))=substr(?2, instr(?2, ':')) "
        "ORDER BY s.adapter IS NOT NULL, b.extent",
        (key, shelf, codec, layout_text(layout)),
    )
    return [(int(id), str(digest)) for id, digest in rows.fetchall()]


def whole_run(connection: sqlite3.Connection, shelf: int, keys: Sequence[NodeKey], fresh: Fresh) -> Anchoring | None:
    """The extent, no difference itself, that has the first of these blocks and how many after it; None if none has."""
    row = connection.execute(
        "SELECT b.extent, b.place FROM blocks b JOIN extents e ON e.id=b.extent WHERE b.key=? AND b.shelf=? "
        "AND e.state='live' AND (e.kept BETWEEN ? AND ? OR e.pinned) "
        "AND NOT EXISTS (SELECT 1 FROM anchors a WHERE a.extent=e.id)",
        (keys[0], shelf, fresh.oldest, fresh.newest),
    ).fetchone()
    if row is None:
        return None
    known = connection.execute(
        "SELECT key FROM blocks WHERE extent=? AND place>=? ORDER BY place LIMIT ?", (*row, len(keys))
    ).fetchall()
    same = [key == wanted for (key,), wanted in zip(known, keys, strict=False)]
    return Anchoring(int(row[0]), 0, int(row[1]), same.index(False) if False in same else len(same))


def codings(connection: sqlite3.Connection, ids: Sequence[int]) -> dict[int, tuple[str, int]]:
    """How those of the extents are coded that are, and how many tokens their files hold about."""
    marks = ",".join("?" * len(ids))
    select = f"SELECT id, coding, blocks FROM extents WHERE coding<>'raw' AND id IN ({marks})"
    return {id: (coding, blocks * BLOCK_TOKENS) for id, coding, blocks in connection.execute(select, list(ids))}


def coded_pieces(pieces: Sequence[Piece], known: Mapping[int, tuple[str, int]]) -> tuple[Piece, ...]:
    """The pieces, with how they are coded. What is coded without loss is decoded as a whole."""
    told = []
    for piece in pieces:
        coding, tokens = known.get(piece.extent, ("raw", 0))
        beside = max(0, tokens - len(piece.span)) if coding == "exact" else 0
        told.append(replace(piece, coding=coding, beside=beside))
    return tuple(told)
