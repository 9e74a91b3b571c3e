"""A client of an origin, which trusts nothing that comes from it.

find     the longest published prefix of a prompt: an index, then manifests; only a trusted signature counts, and only
         chunks whose digest matches the prompt's own tokens
fetch    slices of it, in the order wanted, over ranges as long as possible, each checked against the manifest
decode   a slice to KV

Everything that can go wrong on the other side is `OriginFailed`: compute then.
"""

from __future__ import annotations

import hashlib
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.codec import quantized
from rekindle.codec.cipher import Cipher, Secret
from rekindle.core.cells import CHUNK_TOKENS, Cell, CellGrid
from rekindle.core.chunk import ChunkDigest
from rekindle.core.keys import TOKEN_BYTES, token_ids
from rekindle.core.kv import LayerKv, LayerSpec, Span
from rekindle.core.plan import RAW
from rekindle.core.reply import OriginMiss
from rekindle.errors import InvalidSetting
from rekindle.remote.connection import OriginFailed, OriginLimits, Stop, Timeouts
from rekindle.remote.http import Exchange, HttpClient
from rekindle.remote.index import ContextNames, Index, IndexEntry, KvModel, context_path, index_path, listed_depths
from rekindle.remote.manifest import LevelFile, Manifest, SignedManifest, slice_digest, slice_place, tokens_place
from rekindle.remote.signing import TrustedKeys
from rekindle.remote.slices import decode, regroup_heads, reorder_keys


@dataclass(frozen=True)
class Slice:
    """The bytes of one chunk in one layer, checked and decrypted: for `decode_slice`."""

    cell: Cell
    data: bytes


