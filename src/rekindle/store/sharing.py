"""The shared tiers of a store, the nearest first. As everywhere in the store, a failure is a miss or "not kept"."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from rekindle.core.chunk import ChunkDigest, Variant, chain_tokens, nonprefix
from rekindle.core.keys import BLOCK_TOKENS, KvSpace, token_ids
from rekindle.core.kv import Span
from rekindle.core.scope import Scope
from rekindle.errors import CacheUnusable
from rekindle.store.catalog import catalog, delta_rows
from rekindle.store.catalog.variant_rows import ChunkLocation, SpaceRow, chunk_location, listing, parse_row
from rekindle.store.delta_base import base_files
from rekindle.store.disk import DiskStore
from rekindle.store.extents import BaseFile
from rekindle.store.failures import Failures
from rekindle.store.prefix_index import Match, Piece
from rekindle.store.shared_record import ChainRecord, ChunkRecord, SharedBase, SharedExtent
from rekindle.store.shared_tier import SharedTier
from rekindle.store.variants import StoredVariant, moved

Lookup = Callable[[KvSpace, Sequence[int]], Match]


class Sharing:
    """What a store shares with those of other servers. `lookup` finds what is in the folder."""

    def __init__(self, disk: DiskStore, failures: Failures, lookup: Lookup, tiers: Sequence[SharedTier]) -> None:
        self.tiers = tuple(tiers)
        self._disk = disk
        self._failures = failures
        self._lookup = lookup

    def extend(self, kv_space: KvSpace, match: Match, names: Collection[str]) -> Match:
        """`match` with what the tiers of these names have of the prompt beyond it."""
        for tier in self._named(names):
            known = match
            match = self._failures.reading(lambda tier=tier, known=known: tier.extend(kv_space, known), match)
        return match

    def share(
        self, kv_space: KvSpace, tokens: Sequence[int], names: Collection[str], present: Callable[[], bool]
    ) -> str:
        """Write a stored prompt to the tiers of these names, as far as they do not have it; returns the last outcome."""
        outcome = "unshared"
        for tier in self._named(names):
            outcome = self._failures.writing(
                lambda tier=tier: self._share(tier, kv_space, tokens, present), lambda _: "failed"
            )
        return outcome

    def find_chunks(
        self, kv_space: KvSpace, chunks: Mapping[ChunkDigest, bytes], names: Collection[str]
    ) -> dict[ChunkDigest, list[StoredVariant]]:
        """The variants of chunks, given with the bytes of their tokens, on the first tier that has some of each."""
        found: dict[ChunkDigest, list[StoredVariant]] = {}
        for tier in self._named(names):
            missing = [digest for digest in chunks if digest not in found]

            def look(
                tier: SharedTier = tier, missing: list[ChunkDigest] = missing
            ) -> dict[ChunkDigest, list[StoredVariant]]:
                records = tier.find_chunks(kv_space, missing) if missing else {}
                stored = {
                    digest: [
                        one for one in (self._stored(tier, kv_space, digest, chunks[digest], r) for r in some) if one
                    ]
                    for digest, some in records.items()
                }
                return {digest: some for digest, some in stored.items() if some}

            found |= self._failures.reading(look, {})
        return found

    def share_chunks(
        self, kv_space: KvSpace, tokens: Sequence[int], variants: Sequence[Variant], names: Collection[str]
    ) -> None:
        """List chunks of a prompt on the tiers of these names, as far as they have the prompt."""
        match = self._lookup(kv_space, tokens)

        def write(tier: SharedTier) -> None:
            chain = tier.chain_of(kv_space, match)
            for variant in variants if chain is not None else ():
                location = chunk_location(match.root, match.keys, match.tokens, variant.span)
                if chain is not None and location.last < chain.blocks:
                    self._write_chunk(tier, kv_space, kv_space, location, variant, chain)

        for tier in self._named(names):
            self._failures.writing(lambda tier=tier: write(tier), lambda _: None)

    def share_nonprefix(
        self, kv_space: KvSpace, tokens: bytes, variant: Variant, names: Collection[str], present: Callable[[], bool]
    ) -> None:
        """The same for non-prefix KV of a chunk that was stored, with its KV."""
        own, data = nonprefix(kv_space), token_ids(chain_tokens(variant.digest, tokens))
        self.share(own, data, names, present)
        match = self._lookup(own, data)

        def write(tier: SharedTier) -> None:
            chain = tier.chain_of(own, match)
            if chain is not None and match.pieces:
                span = Span(match.length - len(variant.span), match.length)
                location = chunk_location(match.root, match.keys, match.tokens, span)
                self._write_chunk(tier, kv_space, own, location, variant, chain)

        for tier in self._named(names):
            self._failures.writing(lambda tier=tier: write(tier), lambda _: None)

    def remove(self, scope: Scope | None) -> None:
        """Remove everything of a tenant and salt, or all. Raises `CacheUnusable` if a tier does not answer."""
        for tier in self.tiers:
            try:
                tier.remove_all(scope)
            except OSError as error:
                raise CacheUnusable(
                    f"Not all could be removed from the tier {tier.name}: {error}. Run it again."
                ) from error

    def close(self) -> None:
        """Close the connections. Idempotent."""
        for tier in self.tiers:
            tier.close()

    def _named(self, names: Collection[str]) -> list[SharedTier]:
        return [tier for tier in self.tiers if tier.name in names]

    def _share(self, tier: SharedTier, kv_space: KvSpace, tokens: Sequence[int], present: Callable[[], bool]) -> str:
        match = self._lookup(kv_space, tokens)
        with self._disk.database.reading() as connection:
            rows = [catalog.extent(connection, piece.extent) for piece in match.pieces]
            digest = self._disk.kv_space_digest(kv_space)
            files = [BaseFile(row, digest, 0, 0, 0) for row in rows if row is not None]
            bases = [base_files(connection, delta_rows.bases_of(connection, file.row.id)) for file in files]
        own = []
        by_name: dict[str, catalog.Extent] = {}
        for file, parts in zip(files, bases, strict=True):
            by_name |= {one.row.name: one.row for one in (file, *parts)}
            based = tuple(SharedBase(self._described(part), part.at, part.place, part.blocks) for part in parts)
            own.append(replace(self._described(file), bases=based))
        if len(own) < len(match.pieces):
            return "gone"
        return tier.write(kv_space, match, own, lambda one: self._disk.extents.read_file(by_name[one.name]), present)

    def _described(self, file: BaseFile) -> SharedExtent:
        row = file.row
        opened = self._disk.extents.open(row, file.kv_space)
        self._disk.extents.release(opened)
        return SharedExtent(
            row.name,
            file.kv_space,
            (row.digest or b"").hex(),
            row.size_bytes,
            opened.header.plan.header_bytes,
            row.depth,
            row.blocks,
            row.coding,
        )

    def _write_chunk(
        self,
        tier: SharedTier,
        kv_space: KvSpace,
        own: KvSpace,
        location: ChunkLocation,
        variant: Variant,
        chain: ChainRecord,
    ) -> None:
        digest = self._disk.kv_space_digest(own)
        listed = listing(self._disk.digester, digest, location, variant)
        columns = (location.parent, location.tail, *listed.columns())
        first = location.span.start // BLOCK_TOKENS
        following = [*(one.depth for one in chain.extents[1:]), location.last + 1]
        extents = tuple(one for one, stop in zip(chain.extents, following, strict=True) if stop > first)
        part = replace(chain, extents=tuple(one for one in extents if one.depth <= location.last))
        tier.write_chunk(kv_space, variant.digest, ChunkRecord(own != kv_space, columns, part))

    def _stored(
        self, tier: SharedTier, kv_space: KvSpace, digest: ChunkDigest, tokens: bytes, record: ChunkRecord
    ) -> StoredVariant | None:
        """A variant that a tier lists, if its row matches its seal."""
        own = nonprefix(kv_space) if record.nonprefix else kv_space
        space = SpaceRow(0, self._disk.kv_space_digest(own), record.nonprefix)
        row = parse_row(self._disk.digester, space, digest, (0, *record.columns, 0.0))
        if row is None:
            return None
        pieces = _pieces(tier, row.location.span, record.chain)
        shift = row.variant.span.start - row.location.span.start
        return StoredVariant(
            id=0,
            variant=row.variant,
            frequency=0.0,
            tier=tier.name,
            size_bytes=len(row.variant.span) * kv_space.layout.token_bytes,
            nonprefix=record.nonprefix,
            kv_space=space.digest,
            location=row.location,
            tokens=tokens,
            pieces=tuple(moved(piece, shift) for piece in pieces),
        )


def _pieces(tier: SharedTier, span: Span, chain: ChainRecord) -> list[Piece]:
    """The pieces of a span of a chain."""
    pieces = []
    following = [*(one.depth * BLOCK_TOKENS for one in chain.extents[1:]), span.stop]
    for extent, follows in zip(chain.extents, following, strict=True):
        start, stop = max(span.start, extent.depth * BLOCK_TOKENS), min(span.stop, follows)
        if start < stop:
            first = start // BLOCK_TOKENS - extent.depth
            own = Span(start, stop)
            pieces.append(Piece(0, extent.name, first, own, start % BLOCK_TOKENS, extent.coding, 0, tier.name))
    return pieces
