"""KV on a shared tier: extents as objects, found by records (`shared_record`). Several servers read and write it.

    kv/TENANT.SCOPE/NAME.kv       an extent, byte by byte as in the folder of the server that wrote it
    kv/TENANT.SCOPE/DIGEST.chain  the record of a node: the extents from the root up to it
    kv/TENANT.SCOPE/DIGEST.chunk  the variants of a chunk

Objects are never changed, and a record is written after what it names: a server that dies while it writes leaves
nothing that is found. System errors (`OSError`) pass through; after one the tier is left alone for a while.

Extents are read as files: `ExtentFiles` reads and checks them as those of a folder. A layer, or several small ones, is
fetched with one request, and the next ones while the engine computes: each read then finds its bytes here.
"""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from pathlib import Path
from urllib.parse import quote

from rekindle.codec.digest import Digester
from rekindle.codec.extent import ExtentPlan
from rekindle.core.chunk import ChunkDigest
from rekindle.core.identity import digest_of_fields
from rekindle.core.keys import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, KvSpace, NodeKey, chain, common_tokens
from rekindle.core.kv import Span
from rekindle.core.plan import SharedTierName
from rekindle.core.scope import Scope
from rekindle.store.extents import Damaged, ExtentFiles, OpenExtent
from rekindle.store.files import Files, Handle
from rekindle.store.objects import ByteRange, ObjectStore, TierFailed
from rekindle.store.prefix_index import Match, Piece
from rekindle.store.shared_record import (
    MAX_A_CHUNK,
    MAX_RECORD_BYTES,
    ChainRecord,
    ChunkRecord,
    SharedExtent,
    parse_chain,
    parse_chunks,
    write_chunks,
)

_RECORD_BLOCKS = 8  # between two records
_EARLY_RECORDS = (1, 2, 4)  # and after these numbers of blocks: short beginnings are shared most
_PROBES = 32  # records asked for at once
_CLAIM_SECONDS = 60.0
_QUIET_SECONDS = 10.0  # without questions, after a failure
_MAX_HEADER_BYTES = 64 << 20  # of the extents that one record names, or those of a prompt's chunks
_MAX_KNOWN, _MAX_SCOPES = 1024, 64  # remembered


@dataclass
class TierCounts:
    """What happened since the tier was opened."""

    failures: int = 0
    written_bytes: int = 0
    damaged: int = 0