@dataclass(frozen=True, eq=False)
class PublishedPrefix:
    """What an origin has of a prompt: the first `chunks` chunks of a context, whose tokens are the prompt's own.

    `model` is that of the prompt: KV is decoded in its type.
    """

    manifest: Manifest
    chunks: int
    model: KvModel

    @property
    def tokens(self) -> int:
        """Number of leading tokens of the prompt it covers."""
        return self.span(self.chunks - 1).stop

    @property
    def cells(self) -> CellGrid:
        """Its chunks and layers."""
        return CellGrid(self.tokens, len(self.manifest.model.layout.layers))

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of the levels that fit the prompt's model, best first: unquantized KV is that of one dtype, device and
        engine."""
        same = self.manifest.model == self.model
        return tuple(level.name for level in self.manifest.levels if same or level.name != RAW)

    @property
    def head(self) -> ChunkDigest | None:
        """What its passage was computed after."""
        passage = self.manifest.passage
        return None if passage is None else passage.scores.earlier[0].digest

    def head_dim(self, layer: int) -> int:
        """Size of the keys of a head, which one of the two models may have all in one."""
        return min(model.layout.layers[layer].key_dim for model in (self.model, self.manifest.model))

    def span(self, chunk: int) -> Span:
        """The tokens of a chunk."""
        return self.manifest.cells.span(chunk)

    def sizes(self, level: str) -> NDArray[np.int64]:
        """The bytes of each slice, `[chunks, layers]`. Raises `ValueError` for a level that is not there."""
        return self.manifest.level(level).sizes[: self.chunks]


IsUsable = Callable[[PublishedPrefix], bool]  # whether it is there in a level that a request allows


class Origin:
    """A remote server that may have KV. Thread-safe; connections are kept."""

    def __init__(
        self,
        url: str,
        trusted_keys: Iterable[str],
        *,
        token: str | None = None,
        secret: Secret | None = None,
        limits: OriginLimits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`trusted_keys`: public keys of publishers; `tls`: trusted certificates.

        Connects on first use. Raises `InvalidSetting`.
        """
        self.url = url
        self._keys = TrustedKeys(trusted_keys)
        if not len(self._keys):
            raise InvalidSetting("An origin needs the public key of a publisher you trust. Name one.")
        self._limits = limits or OriginLimits()
        self._http = HttpClient(url, token, self._limits, tls)
        self._secret = secret
        self._names = ContextNames(secret)

    def find(
        self,
        tokens: Sequence[int],
        model: KvModel,
        usable: IsUsable | None = None,
        *,
        timeout_seconds: float | None = None,
        stop: Stop | None = None,
    ) -> PublishedPrefix | None:
        """The longest published prefix of a prompt; None if there is none.

        With `usable`, the longest that is; another only if there is no such. Raises `OriginFailed`, also after
        `timeout_seconds`, and `Cancelled` when `stop` is set.
        """
        timeouts = self._timeouts(timeout_seconds, stop)
        chain = self._names.chain(model, tokens[: len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS])
        entries = self._candidates(chain, timeouts)
        other: PublishedPrefix | None = None
        for manifest in self._manifests(entries, model, timeouts):
            if shared := self._count_shared(manifest, tokens, chain):
                found = PublishedPrefix(manifest, shared, model)
                if usable is None or usable(found):
                    return found
                other = other or found
        return other

    def find_passage(
        self,
        tokens: Sequence[int],
        model: KvModel,
        usable: IsUsable,
        head: ChunkDigest,
        *,
        timeout_seconds: float | None = None,
        stop: Stop | None = None,
    ) -> PublishedPrefix | None:
        """The context whose first passage has these tokens: rather a usable one, rather after the head of that digest.
        None if there is none. Raises as `find`."""
        timeouts, name = self._timeouts(timeout_seconds, stop), self._names.passage(model, tokens)
        index = self._index(name, timeouts)
        entries = () if index is None else tuple(filter(self.trusts, index.entries))
        other: PublishedPrefix | None = None
        for manifest in self._manifests(entries, model, timeouts):
            if manifest.passage is None or manifest.passage.name != name:
                continue
            found = PublishedPrefix(manifest, manifest.cells.chunks, model)
            if usable(found) and found.head == head:
                return found
            if other is None or (usable(found) and not usable(other)):
                other = found
        return other

    def models(self, timeout_seconds: float | None = None) -> list[Manifest]:
        """A manifest of each model at the origin that a key you named has signed. Raises `OriginFailed`."""
        timeouts = self._timeouts(timeout_seconds, None)
        index = self._index(b"", timeouts)
        entries = [] if index is None else [entry for entry in index.entries if self.trusts(entry)]
        found = [self.manifest(entry, timeout_seconds=timeout_seconds) for entry in entries]
        return [manifest for manifest in found if manifest is not None]

    def contexts(
        self, model: KvModel, timeout_seconds: float | None = None, stop: Stop | None = None
    ) -> tuple[IndexEntry, ...]:
        """The newest contexts of a model, of all publishers. Raises `OriginFailed`, and `Cancelled`."""
        index = self._index(self._names.root(model), self._timeouts(timeout_seconds, stop))
        return () if index is None else index.entries

    def why_missing(self, model: KvModel, timeout_seconds: float, stop: Stop) -> OriginMiss:
        """Why a prompt is not there: only it, or everything of its model. Raises `OriginFailed`, and `Cancelled`."""
        return "prompt" if any(map(self.trusts, self.contexts(model, timeout_seconds, stop))) else "nothing"

    def trusts(self, entry: IndexEntry) -> bool:
        """Whether its publisher is one of those you named."""
        return entry.key in self._keys

    def manifest(
        self, entry: IndexEntry, model: KvModel | None = None, timeout_seconds: float | None = None
    ) -> Manifest | None:
        """The verified manifest of a context, by default of any model; None if it is gone. Raises `OriginFailed`."""
        timeouts = self._timeouts(timeout_seconds, None)
        data = self._http.get(context_path(entry.context), self._limits.manifest_bytes, timeouts)
        return None if data is None else self._read(data, entry.context, model)

    def fetch(self, found: PublishedPrefix, cells: Iterable[Cell], level: str) -> SliceTransfer:
        """Slices of a published prefix, in this order, as they arrive: iterate once.

        Neighbours share one request.

        Raises `ValueError` for cells and levels that are not there; see `SliceTransfer` for other errors.
        """
        file = found.manifest.level(level)
        runs = _group_ranges(found, file, cells, self._limits.request_bytes)
        cipher = None
        if self._secret is not None and file.salt is not None:
            cipher = self._secret.cipher(b"slices", file.salt)
        return SliceTransfer(self._http, found.manifest.context, file, runs, cipher)

    def tokens(self, found: PublishedPrefix) -> tuple[int, ...]:
        """All tokens of the published context, also beyond those shared with the prompt. Raises `OriginFailed`."""
        about, context = found.manifest.token_file, found.manifest.context
        data = self._http.get(context_path(context, about.file), about.size_bytes, Timeouts(self._limits, Stop()))
        if data is None or f"{hashlib.blake2b(data, digest_size=32).hexdigest()}.tokens" != about.file:
            raise OriginFailed("The tokens at the origin are not those that were published.")
        try:
            if self._secret is not None and about.salt is not None:
                data = self._secret.cipher(b"tokens", about.salt).open(0, data, tokens_place(context))
            if len(data) != found.manifest.tokens * TOKEN_BYTES:
                raise ValueError("they are more or fewer than the manifest says")
        except ValueError as error:
            raise OriginFailed(f"The tokens at the origin cannot be read: {error}.") from error
        return token_ids(data)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def _candidates(self, chain: Sequence[bytes], timeouts: Timeouts) -> list[IndexEntry]:
        """Contexts that seem to share chunks with a prompt, the longest shared prefix first."""
        found: dict[str, IndexEntry] = {}
        for depth in listed_depths(len(chain)):
            index = self._index(chain[depth - 1], timeouts)
            if index is None:
                break
            found |= {entry.context: entry for entry in index.entries if self.trusts(entry)}
            if not index.full:  # else more are listed under a later chunk
                break
        alike = [entry for entry in found.values() if entry.count_shared(chain)]
        return sorted(alike, key=lambda entry: -entry.count_shared(chain))

    def _manifests(self, entries: Sequence[IndexEntry], model: KvModel, timeouts: Timeouts) -> Iterator[Manifest]:
        """The manifests of the first contexts; if one was refused and none is left, raises that."""
        failed: OriginFailed | None = None
        for entry in entries[: self._limits.candidates]:
            data = self._http.get(context_path(entry.context), self._limits.manifest_bytes, timeouts)
            if data is None:
                continue
            try:
                manifest = self._read(data, entry.context, model)
            except OriginFailed as refused:
                failed = refused
            else:
                yield manifest
        if failed is not None:
            raise failed

    def _index(self, chunk: bytes, timeouts: Timeouts) -> Index | None:
        """The contexts listed under a chunk; None if there are none."""
        data = self._http.get(index_path(self._names.lookup(chunk)), self._limits.index_bytes, timeouts)
        try:
            return None if data is None else Index.from_bytes(data)
        except ValueError as error:
            raise OriginFailed(f"The origin's index cannot be read: {error}.") from error

    def _timeouts(self, timeout_seconds: float | None, stop: Stop | None) -> Timeouts:
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        return Timeouts(self._limits, stop or Stop(), deadline)

    def _read(self, data: bytes, context: str, model: KvModel | None) -> Manifest:
        """Parse and verify the manifest of that context and model, by default of any. Raises `OriginFailed`."""
        try:
            signed = SignedManifest.from_bytes(data)
            manifest = signed.open(self._keys, self._secret)
            name = self._names.context(manifest.chain[-1], manifest.model.exact, signed.header.key)
            if manifest.context != context or name != context:
                raise ValueError("it is that of another context")
            if model is not None and manifest.model.digest != model.digest:
                raise ValueError("it is for another model")
        except ValueError as error:
            raise OriginFailed(f"The origin's manifest {context[:8]} is refused: {error}.") from error
        return manifest

    def _count_shared(self, manifest: Manifest, tokens: Sequence[int], chain: Sequence[bytes]) -> int:
        """Number of leading chunks that a context shares with a prompt."""
        shared = 0
        while shared < min(len(chain), len(manifest.chain)) and chain[shared] == manifest.chain[shared]:
            shared += 1
        if shared == len(manifest.chain) - 1 and len(tokens) >= manifest.tokens:
            ending = self._names.chain(manifest.model, tokens[: manifest.tokens])[-1]  # of its last, partial chunk
            shared += ending == manifest.chain[-1]
        return shared


