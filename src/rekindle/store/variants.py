"""Variants of chunks: KV already kept, found again by the chunk's tokens alone, whatever stood before it.

A variant is a view on the blocks of a prompt (`keep`), or, where these are not exact, loose KV of its own
(`keep_loose`). Like everything else in the store it is never a reason for a request to fail: in trouble, nothing is
known and nothing is kept.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from rekindle.core.app import Asker
from rekindle.core.chunk import ChunkDigest, Variant, chunk_digest
from rekindle.core.keys import BLOCK_BYTES, TOKEN_BYTES, Shelf, chain, token_bytes
from rekindle.core.kv import Kv, Span
from rekindle.errors import InvalidSetting
from rekindle.index.chunks import Seat, locate, seat
from rekindle.index.prefix import Piece
from rekindle.store import anchor_rows, catalog, variant_rows
from rekindle.store.disk import DiskStore
from rekindle.store.failures import Failures, Kept
from rekindle.store.feed import Source, StoredFeed
from rekindle.store.limits import Refused
from rekindle.store.loose import NAME_TOKENS, loose, named, named_kv
from rekindle.store.memory import HeldExtent, MemoryTier
from rekindle.store.sources import Sources
from rekindle.store.uses import BlockUse, Uses
from rekindle.store.variant_rows import ChunkView, Listing, Side, VariantUse, listing

_A_TRANSACTION = 32
_ROWS_A_TIDYING = 1024
_MOST_BROKEN = 1000
_MOST_GAIN = 10.0


@dataclass(frozen=True, eq=False)
class KnownVariant:
    """A variant that can be loaded, as far as the catalog knows.

    `frequency` is how much it was used, a use that needed little mending counting more. `tier` is where its KV is,
    `size_bytes` what that takes. The rest is for `load` and `used`.
    """

    id: int
    variant: Variant
    frequency: float
    tier: Literal["memory", "disk", "coded"]
    size_bytes: int
    loose: bool
    shelf: str
    seat: Seat
    tokens: bytes
    pieces: tuple[Piece, ...]  # which tile `variant.span`


@dataclass(frozen=True)
class VariantCounts:
    """How many chunks are listed, with how many variants, of which so many are loose."""

    chunks: int = 0
    variants: int = 0
    loose: int = 0


class Variants:
    """The variants of a store. Used from several threads and processes at once."""

    def __init__(self, disk: DiskStore, memory: MemoryTier, failures: Failures, sources: Sources, uses: Uses) -> None:
        self._disk = disk
        self._memory = memory
        self._failures = failures
        self._sources = sources
        self._uses = uses
        self._lock = threading.Lock()
        self._broken: set[int] = set()  # rows that make no sense, until they are removed
        self._looked_at = 0  # the last row that was looked at when tidying

    # -- reading: every failure is a miss --------------------------------------------------------------------------

    def find(self, shelf: Shelf, chunks: Mapping[ChunkDigest, bytes]) -> dict[ChunkDigest, list[KnownVariant]]:
        """The variants of chunks, given with the bytes of their tokens; most used first. Changes nothing.

        A chunk without any is left out.
        """

        def look() -> dict[ChunkDigest, list[KnownVariant]]:
            found: dict[ChunkDigest, list[KnownVariant]] = {}
            fresh, size_bytes = self._disk.room.fresh(), shelf.layout.token_bytes
            with self._disk.database.reading() as connection:
                for side in self._sides(connection, shelf):
                    view = ChunkView(connection, side.number, fresh, self._sources.bad)
                    for digest, tokens in chunks.items():
                        if known := list(self._known(view, side, digest, tokens, size_bytes)):
                            found.setdefault(digest, []).extend(known)
            for known in found.values():
                known.sort(key=lambda one: -one.frequency)
            return found

        return self._failures.reading(look, {})

    def load(self, shelf: Shelf, known: KnownVariant) -> StoredFeed:
        """A feed of a variant's KV as it was computed at its span. Raises `KvLost` if it is not there any more."""
        self._failures.check_open()
        stands_on = loose(shelf) if known.loose else shelf
        if self._disk.shelf_digest(stands_on) != known.shelf:
            raise InvalidSetting("The variant was found on another shelf. Load it from that one.")
        opened: list[Source] = []  # from the last on: each names the node that the one before it must reach
        for piece in reversed(known.pieces):
            below = opened[-1] if opened else None
            self._sources.add(opened, stands_on, piece, partial(_is_in_place, known=known, below=below))
        return self._sources.feed(stands_on, opened[::-1])

    def used(self, known: KnownVariant, cfo: float, saved_ms: float = 0.0) -> None:
        """Note that a variant was used, with so much mending for its size, and what that saved. `tend` writes it."""
        now, length = self._disk.clock(), len(known.variant.span)
        gain = min(1 / cfo, _MOST_GAIN) if cfo > 0 else _MOST_GAIN
        blocks = [BlockUse(p.extent, p.name, p.last, now, saved_ms * len(p.span) / length) for p in known.pieces]
        self._uses.add([*blocks, VariantUse(known.id, known.variant.digest, gain, now)])

    def stats(self, shelf: Shelf | None = None) -> VariantCounts:
        """How many there are on a shelf, or on all."""

        def count() -> VariantCounts:
            with self._disk.database.reading() as connection:
                if shelf is None:
                    where, values = "1", list[int]()
                else:
                    values = [side.number for side in self._sides(connection, shelf)]
                    where = f"shelf IN ({','.join('?' * len(values))})"
                apart = variant_rows.loose_shelves(connection)
                select = f"SELECT digest, shelf FROM variants WHERE {where}"
                found = connection.execute(select, values).fetchall()
            return VariantCounts(len({row[0] for row in found}), len(found), sum(row[1] in apart for row in found))

        return self._failures.reading(count, VariantCounts())

    # -- writing: every failure is "not kept" ----------------------------------------------------------------------

    def keep(self, shelf: Shelf, tokens: Sequence[int], variants: Sequence[Variant]) -> int:
        """List variants of chunks in a prompt that was kept on the shelf; how many are new.

        One whose blocks are not known is not listed. One that is listed in the same place is replaced.
        """
        self._failures.check_open()
        data, root = token_bytes(tokens), shelf.namespace.root
        keys, digest = chain(root, data), self._disk.shelf_digest(shelf)
        listed = []
        for variant in variants:
            _check(variant, _part(data, variant.span))
            listed.append(self._listing(digest, seat(root, keys, data, variant.span), variant))
        if self._disk.database.read_only or not listed:
            return 0

        def write() -> int:
            if not self._has_room(sum(one.size_bytes for one in listed)):
                return 0
            batches = [listed[first : first + _A_TRANSACTION] for first in range(0, len(listed), _A_TRANSACTION)]
            return sum(self._add(digest, data, batch) for batch in batches)

        return self._failures.writing(write, lambda _: 0)

    def keep_loose(
        self, shelf: Shelf, chunk_tokens: Sequence[int], kv: Kv, variant: Variant, app: Asker | None = None
    ) -> Kept:
        """Keep KV of a chunk that is not exact, computed at the variant's span. No exact lookup will ever find it.

        One a chunk: while that is there, others are "known". Otherwise as `TieredStore.keep`; `kv.span` does not
        matter, but for its length.
        """
        self._failures.check_open()
        tokens = token_bytes(chunk_tokens)
        _check(variant, tokens)
        if len(kv.span) != len(variant.span) or kv.layout != shelf.layout:
            raise InvalidSetting("Loose KV must be of the chunk's length, in the shelf's layout.")
        stands_on, root = loose(shelf), shelf.namespace.root
        data = named(variant.digest, tokens)
        keys, span = chain(root, data), Span(NAME_TOKENS, NAME_TOKENS + len(variant.span))
        listed = self._listing(self._disk.shelf_digest(stands_on), seat(root, keys, data, span), variant)

        def write() -> Kept:
            self._uses.flush(self._disk.database)
            self._sources.settle()
            if self._is_known(shelf, variant.digest, tokens):
                return Kept("known")
            if self._disk.settings.admission == "second-use" and self._disk.admit(stands_on, keys) < len(keys):
                raise Refused("it was not met before")
            self._cut_rest(stands_on, variant.digest)
            whole = named_kv(kv)
            also = partial(self._list_loose, listed=listed)
            written = self._disk.keep(stands_on, root, data, whole, also=also, app=app)
            if self._memory.fits(written.size_bytes):
                self._memory.put(written.header.plan.name, HeldExtent(written.header, whole.layers))
            self._failures.counts.kept += 1
            return Kept("kept", size_bytes=written.size_bytes)

        try:
            return self._failures.writing(write, lambda reason: Kept("failed", reason))
        except Refused as refusal:
            return self._failures.refused(str(refusal))

    def tidy(self) -> None:
        """Remove rows that make no sense, and some of those whose blocks went. Raises as the catalog does."""
        with self._lock:
            broken, self._broken = self._broken, set()
        if broken:
            with self._disk.database.writing() as connection:
                variant_rows.drop(connection, broken)
        self._looked_at = variant_rows.sweep(self._disk.database, self._looked_at, _ROWS_A_TIDYING)

    # -- the rest --------------------------------------------------------------------------------------------------

    def _sides(self, connection: sqlite3.Connection, shelf: Shelf) -> list[Side]:
        """The shelf and the one for its loose KV, as far as they were ever used."""
        digests = [self._disk.shelf_digest(one) for one in (shelf, loose(shelf))]
        numbers = [catalog.shelf_id(connection, digest) for digest in digests]
        return [
            Side(number, digest, apart)
            for number, digest, apart in zip(numbers, digests, (False, True), strict=True)
            if number is not None
        ]

    def _known(
        self, view: ChunkView, side: Side, digest: ChunkDigest, tokens: bytes, size_bytes: int
    ) -> Iterator[KnownVariant]:
        """The variants of a chunk on one shelf, where a token takes so many bytes."""
        for id, row in variant_rows.rows(view.connection, self._disk.digester, side, digest):
            if row is None:
                with self._lock:
                    if len(self._broken) < _MOST_BROKEN:
                        self._broken.add(id)
                continue
            pieces = locate(view, row.seat, tokens)
            if pieces is None or (side.loose and len(pieces) > 1):
                continue
            if shift := row.variant.span.start - row.seat.span.start:
                pieces = tuple(_moved(piece, shift) for piece in pieces)
            held = all(self._memory.holds(piece.name) for piece in pieces)
            coded = not held and bool(anchor_rows.codings(view.connection, [piece.extent for piece in pieces]))
            yield KnownVariant(
                id=id,
                variant=row.variant,
                frequency=row.frequency,
                tier="memory" if held else "coded" if coded else "disk",
                size_bytes=len(row.variant.span) * size_bytes,
                loose=side.loose,
                shelf=side.digest,
                seat=row.seat,
                tokens=tokens,
                pieces=pieces,
            )

    def _is_known(self, shelf: Shelf, digest: ChunkDigest, tokens: bytes) -> bool:
        return any(one.loose for one in self.find(shelf, {digest: tokens}).get(digest, ()))

    def _listing(self, shelf_digest: str, seat: Seat, variant: Variant) -> Listing:
        try:
            return listing(self._disk.digester, shelf_digest, seat, variant)
        except ValueError as error:
            raise InvalidSetting(f"The variant at {variant.span} cannot be kept: {error}.") from error

    def _add(self, shelf_digest: str, tokens: bytes, listed: Sequence[Listing]) -> int:
        with self._disk.database.writing() as connection:
            number = catalog.shelf_id(connection, shelf_digest)
            if number is None:
                return 0
            view = ChunkView(connection, number, self._disk.room.fresh(), self._sources.bad)
            there = [one for one in listed if locate(view, one.seat, _part(tokens, one.seat.span))]
            return variant_rows.add(connection, number, there, self._disk.clock(), self._disk.settings)

    def _list_loose(self, connection: sqlite3.Connection, number: int, listed: Listing) -> None:
        variant_rows.add(connection, number, [listed], self._disk.clock(), self._disk.settings)

    def _cut_rest(self, shelf: Shelf, digest: ChunkDigest) -> None:
        """Remove what is left of a chunk's loose chain: KV of two computations must not be mixed."""
        with self._disk.database.writing() as connection:
            number = catalog.shelf_id(connection, self._disk.shelf_digest(shelf))
            everything = catalog.Fresh(float("-inf"), float("inf"))
            while number is not None:
                rest = ChunkView(connection, number, everything).beginning(shelf.namespace.root, digest)
                if rest is None:
                    return
                catalog.cut(connection, rest.extent, 0)

    def _has_room(self, size_bytes: int) -> bool:
        """Whether the catalog may grow by so much; what is worth least is evicted for it."""
        room = self._disk.room
        for attempt in (1, 2):
            with self._disk.database.scanning() as connection:
                used = room.used_bytes(connection)
            if used + size_bytes <= room.limit_bytes(used):
                return True
            if attempt == 1:
                room.hold_limit(spare_bytes=size_bytes)
        return False


