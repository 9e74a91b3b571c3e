"""The rows of anchors: which extent a difference stands on, and where such an extent could be found."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rekindle.core.keys import NodeKey, layout_text
from rekindle.core.kv import KvLayout
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
    marks = ",".join("?" * len(given := list(ids)))
    rows = catalog.extents(connection, f"id IN (SELECT extent FROM anchors WHERE anchor IN ({marks}))", given)
    return sorted(rows, key=lambda row: (-row.used, row.id))


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


def whole_run(
    connection: sqlite3.Connection, shelf: int, keys: Sequence[NodeKey], fresh: Fresh
) -> Anchoring | None:
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


def codings(connection: sqlite3.Connection, ids: Sequence[int]) -> dict[int, str]:
    """How those of the extents are coded that are."""
    marks = ",".join("?" * len(ids))
    found = connection.execute(f"SELECT id, coding FROM extents WHERE coding<>'raw' AND id IN ({marks})", list(ids))
    return dict(found.fetchall())