@dataclass(frozen=True)
class _RangeRequest:
    """Slices fetched by one request."""

    cells: tuple[Cell, ...]
    span: Span


class SliceTransfer:
    """An iterator over slices that verifies each of them.

    Iterating raises `OriginFailed` when one does not arrive or is not what was published, and `Cancelled` after
    `cancel`. Slices yielded before stay valid. Stopping early closes the connection.
    """

    def __init__(
        self, http: HttpClient, context: str, file: LevelFile, runs: Sequence[_RangeRequest], cipher: Cipher | None
    ) -> None:
        self._http = http
        self._context = context
        self._file = file
        self._runs = runs
        self._cipher = cipher
        self._stop = Stop()
        self._slices = self._read()

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self._runs)

    def __iter__(self) -> Iterator[Slice]:
        return self._slices

    def cancel(self) -> None:
        """Stop, from any thread: ends a wait for a slice."""
        self._stop.set()

    def _read(self) -> Iterator[Slice]:
        """Request by request. The next is sent before the last ends, so the link is never idle."""
        limits, left = self._http.limits, list(reversed(self._runs))
        coming = self._request_next(left)
        while coming is not None:
            (run, current), coming = coming, None
            try:
                current.wait_for_range(self._file.size_bytes)
                for cell in run.cells:
                    place = self._file.place(cell)
                    if coming is None and (run.span.stop - place.start <= limits.ahead_bytes or cell == run.cells[-1]):
                        coming = self._request_next(left)
                    data = bytearray(len(place))
                    current.fill(data)
                    yield Slice(cell, self._verify(cell, data))
            except BaseException:
                if coming is not None:
                    coming[1].close()
                raise
            finally:
                current.close()

    def _request_next(self, left: list[_RangeRequest]) -> tuple[_RangeRequest, Exchange] | None:
        """Send the next request; None if none is left."""
        if not left:
            return None
        run = left.pop()
        path = context_path(self._context, self._file.file)
        return run, Exchange(self._http, path, run.span, Timeouts(self._http.limits, self._stop))

    def _verify(self, cell: Cell, data: bytearray) -> bytes:
        where = f"chunk {cell.chunk}, layer {cell.layer}"
        if slice_digest(data) != self._file.digest(cell):
            raise OriginFailed(f"The slice of {where} is not the one that was published.")
        if self._cipher is None:
            return bytes(data)
        try:
            about = slice_place(self._context, self._file.name, cell)
            return self._cipher.open(self._file.number(cell), data, about)
        except ValueError as error:
            raise OriginFailed(f"The slice of {where} cannot be decrypted: {error}.") from error


