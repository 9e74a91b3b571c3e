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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.codec.cipher import Cipher, Secret
from rekindle.core.cells import CHUNK_TOKENS, Cell
from rekindle.core.keys import TOKEN_BYTES, token_ids
from rekindle.core.kv import KvLayout, LayerKv, Span
from rekindle.errors import InvalidSetting
from rekindle.remote.connection import OriginFailed, OriginLimits, Stop, Timeouts
from rekindle.remote.http import Exchange, HttpClient
from rekindle.remote.index import ContextNames, Index, IndexEntry, KvModel, context_path, index_path, listed_depths
from rekindle.remote.manifest import LevelFile, Manifest, SignedManifest, slice_digest, slice_place, tokens_place
from rekindle.remote.signing import TrustedKeys
from rekindle.remote.slices import decode


@dataclass(frozen=True)
class Slice:
    """The bytes of one chunk in one layer, checked and decrypted: for `decode_slice`."""

    cell: Cell
    data: bytes


@dataclass(frozen=True, eq=False)
class PublishedPrefix:
    """What an origin has of a prompt: the first `chunks` chunks of a context, whose tokens are the prompt's own."""

    manifest: Manifest
    chunks: int

    @property
    def tokens(self) -> int:
        """Number of leading tokens of the prompt it covers."""
        return self.span(self.chunks - 1).stop

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of the levels, best first."""
        return tuple(level.name for level in self.manifest.levels)

    def span(self, chunk: int) -> Span:
        """The tokens of a chunk."""
        return self.manifest.cells.span(chunk)

    def sizes(self, level: str) -> NDArray[np.int64]:
        """The bytes of each slice, `[chunks, layers]`. Raises `ValueError` for a level that is not there."""
        return self.manifest.level(level).sizes[: self.chunks]


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
        identity: str,
        layout: KvLayout,
        adapter: str | None = None,
        *,
        timeout_seconds: float | None = None,
        stop: Stop | None = None,
    ) -> PublishedPrefix | None:
        """The longest published prefix of a prompt; None if there is none.

        `identity`: digest of the engine's identity; `adapter`: digest of a LoRA. Raises `OriginFailed`, also after
        `timeout_seconds`, and `Cancelled` when `stop` is set.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        patience = Timeouts(self._limits, stop or Stop(), deadline)
        model = KvModel(identity, layout, adapter)
        chain = self._names.chain(model, tokens[: len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS])
        failed: OriginFailed | None = None
        for entry in self._candidates(chain, patience)[: self._limits.candidates]:
            data = self._http.get(context_path(entry.context), self._limits.manifest_bytes, patience)
            try:
                manifest = None if data is None else self._read(data, entry.context, model)
            except ValueError as error:
                failed = OriginFailed(f"The origin's manifest {entry.context[:8]} is refused: {error}.")
                continue
            shared = 0 if manifest is None else self._count_shared(manifest, tokens, chain)
            if manifest is not None and shared:
                return PublishedPrefix(manifest, shared)
        if failed is not None:
            raise failed
        return None

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

    def _candidates(self, chain: Sequence[bytes], patience: Timeouts) -> list[IndexEntry]:
        """Contexts that seem to share chunks with a prompt, the longest shared prefix first."""
        found: dict[str, IndexEntry] = {}
        for depth in listed_depths(len(chain)):
            path = index_path(self._names.lookup(chain[depth - 1]))
            data = self._http.get(path, self._limits.index_bytes, patience)
            if data is None:
                break
            try:
                index = Index.from_bytes(data)
            except ValueError as error:
                raise OriginFailed(f"The origin's index cannot be read: {error}.") from error
            found |= {entry.context: entry for entry in index.entries if entry.key in self._keys}
            if not index.full:  # else more are listed under a later chunk
                break
        alike = [entry for entry in found.values() if entry.count_shared(chain)]
        return sorted(alike, key=lambda entry: -entry.count_shared(chain))

    def _read(self, data: bytes, context: str, model: KvModel) -> Manifest:
        """Parse and verify the manifest of that context and model. Raises `ValueError`."""
        signed = SignedManifest.from_bytes(data)
        manifest = signed.open(self._keys, self._secret)
        if manifest.context != context or self._names.context(manifest.chain[-1], signed.header.key) != context:
            raise ValueError("it is that of another context")
        if manifest.model != model:
            raise ValueError("it is for another model")
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
        self,
        http: HttpClient,
        context: str,
        file: LevelFile,
        runs: Sequence[_RangeRequest],
        cipher: Cipher | None,
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
        return run, self._http.request_range(path, run.span, Timeouts(self._http.limits, self._stop))

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


def decode_slice(found: PublishedPrefix, chunk: int, layer: int, data: bytes) -> LayerKv:
    """The KV of a chunk in a layer, from the bytes of its slice. Raises `OriginFailed` if they are invalid."""
    try:
        return decode(data, found.manifest.model.layout, layer, len(found.span(chunk)))
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
