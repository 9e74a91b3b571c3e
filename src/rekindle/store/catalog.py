"""The catalog: the only truth about what is in a cache folder.

Methods take the transaction they belong to. Whoever changes rows here keeps four promises: an extent's live rows
are its first places, every block's parent is there (chains are prefix-closed), what a difference stands on is there,
and an extent has a row for as long as its file may exist.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rekindle.core.keys import BLOCK_BYTES, TOKEN_BYTES, NodeKey, Shelf, layout_text
from rekindle.index.prefix import Neighbour, Spot


@dataclass(frozen=True)
class Extent:
    """A row of the table of extents."""

    id: int
    name: str
    shelf: int
    state: str
    size_bytes: int
    writer: str
    digest: bytes | None
    depth: int
    blocks: int
    live: int
    tokens: int
    pinned: int
    kept: float
    used: float
    hits: int
    saved_ms: float
    reason: str | None
    coding: str = "raw"


_COLUMNS = (
    "id, name, shelf, state, bytes, writer, digest, depth, blocks, live, tokens, pinned, kept, used, hits, saved_ms, "
    "reason, coding"
)


@dataclass(frozen=True, slots=True)
class Tail:
    """The last live block of an extent, which nothing hangs on: what eviction chooses among."""

    extent: int
    live: int
    blocks: int
    size_bytes: int
    hits: int
    used: float
    tokens: int = 0  # of the extent's live blocks
    shelf: int = 0


@dataclass(frozen=True, slots=True)
class Fresh:
    """When an extent must have been kept to be served. One from the future, of a clock since put right, has no age."""

    oldest: float
    newest: float


@dataclass(frozen=True)
class View:
    """The rows of one shelf, in one read transaction.

    Extents kept outside of `fresh` are expired, unless pinned; those in `lost` could not be read a moment ago.
    """

    connection: sqlite3.Connection
    shelf: int
    fresh: Fresh
    lost: Container[str] = ()

    def find(self, key: NodeKey) -> Spot | None:
        """The block of a node."""
        row = self.connection.execute(
            "SELECT extent, place FROM blocks WHERE key=? AND shelf=?", (key, self.shelf)
        ).fetchone()
        return None if row is None else Spot(*row)

    def name(self, extent: int) -> str | None:
        """The name of an extent, if it may be used."""
        row = self.connection.execute(
            "SELECT name FROM extents WHERE id=? AND state='live' AND (kept BETWEEN ? AND ? OR pinned)",
            (extent, self.fresh.oldest, self.fresh.newest),
        ).fetchone()
        return None if row is None or row[0] in self.lost else str(row[0])

    def tokens(self, spot: Spot) -> bytes:
        """The tokens of an extent's blocks up to and with that place."""
        rows = self.connection.execute(
            "SELECT tokens FROM blocks WHERE extent=? AND place<=? ORDER BY place", (spot.extent, spot.place)
        )
        return b"".join([row[0] for row in rows])

    def neighbours(self, parent: NodeKey, tokens: bytes) -> Sequence[Neighbour]:
        """The children of `parent` next to `tokens`, below (or at) and above."""
        select = "SELECT extent, place, tokens FROM blocks WHERE parent=? AND shelf=? AND tokens"
        found = [
            self.connection.execute(f"{select}<=? ORDER BY tokens DESC LIMIT 1", (parent, self.shelf, tokens)),
            self.connection.execute(f"{select}>? ORDER BY tokens LIMIT 1", (parent, self.shelf, tokens)),
        ]
        return [Neighbour(Spot(row[0], row[1]), row[2]) for cursor in found for row in cursor.fetchall()]

    def children(self, parent: NodeKey, most: int) -> list[bytes]:
        """The tokens of the blocks that hang on `parent`, in order of their bytes."""
        select = "SELECT tokens FROM blocks WHERE parent=? AND shelf=? ORDER BY tokens LIMIT ?"
        return [row[0] for row in self.connection.execute(select, (parent, self.shelf, most)).fetchall()]


def shelf_id(connection: sqlite3.Connection, digest: str) -> int | None:
    """The number of a shelf that has been used before."""
    row = connection.execute("SELECT id FROM shelves WHERE digest=?", (digest,)).fetchone()
    return None if row is None else int(row[0])


