"""The rows of variants in the catalog: each says where in a chain the KV of a chunk stands, and what was scored there.

A row is sealed by a digest of all it says, keyed if the store has a key; one that does not fit its seal says nothing.
Functions take the transaction they belong to, or the catalog where they need several.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.codec import scores
from rekindle.codec.digest import Digester
from rekindle.codec.scores import PackedScores
from rekindle.core.chunk import ChunkDigest, Variant
from rekindle.core.keys import NodeKey
from rekindle.core.kv import Span
from rekindle.index.chunks import Holding, Seat
from rekindle.store import catalog
from rekindle.store.database import Database
from rekindle.store.loose import NAME_TOKENS, SUFFIX
from rekindle.store.settings import StoreSettings

_CANDIDATES = 8  # children of a node that are looked at: nearly always the first will do
_ROWS_A_TRANSACTION = 1024
_ROW_BYTES = 1024  # beside what is counted: numbers, indexes, pages that are not full

# Where bits were flipped, a column may be of another type: made what it should be, it can at least be read.
_COLUMNS = (
    "id, CAST(parent AS BLOB), CAST(tail AS BLOB), CAST(start AS INTEGER), CAST(stop AS INTEGER), "
    "CAST(outside AS BLOB), CAST(received AS BLOB), CAST(intra AS REAL), CAST(earlier AS BLOB), CAST(drift AS REAL), "
    "CAST(seal AS BLOB), CAST(frequency AS REAL)"
)
_HOLDING = (
    "SELECT b.extent, e.name, b.place, e.depth, b.tokens FROM blocks b JOIN extents e ON e.id=b.extent "
    "WHERE e.state='live' AND (e.kept BETWEEN ? AND ? OR e.pinned) AND b.shelf=? AND "
)
_BEGINNING = f"b.parent=? AND b.tokens>=? ORDER BY b.tokens LIMIT {_CANDIDATES}"
# The first child that is not before the tail begins with it, if any does.
_LOST = (
    "(SELECT substr(b.tokens, 1, length(v.tail)) FROM blocks b WHERE b.parent=v.parent AND b.shelf=v.shelf "
    "AND b.tokens>=v.tail ORDER BY b.tokens LIMIT 1) IS NOT v.tail"
)


@dataclass(frozen=True)
class Side:
    """One of the two shelves on which variants are found."""

    number: int
    digest: str
    loose: bool


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """A variant as it is listed."""

    id: int
    seat: Seat
    variant: Variant
    frequency: float


@dataclass(frozen=True, eq=False)
class Listing:
    """A variant to be listed."""

    seat: Seat
    variant: Variant
    packed: PackedScores
    seal: bytes

    @property
    def size_bytes(self) -> int:
        """What its row takes in the catalog, at most."""
        packed = self.packed
        return len(packed.outside) + len(packed.received) + len(packed.earlier) + 2 * len(self.seat.tail) + _ROW_BYTES

    def columns(self) -> tuple[object, ...]:
        """What is written over when the same is listed again."""
        span, packed = self.variant.span, self.packed
        said = (packed.outside, packed.received, packed.intra, packed.earlier, float(self.variant.drift))
        return span.start, span.stop, *said, self.seal


def listing(digester: Digester, shelf_digest: str, seat: Seat, variant: Variant) -> Listing:
    """A variant in its seat, sealed. Raises `ValueError` if its scores are none."""
    packed = scores.pack(variant.scores)
    scores.unpack(packed, len(variant.span))
    if variant.drift != variant.drift or packed.intra != packed.intra:
        raise ValueError("a score is no number")
    seal = _seal(digester, shelf_digest, variant.digest, seat, (variant.span, float(variant.drift)), packed)
    return Listing(seat, variant, packed, seal)


@dataclass(frozen=True)
class ChunkView:
    """The blocks of one shelf, in one transaction, for `index/chunks`; see `catalog.View`."""

    connection: sqlite3.Connection
    shelf: int
    fresh: catalog.Fresh
    lost: Container[str] = ()

    def beginning(self, parent: NodeKey, tokens: bytes) -> Holding | None:
        """A child of `parent` that begins with `tokens`."""
        for *holding, held in self._holdings(_BEGINNING, parent, tokens):
            if not held.startswith(tokens):
                return None
            if holding[1] not in self.lost:
                return Holding(*holding)
        return None

    def holding(self, key: NodeKey) -> Holding | None:
        """The block of a node."""
        for *holding, _ in self._holdings("b.key=?", key):
            if holding[1] not in self.lost:
                return Holding(*holding)
        return None

    def above(self, extent: int) -> NodeKey | None:
        """The node that an extent hangs on."""
        row = self.connection.execute("SELECT parent FROM blocks WHERE extent=? AND place=0", (extent,)).fetchone()
        return None if row is None else row[0]

    def _holdings(self, where: str, *values: bytes) -> list[tuple[Any, ...]]:
        """Extent, name, place, depth and tokens of blocks that may be used."""
        given = (self.fresh.oldest, self.fresh.newest, self.shelf, *values)
        return self.connection.execute(_HOLDING + where, given).fetchall()


def rows(
    connection: sqlite3.Connection, digester: Digester, side: Side, digest: ChunkDigest
) -> Iterator[tuple[int, Row | None]]:
    """The variants of a chunk by number; None for those that make no sense."""
    select = f"SELECT {_COLUMNS} FROM variants WHERE digest=? AND shelf=?"
    for values in connection.execute(select, (digest, side.number)).fetchall():
        yield values[0], _row(digester, side, digest, values)


def add(connection: sqlite3.Connection, shelf: int, listed: Sequence[Listing], now: float, most: StoreSettings) -> int:
    """List variants, each seat once; how many are new. For those, the ones used least go, the oldest of them first."""
    (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM variants").fetchone()
    for one in listed:
        at = (one.variant.digest, shelf, one.seat.parent, one.seat.tail)
        connection.execute(
            "INSERT INTO variants (digest, shelf, parent, tail, start, stop, outside, received, intra, earlier, drift, "
            "seal, used) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT (digest, shelf, parent, tail) DO UPDATE SET "
            "(start, stop, outside, received, intra, earlier, drift, seal) = (excluded.start, excluded.stop, "
            "excluded.outside, excluded.received, excluded.intra, excluded.earlier, excluded.drift, excluded.seal)",
            (*at, *one.columns(), now),
        )
        _trim(connection, "digest=? AND shelf=?", (one.variant.digest, shelf), most.most_a_chunk, last)
    _trim(connection, "shelf=?", (shelf,), most.most_variants, last)
    (new,) = connection.execute("SELECT count(*) FROM variants WHERE id>?", (last,)).fetchone()
    return int(new)


def drop(connection: sqlite3.Connection, ids: Iterable[int]) -> None:
    """Remove rows; loose KV goes with its row."""
    for id in ids:
        extents = connection.execute(
            "SELECT b.extent FROM variants v JOIN shelves s ON s.id=v.shelf "
            "JOIN blocks b ON b.parent=v.parent AND b.shelf=v.shelf AND b.tokens=v.tail "
            "JOIN extents e ON e.id=b.extent WHERE v.id=? AND substr(s.codec, -length(?))=? AND NOT e.pinned",
            (id, SUFFIX, SUFFIX),
        ).fetchall()
        connection.execute("DELETE FROM variants WHERE id=?", (id,))
        for (extent,) in extents:
            catalog.cut(connection, extent, 0)


@dataclass(frozen=True)
class VariantUse:
    """A variant was used, which adds to its frequency."""

    id: int
    digest: ChunkDigest
    gain: float
    at: float

    def write(self, connection: sqlite3.Connection) -> None:
        """Count it, if the number still means the same chunk."""
        connection.execute(
            "UPDATE variants SET frequency=frequency+?, used=max(used, ?) WHERE id=? AND digest=?",
            (self.gain, self.at, self.id, self.digest),
        )


def sweep(database: Database, after: int = 0, most_rows: int | None = None) -> int:
    """Remove the rows behind number `after` whose blocks went, of so many; the last number looked at, 0 at the end."""
    looked_at = 0
    while most_rows is None or looked_at < most_rows:
        with database.scanning() as connection:
            ids = connection.execute(
                f"SELECT id, {_LOST} FROM variants v WHERE id>? ORDER BY id LIMIT {_ROWS_A_TRANSACTION}", (after,)
            ).fetchall()
        if not ids:
            return 0
        lost = [(id,) for id, is_lost in ids if is_lost]
        if lost:
            with database.writing() as connection:
                connection.executemany(f"DELETE FROM variants AS v WHERE id=? AND {_LOST}", lost)
        after = ids[-1][0]
        looked_at += len(ids)
    return after


def loose_shelves(connection: sqlite3.Connection) -> set[int]:
    """The numbers of all shelves that hold loose KV."""
    select = "SELECT id FROM shelves WHERE substr(codec, -length(?))=?"
    return {id for (id,) in connection.execute(select, (SUFFIX, SUFFIX)).fetchall()}


def loose_rests(connection: sqlite3.Connection) -> list[catalog.Extent]:
    """The extents of loose KV that lost their last blocks: nothing can use the others."""
    shelves = ",".join(map(str, loose_shelves(connection)))
    return catalog.extents(connection, f"state='live' AND live<blocks AND shelf IN ({shelves})") if shelves else []


def _trim(connection: sqlite3.Connection, where: str, values: Sequence[object], most: int, last: int) -> None:
    """Remove the rows beyond `most`, those used least first, those numbered above `last` only if nothing else is."""
    (count,) = connection.execute(f"SELECT count(*) FROM variants WHERE {where}", values).fetchone()
    excess = count - most
    for newness in ("id<=?", "id>?"):
        if excess > 0:
            select = f"SELECT id FROM variants WHERE {where} AND {newness} ORDER BY frequency, used, id LIMIT ?"
            ids = [id for (id,) in connection.execute(select, (*values, last, excess)).fetchall()]
            drop(connection, ids)
            excess -= len(ids)


def _row(digester: Digester, side: Side, digest: ChunkDigest, values: Sequence[Any]) -> Row | None:
    """A row, if it fits its seal."""
    id, parent, tail, start, stop, outside, received, intra, earlier, drift, seal, frequency = values
    try:
        span = Span(start, stop)
        seat = Seat(parent, tail, Span(NAME_TOKENS, NAME_TOKENS + len(span)) if side.loose else span)
        packed = PackedScores(outside, received, intra, earlier)
        if seal != _seal(digester, side.digest, digest, seat, (span, drift), packed):
            return None
        variant = Variant(digest, span, scores.unpack(packed, len(span)), drift)
        return Row(id, seat, variant, float(frequency))
    except (ValueError, TypeError, OverflowError, struct.error):
        return None


def _seal(
    digester: Digester,
    shelf_digest: str,
    digest: ChunkDigest,
    seat: Seat,
    computed: tuple[Span, float],
    packed: PackedScores,
) -> bytes:
    span, drift = computed
    numbers = struct.pack("<QQdd", span.start, span.stop, drift, packed.intra)
    texts = (shelf_digest.encode(), digest, seat.parent, seat.tail, packed.outside, packed.received, packed.earlier)
    sizes = struct.pack("<7Q", *map(len, texts))
    return digester.header(b"".join((b"rekindle/variant/1", numbers, sizes, *texts)))
