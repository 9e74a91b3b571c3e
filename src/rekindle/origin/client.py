"""A client of an origin, which trusts nothing that comes from it.

find     the longest published beginning of a prompt: an index, then manifests; only a trusted signature counts, and
         only chunks whose digest comes of the prompt's own tokens
fetch    slices of it, in the order they are wanted, over ranges as long as can be, each checked against the manifest
decode   a slice to KV

All that can go wrong on the other side is `OriginFailed`: then compute.
"""

from __future__ import annotations

import hashlib
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.codec.cipher import Cipher, Secret
from rekindle.core.cells import CHUNK_TOKENS, Cell
from rekindle.core.keys import TOKEN_BYTES, token_ids
from rekindle.core.kv import KvLayout, LayerKv, Span
from rekindle.errors import InvalidSetting
from rekindle.origin.failure import OriginFailed
from rekindle.origin.index import Entry, Index
from rekindle.origin.line import OriginLimits, Patience, Stop
from rekindle.origin.manifest import LevelFile, Manifest, slice_digest, slice_place, tokens_place
from rekindle.origin.names import Model, Names, context_path, depths, index_path
from rekindle.origin.signed import SignedManifest
from rekindle.origin.signing import TrustedKeys
from rekindle.origin.slices import decode
from rekindle.origin.wire import Exchange, Wire


@dataclass(frozen=True)
class Slice:
    """The bytes of one chunk in one layer, checked and decrypted: for `decode_slice`."""

    cell: Cell
    data: bytes


@dataclass(frozen=True)
class Arrival:
    """A slice that came.

    size_bytes        what came for it: its own bytes, and those between it and the one before that nobody wants
    seconds           how long was waited for it; what came while nobody waited took no time
    latency_seconds   how long the request took to be answered, for the first slice of one; else 0
    at                when it was whole, by `time.monotonic()`
    """

    size_bytes: int
    seconds: float
    latency_seconds: float
    at: float


Told = Callable[[Arrival], None]