def add_shelf(connection: sqlite3.Connection, digest: str, shelf: Shelf) -> int:
    """The number of a shelf, new or not."""
    names = shelf.namespace
    fields = (digest, shelf.model, names.identity, names.tenant, names.salt, shelf.adapter, shelf.codec)
    connection.execute(
        "INSERT OR IGNORE INTO shelves (digest, model, identity, tenant, salt, adapter, codec, layout) "
        "VALUES (?,?,?,?,?,?,?,?)",
        (*fields, layout_text(shelf.layout)),
    )
    found = shelf_id(connection, digest)
    if found is None:
        raise LookupError("a shelf that was added is not there")
    return found


def total_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of all extents: written, being written, and not yet removed."""
    return int(connection.execute("SELECT bytes FROM totals").fetchone()[0])


def extents(connection: sqlite3.Connection, where: str = "1", values: Sequence[object] = ()) -> list[Extent]:
    """The extents for which `where` holds."""
    return [Extent(*row) for row in connection.execute(f"SELECT {_COLUMNS} FROM extents WHERE {where}", values)]


def extent(connection: sqlite3.Connection, id: int) -> Extent | None:
    """The extent of that number."""
    found = extents(connection, "id=?", (id,))
    return found[0] if found else None


def tokens_of(connection: sqlite3.Connection, id: int) -> bytes:
    """The tokens of an extent's live blocks."""
    parts = connection.execute("SELECT tokens FROM blocks WHERE extent=? ORDER BY place", (id,))
    return b"".join([part for (part,) in parts])


def sparse(connection: sqlite3.Connection, digest_name: str) -> list[tuple[Extent, str]]:
    """Extents of which less than half is live, with the digests of their shelves; those under other keys left out, and
    quantized ones that others stand on: coded again they would be other numbers."""
    columns = ", ".join(f"e.{column}" for column in _COLUMNS.split(", "))
    rows = connection.execute(
        f"SELECT {columns}, s.digest FROM extents e JOIN shelves s ON s.id=e.shelf "
        "WHERE e.state='live' AND e.live*2<e.blocks AND e.live>0 AND substr(s.digest, -length(?))=? "
        "AND NOT (e.coding='near' AND EXISTS (SELECT 1 FROM anchors a WHERE a.anchor=e.id))",
        (f":{digest_name}",) * 2,
    )
    return [(Extent(*row[:-1]), row[-1]) for row in rows]


