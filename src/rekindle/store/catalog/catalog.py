"""The catalog: the single source of truth about a cache folder.

Functions take the transaction they belong to. Every change of rows keeps four invariants: the live rows of an extent
are its first places; the parent of every block exists (chains are prefix-closed); the base of every delta exists; and
an extent has a row for as long as its file may exist.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rekindle.core.keys import BLOCK_BYTES, TOKEN_BYTES, KvSpace, NodeKey, layout_text
from rekindle.store.catalog.database import Database
from rekindle.store.prefix_index import BlockRef, Neighbour, Piece


@dataclass(frozen=True)
class Extent:
    """A row of the table of extents."""

    id: int
    name: str
    kv_space: int
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
    "id, name, kv_space, state, bytes, writer, digest, depth, blocks, live, tokens, pinned, kept, used, hits, "
    "saved_ms, reason, coding"
)
_KV_SPACES_A_SWEEP = 64  # new KV spaces between two sweeps


@dataclass(frozen=True, slots=True)
class Tail:
    """The last live block of an extent, if it has no successors: a candidate for eviction."""

    extent: int
    live: int
    blocks: int
    size_bytes: int
    hits: int
    used: float
    tokens: int = 0  # of the extent's live blocks
    kv_space: int = 0


@dataclass(frozen=True, slots=True)
class Fresh:
    """The range of keep times that are served. A time in the future, from a wrong clock, is not served either."""

    oldest: float
    newest: float


@dataclass(frozen=True)
class View:
    """The rows of one KV space, in one read transaction.

    Extents kept outside of `fresh` are expired, unless pinned; those in `lost` could not be read recently.
    """

    connection: sqlite3.Connection
    kv_space: int
    fresh: Fresh
    lost: Container[str] = ()

    def find(self, key: NodeKey) -> BlockRef | None:
        """The block with that key."""
        row = self.connection.execute(
            "SELECT extent, place FROM blocks WHERE key=? AND kv_space=?", (key, self.kv_space)
        ).fetchone()
        return None if row is None else BlockRef(*row)

    def name(self, extent: int) -> str | None:
        """The name of an extent, if it may be used."""
        row = self.connection.execute(
            "SELECT name FROM extents WHERE id=? AND state='live' AND (kept BETWEEN ? AND ? OR pinned)",
            (extent, self.fresh.oldest, self.fresh.newest),
        ).fetchone()
        return None if row is None or row[0] in self.lost else str(row[0])

    def tokens(self, spot: BlockRef) -> bytes:
        """The tokens of an extent's blocks up to and including that place."""
        rows = self.connection.execute(
            "SELECT tokens FROM blocks WHERE extent=? AND place<=? ORDER BY place", (spot.extent, spot.place)
        )
        return b"".join([row[0] for row in rows])

    def neighbours(self, parent: NodeKey, tokens: bytes) -> Sequence[Neighbour]:
        """The children of `parent` next to `tokens`, below (or at) and above."""
        select = "SELECT extent, place, tokens FROM blocks WHERE parent=? AND kv_space=? AND tokens"
        found = [
            self.connection.execute(f"{select}<=? ORDER BY tokens DESC LIMIT 1", (parent, self.kv_space, tokens)),
            self.connection.execute(f"{select}>? ORDER BY tokens LIMIT 1", (parent, self.kv_space, tokens)),
        ]
        return [Neighbour(BlockRef(row[0], row[1]), row[2]) for cursor in found for row in cursor.fetchall()]

    def children(self, parent: NodeKey, max_count: int) -> list[bytes]:
        """The tokens of the children of `parent`, in order of their bytes."""
        select = "SELECT tokens FROM blocks WHERE parent=? AND kv_space=? ORDER BY tokens LIMIT ?"
        return [row[0] for row in self.connection.execute(select, (parent, self.kv_space, max_count)).fetchall()]


def kv_space_id(connection: sqlite3.Connection, digest: str) -> int | None:
    """The number of a KV space; None if it was never used."""
    row = connection.execute("SELECT id FROM kv_spaces WHERE digest=?", (digest,)).fetchone()
    return None if row is None else int(row[0])


