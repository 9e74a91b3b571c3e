"""The extent files of a folder: written once, read in part, checked at every read."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.codec import quantized
from rekindle.codec.coder import SAME_LAYER, Coder, decode_into
from rekindle.codec.digest import Digester
from rekindle.codec.extent import (
    HALVES,
    Coding,
    ExtentHeader,
    ExtentPlan,
    Half,
    digest_cells,
    digest_halves,
    digest_layer,
    header_length,
    is_row_contiguous,
    parse_header,
    rows_of,
)
from rekindle.core.keys import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, chain
from rekindle.core.kv import CodedPiece, LayerKv, Span
from rekindle.store.catalog.catalog import Extent
from rekindle.store.files import Files, Handle
from rekindle.store.folder import EXTENTS, is_own_name
from rekindle.store.read_pool import ReadHelper, Work

SUFFIX = ".kv"
_NO_FILE = (errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENOTDIR, errno.ENXIO)
_HEADERS = 64  # remembered
# A prefix of an extent is checked by the digest of the whole, for which the rest is read too, if the rest is at most
# one part in this many: checking cell by cell takes three quarters of the time of reading them, and the GIL.
_READ_ON = 1.5
_PIECE_BYTES = 2 << 20  # read and checked at once, while it is in the processor's cache
_SPLIT_BYTES = 512 << 10  # from this size on, keys and values of a layer are read side by side
_DECODING = 4  # times the work of reading as many bytes


class Damaged(Exception):
    """An extent is not what its row says. The reason is for people; `extent` names the extent at fault, if another."""

    def __init__(self, reason: str, extent: str | None = None) -> None:
        super().__init__(reason)
        self.extent = extent


@dataclass(frozen=True)
class BaseFile:
    """An extent that is the base of a delta: `blocks` blocks of the delta, from number `at` on, are those of this
    extent
    from `place` on. `kv_space` is the digest of this extent's KV space."""

    row: Extent
    kv_space: str
    at: int
    place: int
    blocks: int


@dataclass(frozen=True, eq=False)
class OpenBase:
    """The base of a part of a delta: of its `tokens`, which begin at token `start` of the extent."""

    extent: OpenExtent
    tokens: Span
    start: int


@dataclass(frozen=True, eq=False)
class OpenExtent:
    """An open extent with its bases. The holder releases it. `code`: the coded layers, if they are in memory."""

    handle: Handle
    header: ExtentHeader
    bases: tuple[OpenBase, ...] = ()
    code: tuple[bytes, ...] = ()


@dataclass(frozen=True, eq=False)
class CodedExtent:
    """An encoded extent, to be written: the bytes of each layer, and their digests."""

    plan: ExtentPlan
    blobs: Sequence[bytes]
    digests: bytes


@dataclass(frozen=True, eq=False)
class WrittenExtent:
    """An extent that was just written."""

    header: ExtentHeader
    digest: bytes  # of the header


