"""The extent files of a folder: written once, read in part, checked whenever they are read."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.codec.digest import Digester
from rekindle.codec.extent import (
    ExtentHeader,
    ExtentPlan,
    Half,
    digest_cells,
    digest_layer,
    header_length,
    is_row_contiguous,
    parse_header,
    rows_of,
)
from rekindle.core.keys import BLOCK_TOKENS
from rekindle.core.kv import LayerKv, Span
from rekindle.store.beside import Helper, Work
from rekindle.store.catalog import Extent
from rekindle.store.files import Files, Handle

SUFFIX = ".kv"
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO)
_HEADERS = 64  # remembered
# A beginning of an extent is checked by the digest of the whole, for which the rest is read too, if that is at most one
# part in so many more: checking cell by cell takes three quarters of the time it takes to read them, and the GIL.
_READ_ON = 1.5
_SPLIT_BYTES = 512 << 10  # from this size on, keys and values of a layer are read side by side


class Damaged(Exception):
    """An extent is not what its row says. The reason is for people."""


@dataclass(frozen=True, eq=False)
class OpenExtent:
    """An extent that can be read. Whoever has it closes its handle."""

    handle: Handle
    header: ExtentHeader


@dataclass(frozen=True, eq=False)
class WrittenExtent:
    """An extent that was just written."""

    header: ExtentHeader
    digest: bytes  # of the header


class ExtentFiles:
    """Extents as files. Knows nothing of what is listed or allowed."""

    def __init__(self, folder: Path, files: Files, digester: Digester) -> None:
        self.folder = folder
        self.files = files
        self.digester = digester
        self._lock = threading.Lock()
        self._headers: OrderedDict[str, ExtentHeader] = OrderedDict()
        self._helper = Helper()

    def path(self, name: str) -> Path:
        """The file of an extent."""
        return self.folder / f"{name}{SUFFIX}"

    def open(self, row: Extent, shelf_digest: str, *, fresh: bool = False) -> OpenExtent:
        """An extent, its header checked against its row; `fresh`: even if it was before.

        Raises `Damaged` or `OSError`.
        """
        try:
            handle = self.files.open(self.path(row.name))
        except OSError as error:
            if error.errno in _NO_FILE:
                raise Damaged(f"it is no file: {error}") from error
            raise
        try:
            size_bytes = self.files.size(handle)
            if size_bytes != row.size_bytes:
                raise Damaged(f"the file has {size_bytes:,} bytes, not {row.size_bytes:,}")
            return OpenExtent(handle, self._header(row, shelf_digest, handle, fresh))
        except BaseException:
            with contextlib.suppress(OSError):
                self.files.close(handle)
            raise

    def tokens(self, row: Extent) -> bytes:
        """All tokens that a file holds, also those of blocks that are not live; of one under another key, unchecked.

        Raises `Damaged` or `OSError`.
        """
        handle = self.files.open(self.path(row.name))
        try:
            data = self._read_header(row, handle)
            plan = parse_header(bytes(data)).plan
        except (ValueError, EOFError) as error:
            raise Damaged(str(error)) from error
        finally:
            self.files.close(handle)
        if plan.digest_name == self.digester.name and self.digester.header(data) != row.digest:
            raise Damaged("the header's digest is another")
        return plan.tokens

    def read(self, extent: OpenExtent, layer: int, span: Span, out: LayerKv) -> None:
        """Fill `out` with the tokens `span` of the extent, and check them.

        Raises `Damaged` or `OSError`; `out` then holds anything.
        """
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
            self._read_beside(extent, layer, span, out)
            return
        if span.start < start:
            self._read_beside(extent, layer, Span(span.start, start), _window(out, 0, start - span.start))
        if start < stop:
            self._read_cells(extent, layer, Span(start, stop), _window(out, start - span.start, stop - span.start))
        if stop < span.stop:
            self._read_beside(extent, layer, Span(stop, span.stop), _window(out, stop - span.start, len(span)))

    def read_all(self, extent: OpenExtent, tokens: int) -> tuple[LayerKv, ...]:
        """The first `tokens` tokens of all layers, checked."""
        plan = extent.header.plan
        layers = tuple(plan.empty(layer, tokens) for layer in range(len(plan.layout.layers)))
        for layer, out in enumerate(layers):
            self.read(extent, layer, Span(0, tokens), out)
        return layers

    def side_by_side(self, first: Work, second: Work, size_bytes: int) -> None:
        """Do two things that mostly wait or copy, at the same time if that is worth it."""
        if size_bytes < _SPLIT_BYTES:
            first()
            second()
        else:
            self._helper.run(first, second)

    def write(self, plan: ExtentPlan, layers: Iterable[LayerKv]) -> WrittenExtent:
        """Write a new extent, layer by layer, the header last; one fsync. Raises `OSError`; the file is then left."""
        digests = bytearray()
        handle = self.files.create(self.path(plan.name))
        try:
            for layer, given in enumerate(layers):
                kv = LayerKv(np.ascontiguousarray(given.keys), np.ascontiguousarray(given.values))
                digests += digest_layer(self.digester, kv)
                self.files.write_at(handle, plan.start(layer, "keys"), kv.keys.data)
                self.files.write_at(handle, plan.start(layer, "values"), kv.values.data)
            header = ExtentHeader(plan, bytes(digests))
            text = plan.header(header.digests)
            self.files.write_at(handle, 0, memoryview(text))
            self.files.sync(handle)
        finally:
            self.files.close(handle)
        return WrittenExtent(header, self.digester.header(text))

    def close(self) -> None:
        """End the helper thread. Idempotent."""
        self._helper.close()

    def _read_beside(self, extent: OpenExtent, layer: int, part: Span, out: LayerKv) -> None:
        """Fill `out` with a part of a block, which is read whole, beside: its digest covers all of it."""
        plan = extent.header.plan
        start = part.start // BLOCK_TOKENS * BLOCK_TOKENS
        stop = min(start + BLOCK_TOKENS, plan.token_count)
        block = plan.empty(layer, stop - start)
        self._read_cells(extent, layer, Span(start, stop), block)
        used = _window(block, part.start - start, part.stop - start)
        out.keys[...], out.values[...] = used.keys, used.values

    def _read_whole(self, extent: OpenExtent, layer: int, first: int, out: LayerKv) -> None:
        self.side_by_side(
            lambda: self._read_half(extent, layer, "keys", first, out.keys),
            lambda: self._read_half(extent, layer, "values", first, out.values),
            out.keys.nbytes + out.values.nbytes,
        )

    def _read_half(self, extent: OpenExtent, layer: int, half: Half, first: int, out: NDArray[Any]) -> None:
        """Fill `out` with the tokens of a half from number `first` on; the others are read only to be checked."""
        plan = extent.header.plan
        offset = plan.start(layer, half)
        lead = memoryview(bytearray(plan.row_bytes(layer, half, first)))
        rest = memoryview(bytearray(plan.row_bytes(layer, half, plan.token_count - first - out.shape[1])))
        state = self.digester.data()
        for row in rows_of(out):
            for part in filter(None, (lead, row, rest)):
                self._read_at(extent.handle, offset, part)
                state.update(part)  # while it is in the processor's cache
                offset += len(part)
        if state.digest() != extent.header.half_digest(layer, half):
            raise Damaged(f"layer {layer}: the digest of its {half} is another")

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
            raise Damaged(f"layer {layer}, blocks {first} to {stop - 1}: a digest is another")

    def _read_at(self, handle: Handle, offset: int, out: memoryview) -> None:
        try:
            self.files.read_at(handle, offset, out)
        except EOFError as error:
            raise Damaged(str(error)) from error

    def _header(self, row: Extent, shelf_digest: str, handle: Handle, fresh: bool) -> ExtentHeader:
        with self._lock:
            known = self._headers.get(row.name)
        if known is not None and known.plan.shelf == shelf_digest and not fresh:
            return known
        try:
            data = self._read_header(row, handle)
            if self.digester.header(data) != row.digest:
                raise ValueError("the header's digest is another")
            header = parse_header(bytes(data))
        except (ValueError, EOFError) as error:
            raise Damaged(str(error)) from error
        plan = header.plan
        if (plan.name, plan.shelf, plan.digest_name) != (row.name, shelf_digest, self.digester.name):
            raise Damaged("the file belongs to another entry")
        if plan.file_bytes != row.size_bytes or plan.blocks != row.blocks:
            raise Damaged("the header does not fit the file")
        with self._lock:
            self._headers[row.name] = header
            while len(self._headers) > _HEADERS:
                self._headers.popitem(last=False)
        return header

    def _read_header(self, row: Extent, handle: Handle) -> bytearray:
        """The bytes of a header. Raises `ValueError` or `EOFError` if it is none."""
        first = bytearray(8)
        self.files.read_at(handle, 0, memoryview(first))
        data = bytearray(header_length(bytes(first)))
        if len(data) > row.size_bytes:
            raise ValueError("the header is longer than the file")
        self.files.read_at(handle, 0, memoryview(data))
        return data


def _window(kv: LayerKv, start: int, stop: int) -> LayerKv:
    return LayerKv(kv.keys[:, start:stop], kv.values[:, start:stop])