def freeable_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of all extents that are not pinned and not being written: what eviction could free at most."""
    return int(
        connection.execute(
            "SELECT coalesce(sum(bytes), 0) FROM extents WHERE NOT pinned AND state<>'writing'"
        ).fetchone()[0]
    )


def reserve(
    connection: sqlite3.Connection, name: str, shelf: int, size_bytes: int, writer: str, coding: str = "raw"
) -> int:
    """Count the bytes of a file before it exists."""
    cursor = connection.execute(
        "INSERT INTO extents (name, shelf, state, bytes, writer, coding) VALUES (?,?,'writing',?,?,?)",
        (name, shelf, size_bytes, writer, coding),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of a chain, to be listed."""

    shelf: int
    depth: int
    parent: NodeKey
    keys: Sequence[NodeKey]
    tokens: bytes

    def rows(self, extent: int, now: float) -> Iterator[tuple[object, ...]]:
        """The rows of its blocks."""
        parents = [self.parent, *self.keys]
        for place, key in enumerate(self.keys):
            part = self.tokens[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
            yield extent, place, self.shelf, key, parents[place], part, now


def clashes(connection: sqlite3.Connection, run: Run) -> str | None:
    """Why a run cannot be listed any more: others were busy since it was found missing."""
    select = "SELECT 1 FROM blocks WHERE key=? AND shelf=?"
    if run.depth and connection.execute(select, (run.parent, run.shelf)).fetchone() is None:
        return "what it hangs on was evicted meanwhile"
    if any(connection.execute(select, (key, run.shelf)).fetchone() for key in run.keys):
        return "another process kept it first"
    return None


def publish(connection: sqlite3.Connection, id: int, run: Run, size_bytes: int, digest: bytes, now: float) -> None:
    """Make a written extent visible. A partial block that its first block begins with gives way to it."""
    first = run.tokens[:BLOCK_BYTES]
    prefixes = [first[:stop] for stop in range(TOKEN_BYTES, len(first), TOKEN_BYTES)]
    marks = ",".join("?" * len(prefixes))
    superseded = connection.execute(
        f"SELECT extent, place FROM blocks b WHERE parent=? AND shelf=? AND tokens IN ({marks}) "
        "AND NOT (SELECT pinned FROM extents e WHERE e.id=b.extent) "
        "AND NOT EXISTS (SELECT 1 FROM anchors a WHERE a.anchor=b.extent AND a.place+a.blocks>b.place)",
        (run.parent, run.shelf, *prefixes),
    ).fetchall()
    for old, place in superseded:
        cut(connection, old, place)
    connection.executemany(
        "INSERT INTO blocks (extent, place, shelf, key, parent, tokens, used) VALUES (?,?,?,?,?,?,?)", run.rows(id, now)
    )
    make_live(connection, id, size_bytes, digest, run.depth, len(run.keys), len(run.tokens) // TOKEN_BYTES)
    connection.execute("UPDATE extents SET kept=?, used=? WHERE id=?", (now, now, id))


def make_live(
    connection: sqlite3.Connection, id: int, size_bytes: int, digest: bytes, depth: int, blocks: int, tokens: int
) -> None:
    """What was reserved is now written: from here on its real size counts."""
    connection.execute(
        "UPDATE extents SET state='live', bytes=?, digest=?, depth=?, blocks=?, live=?, tokens=? WHERE id=?",
        (size_bytes, digest, depth, blocks, blocks, tokens, id),
    )


def replace(connection: sqlite3.Connection, old: int, new: int) -> None:
    """Let a written copy of an extent's live blocks take its place, with its history."""
    connection.execute("UPDATE blocks SET extent=? WHERE extent=?", (new, old))
    connection.execute(
        "UPDATE extents SET (pinned, kept, used, hits, saved_ms) = "
        "(SELECT pinned, kept, used, hits, saved_ms FROM extents WHERE id=?) WHERE id=?",
        (old, new),
    )
    connection.execute("UPDATE users SET extent=? WHERE extent=?", (new, old))
    connection.execute("UPDATE anchors SET anchor=? WHERE anchor=?", (new, old))
    connection.execute("DELETE FROM anchors WHERE extent=?", (old,))
    connection.execute("UPDATE extents SET state='dropping', live=0, tokens=0 WHERE id=?", (old,))


def cut(connection: sqlite3.Connection, id: int, place: int) -> None:
    """Free an extent's blocks from `place` on, and everything in other extents that hangs or stands on them.

    An extent without blocks is dropping: its file is to be removed.
    """
    todo = [(id, place)]
    while todo:
        id, place = todo.pop()
        todo += connection.execute(
            "SELECT DISTINCT c.extent, 0 FROM blocks b JOIN blocks c ON c.parent=b.key AND c.shelf=b.shelf "
            "WHERE b.extent=? AND b.place>=? AND c.extent<>b.extent",
            (id, place),
        ).fetchall()
        todo += connection.execute(
            "SELECT DISTINCT extent, 0 FROM anchors WHERE anchor=? AND place+blocks>?", (id, place)
        ).fetchall()
        if place == 0:
            connection.execute("DELETE FROM anchors WHERE extent=?", (id,))
        connection.execute("DELETE FROM blocks WHERE extent=? AND place>=?", (id, place))
        connection.execute(
            "UPDATE extents SET live=min(live, ?), state=CASE WHEN ?=0 AND state='live' THEN 'dropping' ELSE state END,"
            " tokens=(SELECT coalesce(sum(length(tokens)), 0) / ? FROM blocks WHERE extent=?) WHERE id=?",
            (place, place, TOKEN_BYTES, id, id),
        )


def has_children(connection: sqlite3.Connection, id: int) -> bool:
    """Whether another extent hangs on this one."""
    row = connection.execute(
        "SELECT 1 FROM blocks b JOIN blocks c ON c.parent=b.key AND c.shelf=b.shelf AND c.extent<>b.extent "
        "WHERE b.extent=? LIMIT 1",
        (id,),
    ).fetchone()
    return row is not None


def pin(connection: sqlite3.Connection, ids: Iterable[int], pinned: bool) -> None:
    """Pin extents by name, or no more; what they hang on follows."""
    connection.executemany("UPDATE extents SET pinned=? WHERE id=?", [(int(pinned), id) for id in ids])
    connection.execute("UPDATE extents SET pinned=0 WHERE pinned=2")
    todo = [row[0] for row in connection.execute("SELECT id FROM extents WHERE pinned=1").fetchall()]
    while todo:
        needed = connection.execute(
            "SELECT a.extent FROM blocks b JOIN blocks a ON a.key=b.parent AND a.shelf=b.shelf "
            "WHERE b.extent=?1 AND b.place=0 UNION SELECT anchor FROM anchors WHERE extent=?1",
            (todo.pop(),),
        ).fetchall()
        for above in needed:
            connection.execute("UPDATE extents SET pinned=2 WHERE id=? AND pinned=0", above)
            todo.append(above[0])


def quarantine(connection: sqlite3.Connection, id: int, reason: str) -> None:
    """Never read an extent again; its file stays, counted, until the next tidying. Cheap enough for any moment."""
    cut(connection, id, 0)
    connection.execute("UPDATE extents SET state='quarantined', reason=? WHERE id=?", (reason, id))


def forget(connection: sqlite3.Connection, names: Iterable[str]) -> None:
    """Remove the rows of extents whose files are gone: only now do their bytes count as free."""
    connection.executemany("DELETE FROM extents WHERE name=? AND state<>'live'", [(name,) for name in names])


_TAIL = (
    "SELECT e.id, e.live, e.blocks, e.bytes, b.hits, b.used, e.tokens, e.shelf FROM extents e "
    "JOIN blocks b ON b.extent=e.id AND b.place=e.live-1 WHERE e.state='live' AND NOT e.pinned "
    "AND NOT EXISTS (SELECT 1 FROM blocks c WHERE c.parent=b.key AND c.shelf=b.shelf) "
    "AND NOT EXISTS (SELECT 1 FROM anchors a WHERE a.anchor=e.id AND a.place+a.blocks>=e.live)"
)


def tails(connection: sqlite3.Connection) -> Iterator[Tail]:
    """Every tail that may be evicted: nothing hangs or stands on it, and it is not pinned."""
    return (Tail(*row) for row in connection.execute(_TAIL))


def tail(connection: sqlite3.Connection, id: int) -> Tail | None:
    """The tail of an extent, if it may be evicted."""
    row = connection.execute(f"{_TAIL} AND e.id=?", (id,)).fetchone()
    return None if row is None else Tail(*row)


def most_hits(connection: sqlite3.Connection) -> int:
    """How often the most used extent was used."""
    return int(connection.execute("SELECT coalesce(max(hits), 0) FROM extents WHERE state='live'").fetchone()[0])


def tail_start(connection: sqlite3.Connection, tail: Tail, *, by_worth: bool) -> int:
    """From which place on nothing hangs or stands on an extent's blocks, and, by worth, they are worth no more than
    the last."""
    row = connection.execute(
        "SELECT max(place) FROM blocks b WHERE extent=?1 AND place<?2 AND ((?3 AND (hits>?4 OR used>?5 OR place<="
        "(SELECT max(last) FROM users WHERE extent=?1 AND last<?2))) OR EXISTS "
        "(SELECT 1 FROM blocks c WHERE c.parent=b.key AND c.shelf=b.shelf AND c.extent<>b.extent) "
        "OR EXISTS (SELECT 1 FROM anchors a WHERE a.anchor=?1 AND a.place+a.blocks>b.place))",
        (tail.extent, tail.live - 1, by_worth, tail.hits, tail.used),
    ).fetchone()
    return 0 if row[0] is None else int(row[0]) + 1


def touch(connection: sqlite3.Connection, id: int, name: str, last: int, now: float, saved_ms: float) -> None:
    """Count one use of an extent's blocks up to and with place `last`; nothing if it is another extent by now."""
    found = connection.execute(
        "UPDATE extents SET hits=hits+1, used=max(used, ?), saved_ms=saved_ms+? WHERE id=? AND name=?",
        (now, saved_ms, id, name),
    )
    if found.rowcount:
        connection.execute(
            "UPDATE blocks SET hits=hits+1, used=max(used, ?) WHERE extent=? AND place<=?", (now, id, last)
        )
