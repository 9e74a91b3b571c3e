"""Feeds: KV from memory or extent files into a sequence, layer by layer, straight into the engine's own buffers.

A fill is one copy and the check, keys and values in parallel. Nothing is read ahead: asking the system to, for a whole
file or for some layers, made a load from dropped pages slower by a fifth to a third.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rekindle.codec.extent import ExtentHeader
from rekindle.core.keys import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, KvSpace, chain
from rekindle.core.kv import CodedPiece, Held, KvLayout, LayerKv, Span
from rekindle.core.plan import Tier
from rekindle.errors import KvLost
from rekindle.store.catalog import catalog
from rekindle.store.disk import DiskStore
from rekindle.store.extents import Damaged, ExtentFiles, OpenExtent
from rekindle.store.failures import FAILURES, Failures
from rekindle.store.memory import HeldCode, HeldExtent, MemoryTier
from rekindle.store.prefix_index import Match, Piece
from rekindle.store.shared_tier import SharedTier

Fits = Callable[["KvSource"], bool]
TierLoad = tuple[Tier, int, float]  # bytes and seconds


@dataclass(frozen=True, eq=False)
class KvSource:
    """A piece of a prompt and where its KV comes from: a file of `extents`, or memory."""

    piece: Piece
    origin: OpenExtent | HeldExtent
    extents: ExtentFiles

    @property
    def header(self) -> ExtentHeader:
        return self.origin.header

    @property
    def tier(self) -> Tier:
        """Where its KV is read."""
        if isinstance(self.origin, HeldExtent):
            return "memory"
        return self.piece.tier or ("disk" if self.piece.coding == "raw" else "coded")

    def close(self) -> None:
        """Close its file, if it has one."""
        if isinstance(self.origin, OpenExtent):
            self.extents.release(self.origin)

    @property
    def span(self) -> Span:
        """The tokens it provides, as the extent counts them."""
        start = self.piece.first * BLOCK_TOKENS + self.piece.skip
        return Span(start, start + len(self.piece.span))


class StoredFeed:
    """A feed (see `engine/base`) over pieces of extents, with a deadline. It raises `KvLost`, whatever goes wrong."""

    def __init__(
        self,
        layout: KvLayout,
        sources: tuple[KvSource, ...],
        extents: ExtentFiles,
        lost: Callable[[Piece, Exception], None],
        timeout_seconds: float,
    ) -> None:
        """`lost` is called for a piece that could not be read. The clock starts with the first fill: waiting for the
        engine does not count."""
        self.span = Span(sources[0].piece.span.start, sources[-1].piece.span.stop)
        self.layers = range(len(layout.layers))
        self._sources = self._open = sources
        self._extents = extents
        self._lost = lost
        self._lock = threading.Lock()
        self._left = len(self.layers)  # that are not filled yet
        self._filling = 0  # threads that fill a layer now
        self._closed = False
        self.timeout_seconds = timeout_seconds
        self._deadline = math.inf
        self._since = 0.0  # when the first of the threads that fill now began
        self.busy_seconds = 0.0  # while at least one thread was filling, and while an engine took over what was filled
        self._source_seconds = defaultdict[Tier, float](float)  # of all threads together
        self._token_bytes = layout.token_bytes

    @property
    def late(self) -> bool:
        """Whether its deadline passed before it had loaded everything."""
        return self._left > 0 and time.monotonic() > self._deadline

    @property
    def filling(self) -> bool:
        """Whether a thread fills a layer now."""
        return self._filling > 0

    def fill(self, layer: int, out: LayerKv) -> None:
        """Write the KV of `span` in `layer` into `out`."""
        with self._filling_layer():
            self._fill(layer, out)

    @property
    def coded(self) -> bool:
        """Whether some of it is quantized."""
        return any(isinstance(s.origin, OpenExtent) and s.header.plan.coded_as == "quantized" for s in self._sources)

    def fill_coded(self, layer: int, take: Callable[[CodedPiece], None]) -> None:
        """Give `take` the pieces of a layer."""
        with self._filling_layer():
            for source in self._sources:
                at = source.piece.span.start - self.span.start
                with self._timing(source):
                    if isinstance(source.origin, HeldExtent):
                        take(_held_piece(source, source.origin, layer, at))
                        continue
                    with self._losing(source):
                        pieces = source.extents.coded_pieces(source.origin, layer, source.span, at)
                    for piece in pieces:
                        take(piece)

    def damaged(self, piece: CodedPiece, reason: str) -> KvLost:
        """Report that a piece could not be decoded."""
        source = next(s for s in reversed(self._sources) if s.piece.span.start - self.span.start <= piece.at)
        blamed = None if piece.owner == source.piece.name else piece.owner
        return self._lose(source, Damaged(reason, blamed))

    @contextmanager
    def _filling_layer(self) -> Iterator[None]:
        """Keep the files open, and after the last layer close them; take the time."""
        with self._lock:
            if self._closed:
                raise KvLost("The feed was closed; its KV is computed instead.")
            self._deadline = min(self._deadline, time.monotonic() + self.timeout_seconds)
            self._since = self._since if self._filling else time.perf_counter()
            self._filling += 1
        try:
            yield
        except KvLost:
            raise
        except Exception as error:  # any failure: it is computed
            raise KvLost(f"KV from the cache could not be read ({error}); it is computed instead.") from error
        finally:
            with self._lock:
                self._filling -= 1
                if not self._filling:
                    self.busy_seconds += time.perf_counter() - self._since
                self._left -= 1
                self._closed |= self._left == 0
                files = self._take_unused()
            self._close(files)

    def _fill(self, layer: int, out: LayerKv) -> None:
        for source in self._sources:
            start, stop = source.piece.span.start - self.span.start, source.piece.span.stop - self.span.start
            window = out.window(start, stop)
            with self._timing(source):
                if isinstance(source.origin, HeldExtent):
                    self._copy(source.origin.layers[layer], source.span, window)
                    continue
                with self._losing(source):
                    source.extents.read(source.origin, layer, source.span, window)

    @contextmanager
    def _timing(self, source: KvSource) -> Iterator[None]:
        started = time.perf_counter()
        yield
        with self._lock:
            self._source_seconds[source.tier] += time.perf_counter() - started

    def brought(self, seconds: float) -> None:
        """Count what it took to open the feed, or an engine to take over what was filled."""
        with self._lock:
            self.busy_seconds += seconds

    def loads(self) -> list[TierLoad]:
        """The bytes and the seconds of each tier: its share of the time, or of the bytes where a device reads alone."""
        sizes = Counter[Tier]()
        for source in self._sources:
            tokens = len(source.piece.span) + (0 if source.tier == "memory" else source.piece.overread)
            sizes[source.tier] += tokens * self._token_bytes
        shares = self._source_seconds or sizes
        return [(tier, size, self.busy_seconds * shares[tier] / sum(shares.values())) for tier, size in sizes.items()]

    def held(self) -> list[Held] | None:
        """The KV in memory, piece by piece; None unless all of it is in memory."""
        held = [Held(s.origin.layers, s.span) for s in self._sources if isinstance(s.origin, HeldExtent)]
        return held if len(held) == len(self._sources) else None

    def close(self) -> None:
        """Close the files, as soon as no thread reads them. Idempotent."""
        with self._lock:
            self._closed = True
            files = self._take_unused()
        self._close(files)

    def _take_unused(self) -> tuple[KvSource, ...]:
        """The sources to close now: all of them, once, when it is closed and nobody fills."""
        if not self._closed or self._filling:
            return ()
        unused, self._open = self._open, ()
        return unused

    def _close(self, sources: Sequence[KvSource]) -> None:
        for source in sources:
            source.close()

    def __enter__(self) -> StoredFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _losing(self, source: KvSource) -> Iterator[None]:
        """Reading that fails loses the source. Raises `KvLost`."""
        try:
            yield
        except (OSError, Damaged) as error:
            raise self._lose(source, error) from error

    def _lose(self, source: KvSource, error: Exception) -> KvLost:
        self.close()
        self._lost(source.piece, error)
        return KvLost(f"KV from the cache could not be read ({error}); it is computed instead.")

    def _copy(self, held: LayerKv, span: Span, out: LayerKv) -> None:
        self._extents.in_parallel(
            lambda: np.copyto(out.keys, held.keys[:, span.start : span.stop]),
            lambda: np.copyto(out.values, held.values[:, span.start : span.stop]),
            out.keys.nbytes + out.values.nbytes,
        )


def _held_piece(source: KvSource, held: HeldExtent, layer: int, at: int) -> CodedPiece:
    plan = source.header.plan
    spec = plan.layout.layer_spec(layer, plan.token_count)
    return CodedPiece(held.layers[layer], spec, source.span, at, delta=False, owner=source.piece.name)


def is_in_place(source: KvSource, match: Match, kv_space_digest: str) -> bool:
    """Whether the extent itself holds these tokens in this place: the catalog alone is not trusted."""
    plan, piece = source.header.plan, source.piece
    stored = plan.tokens[piece.first * BLOCK_BYTES :][: len(piece.span) * TOKEN_BYTES]
    wanted = match.tokens[piece.span.start * TOKEN_BYTES : piece.span.stop * TOKEN_BYTES]
    above = chain(plan.parent, plan.tokens[: piece.first * BLOCK_BYTES])
    parent = above[-1] if above else plan.parent
    return (plan.kv_space, stored, parent) == (
        kv_space_digest,
        wanted,
        match.key_before(piece.span.start // BLOCK_TOKENS),
    )


def stretched(source: KvSource, match: Match, stop: int) -> KvSource | None:
    """The same extent for all tokens up to `stop`, if its file has those too, though they are listed elsewhere now.

    That happens at the end of a prompt: when the prompt continued, its last block was kept again as a whole.
    """
    plan, piece = source.header.plan, source.piece
    count = stop - piece.span.start
    stored = plan.tokens[piece.first * BLOCK_BYTES :][: count * TOKEN_BYTES]
    if stored != match.tokens[piece.span.start * TOKEN_BYTES : stop * TOKEN_BYTES]:
        return None
    return replace(source, piece=replace(piece, span=Span(piece.span.start, stop)))


class KvSources:
    """Opens the KV of pieces in memory or on disk, and remembers what could not be read. Thread-safe."""

    def __init__(
        self, disk: DiskStore, memory: MemoryTier, failures: Failures, shared: Sequence[SharedTier] = ()
    ) -> None:
        self._shared = shared
        self.bad: dict[str, Exception] = {}  # extents that could not be read, until the catalog is updated
        self._disk = disk
        self._memory = memory
        self._failures = failures
        self._lock = threading.Lock()
        self._wanted: dict[str, None] = {}  # extents read from disk, to be held in memory later

    def add(self, opened: list[KvSource], kv_space: KvSpace, piece: Piece, fits: Fits) -> None:
        """Open the source of a piece. `fits` checks that the extent itself holds what the catalog says.

        Raises `KvLost` if it was removed or damaged; then all opened sources are closed.
        """
        try:
            opened.append(self._open(kv_space, piece, fits))
        except (*FAILURES, Damaged) as error:
            for source in opened:
                source.close()
            self.lost(kv_space, piece, error)
            raise KvLost(f"KV from the cache could not be read ({error}); it is computed instead.") from error

    def feed(self, kv_space: KvSpace, opened: Sequence[KvSource], timeout_seconds: float) -> StoredFeed:
        """A feed over sources that tile a span, in order."""
        lost = partial(self.lost, kv_space)
        return StoredFeed(kv_space.layout, tuple(opened), self._disk.extents, lost, timeout_seconds)

    def lost(self, kv_space: KvSpace, piece: Piece, error: Exception) -> None:
        """Never find an extent again that could not be read. The catalog is updated later, off the request's path."""
        counts = self._failures.counts
        counts.read_failures += 1
        if piece.tier is not None:
            self._lost_shared(kv_space, piece, error)
            return
        blamed = [error.extent] if isinstance(error, Damaged) and error.extent else []  # its delta base
        self._memory.forget([piece.name, *blamed])
        # A missing file was most likely evicted by another process: nothing to warn about.
        level = logging.DEBUG if isinstance(error, FileNotFoundError) else logging.WARNING
        self._failures.log_once("KV from the cache is lost and will be computed again", error, level)
        if isinstance(error, (Damaged, FileNotFoundError)):  # anything else may work the next time
            counts.quarantined += isinstance(error, Damaged)
            with self._lock:
                self.bad |= dict.fromkeys([piece.name, *blamed], error)

    def _lost_shared(self, kv_space: KvSpace, piece: Piece, error: Exception) -> None:
        """What is damaged on a shared tier is removed there, so that it is written again."""
        level = logging.WARNING if isinstance(error, Damaged) else logging.DEBUG
        self._failures.log_once(f"KV from the tier {piece.tier} is lost and will be computed again", error, level)
        if isinstance(error, Damaged):
            name = error.extent or piece.name
            self._failures.writing(lambda: self._tier(piece).drop(kv_space, name), lambda _: None)

    def _tier(self, piece: Piece) -> SharedTier:
        return next(tier for tier in self._shared if tier.name == piece.tier)

    def settle(self) -> None:
        """Tell the catalog what could not be read. Raises as it does."""
        with self._lock:
            bad = dict(self.bad)
        for name, error in bad.items():
            self._disk.lose(name, error)
            with self._lock:
                self.bad.pop(name, None)

    def promote(self) -> None:
        """Hold in memory what was read from disk most recently, if it fits; drop what is no longer listed."""
        with self._lock:
            wanted, self._wanted = list(self._wanted), {}
        with self._disk.database.scanning() as connection:
            kv_spaces = dict(connection.execute("SELECT id, digest FROM kv_spaces").fetchall())
            listed = {name: _live(connection, name) for name in {*wanted, *self._memory.names()}}
        self._memory.forget([name for name in self._memory.names() if listed.get(name) is None])
        room = self._memory.limit_bytes
        for row in filter(None, (listed[name] for name in reversed(wanted))):
            taken = self._take(row, kv_spaces[row.kv_space], room)
            room -= taken or 0
            if taken is None:
                break

    def preload(self, names: Iterable[str], cancelled: Callable[[], bool]) -> None:
        """Hold extents in memory before they are read, as far as those of other claims leave room."""
        for name in names:
            if self._memory.get(name) is not None:
                continue
            with self._disk.database.reading() as connection:
                row = _live(connection, name)
                select = "SELECT digest FROM kv_spaces WHERE id=?"
                found = None if row is None else connection.execute(select, (row.kv_space,)).fetchone()
            if row is None or found is None:
                continue
            if self._take(row, found[0], self._memory.unclaimed_bytes, cancelled) is None:
                return

    def _take(
        self, row: catalog.Extent, kv_space_digest: str, room: int, cancelled: Callable[[], bool] = lambda: False
    ) -> int | None:
        """Read an extent into memory; returns its bytes there, 0 if it cannot be read. None: it has more than `room`
        bytes, or was cancelled."""
        try:
            extent = self._disk.open(row, kv_space_digest)
            try:
                plan, coding = extent.header.plan, extent.header.plan.coding
                coded = coding is not None and not coding.exact
                size_bytes = sum(coding.sizes) if coding and coded else plan.token_count * plan.layout.token_bytes
                if size_bytes > room:
                    return None
                held = self._held_code(extent, cancelled) if coded else self._held_extent(extent, cancelled)
            finally:
                self._disk.extents.release(extent)
        except (OSError, Damaged) as error:
            self._failures.log_once("KV could not be taken into memory", error)
            return 0
        if held is None:
            return None
        self._memory.put(row.name, held)
        return size_bytes

    def want(self, name: str) -> None:
        """Let `promote` hold an extent."""
        if self._memory.limit_bytes:
            with self._lock:
                self._wanted[name] = None

    def _held_code(self, extent: OpenExtent, cancelled: Callable[[], bool]) -> HeldCode | None:
        count = len(extent.header.plan.layout.layers)
        layers = tuple(self._disk.extents.read_code(extent, layer) for layer in range(count) if not cancelled())
        return HeldCode(layers) if len(layers) == count else None

    def _held_extent(self, extent: OpenExtent, cancelled: Callable[[], bool]) -> HeldExtent | None:
        header, layers = extent.header, list[LayerKv]()
        for layer in self._disk.extents.layers(extent, header.plan.token_count):
            if cancelled():
                return None
            layers.append(layer)
        return HeldExtent(header, tuple(layers))

    def _with_code(self, extent: OpenExtent) -> OpenExtent:
        """The extent and its bases, with the coded layers that are in memory."""
        bases = tuple(replace(base, extent=self._with_code(base.extent)) for base in extent.bases)
        held = self._memory.get(extent.header.plan.name)
        return replace(extent, bases=bases, code=held.layers if isinstance(held, HeldCode) else ())

    def _open(self, kv_space: KvSpace, piece: Piece, fits: Fits) -> KvSource:
        """The source of a piece's KV. Raises `Damaged` or `OSError`."""
        held = self._memory.get(piece.name)
        if isinstance(held, HeldExtent):
            source = KvSource(piece, held, self._disk.extents)
            if fits(source):
                return source
            self._memory.forget([piece.name])
        if piece.tier is not None:
            tier = self._tier(piece)
            source = KvSource(piece, tier.open(kv_space, piece), tier.extents(kv_space.namespace.scope))
            return _fitting(source, fits)
        with self._disk.database.reading() as connection:
            row = catalog.extent(connection, piece.extent)
        if row is None or row.state != "live" or row.name != piece.name:
            raise FileNotFoundError("it was evicted meanwhile")
        extent = self._disk.open(row, self._disk.kv_space_digest(kv_space))
        extent = extent if row.coding == "raw" else self._with_code(extent)
        source = _fitting(KvSource(piece, extent, self._disk.extents), fits)
        if held is None:
            self.want(piece.name)
        return source


def _fitting(source: KvSource, fits: Fits) -> KvSource:
    """The source, if it holds what its piece says. Raises `Damaged`."""
    if not fits(source):
        source.close()
        raise Damaged("it holds other tokens than its row says")
    return source


def _live(connection: sqlite3.Connection, name: str) -> catalog.Extent | None:
    found = catalog.extents(connection, "name=? AND state='live'", (name,))
    return found[0] if found else None