def add_kv_space(connection: sqlite3.Connection, digest: str, kv_space: KvSpace) -> int:
    """The number of a KV space, new or not. Refer to it in the same transaction: unreferenced ones go."""
    known = kv_space_id(connection, digest)
    if known is not None:
        return known
    names = kv_space.namespace
    fields = (digest, kv_space.model, names.identity, names.tenant, names.salt, kv_space.adapter, kv_space.codec)
    added = connection.execute(
        "INSERT INTO kv_spaces (digest, model, identity, tenant, salt, adapter, codec, layout) "
        "VALUES (?,?,?,?,?,?,?,?)",
        (*fields, layout_text(kv_space.layout)),
    ).lastrowid
    assert added is not None
    # A client that sends a new salt with each request must not make the catalog grow.
    if added % _KV_SPACES_A_SWEEP == 0:
        sweep_kv_spaces(connection, before=added)
    return added


def sweep_kv_spaces(connection: sqlite3.Connection, before: int | None = None) -> None:
    """Remove unreferenced KV spaces, all or those numbered below `before`, and identities without a KV space."""
    connection.execute(
        "DELETE FROM kv_spaces WHERE (:before IS NULL OR id<:before) AND id NOT IN (SELECT kv_space FROM extents UNION "
        "SELECT kv_space FROM requests UNION SELECT kv_space FROM seen_keys UNION SELECT kv_space FROM variants)",
        {"before": before},
    )
    connection.execute("DELETE FROM identities WHERE digest NOT IN (SELECT identity FROM kv_spaces)")


def total_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of all extents: written, being written, and not yet removed."""
    return int(connection.execute("SELECT bytes FROM totals").fetchone()[0])


def extents(connection: sqlite3.Connection, where: str = "1", values: Sequence[object] = ()) -> list[Extent]:
    """The extents for which `where` holds."""
    return [Extent(*row) for row in connection.execute(f"SELECT {_COLUMNS} FROM extents WHERE {where}", values)]


def extent(connection: sqlite3.Connection, id: int) -> Extent | None:
    found = extents(connection, "id=?", (id,))
    return found[0] if found else None


def tokens_of(connection: sqlite3.Connection, id: int) -> bytes:
    """The tokens of an extent's live blocks."""
    parts = connection.execute("SELECT tokens FROM blocks WHERE extent=? ORDER BY place", (id,))
    return b"".join([part for (part,) in parts])


def sparse(connection: sqlite3.Connection, digest_name: str) -> list[tuple[Extent, str]]:
    """Extents of which less than half is live, with the digests of their KV spaces.

    Without those under other keys, and without quantized bases of deltas: coding them again would change their numbers.
    """
    columns = ", ".join(f"e.{column}" for column in _COLUMNS.split(", "))
    rows = connection.execute(
        f"SELECT {columns}, s.digest FROM extents e JOIN kv_spaces s ON s.id=e.kv_space "
        "WHERE e.state='live' AND e.live*2<e.blocks AND e.live>0 AND substr(s.digest, -length(?))=? "
        "AND NOT (e.coding='quantized' AND EXISTS (SELECT 1 FROM delta_bases a WHERE a.base=e.id))",
        (f":{digest_name}",) * 2,
    )
    return [(Extent(*row[:-1]), row[-1]) for row in rows]