class SharedTier:
    """One shared tier. Thread-safe. Everything raises `TierFailed`."""

    def __init__(self, objects: ObjectStore, digester: Digester, ttl_seconds: float | None = None) -> None:
        self.objects = objects
        self.name: SharedTierName = objects.tier
        self.counts = TierCounts()
        self._digester = digester
        self._ttl_seconds = ttl_seconds
        self._files = SharedFiles(objects)
        self._extents: dict[Scope, ExtentFiles] = {}
        self._known: dict[str, SharedExtent] = {}  # by name, of recent lookups
        self._quiet_until = 0.0

    # -- reading -----------------------------------------------------------------------------------------------------

    def extend(self, kv_space: KvSpace, match: Match) -> Match:
        """`match` with what the tier has of the prompt beyond it."""
        with self._asking():
            keys = match.keys or tuple(chain(match.root, match.tokens))
            whole = len(match.tokens) // BLOCK_BYTES
            record = self._deepest(kv_space, keys, [n for n in _points(whole) if n > match.full_blocks])
            if record is None:
                return match
            local = replace(match.until(match.full_blocks * BLOCK_TOKENS), keys=keys)
            pieces = tuple(self._pieces(kv_space, local, record))
        return replace(local, pieces=(*local.pieces, *pieces)) if pieces else match

    def open(self, kv_space: KvSpace, piece: Piece) -> OpenExtent:
        """An extent that a lookup found, its header checked; its layers are being fetched. `release` it.

        Raises `Damaged` or `OSError`.
        """
        extents = self.extents(kv_space.namespace.scope)
        known = self._known.get(piece.name)
        if known is None:
            raise FileNotFoundError("it was found too long ago")
        opened = extents.open(known.row(), known.kv_space, known.base_files())
        start = piece.first * BLOCK_TOKENS + piece.skip
        self._read_ahead(extents, opened, Span(start, start + len(piece.span)))
        return opened

    def extents(self, scope: Scope) -> ExtentFiles:
        """The extents of a tenant and salt, to read an open one."""
        known = self._extents.get(scope)
        if known is None:
            while len(self._extents) >= _MAX_SCOPES:
                self._extents.pop(next(iter(self._extents))).close()
            known = self._extents[scope] = ExtentFiles(Path(folder_of(scope)), self._files, self._digester)
        return known

    def find_chunks(self, kv_space: KvSpace, digests: Sequence[ChunkDigest]) -> dict[ChunkDigest, list[ChunkRecord]]:
        """The variants of chunks whose extents exist; a chunk without any is left out."""
        with self._asking():
            answers = self.objects.get_many([self._chunk_key(kv_space, digest) for digest in digests])
            found = {digest: parse_chunks(data) for digest, data in zip(digests, answers, strict=True)}
            named = {one.name: one for some in found.values() for record in some for one in record.chain.extents}
            present = self._announce(kv_space, list(named.values()))
        usable: dict[ChunkDigest, list[ChunkRecord]] = {}
        for digest, some in found.items():
            kept = [r for r in some if self._is_fresh(r.chain) and present.issuperset(e.name for e in r.chain.extents)]
            if kept:
                usable[digest] = kept
        return usable

    def plan_of(self, kv_space: KvSpace, extent: SharedExtent) -> ExtentPlan:
        """What an extent of a record that was just found holds, its header checked. Raises `Damaged` or `OSError`."""
        extents = self.extents(kv_space.namespace.scope)
        opened = extents.open(extent.row(), extent.kv_space)
        extents.release(opened)
        return opened.header.plan

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(
        self,
        kv_space: KvSpace,
        match: Match,
        own: Sequence[SharedExtent],
        read: Callable[[SharedExtent], bytes],
        present: Callable[[], bool],
    ) -> str:
        """Write what is missing of a stored prompt: the extents `own`, then the records; returns the outcome.

        A prompt that another server is writing is left to it. `present` says, before the records are written, whether
        its source still exists.
        """
        whole = match.full_blocks
        if not whole:
            return "short"
        points = _points(whole)
        keys = [self._chain_key(kv_space, match.keys[point - 1]) for point in points]
        with self._asking():
            if self._present(kv_space, match).blocks >= whole:
                return "known"
            if not self.objects.claim(keys[-1], _CLAIM_SECONDS):
                return "claimed"
            try:
                known = self._present(kv_space, match)  # another server may have just written it
                if known.blocks >= whole:
                    return "known"
                new = [one for one in own if min(one.depth + one.blocks, whole) > known.blocks]
                first = new[0].depth if new else whole
                record = ChainRecord(known.kept, whole, (*known.until(first).extents, *new))
                if len(record.to_bytes()) > MAX_RECORD_BYTES:
                    return "refused"
                for extent in _with_bases(new):
                    if not self._put_extent(kv_space, extent, read):
                        return "refused"
                if not present():
                    self.objects.remove([self._extent_key(kv_space, extent.name) for extent in new])
                    return "barred"
                for point, key, there in zip(points, keys, self.objects.contains(keys), strict=True):
                    if point > first or not there:
                        self.objects.put(key, (record if point == whole else record.until(point)).to_bytes())
                return "kept"
            finally:
                self.objects.release(keys[-1])

    def write_chunk(self, kv_space: KvSpace, digest: ChunkDigest, record: ChunkRecord) -> None:
        """List a variant of a chunk whose extents were written."""
        with self._asking():
            key = self._chunk_key(kv_space, digest)
            others = [
                one for one in parse_chunks(self.objects.get_many([key])[0]) if one.columns[:2] != record.columns[:2]
            ]
            self.objects.put(key, write_chunks([record, *others][:MAX_A_CHUNK]))

    def chain_of(self, kv_space: KvSpace, match: Match) -> ChainRecord | None:
        """The record of a prompt, as deep as there is one."""
        with self._asking():
            return self._deepest(kv_space, match.keys, _points(match.full_blocks))

    def drop(self, kv_space: KvSpace, name: str) -> None:
        """Remove an extent that is damaged: then it is written again."""
        self.counts.damaged += 1
        with self._asking():
            self.objects.remove([self._extent_key(kv_space, name)])

    def remove_all(self, scope: Scope | None) -> int:
        """Remove everything of a tenant and salt, or of all tenants; returns the number of objects."""
        with self._asking():
            return self.objects.remove_under(folder_of(scope))

    @property
    def answers(self) -> bool:
        """Whether it did, the last time it was asked."""
        return time.monotonic() >= self._quiet_until

    def ping(self) -> None:
        """Ask something, even after a failure. Raises `TierFailed`."""
        self._quiet_until = 0.0
        with self._asking():
            self.objects.contains(["ping"])

    def close(self) -> None:
        """End the threads, close the connections. Idempotent."""
        for extents in self._extents.values():
            extents.close()
        self._files.end()
        self.objects.close()

    # -- the rest ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _asking(self) -> Iterator[None]:
        if not self.answers:
            raise TierFailed(f"the tier {self.name} did not answer a moment ago")
        try:
            yield
        except TierFailed:
            self.counts.failures += 1
            self._quiet_until = time.monotonic() + _QUIET_SECONDS
            raise

    def _deepest(self, kv_space: KvSpace, keys: Sequence[NodeKey], points: Sequence[int]) -> ChainRecord | None:
        """The record of the deepest of these points, in numbers of blocks, that has one."""
        best: ChainRecord | None = None
        while points:
            step = -(-len(points) // _PROBES)
            probed = [*points[::-1][::step]][::-1]
            answers = self.objects.get_many([self._chain_key(kv_space, keys[point - 1]) for point in probed])
            records = [parse_chain(data) for data in answers]
            hits = [number for number, record in enumerate(records) if record is not None and self._is_fresh(record)]
            last = hits[-1] if hits else -1
            best = records[last] if hits else best
            low, high = probed[last] if hits else 0, probed[last + 1] if last + 1 < len(probed) else 0
            points = [point for point in points if low < point < high]
        return best

    def _is_fresh(self, record: ChainRecord) -> bool:
        return self._ttl_seconds is None or time.time() <= record.kept + self._ttl_seconds

    def _pieces(self, kv_space: KvSpace, match: Match, record: ChainRecord) -> Iterator[Piece]:
        """The pieces behind a match that a chain has, as far as its extents exist and hold the prompt's tokens."""
        at = match.length
        useful = [one for one in record.extents if (one.depth + one.blocks) * BLOCK_TOKENS > at]
        present = self._announce(kv_space, useful)
        useful = list(takewhile(lambda one: one.name in present, useful))
        for number, extent in enumerate(useful):
            first = extent.depth * BLOCK_TOKENS
            if first > at:
                return
            try:
                plan = self.plan_of(kv_space, extent)
            except Damaged:
                self.drop(kv_space, extent.name)
                return
            if plan.parent != match.key_before(extent.depth):
                return
            stop = first + common_tokens(plan.tokens, match.tokens[first * TOKEN_BYTES :])
            follows = useful[number + 1].depth * BLOCK_TOKENS if number + 1 < len(useful) else stop
            stop = min(stop, follows)
            if stop <= at:
                continue
            overread = plan.token_count - (stop - at) if extent.coding == "exact" else 0
            place = at // BLOCK_TOKENS - extent.depth
            yield Piece(0, extent.name, place, Span(at, stop), 0, extent.coding, overread, self.name)
            if stop < follows:
                return
            at = stop

    def _announce(self, kv_space: KvSpace, wanted: Sequence[SharedExtent]) -> set[str]:
        """Fetch the headers of extents and of their bases, so that they can be opened; returns the names of those that
        exist."""
        every = list(_with_bases(wanted))
        sums = accumulate(extent.header_bytes for extent in every)
        every = [extent for extent, read_bytes in zip(every, sums, strict=True) if read_bytes <= _MAX_HEADER_BYTES]
        heads = self.objects.get_ranges(
            [ByteRange(self._extent_key(kv_space, one.name), 0, one.header_bytes) for one in every]
        )
        present = set()
        for extent, head in zip(every, heads, strict=True):
            if head is not None:
                path = Path(folder_of(kv_space.namespace.scope)) / f"{extent.name}.kv"
                self._files.expect(path, extent.size_bytes, head)
                present.add(extent.name)
        while len(self._known) + len(wanted) > _MAX_KNOWN and self._known:
            self._known.pop(next(iter(self._known)), None)
        whole = [one for one in wanted if present.issuperset(e.name for e in _with_bases([one]))]
        self._known |= {one.name: one for one in whole}
        return {one.name for one in whole}

    def _present(self, kv_space: KvSpace, match: Match) -> ChainRecord:
        """The chain that the tier has of a prompt, as far as its extents exist and hold the prompt's tokens."""
        record = self._deepest(kv_space, match.keys, _points(match.full_blocks))
        pieces = [] if record is None else list(self._pieces(kv_space, replace(match, pieces=()), record))
        if record is None or not pieces:
            return ChainRecord(time.time(), 0, ())
        names = {piece.name for piece in pieces}
        blocks = pieces[-1].span.stop // BLOCK_TOKENS
        return ChainRecord(record.kept, blocks, tuple(one for one in record.extents if one.name in names))

    def _put_extent(self, kv_space: KvSpace, extent: SharedExtent, read: Callable[[SharedExtent], bytes]) -> bool:
        key = self._extent_key(kv_space, extent.name)
        if self.objects.contains([key])[0]:
            return True
        data = read(extent)
        if not self.objects.put(key, data):
            return False
        self.counts.written_bytes += len(data)
        return True

    def _read_ahead(self, extents: ExtentFiles, opened: OpenExtent, span: Span) -> None:
        plan = opened.header.plan
        layers = range(len(plan.layout.layers))
        self._files.read_ahead(opened.handle, [extents.ranges(plan, layer, span) for layer in layers])
        wanted = Span(0, plan.token_count) if plan.coding is not None and plan.coding.exact else span
        for base in opened.bases:
            start, stop = max(wanted.start, base.tokens.start), min(wanted.stop, base.tokens.stop)
            if start < stop:
                at = base.start + start - base.tokens.start
                self._read_ahead(extents, base.extent, Span(at, at + stop - start))

    def _chain_key(self, kv_space: KvSpace, node: NodeKey) -> str:
        return self._record_key(kv_space, node, "chain")

    def _chunk_key(self, kv_space: KvSpace, digest: ChunkDigest) -> str:
        return self._record_key(kv_space, digest, "chunk")

    def _record_key(self, kv_space: KvSpace, key: bytes, kind: str) -> str:
        name = digest_of_fields("rekindle/shared/1", kv_space.digest, self._digester.name, key)
        return f"{folder_of(kv_space.namespace.scope)}/{name}.{kind}"

    def _extent_key(self, kv_space: KvSpace, name: str) -> str:
        return f"{folder_of(kv_space.namespace.scope)}/{name}.kv"


def folder_of(scope: Scope | None) -> str:
    """The folder of a tenant and salt: the tenant can be read in it, the salt cannot. None: of all of them."""
    if scope is None:
        return "kv"
    return f"kv/{quote(scope.tenant, safe='')[:64]}.{digest_of_fields(scope.tenant, scope.salt)[:16]}"


def _points(whole: int) -> list[int]:
    """Where a chain of `whole` whole blocks has records, in numbers of blocks."""
    points = [point for point in (*_EARLY_RECORDS, *range(_RECORD_BLOCKS, whole, _RECORD_BLOCKS)) if point < whole]
    return [*points, whole] if whole else []


def _with_bases(extents: Sequence[SharedExtent]) -> Iterator[SharedExtent]:
    """Extents, each behind its bases."""
    for extent in extents:
        yield from (base.extent for base in extent.bases)
        yield extent


_FETCHED_BYTES = 1 << 20  # at once: smaller layers are fetched together, for each request is a round trip
_LAYERS_AHEAD = 3  # or groups of layers
_WORKERS = 4


class SharedFiles(Files):
    """The objects of a shared tier that were announced by `expect`. A handle's descriptor is a number of our own."""

    def __init__(self, objects: ObjectStore) -> None:
        super().__init__()
        self._objects = objects
        self._workers = ThreadPoolExecutor(_WORKERS, "rekindle-tier")
        self._numbers = itertools.count()
        self._open: dict[int, _Reading] = {}
        self._expected: dict[str, tuple[int, bytes]] = {}

    def expect(self, path: Path, size_bytes: int, head: bytes) -> None:
        """Let a file be opened whose first bytes are known."""
        while len(self._expected) >= 1024:
            self._expected.pop(next(iter(self._expected)), None)
        self._expected[path.as_posix()] = size_bytes, head

    def open(self, path: Path) -> Handle:
        """Open a file. Asks nobody. Raises `FileNotFoundError` for one that was not announced."""
        key = path.as_posix()
        if (expected := self._expected.get(key)) is None:
            raise FileNotFoundError(f"{key} is not on the tier")
        number = next(self._numbers)
        self._open[number] = _Reading(self._objects, self._workers, key, *expected)
        return Handle(number)

    def size(self, handle: Handle) -> int:
        return self._open[handle.descriptor].size_bytes

    def read_at(self, handle: Handle, offset: int, out: memoryview) -> None:
        """Fill all of `out`. Raises `EOFError` if the object is gone or shorter, and `TierFailed`."""
        reading = self._open.get(handle.descriptor)
        if reading is None:
            raise FileNotFoundError("the file was closed")
        reading.read(offset, out.cast("B"))

    def read_ahead(self, handle: Handle, layers: Sequence[Sequence[Span]]) -> None:
        """Begin to fetch the bytes of each layer that will be read."""
        self._open[handle.descriptor].begin(layers)

    def close(self, handle: Handle) -> None:
        if (reading := self._open.pop(handle.descriptor, None)) is not None:
            reading.close()

    def end(self) -> None:
        """End the threads. Idempotent."""
        self._workers.shutdown(wait=False, cancel_futures=True)


class _Reading:
    """One open file. Thread-safe."""

    def __init__(
        self, objects: ObjectStore, workers: ThreadPoolExecutor, key: str, size_bytes: int, head: bytes
    ) -> None:
        self.size_bytes = size_bytes
        self._objects, self._workers, self._key, self._head = objects, workers, key, head
        self._lock = threading.Lock()
        self._layers: Sequence[Sequence[Span]] = ()
        self._starts: list[int] = []
        self._fetched: dict[int, Future[list[bytes]]] = {}

    def begin(self, layers: Sequence[Sequence[Span]]) -> None:
        size_bytes = sum(len(span) for spans in layers for span in spans)
        together = max(1, _FETCHED_BYTES * len(layers) // max(1, size_bytes))
        firsts = range(0, len(layers), together)
        self._layers = [[span for spans in layers[first : first + together] for span in spans] for first in firsts]
        self._starts = [spans[0].start for spans in self._layers]
        self._layer(0)

    def read(self, offset: int, out: memoryview) -> None:
        wanted = Span(offset, offset + len(out))
        if wanted.stop <= len(self._head):
            out[:] = self._head[offset : wanted.stop]
            return
        layer = bisect_right(self._starts, offset) - 1
        for span, data in zip(self._layers[layer], self._layer(layer).result(), strict=True) if layer >= 0 else ():
            if span.start <= offset and wanted.stop <= span.stop:
                out[:] = memoryview(data)[offset - span.start : wanted.stop - span.start]
                return
        (data,) = self._fetch([wanted])
        out[:] = data

    def close(self) -> None:
        with self._lock:
            for fetch in self._fetched.values():
                fetch.cancel()
            self._fetched.clear()

    def _layer(self, layer: int) -> Future[list[bytes]]:
        """The bytes of a layer; the next ones follow, and those long before it are forgotten."""
        with self._lock:
            for number in range(layer, min(layer + 1 + _LAYERS_AHEAD, len(self._layers))):
                if number not in self._fetched:
                    self._fetched[number] = self._workers.submit(self._fetch, self._layers[number])
            for number in [number for number in self._fetched if number < layer - 1]:
                del self._fetched[number]
            return self._fetched[layer]

    def _fetch(self, spans: Sequence[Span]) -> list[bytes]:
        found = self._objects.get_ranges([ByteRange(self._key, span.start, span.stop) for span in spans])
        whole = [data for data in found if data is not None]
        if len(whole) < len(spans):
            raise FileNotFoundError(f"{self._key} is no longer on the tier, or was cut off")
        return whole
