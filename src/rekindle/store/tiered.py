"""The store that everything above uses: memory above disk, and the two places where failure ends.

What cannot be read is a miss, what cannot be written is not kept; both are counted and logged once. Nothing here
raises because of a disk, a damaged file or another process, except opening the store and loading what was found.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from rekindle.core.identity import Identity
from rekindle.core.keys import BLOCK_TOKENS, TOKEN_BYTES, Shelf, chain, token_bytes
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.core.size import parse_limit
from rekindle.errors import CacheUnusable, Closed, InvalidSetting, KvLost
from rekindle.index.prefix import Match, Piece, continuation, search
from rekindle.store import catalog, history, purge
from rekindle.store.disk import DiskStore, Machine
from rekindle.store.extents import Damaged
from rekindle.store.feed import Source, StoredFeed, is_in_place, stretched
from rekindle.store.memory import HeldExtent, MemoryTier
from rekindle.store.room import Refused
from rekindle.store.settings import StoreSettings

log = logging.getLogger("rekindle.store")

# The last four: rows that make no sense, because bits of the catalog were flipped.
_FAILURES = (OSError, sqlite3.Error, CacheUnusable, TypeError, ValueError, LookupError, ArithmeticError)
_MOST_REASONS = 1000
_USES_A_TRANSACTION = 16
_MOST_USES = 10_000  # remembered while the catalog cannot be written
T = TypeVar("T")


@dataclass(frozen=True)
class Kept:
    """What became of a keep: kept, known already, or refused and why."""

    outcome: Literal["kept", "known", "refused", "failed"]
    reason: str = ""
    size_bytes: int = 0


@dataclass
class Counts:
    """What happened since the store was opened."""

    kept: int = 0
    refused: int = 0
    read_failures: int = 0
    write_failures: int = 0
    quarantined: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Use:
    extent: int
    name: str
    last: int
    at: float
    saved_ms: float


class TieredStore:
    """KV of any number of models in one folder. Used from several threads and processes at once.

    Raises `CacheUnusable` if the folder cannot be opened.
    """

    def __init__(
        self, folder: Path | str, settings: StoreSettings | None = None, machine: Machine | None = None
    ) -> None:
        self.settings = settings or StoreSettings()
        self.disk = DiskStore(Path(folder), self.settings, machine)
        self.memory = MemoryTier(parse_limit(self.settings.memory_limit).resolve(psutil.virtual_memory().total))
        self.counts = Counts()
        self._lock = threading.Lock()
        self._uses: list[_Use] = []
        self._wanted: dict[str, None] = {}  # extents read from disk, to be held in memory when there is time
        self._bad: dict[str, Exception] = {}  # extents that could not be read, until the catalog knows
        self._closed = False
        self._tidy_at_start()

    # -- reading: every failure is a miss --------------------------------------------------------------------------

    def lookup(self, shelf: Shelf, tokens: Sequence[int]) -> Match:
        """The longest prefix of `tokens` whose KV is known. Changes nothing."""
        data, root = token_bytes(tokens), shelf.namespace.root
        return self._viewing(shelf, lambda rows: search(rows, root, data), Match(root, data, (), ()))

    def continuation(self, shelf: Shelf, match: Match) -> bytes | None:
        """How something known goes on where `match` ends and its prompt does not; None if nothing does."""
        return self._viewing(shelf, lambda rows: continuation(rows, match), None)

    def beginnings(self, shelf: Shelf, most: int = 10_000) -> list[bytes]:
        """The tokens with which everything kept on a shelf begins, a block of each; of a store in trouble, none."""
        return self._viewing(shelf, lambda rows: rows.children(shelf.namespace.root, most), [])

    def _viewing(self, shelf: Shelf, ask: Callable[[catalog.View], T], nothing: T) -> T:
        def look() -> T:
            with self.disk.view(shelf, self._bad) as rows:
                return nothing if rows is None else ask(rows)

        return self._reading(look, nothing)

    def load(self, shelf: Shelf, match: Match) -> StoredFeed:
        """A feed of what `match` found, ready to fill. Raises `KvLost` if it is not there any more."""
        if not match.pieces:
            raise InvalidSetting("There is nothing to load: the match is empty.")
        if self._closed:
            raise Closed("The store was closed.")
        sources: list[Source] = []
        for piece in match.pieces:
            if sources and (longer := stretched(sources[-1], match, piece.span.stop)) is not None:
                sources[-1] = longer
                continue
            try:
                sources.append(self._source(shelf, match, piece))
            except (*_FAILURES, Damaged) as error:
                for source in sources:
                    source.close(self.disk.files)
                self._lost(piece, error)
                raise KvLost(f"KV from the cache could not be read ({error}); it is computed instead.") from error
        return StoredFeed(shelf.layout, tuple(sources), self.disk.extents, self._lost)

    def holds(self, piece: Piece) -> bool:
        """Whether a piece's KV is in memory, as far as is known without looking closer."""
        return self.memory.holds(piece.name)

    def used(self, match: Match, saved_ms: float = 0.0) -> None:
        """Note that what `match` found was used, and what that saved. Written to the catalog by `tend`."""
        length = max(1, match.length)
        now = self.disk.clock()
        uses = [_Use(p.extent, p.name, p.last, now, saved_ms * len(p.span) / length) for p in match.pieces]
        with self._lock:
            self._uses += uses

    # -- writing: every failure is "not kept" ----------------------------------------------------------------------

    def gap(self, shelf: Shelf, tokens: Sequence[int]) -> Span | None:
        """The span of `tokens` that `keep` would take: what is not known, and admitted. None: nothing."""
        match = self.lookup(shelf, tokens)
        gap = match.gap()
        if gap is None or self.settings.admission == "always":
            return gap

        def admit() -> Span | None:
            keys = chain(match.root, match.tokens)
            with self.disk.database.writing() as connection:
                number = catalog.add_shelf(connection, self.disk.shelf_digest(shelf), shelf)
                first = gap.start // BLOCK_TOKENS
                most = self.disk.room.most_seen(self.disk.room.limit_bytes(self.disk.room.used_bytes(connection)))
                seen = catalog.seen_before(connection, number, keys[first:], self.disk.clock(), most)
            stop = min(gap.start + seen * BLOCK_TOKENS, gap.stop)
            return Span(gap.start, stop) if stop > gap.start else None

        return self._writing(admit, lambda _: None)

    def keep(self, shelf: Shelf, tokens: Sequence[int], kv: Kv, *, evict: bool = True) -> Kept:
        """Keep KV whose span is what `gap` said of the same tokens, or begins at an earlier block.

        `tokens` may go on behind the span. The arrays are the store's from now on: it may hold them in memory.
        Returns when it is on disk and visible to every process. Without `evict` it is refused where others would have
        to go for it.
        """
        data = token_bytes(tokens[: kv.span.stop])
        if kv.span.start % BLOCK_TOKENS or len(kv.span) == 0 or kv.layout != shelf.layout:
            raise InvalidSetting(f"KV of {kv.span} cannot be kept: it must begin at a block, in the shelf's layout.")
        if len(data) != kv.span.stop * TOKEN_BYTES:
            raise InvalidSetting(f"KV of {kv.span} cannot be kept: only {len(tokens)} tokens are given.")

        def write() -> Kept:
            match = self.lookup(shelf, tokens[: kv.span.stop])
            gap = match.gap()
            if gap is None:
                return Kept("known")
            if gap.start < kv.span.start:
                return Kept("refused", "what it hangs on is not known any more")
            self._flush()
            rest = _from(kv, gap.start)
            written = self.disk.keep(shelf, match.root, data, rest, evict=evict)
            if self.memory.fits(written.size_bytes):
                held = kv.layers if rest.span == kv.span else _copied(rest)
                self.memory.put(written.header.plan.name, HeldExtent(written.header, held))
            self.counts.kept += 1
            return Kept("kept", size_bytes=written.size_bytes)

        try:
            return self._writing(write, lambda reason: Kept("failed", reason))
        except Refused as refusal:
            self.counts.refused += 1
            self._count(str(refusal))
            return Kept("refused", str(refusal))

    def note(
        self, shelf: Shelf, identity: Identity, tokens: Sequence[int], content: bytes, record: Mapping[str, Any]
    ) -> None:
        """Remember a request, for `explain`. What cannot be remembered is not."""
        if not self.disk.database.read_only:
            self._writing(lambda: history.note(self.disk, shelf, identity, tokens, content, record), lambda _: None)

    def tend(self) -> None:
        """Do what may wait: note uses, hold in memory what was read, remove what expired. Call it when idle."""

        def work() -> None:
            if not self.disk.database.read_only:
                self._flush()
                self.disk.tidy()
            self._promote()

        if self._closed:
            raise Closed("The store was closed.")
        self._writing(work, lambda _: None)

    def close(self) -> None:
        """Note what is still to be noted, then close. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self.disk.database.read_only:
            self._writing(self._flush, lambda _: None)
        self.disk.close()

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def purge(
        self,
        tenant: str,
        salt: str,
        runs: Sequence[purge.Run],
        *,
        texts: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> purge.Purged:
        """Remove every trace of runs of tokens, from memory too. Raises `CacheUnusable`: then run it again."""
        if self._closed:
            raise Closed("The store was closed.")
        try:
            return purge.purge(self.disk, tenant, salt, runs, texts=texts, progress=progress)
        finally:
            self.memory.forget(self.memory.names())  # of all: use brings the others back

    # -- the two places where failure ends -------------------------------------------------------------------------

    def _reading(self, work: Callable[[], T], miss: T) -> T:
        if self._closed:
            raise Closed("The store was closed.")
        try:
            return work()
        except _FAILURES as error:
            self.counts.read_failures += 1
            self._log_once("The cache cannot be read, so everything is computed", error)
            return miss

    def _writing(self, work: Callable[[], T], failed: Callable[[str], T]) -> T:
        try:
            return work()
        except _FAILURES as error:
            self.counts.write_failures += 1
            self._log_once("The cache cannot be written, so nothing new is kept", error)
            return failed(str(error))

    def _log_once(self, what: str, error: Exception, level: int = logging.WARNING) -> None:
        log.log(level if self._count(str(error)) == 1 else logging.DEBUG, "%s: %s", what, error)

    def _count(self, reason: str) -> int:
        """Count a reason; how often it came up. Reasons may have names in them, so the memory for them is bounded."""
        reasons = self.counts.reasons
        if len(reasons) >= _MOST_REASONS and reason not in reasons:
            reasons.clear()
        reasons[reason] += 1
        return reasons[reason]

    def _lost(self, piece: Piece, error: Exception) -> None:
        """An extent that was found could not be read: never find it again. The catalog learns of it off the path."""
        self.counts.read_failures += 1
        self.memory.forget([piece.name])
        # A file that is gone was most likely evicted by another process: that is nothing to worry about.
        level = logging.DEBUG if isinstance(error, FileNotFoundError) else logging.WARNING
        self._log_once("KV from the cache is lost and will be computed again", error, level)
        if isinstance(error, (Damaged, FileNotFoundError)):  # anything else may be gone by the next time
            self.counts.quarantined += isinstance(error, Damaged)
            with self._lock:
                self._bad[piece.name] = error

    # -- the rest --------------------------------------------------------------------------------------------------

    def _source(self, shelf: Shelf, match: Match, piece: Piece) -> Source:
        """Where the KV of a piece comes from. Raises `Damaged` or `OSError`."""
        digest = self.disk.shelf_digest(shelf)
        held = self.memory.get(piece.name)
        if held is not None:
            source = Source(piece, held)
            if is_in_place(source, match, digest):
                return source
            self.memory.forget([piece.name])
        with self.disk.database.reading() as connection:
            row = catalog.extent(connection, piece.extent)
        if row is None or row.state != "live" or row.name != piece.name:
            raise FileNotFoundError("it was evicted meanwhile")
        source = Source(piece, self.disk.extents.open(row, digest))
        if not is_in_place(source, match, digest):
            source.close(self.disk.files)
            raise Damaged("it holds other tokens than its row says")
        with self._lock:
            self._wanted[piece.name] = None
        return source

    def _flush(self) -> None:
        """Tell the catalog what was used, and what could not be read."""
        with self._lock:
            uses, self._uses = self._uses, []
            bad = dict(self._bad)
        try:
            while uses:
                with self.disk.database.writing() as connection:
                    for use in uses[:_USES_A_TRANSACTION]:
                        catalog.touch(connection, use.extent, use.name, use.last, use.at, use.saved_ms)
                del uses[:_USES_A_TRANSACTION]
        except BaseException:
            with self._lock:
                self._uses = uses[-_MOST_USES:] + self._uses
            raise
        for name, error in bad.items():
            self.disk.lose(name, error)
            with self._lock:
                self._bad.pop(name, None)

    def _promote(self) -> None:
        """Hold in memory what was read from disk last, as far as it fits; let go of what is not listed any more."""
        with self._lock:
            wanted, self._wanted = list(self._wanted), {}
        with self.disk.database.scanning() as connection:
            shelves = dict(connection.execute("SELECT id, digest FROM shelves").fetchall())
            listed = {name: _live(connection, name) for name in {*wanted, *self.memory.names()}}
        self.memory.forget([name for name in self.memory.names() if listed.get(name) is None])
        room = self.memory.limit_bytes
        for row in filter(None, (listed[name] for name in reversed(wanted))):
            room -= row.size_bytes
            if room < 0:
                break
            try:
                extent = self.disk.extents.open(row, shelves[row.shelf])
                try:
                    layers = self.disk.extents.read_all(extent, extent.header.plan.token_count)
                finally:
                    self.disk.files.close(extent.handle)
            except (OSError, Damaged) as error:
                self._log_once("KV could not be taken into memory", error)
            else:
                self.memory.put(row.name, HeldExtent(extent.header, layers))

    def _tidy_at_start(self) -> None:
        """Remove what others left unfinished; cheap when there is nothing, and never a reason not to open."""

        def work() -> None:
            self.disk.room.sweep_once()
            self.disk.room.recover()
            self.disk.room.sweep()

        if not self.disk.database.read_only:
            self._writing(work, lambda _: None)


def _live(connection: sqlite3.Connection, name: str) -> catalog.Extent | None:
    found = catalog.extents(connection, "name=? AND state='live'", (name,))
    return found[0] if found else None


def _from(kv: Kv, start: int) -> Kv:
    """The part of the KV from token `start` on; views, no copies."""
    skip = start - kv.span.start
    layers = tuple(LayerKv(layer.keys[:, skip:], layer.values[:, skip:]) for layer in kv.layers)
    return Kv(Span(start, kv.span.stop), kv.layout, layers)


def _copied(kv: Kv) -> tuple[LayerKv, ...]:
    """Layers of its own: views would hold on to the whole they are a part of."""
    return tuple(LayerKv(layer.keys.copy(), layer.values.copy()) for layer in kv.layers)