class ExtentFiles:
    """Extents as files. Knows nothing of the catalog and the limits."""

    def __init__(self, folder: Path, files: Files, digester: Digester) -> None:
        self.folder = folder
        self.files = files
        self.digester = digester
        self._lock = threading.Lock()
        self._headers: OrderedDict[str, ExtentHeader] = OrderedDict()
        self._helper = ReadHelper()

    def path(self, name: str) -> Path:
        """The file of an extent. Raises `Damaged` for a name that no extent has."""
        file = f"{name}{SUFFIX}"
        if not is_own_name(EXTENTS, file):  # it comes from a row, and could lead anywhere
            raise Damaged(f"no extent is called {name!r}")
        return self.folder / file

    def open(
        self, row: Extent, kv_space_digest: str, stands_on: Sequence[BaseFile] = (), *, fresh: bool = False
    ) -> OpenExtent:
        """An extent, its header checked against its row; `fresh`: even if it was checked before.

        Raises `Damaged` or `OSError`.
        """
        extent = self._open(row, kv_space_digest, fresh)
        if not stands_on:
            return extent
        try:
            return replace(extent, bases=self.open_bases(stands_on, extent.header.plan, fresh=fresh))
        except BaseException:
            self.release(extent)
            raise

    def open_bases(self, files: Sequence[BaseFile], plan: ExtentPlan, *, fresh: bool = False) -> tuple[OpenBase, ...]:
        """The bases of an extent. Release each one's extent. Raises `Damaged` or `OSError`."""
        opened: list[OpenBase] = []
        try:
            for file in files:
                opened.append(self._open_base(file, plan, fresh))
        except BaseException:
            for base in opened:
                self.release(base.extent)
            raise
        return tuple(opened)

    def release(self, extent: OpenExtent) -> None:
        """Close the files of an extent that was only read."""
        for one in (*(base.extent for base in extent.bases), extent):
            with contextlib.suppress(OSError):
                self.files.close(one.handle)

    def _open_base(self, file: BaseFile, plan: ExtentPlan, fresh: bool) -> OpenBase:
        """The base of a part of an extent, checked to hold the same tokens in the same place of the right KV space."""
        if plan.coding is not None and plan.coding.base_kv_space != file.kv_space:
            raise Damaged("its delta base is in another KV space")
        try:
            extent = self._open(file.row, file.kv_space, fresh)
        except Damaged as error:
            raise Damaged(str(error), file.row.name) from error
        own = extent.header.plan
        tokens = plan.tokens[file.at * BLOCK_BYTES : (file.at + file.blocks) * BLOCK_BYTES]
        start = file.place * BLOCK_BYTES
        above, below = (
            [found.parent, *chain(found.parent, found.tokens[:stop])][-1]
            for found, stop in ((own, start), (plan, file.at * BLOCK_BYTES))
        )
        if own.tokens[start : start + len(tokens)] != tokens or above != below or own.layout != plan.layout:
            self.release(extent)
            raise Damaged("its delta base holds other tokens")
        at = file.at * BLOCK_TOKENS
        return OpenBase(extent, Span(at, at + len(tokens) // TOKEN_BYTES), file.place * BLOCK_TOKENS)

    def _open(self, row: Extent, kv_space_digest: str, fresh: bool) -> OpenExtent:
        handle = self._open_file(row)
        try:
            size_bytes = self.files.size(handle)
            if size_bytes != row.size_bytes:
                raise Damaged(f"the file has {size_bytes:,} bytes, not {row.size_bytes:,}")
            return OpenExtent(handle, self._header(row, kv_space_digest, handle, fresh))
        except BaseException:
            with contextlib.suppress(OSError):
                self.files.close(handle)
            raise

    def _open_file(self, row: Extent) -> Handle:
        try:
            return self.files.open(self.path(row.name))
        except OSError as error:
            if error.errno in _NO_FILE:
                raise Damaged(f"it is not a file: {error}") from error
            raise

    def tokens(self, row: Extent) -> bytes:
        """All tokens in a file, also those of blocks that are not live; unchecked for a file under another key.

        Raises `Damaged` or `OSError`.
        """
        handle = self._open_file(row)
        try:
            data = self._read_header(row, handle)
            plan = parse_header(bytes(data)).plan
        except (ValueError, EOFError) as error:
            raise Damaged(str(error)) from error
        finally:
            self.files.close(handle)
        if plan.digest_name == self.digester.name and self.digester.header(data) != row.digest:
            raise Damaged("the header's digest does not match")
        return plan.tokens

    def read(self, extent: OpenExtent, layer: int, span: Span, out: LayerKv) -> None:
        """Fill `out` with the tokens `span` of the extent, and check them.

        Raises `Damaged` or `OSError`; `out` then holds anything.
        """
        if extent.header.plan.coding is not None:
            self._read_coded(extent, layer, span, out)
            return
        if not is_row_contiguous(out):
            straight = extent.header.plan.empty(layer, len(span))
            self.read(extent, layer, span, straight)
            out.keys[...], out.values[...] = straight.keys, straight.values
            return
        count = extent.header.plan.token_count
        if (count - len(span)) * _READ_ON <= len(span):
            self._read_whole(extent, layer, span.start, out)
            return
        start = -(-span.start // BLOCK_TOKENS) * BLOCK_TOKENS  # between them, whole blocks
        stop = span.stop if span.stop == count else span.stop // BLOCK_TOKENS * BLOCK_TOKENS
        if start > stop:  # all in one block
            self._read_block_part(extent, layer, span, out)
            return
        if span.start < start:
            self._read_block_part(extent, layer, Span(span.start, start), out.window(0, start - span.start))
        if start < stop:
            self._read_cells(extent, layer, Span(start, stop), out.window(start - span.start, stop - span.start))
        if stop < span.stop:
            self._read_block_part(extent, layer, Span(stop, span.stop), out.window(stop - span.start, len(span)))

    def ranges(self, plan: ExtentPlan, layer: int, span: Span) -> list[Span]:
        """The bytes of the file that `read` reads for the tokens `span`, in order."""
        count = plan.token_count
        if plan.coding is not None:
            return [plan.coded_at(layer)]
        if (count - len(span)) * _READ_ON <= len(span):
            first = plan.start(layer, "keys")
            return [Span(first, first + plan.layer_bytes(layer))]
        start = span.start // BLOCK_TOKENS * BLOCK_TOKENS
        stop = min(-(-span.stop // BLOCK_TOKENS) * BLOCK_TOKENS, count)
        spans = []
        for half in HALVES:
            before, row = plan.row_bytes(layer, half, start), plan.row_bytes(layer, half, count)
            for head in range(plan.layout.layers[layer].kv_heads):
                first = plan.start(layer, half) + head * row + before
                spans.append(Span(first, first + plan.row_bytes(layer, half, stop - start)))
        return spans

    def read_file(self, row: Extent) -> bytes:
        """All bytes of a file, unchecked. Raises `OSError`, `EOFError` or `Damaged`."""
        handle = self._open_file(row)
        try:
            data = bytearray(row.size_bytes)
            self.files.read_at(handle, 0, memoryview(data))
            return bytes(data)
        finally:
            self.files.close(handle)

    def coded_pieces(self, extent: OpenExtent, layer: int, span: Span, at: int = 0) -> list[CodedPiece]:
        """The tokens `span` for an engine that decodes quantized KV, with the base of a delta before it: the bytes are
        checked, not decoded. What is not quantized is read. Raises `Damaged` or `OSError`.
        """
        plan, coding = extent.header.plan, extent.header.plan.coding
        data = b"" if coding is None or coding.exact else self.read_code(extent, layer)
        if coding is None or (data[:4] != quantized.MAGIC and data != SAME_LAYER):
            kv = plan.empty(layer, len(span))
            self.read(extent, layer, span, kv)
            spec = plan.layout.layer_spec(layer, len(span))
            return [CodedPiece(kv, spec, Span(0, len(span)), at, delta=False, owner=plan.name)]
        pieces: list[CodedPiece] = []
        delta = coding.base_kv_space is not None
        for base, part, own in _base_parts(extent.bases, span) if delta else ():
            with _blaming(base):
                pieces += self.coded_pieces(base.extent, layer, own, at + part.start - span.start)
        if data != SAME_LAYER or not delta:
            spec = plan.layout.layer_spec(layer, plan.token_count)
            pieces.append(CodedPiece((data,), spec, span, at, delta=delta, owner=plan.name))
        return pieces

    def layers(self, extent: OpenExtent, tokens: int) -> Iterator[LayerKv]:
        """The first `tokens` tokens of one layer after the other, checked."""
        plan = extent.header.plan
        for layer in range(len(plan.layout.layers)):
            out = plan.empty(layer, tokens)
            self.read(extent, layer, Span(0, tokens), out)
            yield out

    def in_parallel(self, first: Work, second: Work, size_bytes: int) -> None:
        """Run two pieces of work that mostly wait or copy, in parallel if they are large enough."""
        if size_bytes < _SPLIT_BYTES:
            first()
            second()
        else:
            self._helper.run(first, second)

    def encode(
        self,
        plan: ExtentPlan,
        layers: Iterable[LayerKv],
        coder: Coder,
        base_kv_space: str | None,
        parts: Sequence[OpenBase],
    ) -> CodedExtent:
        """The encoded layers of the file, as deltas from KV of `base_kv_space`, if there is one.

        Raises `ValueError` for KV that cannot be coded, and as reading does.
        """
        dtype, coding = plan.layout.dtype, Coding(coder, base_kv_space, ())
        blobs: list[bytes] = []
        digests = bytearray()
        for layer, given in enumerate(layers):
            kv = LayerKv(np.ascontiguousarray(given.keys), np.ascontiguousarray(given.values))
            base = None if base_kv_space is None else plan.empty(layer, plan.token_count)
            if base is not None:
                self._read_base(parts, layer, Span(0, plan.token_count), base)
            blobs.append(coder.encode(layer, kv, base, dtype))
            if coding.exact:
                digests += digest_halves(self.digester, kv)
            digests += self._digest(blobs[-1])
        sizes = tuple(map(len, blobs))
        return CodedExtent(replace(plan, coding=replace(coding, sizes=sizes)), blobs, bytes(digests))

    def write_coded(self, coded: CodedExtent) -> WrittenExtent:
        """Write what was encoded, as `write` does."""
        plan = coded.plan
        handle = self.files.create(self.path(plan.name))
        try:
            for layer, data in enumerate(coded.blobs):
                self.files.write_at(handle, plan.coded_at(layer).start, memoryview(data))
            return self._finish(handle, ExtentHeader(plan, coded.digests))
        finally:
            self.files.close(handle)

    def write(self, plan: ExtentPlan, layers: Iterable[LayerKv]) -> WrittenExtent:
        """Write a new extent, layer by layer, the header last; one fsync. On `OSError` the partial file is left."""
        digests = bytearray()
        handle = self.files.create(self.path(plan.name))
        try:
            for layer, given in enumerate(layers):
                kv = LayerKv(np.ascontiguousarray(given.keys), np.ascontiguousarray(given.values))
                digests += digest_layer(self.digester, kv)
                self.files.write_at(handle, plan.start(layer, "keys"), kv.keys.data)
                self.files.write_at(handle, plan.start(layer, "values"), kv.values.data)
            return self._finish(handle, ExtentHeader(plan, bytes(digests)))
        finally:
            self.files.close(handle)

    def _finish(self, handle: Handle, header: ExtentHeader) -> WrittenExtent:
        text = header.plan.header(header.digests)
        self.files.write_at(handle, 0, memoryview(text))
        self.files.sync(handle)
        return WrittenExtent(header, self.digester.header(text))

    def close(self) -> None:
        """End the helper thread. Idempotent."""
        self._helper.close()

    def _read_coded(self, extent: OpenExtent, layer: int, span: Span, out: LayerKv) -> None:
        """Fill `out` from coded bytes. A lossless layer is decoded as a whole, because its digest covers all of it."""
        plan, coding = extent.header.plan, extent.header.plan.coding
        assert coding is not None
        if (out.keys.shape, out.values.shape) != plan.layer_shapes(layer, len(span)) or (
            out.keys.dtype != plan.layout.numpy_dtype
        ):
            raise Damaged(f"layer {layer}: it has another shape or type")
        data = self.read_code(extent, layer)
        wanted = Span(0, plan.token_count) if coding.exact else span
        target = out if wanted == span and is_row_contiguous(out) else plan.empty(layer, len(wanted))
        if coding.base_kv_space is not None:
            self._read_base(extent.bases, layer, wanted, target)
        try:
            spec = plan.layout.layer_spec(layer, plan.token_count)
            work_bytes = _DECODING * (target.keys.nbytes + target.values.nbytes)
            both = partial(self.in_parallel, size_bytes=work_bytes)
            decode_into(data, spec, target, wanted, delta=coding.base_kv_space is not None, both=both)
        except ValueError as error:
            raise Damaged(f"layer {layer}: {error}") from error
        if coding.exact and digest_halves(self.digester, target) != extent.header.half_digests(layer):
            raise Damaged(f"layer {layer}: the digest of its decoded KV does not match")
        if target is not out:
            used = target.window(span.start - wanted.start, span.stop - wanted.start)
            out.keys[...], out.values[...] = used.keys, used.values

    def read_code(self, extent: OpenExtent, layer: int) -> bytes:
        """The coded bytes of a layer, checked. Raises `Damaged` or `OSError`."""
        if extent.code:
            return extent.code[layer]
        at = extent.header.plan.coded_at(layer)
        data = bytearray(len(at))
        self._read_at(extent.handle, at.start, memoryview(data))
        if self._digest(data) != extent.header.coded_digest(layer):
            raise Damaged(f"layer {layer}: the digest of its bytes does not match")
        return bytes(data)

    def _read_base(self, parts: Sequence[OpenBase], layer: int, span: Span, out: LayerKv) -> None:
        """Fill `out` with the base KV of tokens `span` of a delta."""
        for base, part, own in _base_parts(parts, span):
            with _blaming(base):
                self.read(base.extent, layer, own, out.window(part.start - span.start, part.stop - span.start))

    def _digest(self, data: bytes | bytearray) -> bytes:
        state = self.digester.data()
        state.update(memoryview(data))
        return state.digest()

    def _read_block_part(self, extent: OpenExtent, layer: int, part: Span, out: LayerKv) -> None:
        """Fill `out` with a part of a block, which is read whole: its digest covers all of it."""
        plan = extent.header.plan
        start = part.start // BLOCK_TOKENS * BLOCK_TOKENS
        stop = min(start + BLOCK_TOKENS, plan.token_count)
        block = plan.empty(layer, stop - start)
        self._read_cells(extent, layer, Span(start, stop), block)
        used = block.window(part.start - start, part.stop - start)
        out.keys[...], out.values[...] = used.keys, used.values

    def _read_whole(self, extent: OpenExtent, layer: int, first: int, out: LayerKv) -> None:
        self.in_parallel(
            lambda: self._read_half(extent, layer, "keys", first, out.keys),
            lambda: self._read_half(extent, layer, "values", first, out.values),
            out.keys.nbytes + out.values.nbytes,
        )

    def _read_half(self, extent: OpenExtent, layer: int, half: Half, first: int, out: NDArray[Any]) -> None:
        """Fill `out` with the tokens of a half from number `first` on; the others are only checked."""
        plan = extent.header.plan
        offset = plan.start(layer, half)
        lead = memoryview(bytearray(plan.row_bytes(layer, half, first)))
        rest = memoryview(bytearray(plan.row_bytes(layer, half, plan.token_count - first - out.shape[1])))
        state = self.digester.data()
        whole = not (lead or rest) and out.flags.c_contiguous
        for row in _pieces(out) if whole else rows_of(out):
            for part in filter(None, (lead, row, rest)):
                self._read_at(extent.handle, offset, part)
                state.update(part)  # while it is in the processor's cache
                offset += len(part)
        if state.digest() != extent.header.half_digest(layer, half):
            raise Damaged(f"layer {layer}: the digest of its {half} does not match")

    def _read_cells(self, extent: OpenExtent, layer: int, span: Span, out: LayerKv) -> None:
        plan = extent.header.plan
        halves: tuple[tuple[Half, NDArray[Any]], ...] = (("keys", out.keys), ("values", out.values))
        for half, array in halves:
            offset = plan.start(layer, half) + plan.row_bytes(layer, half, span.start)
            for row in rows_of(array):
                self._read_at(extent.handle, offset, row)
                offset += plan.row_bytes(layer, half, plan.token_count)
        first, stop = span.start // BLOCK_TOKENS, -(-span.stop // BLOCK_TOKENS)
        if digest_cells(self.digester, out) != extent.header.cell_digests(layer, first, stop):
            raise Damaged(f"layer {layer}, blocks {first} to {stop - 1}: a digest does not match")

    def _read_at(self, handle: Handle, offset: int, out: memoryview) -> None:
        try:
            self.files.read_at(handle, offset, out)
        except EOFError as error:
            raise Damaged(str(error)) from error

    def _header(self, row: Extent, kv_space_digest: str, handle: Handle, fresh: bool) -> ExtentHeader:
        with self._lock:
            cached = self._headers.get(row.name)
        if cached is not None and cached.plan.kv_space == kv_space_digest and not fresh:
            return cached
        try:
            data = self._read_header(row, handle)
            if self.digester.header(data) != row.digest:
                raise ValueError("the header's digest does not match")
            header = parse_header(bytes(data))
        except (ValueError, EOFError) as error:
            raise Damaged(str(error)) from error
        plan = header.plan
        if (plan.name, plan.kv_space, plan.digest_name) != (row.name, kv_space_digest, self.digester.name):
            raise Damaged("the file belongs to another entry")
        if plan.file_bytes != row.size_bytes or plan.blocks != row.blocks:
            raise Damaged("the header does not fit the file")
        with self._lock:
            self._headers[row.name] = header
            while len(self._headers) > _HEADERS:
                self._headers.popitem(last=False)
        return header

    def _read_header(self, row: Extent, handle: Handle) -> bytearray:
        """The bytes of a header. Raises `ValueError` or `EOFError`."""
        first = bytearray(8)
        self.files.read_at(handle, 0, memoryview(first))
        data = bytearray(header_length(bytes(first), row.size_bytes))
        self.files.read_at(handle, 0, memoryview(data))
        return data


def _base_parts(bases: Sequence[OpenBase], span: Span) -> Iterator[tuple[OpenBase, Span, Span]]:
    """The bases of tokens `span` of a delta, each with its part of `span` and the same tokens as the base counts them.
    Raises `Damaged` if some have none."""
    covered = span.start
    for base in bases:
        start, stop = max(span.start, base.tokens.start), min(span.stop, base.tokens.stop)
        if start >= stop or start != covered:
            continue
        at = base.start + start - base.tokens.start
        yield base, Span(start, stop), Span(at, at + stop - start)
        covered = stop
    if covered != span.stop:
        raise Damaged("its delta base does not cover it")


@contextlib.contextmanager
def _blaming(base: OpenBase) -> Iterator[None]:
    """Damage is that of the base."""
    try:
        yield
    except Damaged as error:
        raise Damaged(str(error), base.extent.header.plan.name) from error


def _pieces(array: NDArray[Any]) -> Iterator[memoryview]:
    """The bytes of a contiguous array, in few pieces: between two of them a thread waits for Python's lock."""
    data = array.data.cast("B")
    return (data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))
