"""The shared tiers of a store, the nearest first. A failure is a miss or "not kept"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from rekindle.core.chunk import ChunkDigest, Variant, chain_tokens, nonprefix
from rekindle.core.keys import BLOCK_TOKENS, KvSpace, token_ids
from rekindle.core.kv import Span
from rekindle.core.scope import Scope
from rekindle.errors import CacheUnusable
from rekindle.store.catalog import catalog
from rekindle.store.catalog.variant_rows import ChunkLocation, SpaceRow, chunk_location, listing, parse_row
from rekindle.store.delta_base import base_files, bases_of
from rekindle.store.disk import DiskStore
from rekindle.store.extents import BaseFile, Damaged
from rekindle.store.failures import FAILURES, Failures
from rekindle.store.prefix_index import Match, Piece
from rekindle.store.shared_record import ChainRecord, ChunkRecord, SharedBase, SharedExtent
from rekindle.store.shared_tier import SharedTier
from rekindle.store.variants import StoredVariant, moved

_MAX_WAITING = 64
T = TypeVar("T")
Lookup = Callable[[KvSpace, Sequence[int]], Match]
Present = Callable[[], bool]


def _always() -> bool:
    return True


class Sharing:
    """What a store shares with those of other servers. `lookup` finds what is in the folder.

    `worth` names the tiers from which a prompt of that many tokens loads sooner than it is computed: only those get it.
    """

    def __init__(self, disk: DiskStore, failures: Failures, lookup: Lookup, tiers: Sequence[SharedTier]) -> None:
        self.tiers = tuple(tiers)
        self.worth: Callable[[KvSpace, int], Collection[str]] = lambda *_: [tier.name for tier in tiers]
        self.outcomes: Counter[str] = Counter()
        self._disk = disk
        self._failures = failures
        self._lookup = lookup
        self._writer = ThreadPoolExecutor(1, "rekindle-share")
        self._waiting: set[Future[None]] = set()

    # -- in the background -------------------------------------------------------------------------------------------

    def later(self, work: Callable[[], str]) -> None:
        """Do something on the writer's thread, and count its outcome; what does not fit into its queue is dropped."""

        def do() -> None:
            self.outcomes[work()] += 1

        if not self.tiers:
            return
        if len(self._waiting) >= _MAX_WAITING:
            self.outcomes["backlog"] += 1
            return
        with suppress(RuntimeError):  # it was closed
            future = self._writer.submit(do)
            self._waiting.add(future)
            future.add_done_callback(self._waiting.discard)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all that is queued was written; False if that takes longer."""
        return not wait(list(self._waiting), timeout_seconds).not_done

    # -- reading and writing -----------------------------------------------------------------------------------------

    def extend(self, kv_space: KvSpace, match: Match, names: Collection[str]) -> Match:
        """`match` with what the tiers of these names have of the prompt beyond it."""
        for tier in self._named(names):
            match = self._trying(partial(tier.extend, kv_space, match), match)
        return match

    def share(self, kv_space: KvSpace, tokens: Sequence[int], present: Present = _always) -> str:
        """Write a stored prompt to the tiers that are worth it and do not have it; returns the last outcome."""
        outcome = "unshared"
        for tier in self._named(self.worth(kv_space, len(tokens))):
            share = partial(self._share, tier, kv_space, tokens, present)
            outcome = self._trying(share, "failed")
        return outcome

    def find_chunks(
        self, kv_space: KvSpace, chunks: Mapping[ChunkDigest, bytes], names: Collection[str]
    ) -> dict[ChunkDigest, list[StoredVariant]]:
        """The variants of chunks, given with the bytes of their tokens, on the first tier that has some of each."""
        found: dict[ChunkDigest, list[StoredVariant]] = {}

        def look(tier: SharedTier) -> None:
            missing = [digest for digest in chunks if digest not in found]
            for digest, records in (tier.find_chunks(kv_space, missing) if missing else {}).items():
                stored = [self._stored(tier, kv_space, digest, chunks[digest], record) for record in records]
                if usable := [one for one in stored if one is not None]:
                    found[digest] = usable

        for tier in self._named(names):
            self._trying(partial(look, tier), None)
        return found

    def share_chunks(self, kv_space: KvSpace, tokens: Sequence[int], variants: Sequence[Variant]) -> str:
        """List chunks of a prompt on the tiers that have it."""
        match = self._lookup(kv_space, tokens)

        def write(tier: SharedTier) -> str:
            chain = tier.chain_of(kv_space, match)
            for variant in variants if chain is not None else ():
                location = chunk_location(match.root, match.keys, match.tokens, variant.span)
                if chain is not None and location.last < chain.blocks:
                    self._write_chunk(tier, kv_space, kv_space, location, variant, chain)
            return "noted"

        return self._on_all(write)

    def share_nonprefix(self, kv_space: KvSpace, tokens: bytes, variant: Variant, present: Present = _always) -> str:
        """Write non-prefix KV of a chunk that was stored, and list it."""
        own, data = nonprefix(kv_space), token_ids(chain_tokens(variant, tokens))
        self.share(own, data, present)
        match = self._lookup(own, data)

        def write(tier: SharedTier) -> str:
            chain = tier.chain_of(own, match)
            if chain is not None and match.length == len(data):
                span = Span(match.length - len(variant.span), match.length)
                location = chunk_location(match.root, match.keys, match.tokens, span)
                self._write_chunk(tier, kv_space, own, location, variant, chain)
            return "noted"

        return self._on_all(write)

    def _on_all(self, write: Callable[[SharedTier], str]) -> str:
        done = [self._trying(partial(write, tier), "failed") for tier in self.tiers]
        return done[-1] if done else "unshared"

    def remove(self, scope: Scope | None) -> None:
        """Remove everything of a tenant and salt, or all. Raises `CacheUnusable` if a tier does not answer."""
        remove_from(self.tiers, scope)

    def close(self) -> None:
        """End the thread, close the connections. Idempotent."""
        self._writer.shutdown(wait=False, cancel_futures=True)
        for tier in self.tiers:
            tier.close()

    def _trying(self, work: Callable[[], T], failed: T) -> T:
        """The result of `work`, or `failed`: a tier that does not answer, or what is in the folder cannot be read."""
        try:
            return work()
        except (*FAILURES, Damaged) as error:
            self._failures.log_once("A shared tier was not used", error)
            return failed

    def _named(self, names: Collection[str]) -> list[SharedTier]:
        return [tier for tier in self.tiers if tier.name in names]

    def _share(self, tier: SharedTier, kv_space: KvSpace, tokens: Sequence[int], present: Callable[[], bool]) -> str:
        match = self._lookup(kv_space, tokens)
        with self._disk.database.reading() as connection:
            rows = [catalog.extent(connection, piece.extent) for piece in match.pieces]
            digest = self._disk.kv_space_digest(kv_space)
            files = [BaseFile(row, digest, 0, 0, 0) for row in rows if row is not None]
            bases = [base_files(connection, bases_of(connection, file.row.id)) for file in files]
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


def remove_from(tiers: Sequence[SharedTier], scope: Scope | None) -> None:
    """Remove everything of a tenant and salt, or all, from tiers. Raises `CacheUnusable` if one does not answer."""
    for tier in tiers:
        try:
            tier.remove_all(scope)
        except OSError as error:
            raise CacheUnusable(
                f"Not all could be removed from the tier {tier.name}: {error}. Run it again."
            ) from error


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
