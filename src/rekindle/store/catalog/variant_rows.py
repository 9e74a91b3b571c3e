"""The rows of variants in the catalog: where in a chain the KV of a chunk is, and its attention scores.

A row is sealed by a digest of all its fields, keyed if the store has a key; a row that does not match its seal is
ignored. Functions take the transaction they belong to, or the catalog where they need several.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rekindle.codec.digest import Digester
from rekindle.core.chunk import DIGEST_TOKENS, NONPREFIX_SUFFIX, ChunkDigest, ChunkScores, EarlierChunk, Variant
from rekindle.core.keys import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, NodeKey
from rekindle.core.kv import Span
from rekindle.store.catalog import catalog
from rekindle.store.catalog.database import Database
from rekindle.store.prefix_index import Piece

_CANDIDATES = 8  # children of a node that are compared: nearly always the first matches
_ROWS_A_TRANSACTION = 1024
_ROW_BYTES = 1024  # estimate for numbers, indexes and pages that are not full

# In a damaged catalog a column may have another type: a cast makes it readable at least.
_COLUMNS = (
    "id, CAST(parent AS BLOB), CAST(tail AS BLOB), CAST(start AS INTEGER), CAST(stop AS INTEGER), "
    "CAST(outside AS BLOB), CAST(received AS BLOB), CAST(intra AS REAL), CAST(earlier AS BLOB), CAST(drift AS REAL), "
    "CAST(seal AS BLOB), CAST(frequency AS REAL)"
)
_HOLDING = (
    "SELECT b.extent, e.name, b.place, e.depth, b.tokens FROM blocks b JOIN extents e ON e.id=b.extent "
    "WHERE e.state='live' AND (e.kept BETWEEN ? AND ? OR e.pinned) AND b.kv_space=? AND "
)
_BEGINNING = f"b.parent=? AND b.tokens>=? ORDER BY b.tokens LIMIT {_CANDIDATES}"
# Whether the blocks of a row were removed, by table.
LOST = {
    # The first child that is not before the tail begins with it, if any does.
    "variants": "(SELECT substr(b.tokens, 1, length(v.tail)) FROM blocks b WHERE b.parent=v.parent "
    "AND b.kv_space=v.kv_space AND b.tokens>=v.tail ORDER BY b.tokens LIMIT 1) IS NOT v.tail",
    "fingerprints": "NOT EXISTS (SELECT 1 FROM blocks b WHERE b.parent=v.parent AND b.kv_space=v.kv_space)",
}

_EARLIER = struct.Struct("<16sId")
_HALF = np.dtype("<f2")


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """A chunk's place in a chain. `span` counts from the chain's root."""

    parent: NodeKey
    tail: bytes
    span: Span

    @property
    def last(self) -> int:
        """The last block it needs, counted from the root."""
        return (self.span.stop - 1) // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class BlockLocation:
    """A usable block: its extent, its place there, and how many blocks precede the extent."""

    extent: int
    name: str
    place: int
    depth: int


def chunk_location(root: NodeKey, keys: Sequence[NodeKey], tokens: bytes, span: Span) -> ChunkLocation:
    """The location of `span` in a prompt of `tokens` whose blocks have these keys."""
    last = (span.stop - 1) // BLOCK_TOKENS
    tail = tokens[last * BLOCK_BYTES : span.stop * TOKEN_BYTES]
    return ChunkLocation(keys[last - 1] if last else root, tail, span)


@dataclass(frozen=True)
class SpaceRow:
    """One of the two KV spaces on which variants are found."""

    number: int
    digest: str
    nonprefix: bool


@dataclass(frozen=True, eq=False, slots=True)
class VariantRow:
    """A listed variant."""

    id: int
    location: ChunkLocation
    variant: Variant
    frequency: float


@dataclass(frozen=True, eq=False)
class Listing:
    """A variant to be listed."""

    location: ChunkLocation
    variant: Variant
    packed: PackedScores
    seal: bytes

    @property
    def size_bytes(self) -> int:
        """An upper bound of the size of its row."""
        packed = self.packed
        return (
            len(packed.outside) + len(packed.received) + len(packed.earlier) + 2 * len(self.location.tail) + _ROW_BYTES
        )

    def columns(self) -> tuple[object, ...]:
        """The columns that are overwritten when the same location is listed again."""
        span, packed = self.variant.span, self.packed
        said = (packed.outside, packed.received, packed.intra, packed.earlier, float(self.variant.drift))
        return span.start, span.stop, *said, self.seal


def listing(digester: Digester, kv_space_digest: str, location: ChunkLocation, variant: Variant) -> Listing:
    """A variant at its location, sealed. Raises `ValueError` for invalid scores."""
    packed = pack_scores(variant.scores)
    unpack_scores(packed, len(variant.span))
    if variant.drift != variant.drift or packed.intra != packed.intra:
        raise ValueError("a score is no number")
    seal = _seal(digester, kv_space_digest, variant.digest, location, (variant.span, float(variant.drift)), packed)
    return Listing(location, variant, packed, seal)


@dataclass(frozen=True)
class ChunkView(catalog.View):
    """The blocks of one KV space, in one transaction. Blocks that may not be used are left out.

    A chunk's KV is found from its end, walking back to its beginning:

        chain     [ block ][ block ][ block ][ block ...
        chunk          [...............]
                                    ^ tail: the tokens of the last block it needs, up to its end; `parent` is the node
                                      above that block

    The last block may be kept again, longer, when its prompt continues: any child of the parent that begins with the
    tail is right. Above it, each extent names its parent node.
    """

    def find_pieces(self, location: ChunkLocation, tokens: bytes) -> tuple[Piece, ...] | None:
        """The pieces that hold a chunk of these tokens, in order, with spans counted from the root.

        None if any part is missing. Only the tail is compared: the node above it identifies all tokens before, and the
        loader compares every token with the extent files.
        """
        span, block, tail = location.span, location.last, location.tail
        if not tokens or len(tokens) != len(span) * TOKEN_BYTES:
            return None
        shared = min(len(tail), len(tokens))
        if len(tail) != (span.stop - block * BLOCK_TOKENS) * TOKEN_BYTES or tail[-shared:] != tokens[-shared:]:
            return None
        found = self.beginning(location.parent, tail)
        stop, pieces = span.stop, list[Piece]()
        while found is not None and found.depth + found.place == block:
            start = max(span.start, found.depth * BLOCK_TOKENS)
            first = start // BLOCK_TOKENS - found.depth
            pieces.append(Piece(found.extent, found.name, first, Span(start, stop), start % BLOCK_TOKENS))
            if start == span.start:
                return tuple(reversed(pieces))
            stop, block = start, found.depth - 1
            above = self.above(found.extent)
            found = None if above is None else self.holding(above)
        return None

    def beginning(self, parent: NodeKey, tokens: bytes) -> BlockLocation | None:
        """A child of `parent` that begins with `tokens`."""
        for *holding, held in self._holdings(_BEGINNING, parent, tokens):
            if not held.startswith(tokens):
                return None
            if holding[1] not in self.lost:
                return BlockLocation(*holding)
        return None

    def holding(self, key: NodeKey) -> BlockLocation | None:
        """The block with that key."""
        for *holding, _ in self._holdings("b.key=?", key):
            if holding[1] not in self.lost:
                return BlockLocation(*holding)
        return None

    def above(self, extent: int, place: int = 0) -> NodeKey | None:
        """The parent node of a block, by default of an extent's first."""
        select = "SELECT parent FROM blocks WHERE extent=? AND place=?"
        row = self.connection.execute(select, (extent, place)).fetchone()
        return None if row is None else row[0]

    def block_tokens(self, extent: int, first: int, stop: int) -> bytes:
        """The tokens of an extent's blocks from place `first` up to `stop`, as many as there are."""
        select = "SELECT tokens FROM blocks WHERE extent=? AND place>=? AND place<? ORDER BY place"
        return b"".join([part for (part,) in self.connection.execute(select, (extent, first, stop))])

    def _holdings(self, where: str, *values: bytes) -> list[tuple[Any, ...]]:
        """Extent, name, place, depth and tokens of usable blocks."""
        given = (self.fresh.oldest, self.fresh.newest, self.kv_space, *values)
        return self.connection.execute(_HOLDING + where, given).fetchall()


def rows(
    connection: sqlite3.Connection, digester: Digester, space: SpaceRow, digest: ChunkDigest
) -> Iterator[tuple[int, VariantRow | None]]:
    """The variants of a chunk by number; None for damaged rows."""
    select = f"SELECT {_COLUMNS} FROM variants WHERE digest=? AND kv_space=?"
    for values in connection.execute(select, (digest, space.number)).fetchall():
        yield values[0], parse_row(digester, space, digest, values)


def add(
    connection: sqlite3.Connection,
    kv_space: int,
    listed: Sequence[Listing],
    now: float,
    max_count: int,
    max_a_chunk: int,
) -> int:
    """List variants, each location once; returns how many are new. The least used go for them, the oldest first."""
    (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM variants").fetchone()
    for one in listed:
        at = (one.variant.digest, kv_space, one.location.parent, one.location.tail)
        connection.execute(
            "INSERT INTO variants (digest, kv_space, parent, tail, start, stop, outside, received, intra, earlier, "
            "drift, seal, used) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?) "
            "ON CONFLICT (digest, kv_space, parent, tail) DO UPDATE SET "
            "(start, stop, outside, received, intra, earlier, drift, seal) = (excluded.start, excluded.stop, "
            "excluded.outside, excluded.received, excluded.intra, excluded.earlier, excluded.drift, excluded.seal)",
            (*at, *one.columns(), now),
        )
        _trim(connection, "digest=? AND kv_space=?", (one.variant.digest, kv_space), max_a_chunk, last)
    _trim(connection, "kv_space=?", (kv_space,), max_count, last)
    (new,) = connection.execute("SELECT count(*) FROM variants WHERE id>?", (last,)).fetchone()
    return int(new)


def drop(connection: sqlite3.Connection, ids: Iterable[int]) -> None:
    """Remove rows; non-prefix KV goes with its row."""
    for id in ids:
        extents = connection.execute(
            "SELECT b.extent FROM variants v JOIN kv_spaces s ON s.id=v.kv_space "
            "JOIN blocks b ON b.parent=v.parent AND b.kv_space=v.kv_space AND b.tokens=v.tail "
            "JOIN extents e ON e.id=b.extent WHERE v.id=? AND substr(s.codec, -length(?))=? AND NOT e.pinned",
            (id, NONPREFIX_SUFFIX, NONPREFIX_SUFFIX),
        ).fetchall()
        connection.execute("DELETE FROM variants WHERE id=?", (id,))
        for (extent,) in extents:
            catalog.cut(connection, extent, 0)


def count_use(connection: sqlite3.Connection, id: int, digest: ChunkDigest, gain: float, at: float) -> None:
    """Add a use of a variant to its frequency, if the number still means the same chunk."""
    connection.execute(
        "UPDATE variants SET frequency=frequency+?, used=max(used, ?) WHERE id=? AND digest=?", (gain, at, id, digest)
    )


def sweep(database: Database) -> None:
    """Remove all rows whose blocks were removed."""
    for table in LOST:
        sweep_some(database, table)


def sweep_some(database: Database, table: str, after: int = 0, max_rows: int | None = None) -> int:
    """The same, of a table from number `after` on; checks `max_rows`, returns the last, 0 at the end."""
    looked_at = 0
    while max_rows is None or looked_at < max_rows:
        with database.scanning() as connection:
            ids = connection.execute(
                f"SELECT id, {LOST[table]} FROM {table} v WHERE id>? ORDER BY id LIMIT {_ROWS_A_TRANSACTION}", (after,)
            ).fetchall()
        if not ids:
            return 0
        lost = [(id,) for id, is_lost in ids if is_lost]
        if lost:
            with database.writing() as connection:
                connection.executemany(f"DELETE FROM {table} AS v WHERE id=? AND {LOST[table]}", lost)
        after = ids[-1][0]
        looked_at += len(ids)
    return after


def nonprefix_kv_spaces(connection: sqlite3.Connection) -> set[int]:
    """The numbers of all KV spaces that hold non-prefix KV."""
    select = "SELECT id FROM kv_spaces WHERE substr(codec, -length(?))=?"
    return {id for (id,) in connection.execute(select, (NONPREFIX_SUFFIX, NONPREFIX_SUFFIX)).fetchall()}


def cut_nonprefix(connection: sqlite3.Connection) -> list[catalog.Extent]:
    """Extents of non-prefix KV that lost their last blocks: the remainder is useless."""
    kv_spaces = ",".join(map(str, nonprefix_kv_spaces(connection)))
    return (
        catalog.extents(connection, f"state='live' AND live<blocks AND kv_space IN ({kv_spaces})") if kv_spaces else []
    )


def _trim(connection: sqlite3.Connection, where: str, values: Sequence[object], max_count: int, last: int) -> None:
    """Remove the rows beyond `max_count`, the least used first; those numbered above `last` only as a last resort."""
    (count,) = connection.execute(f"SELECT count(*) FROM variants WHERE {where}", values).fetchone()
    excess = count - max_count
    for newness in ("id<=?", "id>?"):
        if excess > 0:
            select = f"SELECT id FROM variants WHERE {where} AND {newness} ORDER BY frequency, used, id LIMIT ?"
            ids = [id for (id,) in connection.execute(select, (*values, last, excess)).fetchall()]
            drop(connection, ids)
            excess -= len(ids)


def parse_row(digester: Digester, space: SpaceRow, digest: ChunkDigest, values: Sequence[Any]) -> VariantRow | None:
    """A row of `_COLUMNS`, if it matches its seal."""
    id, parent, tail, start, stop, outside, received, intra, earlier, drift, seal, frequency = values
    try:
        span = Span(start, stop)
        location = ChunkLocation(
            parent, tail, Span(DIGEST_TOKENS, DIGEST_TOKENS + len(span)) if space.nonprefix else span
        )
        packed = PackedScores(outside, received, intra, earlier)
        if seal != _seal(digester, space.digest, digest, location, (span, drift), packed):
            return None
        variant = Variant(digest, span, unpack_scores(packed, len(span)), drift)
        return VariantRow(id, location, variant, float(frequency))
    except (ValueError, TypeError, OverflowError, struct.error):
        return None


def _seal(
    digester: Digester,
    kv_space_digest: str,
    digest: ChunkDigest,
    location: ChunkLocation,
    computed: tuple[Span, float],
    packed: PackedScores,
) -> bytes:
    span, drift = computed
    numbers = struct.pack("<QQdd", span.start, span.stop, drift, packed.intra)
    texts = (
        kv_space_digest.encode(),
        digest,
        location.parent,
        location.tail,
        packed.outside,
        packed.received,
        packed.earlier,
    )
    sizes = struct.pack("<7Q", *map(len, texts))
    return digester.header(b"".join((b"rekindle/variant/1", numbers, sizes, *texts)))


@dataclass(frozen=True, slots=True)
class PackedScores:
    """Scores as they are stored."""

    outside: bytes
    received: bytes
    intra: float
    earlier: bytes


def pack_scores(scores: ChunkScores) -> PackedScores:
    """Scores as bytes. Raises `ValueError` for invalid ones."""
    outside, received = (np.asarray(of_tokens, _HALF) for of_tokens in (scores.outside, scores.received))
    try:
        earlier = [_EARLIER.pack(chunk.digest, chunk.tokens, chunk.mass) for chunk in scores.earlier]
    except struct.error as error:
        raise ValueError(f"not a chunk: {error}") from error
    return PackedScores(outside.tobytes(), received.tobytes(), float(scores.intra), b"".join(earlier))


def unpack_scores(packed: PackedScores, tokens: int) -> ChunkScores:
    """The scores of a chunk of `tokens` tokens. Raises `ValueError` if they do not match."""
    if not len(packed.outside) == len(packed.received) == tokens * _HALF.itemsize:
        raise ValueError("there is not one score per token")
    if len(packed.earlier) % _EARLIER.size:
        raise ValueError("a chunk before it is cut off")
    earlier = [EarlierChunk(ChunkDigest(digest), *rest) for digest, *rest in _EARLIER.iter_unpack(packed.earlier)]
    outside, received = np.frombuffer(packed.outside, _HALF), np.frombuffer(packed.received, _HALF)
    return ChunkScores(outside, received, packed.intra, tuple(earlier))