@dataclass(frozen=True, eq=False)
class Found:
    """What an origin has of a prompt: the first `chunks` chunks of a context, whose tokens are the prompt's own."""

    manifest: Manifest
    chunks: int

    @property
    def tokens(self) -> int:
        """How many first tokens of the prompt that are."""
        return self.span(self.chunks - 1).stop

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels there are, the best first."""
        return tuple(level.name for level in self.manifest.levels)

    def span(self, chunk: int) -> Span:
        """The tokens of a chunk."""
        return self.manifest.cells.span(chunk)

    def sizes(self, level: str) -> NDArray[np.int64]:
        """The bytes of each slice, `[chunks, layers]`. Raises `ValueError` for a level that is not there."""
        return self.manifest.level(level).sizes[: self.chunks]


class Origin:
    """A remote place that may have KV. Used from several threads; connections are kept."""

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
        """`trusted_keys` are the public keys of publishers, `tls` the certificates that are believed.

        Connects when it must. Raises `InvalidSetting`.
        """
        self._keys = TrustedKeys(trusted_keys)
        if not len(self._keys):
            raise InvalidSetting("Without the public key of a publisher nothing of an origin can be used. Name one.")
        self._limits = limits or OriginLimits()
        self._wire = Wire(url, token, self._limits, tls)
        self._secret = secret
        self._names = Names(secret)

    def find(
        self,
        tokens: Sequence[int],
        identity: str,
        layout: KvLayout,
        adapter: str | None = None,
        *,
        patience_seconds: float | None = None,
        stop: Stop | None = None,
    ) -> Found | None:
        """The longest beginning of a prompt that is published; None if there is none.

        `identity` is the digest of the engine's identity, `adapter` that of a LoRA. Raises `OriginFailed`, also if it
        takes longer than `patience_seconds`, and `Cancelled` when `stop` is set.
        """
        deadline = None if patience_seconds is None else time.monotonic() + patience_seconds
        patience = Patience(self._limits, stop or Stop(), deadline)
        model = Model(identity, layout, adapter)
        chain = self._names.chain(model, tokens[: len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS])
        failed: OriginFailed | None = None
        for entry in self._candidates(chain, patience)[: self._limits.candidates]:
            data = self._wire.small(context_path(entry.context), self._limits.manifest_bytes, patience)
            try:
                manifest = None if data is None else self._read(data, entry.context, model)
            except ValueError as error:
                failed = OriginFailed(f"The origin's manifest {entry.context[:8]} is refused: {error}.")
                continue
            shared = 0 if manifest is None else self._common(manifest, tokens, chain)
            if manifest is not None and shared:
                return Found(manifest, shared)
        if failed is not None:
            raise failed
        return None

    def fetch(
        self, found: Found, cells: Iterable[Cell], level: str, *, bridge_bytes: int = 0, told: Told | None = None
    ) -> Transfer:
        """Slices of what was found, in this order, as they come: iterate over it, once.

        A run of neighbours is one request. So are two that are not, if at most `bridge_bytes` lie between them: these
        are read in vain, which takes less time than another request if they are few. `told` hears of every slice.

        Raises `ValueError` for cells and levels that are not there; `Transfer` says what else.
        """
        file = found.manifest.level(level)
        runs = _runs(found, file, cells, self._limits.request_bytes, bridge_bytes)
        cipher = None
        if self._secret is not None and file.salt is not None:
            cipher = self._secret.cipher(b"slices", file.salt)
        return Transfer(self._wire, found.manifest.context, file, runs, cipher, told)

    def tokens(self, found: Found) -> tuple[int, ...]:
        """All tokens of the context that was found, beyond those it shares with the prompt. Raises `OriginFailed`."""
        about, context = found.manifest.token_file, found.manifest.context
        data = self._wire.small(context_path(context, about.file), about.size_bytes, Patience(self._limits, Stop()))
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
        self._wire.close()

    def _candidates(self, chain: Sequence[bytes], patience: Patience) -> list[Entry]:
        """The contexts that seem to go along with a prompt, the longest common beginning first."""
        found: dict[str, Entry] = {}
        for depth in depths(len(chain)):
            path = index_path(self._names.lookup(chain[depth - 1]))
            data = self._wire.small(path, self._limits.index_bytes, patience)
            if data is None:
                break
            try:
                index = Index.from_bytes(data)
            except ValueError as error:
                raise OriginFailed(f"The origin's index is none: {error}.") from error
            found |= {entry.context: entry for entry in index.entries if entry.key in self._keys}
            if not index.full:  # else there are more, listed by a later chunk
                break
        alike = [entry for entry in found.values() if entry.common(chain)]
        return sorted(alike, key=lambda entry: -entry.common(chain))

    def _read(self, data: bytes, context: str, model: Model) -> Manifest:
        """A manifest that is trusted, of that context and model. Raises `ValueError`."""
        signed = SignedManifest.from_bytes(data)
        manifest = signed.open(self._keys, self._secret)
        if manifest.context != context or self._names.context(manifest.chain[-1], signed.header.key) != context:
            raise ValueError("it is that of another context")
        if manifest.model != model:
            raise ValueError("it is for another model")
        return manifest

    def _common(self, manifest: Manifest, tokens: Sequence[int], chain: Sequence[bytes]) -> int:
        """How many first chunks of a context are a prompt's own."""
        shared = 0
        while shared < min(len(chain), len(manifest.chain)) and chain[shared] == manifest.chain[shared]:
            shared += 1
        if shared == len(manifest.chain) - 1 and len(tokens) >= manifest.tokens:
            ending = self._names.chain(manifest.model, tokens[: manifest.tokens])[-1]  # of its last, partial chunk
            shared += ending == manifest.chain[-1]
        return shared