@dataclass(frozen=True)
class CodedSlice:
    """Quantized KV of one chunk in one layer, for an engine that decodes it on its device."""

    data: bytes
    spec: LayerSpec


def coded_slice(found: PublishedPrefix, chunk: int, layer: int, data: bytes) -> CodedSlice | None:
    """A slice that is left as it is; None if it is not quantized, or the model has other heads or another order of
    channels: then decode it."""
    published, own = found.manifest.model.layout, found.model.layout
    fits = published.layers[layer] == own.layers[layer] and found.model.key_order == "same"
    if data[: len(quantized.MAGIC)] != quantized.MAGIC or not fits:
        return None
    return CodedSlice(data, published.layer_spec(layer, len(found.span(chunk))))


def decode_slice(found: PublishedPrefix, chunk: int, layer: int, data: bytes) -> LayerKv:
    """The KV of a chunk in a layer, from the bytes of its slice. Raises `OriginFailed` if they are invalid."""
    try:
        model, layout = found.model, found.manifest.model.layout
        kv = decode(data, layout, layer, len(found.span(chunk)), model.layout.dtype)
        return reorder_keys(regroup_heads(kv, model.layout.layers[layer]), model.key_order, found.head_dim(layer))
    except ValueError as error:
        raise OriginFailed(f"The slice of chunk {chunk}, layer {layer} cannot be decoded: {error}.") from error


def _group_ranges(
    found: PublishedPrefix, file: LevelFile, cells: Iterable[Cell], max_bytes: int
) -> list[_RangeRequest]:
    """Group cells into requests: neighbours together, up to the size of one request."""
    runs: list[_RangeRequest] = []
    for cell in cells:
        if not 0 <= cell.chunk < found.chunks:
            raise ValueError(f"chunk {cell.chunk} is not among the {found.chunks} that were found")
        place = file.place(cell)
        last = runs[-1] if runs else None
        if last is not None and place.start == last.span.stop and place.stop - last.span.start <= max_bytes:
            runs[-1] = _RangeRequest((*last.cells, cell), Span(last.span.start, place.stop))
        else:
            runs.append(_RangeRequest((cell,), place))
    return runs
