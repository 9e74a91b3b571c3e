"""Variants of chunks: KV already kept, found by the chunk's tokens alone, whatever preceded it.

A variant is a view on the blocks of a prompt (`keep`), or, where these are not exact, a separate copy of non-prefix KV
(`keep_nonprefix`). As everywhere in the store, failures never fail a request: then nothing is found and nothing is
kept.
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rekindle.core.chunk import DIGEST_TOKENS, ChunkDigest, Variant, chain_kv, chain_tokens, chunk_digest, nonprefix
from rekindle.core.keys import BLOCK_BYTES, TOKEN_BYTES, KvSpace, chain, token_bytes
from rekindle.core.kv import Kv, Span
from rekindle.core.plan import Tier
from rekindle.core.scope import AppRef
from rekindle.errors import InvalidSetting
from rekindle.store.catalog import catalog, variant_rows
from rekindle.store.catalog.catalog import AccessLog, uses_of
from rekindle.store.catalog.variant_rows import (
    ChunkLocation,
    ChunkView,
    Listing,
    SpaceRow,
    chunk_location,
    listing,
)
from rekindle.store.delta_base import coded_pieces
from rekindle.store.disk import DiskStore, check_present
from rekindle.store.failures import Failures, Kept
from rekindle.store.feed import KvSource, KvSources, StoredFeed
from rekindle.store.limits import Refused
from rekindle.store.memory import HeldExtent, MemoryTier
from rekindle.store.prefix_index import Piece

_A_TRANSACTION = 32
_ROWS_A_TIDYING = 1024
_MAX_BROKEN = 1000
_MAX_GAIN = 10.0
_MAX_NONPREFIX = 2  # variants of one chunk that are non-prefix KV: each has bytes of its own


@dataclass(frozen=True, eq=False)
class StoredVariant:
    """A variant that can be loaded, by what the catalog says.

    `id` is the number of its row, 0 for text that has none. `frequency` counts its uses; a use that needed little
    recompute counts more. `tier` is where its KV is, `size_bytes` its size. The rest is for `load` and `record_use`.
    """

    id: int
    variant: Variant
    frequency: float
    tier: Tier
    size_bytes: int
    nonprefix: bool
    kv_space: str
    location: ChunkLocation
    tokens: bytes
    pieces: tuple[Piece, ...]  # which tile `variant.span`


class Variants:
    """The variants of a store. Thread-safe, and shared by processes."""

    def __init__(
        self, disk: DiskStore, memory: MemoryTier, failures: Failures, sources: KvSources, access_log: AccessLog
    ) -> None:
        self._disk = disk
        self._memory = memory
        self._failures = failures
        self._sources = sources
        self._access_log = access_log
        self._lock = threading.Lock()
        self._broken: set[int] = set()  # damaged rows, until they are removed
        self._looked_at = dict.fromkeys(variant_rows.LOST, 0)  # the last row checked of each table

    # -- reading: every failure is a miss --------------------------------------------------------------------------

    def find(self, kv_space: KvSpace, chunks: Mapping[ChunkDigest, bytes]) -> dict[ChunkDigest, list[StoredVariant]]:
        """The variants of chunks, given with the bytes of their tokens; most used first. Changes nothing.

        A chunk without any is left out.
        """

        def look() -> dict[ChunkDigest, list[StoredVariant]]:
            found: dict[ChunkDigest, list[StoredVariant]] = {}
            fresh, size_bytes = self._disk.room.fresh(), kv_space.layout.token_bytes
            with self._disk.database.reading() as connection:
                for space in spaces_of(self._disk, connection, kv_space):
                    view = ChunkView(connection, space.number, fresh, self._sources.bad)
                    for digest, tokens in chunks.items():
                        if stored := list(self._stored(view, space, digest, tokens, size_bytes)):
                            found.setdefault(digest, []).extend(stored)
            for stored in found.values():
                stored.sort(key=lambda one: -one.frequency)
            return found

        return self._failures.reading(look, {})

    def load(self, kv_space: KvSpace, stored: StoredVariant, timeout_seconds: float = math.inf) -> StoredFeed:
        """A feed of a variant's KV as it was computed at its span. Raises `KvLost` if it was removed or damaged."""
        self._failures.check_open()
        own_kv_space = nonprefix(kv_space) if stored.nonprefix else kv_space
        if self._disk.kv_space_digest(own_kv_space) != stored.kv_space:
            raise InvalidSetting("The variant was found on another kv_space. Load it from that one.")
        opened: list[KvSource] = []  # from the last on: each names the node that the one before it must reach
        for piece in reversed(stored.pieces):
            below = opened[-1] if opened else None
            self._sources.add(opened, own_kv_space, piece, partial(_is_in_place, stored=stored, below=below))
        return self._sources.feed(own_kv_space, opened[::-1], timeout_seconds)

    def stored_at(
        self,
        view: ChunkView,
        space: SpaceRow,
        location: ChunkLocation,
        variant: Variant,
        tokens: bytes,
        size_bytes: int,
    ) -> StoredVariant | None:
        """A variant of these tokens whose KV is at a location; None if part of it is missing."""
        pieces = view.find_pieces(location, tokens)
        if pieces is None or (space.nonprefix and len(pieces) > 1):
            return None
        if shift := variant.span.start - location.span.start:
            pieces = tuple(moved(piece, shift) for piece in pieces)
        held = all(self._memory.holds(piece.name) for piece in pieces)
        coded = not held and any(piece.coding != "raw" for piece in coded_pieces(view.connection, pieces))
        return StoredVariant(
            id=0,
            variant=variant,
            frequency=0.0,
            tier="memory" if held else "coded" if coded else "disk",
            size_bytes=size_bytes,
            nonprefix=space.nonprefix,
            kv_space=space.digest,
            location=location,
            tokens=tokens,
            pieces=pieces,
        )

    def record_use(self, stored: StoredVariant, recomputed: float, saved_ms: float = 0.0) -> None:
        """Record a use of a variant, the share of it that was recomputed, and the time that saved. Written by
        `maintain`.

        What a use saves grows with the chunk as its bytes do, so the sum of these gains is what a byte is worth.
        """
        now, length = self._disk.clock(), len(stored.variant.span)
        gain = min(1 / recomputed, _MAX_GAIN) if recomputed > 0 else _MAX_GAIN
        use = partial(variant_rows.count_use, id=stored.id, digest=stored.variant.digest, gain=gain, at=now)
        self._access_log.add([*uses_of(stored.pieces, now, saved_ms / length), use])

    # -- writing: every failure is "not kept" ----------------------------------------------------------------------

    def keep(self, kv_space: KvSpace, tokens: Sequence[int], variants: Sequence[Variant]) -> int:
        """List variants of chunks in a prompt that was kept in the KV space; returns how many are new.

        A variant whose blocks are not stored is not listed. One that is listed in the same place is replaced.
        """
        self._failures.check_open()
        data, root = token_bytes(tokens), kv_space.namespace.root
        keys, digest = chain(root, data), self._disk.kv_space_digest(kv_space)
        listed = []
        for variant in variants:
            _check(variant, part_of(data, variant.span))
            listed.append(self._listing(digest, chunk_location(root, keys, data, variant.span), variant))
        if self._disk.database.read_only or not listed:
            return 0

        def write() -> int:
            if not self._has_room(sum(one.size_bytes for one in listed)):
                return 0
            batches = [listed[first : first + _A_TRANSACTION] for first in range(0, len(listed), _A_TRANSACTION)]
            return sum(self._add(digest, data, batch) for batch in batches)

        return self._failures.writing(write, lambda _: 0)

    def keep_nonprefix(
        self,
        kv_space: KvSpace,
        chunk_tokens: Sequence[int],
        kv: Kv,
        variant: Variant,
        *,
        app: AppRef | None = None,
        present: Callable[[], bool] | None = None,
    ) -> Kept:
        """Keep KV of a chunk that is not exact, computed at the variant's span. Exact lookups never find it.

        After the same chunks it is "known". Of more than `_MAX_NONPREFIX` for one chunk the least used goes, with its
        KV. Otherwise like `TieredStore.keep`; only the length of `kv.span` matters.
        """
        self._failures.check_open()
        tokens = token_bytes(chunk_tokens)
        _check(variant, tokens)
        if len(kv.span) != len(variant.span) or kv.layout != kv_space.layout:
            raise InvalidSetting("Non-prefix KV must be of the chunk's length, in the kv_space's layout.")
        own_kv_space, root = nonprefix(kv_space), kv_space.namespace.root
        data = chain_tokens(variant, tokens)
        keys, span = chain(root, data), Span(DIGEST_TOKENS, DIGEST_TOKENS + len(variant.span))
        listed = self._listing(
            self._disk.kv_space_digest(own_kv_space), chunk_location(root, keys, data, span), variant
        )

        def write() -> Kept:
            self._access_log.flush(self._disk.database)
            self._sources.settle()
            found = self.find(kv_space, {variant.digest: tokens}).get(variant.digest, ())
            if any(stored.nonprefix and stored.variant.before == variant.before for stored in found):
                return Kept("known")
            size_bytes = len(kv.span) * kv.layout.token_bytes
            if self._disk.admit(own_kv_space, keys, size_bytes) < len(keys):
                raise Refused("it was seen for the first time")
            self._cut_rest(own_kv_space, variant.chain_name)
            whole = chain_kv(kv)
            also = partial(self._list_nonprefix, listed=listed, present=present)
            written = self._disk.keep(own_kv_space, root, data, whole, also=also, app=app)
            if self._memory.fits(written.size_bytes):
                self._memory.put(written.header.plan.name, HeldExtent(written.header, whole.layers))
            self._failures.counts.kept += 1
            return Kept("kept", size_bytes=written.size_bytes)

        try:
            return self._failures.writing(write, lambda reason: Kept("failed", reason))
        except Refused as refusal:
            return self._failures.refused(refusal)

    def tidy(self) -> None:
        """Remove damaged rows, and some of those whose blocks were removed, fingerprints too. Raises as the catalog
        does."""
        with self._lock:
            broken, self._broken = self._broken, set()
        if broken:
            with self._disk.database.writing() as connection:
                variant_rows.drop(connection, broken)
        for table, last in self._looked_at.items():
            self._looked_at[table] = variant_rows.sweep_some(self._disk.database, table, last, _ROWS_A_TIDYING)

    # -- the rest --------------------------------------------------------------------------------------------------

    def _stored(
        self, view: ChunkView, space: SpaceRow, digest: ChunkDigest, tokens: bytes, size_bytes: int
    ) -> Iterator[StoredVariant]:
        """The variants in one KV space of a chunk whose tokens take `size_bytes` bytes."""
        for id, row in variant_rows.rows(view.connection, self._disk.digester, space, digest):
            if row is None:
                with self._lock:
                    if len(self._broken) < _MAX_BROKEN:
                        self._broken.add(id)
                continue
            stored = self.stored_at(view, space, row.location, row.variant, tokens, size_bytes * len(row.variant.span))
            if stored is not None:
                yield replace(stored, id=id, frequency=row.frequency)

    def _listing(self, kv_space_digest: str, location: ChunkLocation, variant: Variant) -> Listing:
        try:
            return listing(self._disk.digester, kv_space_digest, location, variant)
        except ValueError as error:
            raise InvalidSetting(f"The variant at {variant.span} cannot be kept: {error}.") from error

    def _add(self, kv_space_digest: str, tokens: bytes, listed: Sequence[Listing]) -> int:
        with self._disk.database.writing() as connection:
            number = catalog.kv_space_id(connection, kv_space_digest)
            if number is None:
                return 0
            view = ChunkView(connection, number, self._disk.room.fresh(), self._sources.bad)
            there = [one for one in listed if view.find_pieces(one.location, part_of(tokens, one.location.span))]
            return self._add_rows(connection, number, there)

    def _list_nonprefix(
        self, connection: sqlite3.Connection, number: int, listed: Listing, present: Callable[[], bool] | None
    ) -> None:
        check_present(connection, number, present)
        self._add_rows(connection, number, [listed], _MAX_NONPREFIX)

    def _add_rows(
        self, connection: sqlite3.Connection, number: int, listed: Sequence[Listing], max_a_chunk: int | None = None
    ) -> int:
        settings = self._disk.settings
        max_a_chunk = min(settings.max_a_chunk, max_a_chunk or settings.max_a_chunk)
        return variant_rows.add(connection, number, listed, self._disk.clock(), settings.max_variants, max_a_chunk)

    def _cut_rest(self, kv_space: KvSpace, chain_name: ChunkDigest) -> None:
        """Remove the rest of a variant's own chain: KV of two computations must not be mixed."""
        with self._disk.database.writing() as connection:
            number = catalog.kv_space_id(connection, self._disk.kv_space_digest(kv_space))
            everything = catalog.Fresh(float("-inf"), float("inf"))
            while number is not None:
                rest = ChunkView(connection, number, everything).beginning(kv_space.namespace.root, chain_name)
                if rest is None:
                    return
                catalog.cut(connection, rest.extent, 0)

    def _has_room(self, size_bytes: int) -> bool:
        """Whether the catalog may grow by `size_bytes`; KV of the lowest worth is evicted for it."""
        room = self._disk.room
        for attempt in (1, 2):
            with self._disk.database.scanning() as connection:
                used = room.used_bytes(connection)
            if used + size_bytes <= room.limit_bytes(used):
                return True
            if attempt == 1:
                room.hold_limit(spare_bytes=size_bytes)
        return False


