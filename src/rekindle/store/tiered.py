"""The store that everything above uses: memory above disk.

What cannot be read is a miss, what cannot be written is not kept; both are counted and logged once. Nothing here
raises because of a disk, a damaged file or another process, except opening the store and loading what was found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rekindle.codec.coder import is_quantized
from rekindle.core.identity import Identity
from rekindle.core.keys import BLOCK_TOKENS, TOKEN_BYTES, KvSpace, chain, token_bytes, token_ids
from rekindle.core.kv import Kv, Span
from rekindle.core.scope import AppRef, Scope
from rekindle.core.size import parse_limit
from rekindle.errors import InvalidSetting
from rekindle.store import history, purge
from rekindle.store.catalog import app_rows, catalog
from rekindle.store.catalog.app_rows import AppRow, UsedBlocks
from rekindle.store.catalog.catalog import AccessLog, uses_of
from rekindle.store.delta_base import DeltaBase, coded_pieces
from rekindle.store.disk import DiskStore, Machine, Written, check_present
from rekindle.store.evict import HeldRank
from rekindle.store.failures import Counts, Failures, Kept
from rekindle.store.feed import KvSource, KvSources, StoredFeed, is_in_place, stretched
from rekindle.store.limits import Refused
from rekindle.store.memory import HeldExtent, MemoryTier
from rekindle.store.objects import ObjectStore
from rekindle.store.prefix_index import Match, Piece, continuation, following, search
from rekindle.store.settings import StoreSettings
from rekindle.store.shared_tier import SharedTier
from rekindle.store.sharing import Sharing
from rekindle.store.text_index import TextIndex
from rekindle.store.variants import Variants

__all__ = ["Counts", "Kept", "TieredStore"]

T = TypeVar("T")
_SPARE_BYTES = 64 << 10  # for rows about apps, before they are written
_LOOK_AGAIN_SECONDS = 15.0  # between two checks for killed apps


class TieredStore:
    """KV of any number of models in one folder. Thread-safe, and shared by processes.

    Raises `CacheUnusable` if the folder cannot be opened.
    """

    def __init__(
        self,
        folder: Path | str,
        settings: StoreSettings | None = None,
        machine: Machine | None = None,
        shared: Sequence[ObjectStore] = (),
    ) -> None:
        """`shared`: the tiers below the disk, the nearest first, which belong to the store from now on."""
        self.settings = settings or StoreSettings()
        self.disk = DiskStore(Path(folder), self.settings, machine)
        memory = parse_limit(self.settings.memory_limit).resolve(psutil.virtual_memory().total)
        self.memory = MemoryTier(memory, lambda names: self._rank_held(names).order)
        self._failures = Failures()
        self.counts = self._failures.counts
        self._access_log = AccessLog()
        tiers = [SharedTier(objects, self.disk.digester, self.settings.ttl_seconds) for objects in shared]
        self.shared = Sharing(self.disk, self._failures, self.lookup, tiers)
        self._sources = KvSources(self.disk, self.memory, self._failures, tiers)
        self.variants = Variants(self.disk, self.memory, self._failures, self._sources, self._access_log)
        self.text = TextIndex(self.disk, self._failures, self._sources, self.variants)
        self._apps_to_flush = False  # since the last flush
        self.wake_seconds: float | None = None  # call `maintain` this often, even without requests
        self._tidy_at_start()

    # -- reading: every failure is a miss --------------------------------------------------------------------------

    def lookup(self, kv_space: KvSpace, tokens: Sequence[int]) -> Match:
        """The longest stored prefix of `tokens`. Changes nothing."""
        data, root = token_bytes(tokens), kv_space.namespace.root

        def look(rows: catalog.View) -> Match:
            match = search(rows, root, data)
            return replace(match, pieces=coded_pieces(rows.connection, match.pieces)) if match.pieces else match

        return self._viewing(kv_space, look, Match(root, data, (), ()))

    def continuation(self, kv_space: KvSpace, match: Match) -> bytes | None:
        """The tokens of a stored continuation where `match` ends and its prompt differs; None if there is none."""
        return self._viewing(kv_space, lambda rows: continuation(rows, match), None)

    def following(self, kv_space: KvSpace, match: Match, max_count: int) -> tuple[int, ...]:
        """Up to `max_count` tokens that followed the whole prompt before; none if it was not continued."""
        return token_ids(self._viewing(kv_space, lambda rows: following(rows, match, max_count), b""))

    def beginnings(self, kv_space: KvSpace, max_count: int = 10_000) -> list[bytes]:
        """The first block of tokens of every chain in a KV space; none if the store cannot be read."""
        return self._viewing(kv_space, lambda rows: rows.children(kv_space.namespace.root, max_count), [])

    def _viewing(self, kv_space: KvSpace, ask: Callable[[catalog.View], T], nothing: T) -> T:
        def look() -> T:
            with self.disk.view(kv_space, self._sources.bad) as rows:
                return nothing if rows is None else ask(rows)

        return self._failures.reading(look, nothing)

    def load(self, kv_space: KvSpace, match: Match, timeout_seconds: float = math.inf) -> StoredFeed:
        """A feed of what `match` found, ready to fill. Raises `KvLost` if it was removed.

        It is late if its fills take longer than `timeout_seconds`, and closed if opening it does.
        """
        if not match.pieces:
            raise InvalidSetting("There is nothing to load: the match is empty.")
        self._failures.check_open()
        deadline = time.monotonic() + timeout_seconds
        digest = self.disk.kv_space_digest(kv_space)
        sources: list[KvSource] = []
        for piece in match.pieces:
            if (
                sources
                and sources[-1].piece.tier is None
                and (longer := stretched(sources[-1], match, piece.span.stop)) is not None
            ):
                sources[-1] = longer
            else:
                self._sources.add(sources, kv_space, piece, lambda source: is_in_place(source, match, digest))
        feed = self._sources.feed(kv_space, sources, timeout_seconds)
        if time.monotonic() > deadline:  # the caller has given up
            feed.close()
        return feed

    def preload(self, pieces: Sequence[Piece], cancelled: Callable[[], bool]) -> Callable[[], None]:
        """Bring the KV of a queued request from this machine's disk to memory, as far as it fits; returns when it is
        there, or `cancelled`. It leaves memory last, until the returned function is called."""
        names = list(dict.fromkeys(piece.name for piece in pieces if piece.tier is None))
        self.memory.claim(names)
        self._failures.reading(lambda: self._sources.preload(names, cancelled), None)
        return partial(self.memory.release, names)

    def holds(self, piece: Piece) -> bool:
        """Whether a piece's KV is in memory, by a quick check."""
        return self.memory.holds(piece.name)

    def record_use(self, match: Match, saved_ms: float = 0.0, app: AppRef | None = None) -> None:
        """Record a use of what `match` found, and the time it saved. Written to the catalog by `maintain`.

        `app` is the user; without one, `record_request` or `record_use_by` record it when the request is over.
        """
        length = max(1, match.length)
        self._access_log.add(uses_of(match.pieces, self.disk.clock(), saved_ms / length))
        if app is not None:
            self.record_use_by(app, match.pieces)

    def record_stay(self, kv_space: KvSpace, tokens: Sequence[int], saved_ms: float) -> None:
        """Record a use of stored KV of tokens that were still in the engine: else it would look unused, and go."""
        match = self.lookup(kv_space, tokens)
        if match.pieces:
            self.record_use(match, saved_ms * match.length / len(tokens))

    def record_use_by(self, app: AppRef | None, pieces: Sequence[Piece], requests: int = 0) -> None:
        """Record the user of pieces here, and the number of requests; without an app, only if apps are registered."""
        places = [UsedBlocks(piece.extent, piece.name, piece.last) for piece in pieces if piece.tier is None]
        at, allows = self.disk.clock(), self.disk.room.allows
        use = partial(app_rows.record_use, app=app, places=places, at=at, allows=allows, requests=requests)
        self._access_log.add([use])
        self._apps_to_flush = True

    def record_request(self, kv_space: KvSpace, tokens: Sequence[int], app: AppRef | None) -> None:
        """Record a finished request: the app used all stored KV of its tokens, also what it did not load."""
        if self.tracks_use_of(app):
            self.record_use_by(app, self.lookup(kv_space, tokens).pieces, requests=1)

    def tracks_use_of(self, app: AppRef | None) -> bool:
        """Whether uses by that app, or without an app, are recorded."""
        if self.disk.database.read_only:
            return False
        return app is not None or self._failures.reading(self._knows_apps, False)

    def _knows_apps(self) -> bool:
        with self.disk.database.reading() as connection:
            return app_rows.any_known(connection)

    # -- writing: every failure is "not kept" ----------------------------------------------------------------------

    def admit(self, kv_space: KvSpace, tokens: Sequence[int], *, last: bool = True) -> Span | Kept:
        """The span of `tokens` that `keep` would take: not stored yet, and admitted; or why there is nothing to keep.
        `last`: see `DiskStore.admit`."""
        match = self.lookup(kv_space, tokens)
        gap = match.gap()
        if gap is None:
            return Kept("known")
        if self.settings.admission == "always" and self.settings.write_budget is None:
            return gap

        def admit() -> Span | Kept:
            keys = chain(match.root, match.tokens)[gap.start // BLOCK_TOKENS :]
            shrinks = kv_space.adapter is not None or is_quantized(kv_space.codec)  # how much shows when it is coded
            size_bytes = len(gap) * kv_space.layout.token_bytes // (8 if shrinks else 1)
            count = self.disk.admit(kv_space, keys, size_bytes, last=last)
            return Span(gap.start, min(gap.start + count * BLOCK_TOKENS, gap.stop))

        return self._writing(admit, counted=last)

    def keep(
        self,
        kv_space: KvSpace,
        tokens: Sequence[int],
        kv: Kv,
        *,
        evict: bool = True,
        app: AppRef | None = None,
        lossy: bool = False,
        present: Callable[[], bool] | None = None,
    ) -> Kept:
        """Keep KV whose span is what `admit` returned for the same tokens, or begins at an earlier block.

        `tokens` may continue after the span. The store owns the arrays from now on, and may hold them in memory.
        Returns when the KV is on disk and visible to every process. Without `evict` it is refused if other KV would
        have to go. `app` is its user. `lossy`: it was quantized before, and is not again. `present` says, in the
        transaction that makes it visible, whether its source still exists.
        """
        data = token_bytes(tokens[: kv.span.stop])
        if kv.span.start % BLOCK_TOKENS or len(kv.span) == 0 or kv.layout != kv_space.layout:
            raise InvalidSetting(f"KV of {kv.span} cannot be kept: it must begin at a block, in the kv_space's layout.")
        if len(data) != kv.span.stop * TOKEN_BYTES:
            raise InvalidSetting(f"KV of {kv.span} cannot be kept: only {len(tokens)} tokens are given.")

        def write() -> Kept:
            match = self.lookup(kv_space, tokens[: kv.span.stop])
            gap = match.gap()
            if gap is None:
                return Kept("known")
            if gap.start < kv.span.start:
                return Kept("refused", "its prefix is no longer stored")
            self._flush()
            coder = None if lossy else self.settings.coder(kv_space.codec)
            base = (
                None if coder is None or coder.delta is None else self.disk.find_base(kv_space, match.root, data, gap)
            )
            size_bytes = 0
            for span in _covered(gap, base):
                part = kv if span == kv.span else kv.part(span)
                to_here = data[: span.stop * TOKEN_BYTES]
                stands_on = base if span.start == gap.start else None
                how: dict[str, Any] = {"evict": evict, "app": app, "coder": coder, "lossy": lossy}
                also = partial(check_present, present=present)
                write_it = partial(self.disk.keep_first, kv_space, match.root, to_here, part, also=also, **how)
                try:
                    written = write_it(base=stands_on)
                except Refused:
                    if stands_on is None:
                        raise
                    written = write_it()  # whole, and the base may be evicted for it
                size_bytes += written.size_bytes
                count = written.header.plan.token_count
                whole = count == len(part.span)
                self._hold(written, kv, part if whole else part.part(Span(span.start, span.start + count)))
                self.counts.kept += 1
                if not whole:
                    self._failures.cut(span.start + count, kv.span.stop)
                    return Kept("kept", size_bytes=size_bytes, whole=False)
            return Kept("kept", size_bytes=size_bytes)

        return self._writing(write)

    def _writing(self, work: Callable[[], T | Kept], *, counted: bool = True) -> T | Kept:
        try:
            return self._failures.writing(work, lambda reason: Kept("failed", reason))
        except Refused as refusal:
            return self._failures.refused(refusal) if counted else Kept("early", str(refusal))

    def _hold(self, written: Written, kv: Kv, part: Kv) -> None:
        """Hold what was just written in memory too; quantized KV later, as it was written."""
        name = written.header.plan.name
        if written.coding == "quantized":
            self._sources.want(name)
        elif self.memory.fits(len(part.span) * part.layout.token_bytes):
            # Copies, unless it is all of it: views would keep the whole arrays alive.
            held = kv.layers if part is kv else tuple(layer.copy() for layer in part.layers)
            self.memory.put(name, HeldExtent(written.header, held))

    def free_killed(self) -> list[AppRow]:
        """Forget what is held in memory for killed apps alone; returns the killed apps. It stays on disk."""
        self.memory.forget(self._rank_held(self.memory.names()).dead)

        def killed() -> list[AppRow]:
            with self.disk.database.reading() as connection:
                return [row for row in app_rows.apps(connection) if row.state == "killed"]

        return self._failures.reading(killed, [])

    def _rank_held(self, names: Sequence[str]) -> HeldRank:
        return self._failures.reading(lambda: self.disk.room.eviction.rank_held(names), HeldRank(list(names), []))

    def note(
        self,
        kv_space: KvSpace,
        identity: Identity,
        tokens: Sequence[int],
        content: bytes,
        record: Mapping[str, Any],
        *,
        present: Callable[[], bool] | None = None,
    ) -> None:
        """Record a request for `explain`, if what it quotes is still `present`. Never fails."""
        if not self.disk.database.read_only:
            note = partial(history.note, self.disk, kv_space, identity, tokens, content, record, present=present)
            self._failures.writing(note, lambda _: None)

    def maintain(self) -> None:
        """Do deferred work: record uses, hold in memory what was read, remove what expired. Call it when idle."""

        def work() -> None:
            if not self.disk.database.read_only:
                self._flush()
                self.disk.tidy()
                self.variants.tidy()  # after it: expired and evicted KV takes its variants along
            self._sources.promote()
            self.wake_seconds = _LOOK_AGAIN_SECONDS if self._knows_apps() else None

        self._failures.check_open()
        self._failures.writing(work, lambda _: None)

    def close(self) -> None:
        """Record what is buffered, then close. Idempotent."""
        if self._failures.closed:
            return
        self._failures.closed = True
        if not self.disk.database.read_only:
            self._failures.writing(self._flush, lambda _: None)
        self.shared.close()
        self.disk.close()

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def purge(
        self,
        tenant: str,
        salt: str,
        runs: Sequence[purge.TokenRun],
        *,
        texts: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> purge.Purged:
        """Remove every trace of runs of tokens, from memory too. On `CacheUnusable`, run it again."""
        self._failures.check_open()
        try:
            purged = purge.purge(self.disk, tenant, salt, runs, texts=texts, progress=progress)
            self.shared.remove(Scope(tenant, salt))  # all of it: what is there is not searched for tokens
            return purged
        finally:
            self.memory.forget(self.memory.names())  # all of them: later use loads the others again

    def clear(self) -> int:
        """Remove everything, from memory too; returns the number of files. On `CacheUnusable`, run it again."""
        self._failures.check_open()
        self._access_log.drop()
        try:
            self.shared.remove(None)
            return purge.clear(self.disk)
        finally:
            self.memory.forget(self.memory.names())

    def remove_all(self, tenant: str, salt: str) -> None:
        """Remove all KV of a tenant and salt, from memory too, and their past requests.

        On `CacheUnusable`, run it again.
        """
        self._failures.check_open()
        self.shared.remove(Scope(tenant, salt))
        self._remove_spaces("tenant=? AND salt=?", (tenant, salt))

    def remove_model(self, identity: str, tenant: str) -> None:
        """The same for a tenant's KV of one model, under every salt; shared tiers keep theirs."""
        self._failures.check_open()
        self._remove_spaces("identity=? AND tenant=?", (identity, tenant))

    def _remove_spaces(self, chosen: str, values: tuple[str, str]) -> None:
        own = f"SELECT id FROM kv_spaces WHERE {chosen}"
        try:
            with purge.removing(self.disk):
                with self.disk.database.writing() as connection:
                    connection.execute(f"DELETE FROM requests WHERE kv_space IN ({own})", values)
                    kv_spaces = {id for (id,) in connection.execute(own, values)}
                self.disk.remove([row for row in self.disk.entries() if row.kv_space in kv_spaces])
                purge.remove_traces(self.disk, lambda row: row.kv_space in kv_spaces)
        finally:
            self.memory.forget(self.memory.names())

    # -- the rest --------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Write uses, and extents that could not be read, to the catalog."""
        if self._apps_to_flush:
            self._apps_to_flush = False
            self.disk.room.hold_limit(_SPARE_BYTES)
        self._access_log.flush(self.disk.database)
        self._sources.settle()

    def _tidy_at_start(self) -> None:
        """Remove unfinished work of others; cheap if there is none, and failures do not prevent opening."""

        def work() -> None:
            self.disk.room.sweep_once()
            self.disk.room.recover()
            self.disk.room.expire_killed()
            self.disk.room.sweep()

        if not self.disk.database.read_only:
            self._failures.writing(work, lambda _: None)


def _covered(gap: Span, base: DeltaBase | None) -> list[Span]:
    """The spans to keep separately: the part that can be a delta from the base, and the rest."""
    cut = gap.stop if base is None else min(gap.start + base.blocks * BLOCK_TOKENS, gap.stop)
    return [Span(gap.start, gap.stop)] if cut == gap.stop else [Span(gap.start, cut), Span(cut, gap.stop)]