def _check(variant: Variant, tokens: bytes) -> None:
    """Raises `InvalidSetting` if the variant is not of these tokens."""
    if not tokens or len(tokens) != len(variant.span) * TOKEN_BYTES or chunk_digest(tokens) != variant.digest:
        raise InvalidSetting(f"The variant at {variant.span} is of other tokens than those given.")


def _part(tokens: bytes, span: Span) -> bytes:
    return tokens[span.start * TOKEN_BYTES : span.stop * TOKEN_BYTES]


def _moved(piece: Piece, by: int) -> Piece:
    return replace(piece, span=Span(piece.span.start + by, piece.span.stop + by))


def _is_in_place(source: Source, known: KnownVariant, below: Source | None) -> bool:
    """Whether the extent itself says that it holds these tokens in this place: the catalog's word is not enough.

    Its blocks must lead to the node above the chunk's last block, or to what the extent below hangs on.
    """
    plan, piece, start = source.header.plan, source.piece, known.variant.span.start
    wanted = _part(known.tokens, Span(piece.span.start - start, piece.span.stop - start))
    blocks, node, tail = piece.last, known.seat.parent, known.seat.tail
    if below is not None:
        blocks, node, tail = piece.last + 1, below.header.plan.parent, b""
    above = chain(plan.parent, plan.tokens[: blocks * BLOCK_BYTES])
    return (
        plan.shelf == known.shelf
        and _part(plan.tokens, source.span) == wanted
        and plan.tokens.startswith(tail, blocks * BLOCK_BYTES)
        and (above[-1] if above else plan.parent) == node
    )