def freeable_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of all extents that are not pinned and not being written: the most that eviction could free."""
    return int(
        connection.execute(
            "SELECT coalesce(sum(bytes), 0) FROM extents WHERE NOT pinned AND state<>'writing'"
        ).fetchone()[0]
    )


def pinned_bytes(connection: sqlite3.Connection, tenant: str | None = None) -> int:
    """Bytes of pinned extents and of the extents they need; of one tenant, or of all."""
    select = (
        "SELECT coalesce(sum(e.bytes), 0) FROM extents e JOIN kv_spaces s ON s.id=e.kv_space "
        "WHERE e.pinned AND e.state='live' AND (:tenant IS NULL OR s.tenant=:tenant)"
    )
    return int(connection.execute(select, {"tenant": tenant}).fetchone()[0])


def reserve(
    connection: sqlite3.Connection, name: str, kv_space: int, size_bytes: int, writer: str, coding: str = "raw"
) -> int:
    """Count the bytes of a file before it exists."""
    cursor = connection.execute(
        "INSERT INTO extents (name, kv_space, state, bytes, writer, coding) VALUES (?,?,'writing',?,?,?)",
        (name, kv_space, size_bytes, writer, coding),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


@dataclass(frozen=True)
class BlockRun:
    """Consecutive blocks of a chain, to be listed."""

    kv_space: int
    depth: int
    parent: NodeKey
    keys: Sequence[NodeKey]
    tokens: bytes

    def rows(self, extent: int, now: float) -> Iterator[tuple[object, ...]]:
        parents = [self.parent, *self.keys]
        for place, key in enumerate(self.keys):
            part = self.tokens[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
            yield extent, place, self.kv_space, key, parents[place], part, now


def clashes(connection: sqlite3.Connection, run: BlockRun) -> str | None:
    """Why a run can no longer be listed; None if it can. Other processes may have changed its surroundings."""
    select = "SELECT 1 FROM blocks WHERE key=? AND kv_space=?"
    if run.depth and connection.execute(select, (run.parent, run.kv_space)).fetchone() is None:
        return "its prefix was evicted meanwhile"
    if any(connection.execute(select, (key, run.kv_space)).fetchone() for key in run.keys):
        return "another process kept it first"
    return None


def publish(connection: sqlite3.Connection, id: int, run: BlockRun, size_bytes: int, digest: bytes, now: float) -> None:
    """Make a written extent visible. A partial block that its first block extends is replaced by it."""
    first = run.tokens[:BLOCK_BYTES]
    prefixes = [first[:stop] for stop in range(TOKEN_BYTES, len(first), TOKEN_BYTES)]
    marks = ",".join("?" * len(prefixes))
    superseded = connection.execute(
        f"SELECT extent, place FROM blocks b WHERE parent=? AND kv_space=? AND tokens IN ({marks}) "
        "AND NOT (SELECT pinned FROM extents e WHERE e.id=b.extent) "
        "AND NOT EXISTS (SELECT 1 FROM delta_bases a WHERE a.base=b.extent AND a.place+a.blocks>b.place)",
        (run.parent, run.kv_space, *prefixes),
    ).fetchall()
    for old, place in superseded:
        cut(connection, old, place)
    connection.executemany(
        "INSERT INTO blocks (extent, place, kv_space, key, parent, tokens, used) VALUES (?,?,?,?,?,?,?)",
        run.rows(id, now),
    )
    make_live(connection, id, size_bytes, digest, run.depth, len(run.keys), len(run.tokens) // TOKEN_BYTES)
    connection.execute("UPDATE extents SET kept=?, used=? WHERE id=?", (now, now, id))


def make_live(
    connection: sqlite3.Connection, id: int, size_bytes: int, digest: bytes, depth: int, blocks: int, tokens: int
) -> None:
    """Mark a reserved extent as written; from here on its real size counts."""
    connection.execute(
        "UPDATE extents SET state='live', bytes=?, digest=?, depth=?, blocks=?, live=?, tokens=? WHERE id=?",
        (size_bytes, digest, depth, blocks, blocks, tokens, id),
    )


def replace(connection: sqlite3.Connection, old: int, new: int) -> None:
    """Replace an extent by a written copy of its live blocks, keeping its statistics."""
    connection.execute("UPDATE blocks SET extent=? WHERE extent=?", (new, old))
    connection.execute(
        "UPDATE extents SET (pinned, kept, used, hits, saved_ms) = "
        "(SELECT pinned, kept, used, hits, saved_ms FROM extents WHERE id=?) WHERE id=?",
        (old, new),
    )
    connection.execute("UPDATE app_uses SET extent=? WHERE extent=?", (new, old))
    connection.execute("UPDATE delta_bases SET base=? WHERE base=?", (new, old))
    connection.execute("DELETE FROM delta_bases WHERE extent=?", (old,))
    connection.execute("UPDATE extents SET state='dropping', live=0, tokens=0 WHERE id=?", (old,))


def cut(connection: sqlite3.Connection, id: int, place: int) -> None:
    """Free an extent's blocks from `place` on, and everything in other extents that needs them.

    An extent without blocks becomes `dropping`: its file is to be removed.
    """
    todo = [(id, place)]
    while todo:
        id, place = todo.pop()
        todo += connection.execute(
            "SELECT DISTINCT c.extent, 0 FROM blocks b JOIN blocks c ON c.parent=b.key AND c.kv_space=b.kv_space "
            "WHERE b.extent=? AND b.place>=? AND c.extent<>b.extent",
            (id, place),
        ).fetchall()
        todo += connection.execute(
            "SELECT DISTINCT extent, 0 FROM delta_bases WHERE base=? AND place+blocks>?", (id, place)
        ).fetchall()
        if place == 0:
            connection.execute("DELETE FROM delta_bases WHERE extent=?", (id,))
        connection.execute("DELETE FROM blocks WHERE extent=? AND place>=?", (id, place))
        connection.execute(
            "UPDATE extents SET live=min(live, ?), state=CASE WHEN ?=0 AND state='live' THEN 'dropping' ELSE state END,"
            " tokens=(SELECT coalesce(sum(length(tokens)), 0) / ? FROM blocks WHERE extent=?) WHERE id=?",
            (place, place, TOKEN_BYTES, id, id),
        )


def has_children(connection: sqlite3.Connection, id: int) -> bool:
    """Whether another extent continues this one."""
    row = connection.execute(
        "SELECT 1 FROM blocks b JOIN blocks c ON c.parent=b.key AND c.kv_space=b.kv_space AND c.extent<>b.extent "
        "WHERE b.extent=? LIMIT 1",
        (id,),
    ).fetchone()
    return row is not None


def pin(connection: sqlite3.Connection, ids: Iterable[int], pinned: bool) -> None:
    """Pin or unpin extents; the extents they need follow."""
    connection.executemany("UPDATE extents SET pinned=? WHERE id=?", [(int(pinned), id) for id in ids])
    connection.execute("UPDATE extents SET pinned=0 WHERE pinned=2")
    todo = [row[0] for row in connection.execute("SELECT id FROM extents WHERE pinned=1").fetchall()]
    while todo:
        needed = connection.execute(
            "SELECT a.extent FROM blocks b JOIN blocks a ON a.key=b.parent AND a.kv_space=b.kv_space "
            "WHERE b.extent=:extent AND b.place=0 UNION SELECT base FROM delta_bases WHERE extent=:extent",
            {"extent": todo.pop()},
        ).fetchall()
        for above in needed:
            connection.execute("UPDATE extents SET pinned=2 WHERE id=? AND pinned=0", above)
            todo.append(above[0])


def quarantine(connection: sqlite3.Connection, id: int, reason: str) -> None:
    """Never read an extent again. Its file stays and counts until the next tidying. Cheap."""
    cut(connection, id, 0)
    connection.execute("UPDATE extents SET state='quarantined', reason=? WHERE id=?", (reason, id))


def forget(connection: sqlite3.Connection, names: Iterable[str]) -> None:
    """Remove the rows of extents whose files were removed: only then do their bytes count as free."""
    connection.executemany("DELETE FROM extents WHERE name=? AND state<>'live'", [(name,) for name in names])


_TAIL = (
    "SELECT e.id, e.live, e.blocks, e.bytes, b.hits, b.used, e.tokens, e.kv_space FROM extents e "
    "JOIN blocks b ON b.extent=e.id AND b.place=e.live-1 WHERE e.state='live' AND NOT e.pinned "
    "AND NOT EXISTS (SELECT 1 FROM blocks c WHERE c.parent=b.key AND c.kv_space=b.kv_space) "
    "AND NOT EXISTS (SELECT 1 FROM delta_bases a WHERE a.base=e.id AND a.place+a.blocks>=e.live)"
)


def tails(connection: sqlite3.Connection) -> Iterator[Tail]:
    """Every tail that may be evicted: no other extent needs it, and it is not pinned."""
    return (Tail(*row) for row in connection.execute(_TAIL))


def tail(connection: sqlite3.Connection, id: int) -> Tail | None:
    """The tail of an extent, if it may be evicted."""
    row = connection.execute(f"{_TAIL} AND e.id=?", (id,)).fetchone()
    return None if row is None else Tail(*row)


def max_hits(connection: sqlite3.Connection) -> int:
    """The hit count of the most used extent."""
    return int(connection.execute("SELECT coalesce(max(hits), 0) FROM extents WHERE state='live'").fetchone()[0])


def tail_start(connection: sqlite3.Connection, tail: Tail, *, by_worth: bool) -> int:
    """The first place of an extent from which on no other extent needs its blocks.

    With `by_worth`, also only blocks that are worth no more than the last.
    """
    row = connection.execute(
        "SELECT max(place) FROM blocks b WHERE extent=:extent AND place<:last AND ((:by_worth AND "
        "(hits>:hits OR used>:used OR place<="
        "(SELECT max(last) FROM app_uses WHERE extent=:extent AND last<:last))) OR EXISTS "
        "(SELECT 1 FROM blocks c WHERE c.parent=b.key AND c.kv_space=b.kv_space AND c.extent<>b.extent) "
        "OR EXISTS (SELECT 1 FROM delta_bases a WHERE a.base=:extent AND a.place+a.blocks>b.place))",
        {"extent": tail.extent, "last": tail.live - 1, "by_worth": by_worth, "hits": tail.hits, "used": tail.used},
    ).fetchone()
    return 0 if row[0] is None else int(row[0]) + 1


def touch(connection: sqlite3.Connection, id: int, name: str, last: int, now: float, saved_ms: float) -> None:
    """Count one use of an extent's blocks up to and including place `last`, unless the extent was replaced."""
    found = connection.execute(
        "UPDATE extents SET hits=hits+1, used=max(used, ?), saved_ms=saved_ms+? WHERE id=? AND name=?",
        (now, saved_ms, id, name),
    )
    if found.rowcount:
        connection.execute(
            "UPDATE blocks SET hits=hits+1, used=max(used, ?) WHERE extent=? AND place<=?", (now, id, last)
        )


