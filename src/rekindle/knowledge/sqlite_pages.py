"""The rows of a SQLite file, page by page, without SQLite: also where it is damaged.

SQLite finds rows from the root page downwards, so one bad page hides everything below it; here every page is read by
itself, those in the log first. Nothing in the bytes is trusted: lengths and page numbers are checked against the file.
The format: https://www.sqlite.org/fileformat2.html
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

Value = None | int | float | str | bytes

MAGIC = b"SQLite format 3\0"
_PAGE_BYTES = 4096  # if the first page does not say
_LOG_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
_LOG_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}  # the byte order of its checksums
_INDEX_INTERIOR, _INDEX_LEAF, _TABLE_LEAF = 2, 10, 13
_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}  # by serial type


@dataclass(frozen=True, slots=True)
class RawRow:
    """One cell. `rowid` is None in an index, and in a table WITHOUT ROWID, which is stored as one."""

    rowid: int | None
    values: tuple[Value, ...]


# Never closed: closing any descriptor of a file drops all POSIX locks of the process on it, including SQLite's.
# Happens once per damaged file.
_OPENED: list[IO[bytes]] = []


class Unreadable(Exception):
    """These bytes are not a row."""


class SqlitePages:
    """The pages of a SQLite file as its last committed transaction left them: some are still in its log."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        _OPENED.append(self._file)
        first = self._file.read(100)
        valid = len(first) == 100 and first.startswith(MAGIC)
        (size,) = struct.unpack(">H", first[16:18]) if valid else (0,)
        size = 65536 if size == 1 else size
        self.page_bytes = size if size in {1 << bits for bits in range(9, 17)} else _PAGE_BYTES
        self.pages = -(-path.stat().st_size // self.page_bytes)
        self._frames: dict[int, int] = {}  # pages that are in the log, and where
        # Auto-vacuum files, such as ours, name their largest root page here and have pointer-map pages.
        self._has_maps = not valid or any(first[52:56])
        log = Path(f"{path}-wal")
        if log.exists():
            self._log = log.open("rb")
            self._read_log()

    def rows(self) -> Iterator[RawRow]:
        """Every row of every page that can be read, in the order of the pages."""
        for number in range(1, self.pages + 1):
            yield from self.rows_of(number)

    def _page(self, number: int) -> bytes:
        """A page, padded with zeros where the file is too short."""
        at = self._frames.get(number)
        file, offset = (self._file, (number - 1) * self.page_bytes) if at is None else (self._log, at)
        try:
            file.seek(offset)
            return file.read(self.page_bytes).ljust(self.page_bytes, b"\0")
        except OSError:  # a sector that the disk cannot read
            return bytes(self.page_bytes)

    def rows_of(self, number: int) -> Iterator[RawRow]:
        """The rows of a page; pages count from 1."""
        if self._has_maps and number > 1 and (number - 2) % (self.page_bytes // 5 + 1) == 0:
            return  # a pointer-map page: its bytes look like anything
        page = self._page(number)
        start = 100 if number == 1 else 0
        kind = page[start]
        if kind not in (_INDEX_INTERIOR, _INDEX_LEAF, _TABLE_LEAF):
            return
        begins = start + (12 if kind == _INDEX_INTERIOR else 8)
        (count,) = struct.unpack_from(">H", page, start + 3)
        if begins + 2 * count > self.page_bytes:
            return
        for offset in struct.unpack_from(f">{count}H", page, begins):
            try:
                yield self._row(page, offset, kind)
            except (Unreadable, IndexError, struct.error, UnicodeDecodeError, OverflowError):
                continue

    def _row(self, page: bytes, offset: int, kind: int) -> RawRow:
        if offset < 8:
            raise Unreadable
        at = offset + (4 if kind == _INDEX_INTERIOR else 0)
        size, at = _varint(page, at)
        rowid = None
        if kind == _TABLE_LEAF:
            rowid, at = _varint(page, at)
        return RawRow(rowid, _values(self._payload(page, at, size, table=kind == _TABLE_LEAF)))

    def _payload(self, page: bytes, at: int, size: int, *, table: bool) -> bytes:
        """The bytes of a row, with those on overflow pages."""
        if not 0 < size <= self.pages * self.page_bytes:
            raise Unreadable
        max_local = self.page_bytes - 35 if table else (self.page_bytes - 12) * 64 // 255 - 23
        local = size
        if size > max_local:
            min_local = (self.page_bytes - 12) * 32 // 255 - 23
            local = min_local + (size - min_local) % (self.page_bytes - 4)
            local = local if local <= max_local else min_local
        payload = page[at : at + local]
        if len(payload) < local:
            raise Unreadable
        if local == size:
            return payload
        (following,) = struct.unpack_from(">I", page, at + local)
        parts, left = [payload], size - local
        while left > 0:  # every page shortens `left`, so even a cyclic chain ends
            if not 1 < following <= self.pages:
                raise Unreadable
            page = self._page(following)
            (following,) = struct.unpack_from(">I", page)
            parts.append(page[4 : 4 + left])
            left -= self.page_bytes - 4
        return b"".join(parts)

    def _read_log(self) -> None:
        """Find the pages of committed transactions, up to the first invalid frame, as SQLite does."""
        header = self._log.read(_LOG_HEADER_BYTES)
        if len(header) < _LOG_HEADER_BYTES:
            return
        magic, _, size = struct.unpack_from(">3I", header)
        order = _LOG_MAGIC.get(magic)
        sums = (0, 0) if order is None else _checksum(header[:24], (0, 0), order)
        if order is None or sums != struct.unpack_from(">2I", header, 24) or not 512 <= size <= 65536:
            return
        self.page_bytes = size
        waiting: dict[int, int] = {}
        at = _LOG_HEADER_BYTES
        while len(frame := self._log.read(_FRAME_HEADER_BYTES + size)) == _FRAME_HEADER_BYTES + size:
            number, pages = struct.unpack_from(">2I", frame)
            sums = _checksum(frame[:8] + frame[_FRAME_HEADER_BYTES:], sums, order)
            if frame[8:16] != header[16:24] or struct.unpack_from(">2I", frame, 16) != sums:
                return
            waiting[number] = at + _FRAME_HEADER_BYTES
            if pages:  # the last frame of a transaction
                self._frames |= waiting
                self.pages = pages
                waiting = {}
            at += len(frame)


def _checksum(data: bytes, sums: tuple[int, int], order: str) -> tuple[int, int]:
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint of one to nine bytes, and where it ends."""
    value = 0
    for place in range(9):
        byte = data[at + place]
        if place == 8:
            value = value << 8 | byte
            return value - (1 << 64) if value >> 63 else value, at + 9
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + place + 1
    raise AssertionError


def _values(payload: bytes) -> tuple[Value, ...]:
    """The columns of a record. Raises `Unreadable`, also if bytes are left over."""
    header, at = _varint(payload, 0)
    if not at <= header <= len(payload):
        raise Unreadable
    values: list[Value] = []
    body = header
    while at < header:
        kind, at = _varint(payload, at)
        if kind in (10, 11) or kind < 0:
            raise Unreadable
        size = (kind - 12) // 2 if kind >= 12 else 8 if kind == 7 else _INTEGER_BYTES.get(kind, 0)
        part = payload[body : body + size]
        if len(part) < size:
            raise Unreadable
        values.append(_value(kind, part))
        body += size
    if at != header or body != len(payload):
        raise Unreadable
    return tuple(values)


def _value(kind: int, part: bytes) -> Value:
    if kind >= 12:
        return part.decode() if kind % 2 else part
    if kind == 7:
        return float(struct.unpack(">d", part)[0])
    if kind in (8, 9):
        return kind - 8
    return None if kind == 0 else int.from_bytes(part, "big", signed=True)