def spaces_of(disk: DiskStore, connection: sqlite3.Connection, kv_space: KvSpace) -> list[SpaceRow]:
    """The KV space and the one for its non-prefix KV, if they were used before."""
    digests = [disk.kv_space_digest(one) for one in (kv_space, nonprefix(kv_space))]
    numbers = [catalog.kv_space_id(connection, digest) for digest in digests]
    return [
        SpaceRow(number, digest, apart)
        for number, digest, apart in zip(numbers, digests, (False, True), strict=True)
        if number is not None
    ]


def _check(variant: Variant, tokens: bytes) -> None:
    """Raises `InvalidSetting` if the variant is not of these tokens."""
    if not tokens or len(tokens) != len(variant.span) * TOKEN_BYTES or chunk_digest(tokens) != variant.digest:
        raise InvalidSetting(f"The variant at {variant.span} is of other tokens than those given.")


def part_of(tokens: bytes, span: Span) -> bytes:
    """The tokens of a span."""
    return tokens[span.start * TOKEN_BYTES : span.stop * TOKEN_BYTES]


def moved(piece: Piece, by: int) -> Piece:
    """The same piece for tokens that stand `by` positions later."""
    return replace(piece, span=Span(piece.span.start + by, piece.span.stop + by))


def _is_in_place(source: KvSource, stored: StoredVariant, below: KvSource | None) -> bool:
    """Whether the extent file itself holds these tokens in this place: the catalog alone is not trusted.

    Its blocks must lead to the node above the chunk's last block, or to the parent of the extent below.
    """
    plan, piece, start = source.header.plan, source.piece, stored.variant.span.start
    wanted = part_of(stored.tokens, Span(piece.span.start - start, piece.span.stop - start))
    blocks, node, tail = piece.last, stored.location.parent, stored.location.tail
    if below is not None:
        blocks, node, tail = piece.last + 1, below.header.plan.parent, b""
    above = chain(plan.parent, plan.tokens[: blocks * BLOCK_BYTES])
    return (
        plan.kv_space == stored.kv_space
        and part_of(plan.tokens, source.span) == wanted
        and plan.tokens.startswith(tail, blocks * BLOCK_BYTES)
        and (above[-1] if above else plan.parent) == node
    )