@dataclass(frozen=True)
class _Run:
    """Slices that one request brings."""

    cells: tuple[Cell, ...]
    span: Span


class Transfer:
    """Slices on their way: an iterator that checks each of them.

    Iterating raises `OriginFailed` when one does not come, or is not what was published, and `Cancelled` after
    `cancel`. What was yielded before is good all the same. Leaving it early costs the connection.
    """

    def __init__(
        self,
        wire: Wire,
        context: str,
        file: LevelFile,
        runs: Sequence[_Run],
        cipher: Cipher | None,
        told: Told | None,
    ) -> None:
        self._wire = wire
        self._context = context
        self._file = file
        self._runs = runs
        self._cipher = cipher
        self._told = told
        self._stop = Stop()
        self._slices = self._read()

    @property
    def requests(self) -> int:
        """How many requests it takes."""
        return len(self._runs)

    @property
    def size_bytes(self) -> int:
        """How many bytes it asks for."""
        return sum(len(run.span) for run in self._runs)

    def __iter__(self) -> Iterator[Slice]:
        return self._slices

    def cancel(self) -> None:
        """Stop, from any thread: whoever waits for a slice waits no longer."""
        self._stop.set()

    def _read(self) -> Iterator[Slice]:
        """Run by run. The next request is on its way before the last is over: the link is never idle for an answer."""
        limits, left = self._wire.limits, list(reversed(self._runs))
        coming = self._ask(left)
        while coming is not None:
            (run, current), coming = coming, None
            try:
                asked = time.perf_counter()
                current.wait_for_range(self._file.size_bytes)
                latency, at = time.perf_counter() - asked, run.span.start
                for cell in run.cells:
                    if coming is None and (run.span.stop - at <= limits.ahead_bytes or cell == run.cells[-1]):
                        coming = self._ask(left)
                    place = self._file.place(cell)
                    data, started = bytearray(place.stop - at), time.perf_counter()
                    current.fill(data)
                    seconds = time.perf_counter() - started
                    if self._told is not None:
                        self._told(Arrival(len(data), seconds, latency, time.monotonic()))
                    latency, at, between = 0.0, place.stop, place.start - at
                    yield Slice(cell, self._checked(cell, data[between:] if between else data))
            except BaseException:
                if coming is not None:
                    coming[1].close()
                raise
            finally:
                current.close()

    def _ask(self, left: list[_Run]) -> tuple[_Run, Exchange] | None:
        """Send the next request; None if there is none."""
        if not left:
            return None
        run = left.pop()
        path = context_path(self._context, self._file.file)
        return run, self._wire.ask(path, run.span, Patience(self._wire.limits, self._stop))

    def _checked(self, cell: Cell, data: bytearray) -> bytes:
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


def decode_slice(found: Found, chunk: int, layer: int, data: bytes) -> LayerKv:
    """The KV of a chunk in a layer, from the bytes of its slice. Raises `OriginFailed` if they are none."""
    try:
        return decode(data, found.manifest.model.layout, layer, len(found.span(chunk)))
    except ValueError as error:
        raise OriginFailed(f"The slice of chunk {chunk}, layer {layer} cannot be decoded: {error}.") from error


def _runs(found: Found, file: LevelFile, cells: Iterable[Cell], most_bytes: int, bridge_bytes: int) -> list[_Run]:
    """Cells in their order, neighbours together, as far as one request may ask for them."""
    runs: list[_Run] = []
    for cell in cells:
        if not 0 <= cell.chunk < found.chunks:
            raise ValueError(f"chunk {cell.chunk} is not among the {found.chunks} that were found")
        place = file.place(cell)
        last = runs[-1] if runs else None
        if (
            last is not None
            and 0 <= place.start - last.span.stop <= bridge_bytes
            and place.stop - last.span.start <= most_bytes
        ):
            runs[-1] = _Run((*last.cells, cell), Span(last.span.start, place.stop))
        else:
            runs.append(_Run((cell,), place))
    return runs