log = logging.getLogger("rekindle.store")

_ACCESSES_A_TRANSACTION = 16
_MAX_ACCESSES = 10_000  # kept while the catalog cannot be written


Access = Callable[[sqlite3.Connection], None]  # writes a use of KV, if its rows still mean the same extent


def uses_of(pieces: Iterable[Piece], at: float, saved_ms_a_token: float) -> list[Access]:
    """The uses of those pieces that are in this folder, and the time they saved."""
    return [
        partial(touch, id=p.extent, name=p.name, last=p.last, now=at, saved_ms=saved_ms_a_token * len(p.span))
        for p in pieces
        if p.tier is None
    ]


class AccessLog:
    """Uses of KV, buffered until the catalog is updated: a request must not wait for that. Bounded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Access] = []

    def add(self, accesses: Sequence[Access]) -> None:
        with self._lock:
            self._waiting += accesses

    def drop(self) -> None:
        with self._lock:
            self._waiting = []

    def flush(self, database: Database) -> None:
        """Write the buffered uses to the catalog, a few per transaction. Raises as it does, and keeps what was not
        written.

        A use that no catalog could store is dropped: it would block all others.
        """
        with self._lock:
            accesses, self._waiting = self._waiting, []
        try:
            while accesses:
                with database.writing() as connection:
                    for access in accesses[:_ACCESSES_A_TRANSACTION]:
                        _write(connection, access)
                del accesses[:_ACCESSES_A_TRANSACTION]
        except BaseException:
            with self._lock:
                self._waiting = accesses[-_MAX_ACCESSES:] + self._waiting
            raise


def _write(connection: sqlite3.Connection, access: Access) -> None:
    try:
        access(connection)
    except (TypeError, ValueError, OverflowError) as error:  # a value that SQLite cannot store or encode
        log.debug("a use was not recorded: %s", error)
