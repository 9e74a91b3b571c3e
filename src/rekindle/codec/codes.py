"""Small integers to bytes and back: packed a few to a byte, then entropy-coded by zstd.

The entropy coder of zstd gives each byte at least one bit and a whole number of bits. Codes of 2 or 3 bits therefore
stand two, three or four to a byte: what a byte loses by rounding is then shared. The last symbol of an alphabet stands
for a code that does not fit into it; such codes follow in a list of their own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

_RADIX = {1: 256, 2: 16, 3: 6, 4: 4}  # codes a byte -> symbols a code; radix ** codes <= 256
_RARE = 1 / 500  # strays cost about 24 bits each: so few cost less than the denser packing saves
_LEVEL = 1
# Longer matches than zstd would take by itself: codes look random, and a short match costs more than its codes.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(_LEVEL, min_match=7, write_content_size=True)
DENSEST = max(_RADIX)
_LARGEST_RATIO = 1 << 16  # more than zstd ever reaches: a block of at most 128 KiB takes at least 4 bytes


@dataclass(frozen=True)
class Packed:
    """Codes as bytes: `symbols` with `per_byte` codes in each byte, and the codes that had no symbol."""

    per_byte: int
    symbols: bytes
    strays: NDArray[np.int16]  # in the order of the codes


def pack(codes: NDArray[np.int16]) -> Packed:
    """The codes as bytes, in the order of the array's axes."""
    flat = codes.reshape(-1)
    size = np.abs(flat.astype(np.int32))
    per_byte = _density(size)
    radix = _RADIX[per_byte]
    reach = radix // 2 - 1
    inside = size <= reach
    symbols = np.where(inside, flat + np.int16(reach), np.int16(radix - 1)).astype(np.uint8)
    padded = np.concatenate([symbols, np.full(-len(symbols) % per_byte, reach, np.uint8)]).reshape(-1, per_byte)
    joined = padded[:, 0].copy()
    for column in range(1, per_byte):
        joined = joined * np.uint8(radix) + padded[:, column]
    return Packed(per_byte, squeeze(joined.tobytes()), flat[~inside])


def symbols_of(packed: Packed, count: int) -> NDArray[np.uint8]:
    """The bytes that hold so many codes, no longer compressed. Raises `ValueError` if they are damaged or others."""
    if packed.per_byte not in _RADIX:
        raise ValueError(f"codes cannot stand {packed.per_byte} to a byte")
    return np.frombuffer(expand(packed.symbols, -(-count // packed.per_byte)), np.uint8)


def codes_of(symbols: NDArray[np.uint8], per_byte: int, strays: NDArray[np.int16], count: int) -> NDArray[np.int16]:
    """The codes of such bytes. Raises `ValueError` if there is not one stray for each place that wants one."""
    codes: NDArray[np.int16] = np.take(TABLES[per_byte], symbols, axis=0).reshape(-1)[:count]
    stray = codes == _RADIX[per_byte] // 2
    if np.count_nonzero(stray) != len(strays):
        raise ValueError("codes are damaged: their strays do not match")
    codes[stray] = strays
    return codes


def unpack(packed: Packed, count: int) -> NDArray[np.int16]:
    """So many codes of what `pack` gave. Raises `ValueError` if it is damaged or holds another number."""
    return codes_of(symbols_of(packed, count), packed.per_byte, packed.strays, count)


def squeeze(data: bytes) -> bytes:
    """The bytes as one zstd frame."""
    frame: bytes = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(data)
    return frame


def expand(frame: bytes | memoryview, size: int) -> bytes:
    """The `size` bytes of a frame. Raises `ValueError` for anything else, before memory is taken for it."""
    if size > len(frame) * _LARGEST_RATIO:
        raise ValueError("a frame is too short for what it should hold")
    try:
        told = zstandard.get_frame_parameters(frame).content_size
        if told != size:
            raise ValueError(f"a frame holds {told} bytes instead of {size}")
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from error
    if len(data) != size:
        raise ValueError("a frame ends early")
    return data


def check_frame(frame: memoryview, size: int) -> None:
    """Raises `ValueError` unless a frame says that it holds so many bytes, can, and ends where it should: before
    memory is taken for it."""
    try:
        told, header = zstandard.frame_content_size(frame), zstandard.frame_header_size(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from error
    if told != size or size > len(frame) * _LARGEST_RATIO:
        raise ValueError(f"a frame holds {told} bytes instead of {size}")
    if _end_of(frame, header) != len(frame):
        raise ValueError("a frame does not end where it should")


def _end_of(frame: memoryview, at: int) -> int | None:
    """Where a frame ends whose blocks begin at `at`; None if that is nowhere. A frame of ours has no checksum."""
    if frame[4] & 4:
        return None
    while at + 3 <= len(frame):
        block = int.from_bytes(frame[at : at + 3], "little")  # whether it is the last, 2 bits of type, the size
        at += 3 + (1 if block & 6 == 2 else block >> 3)  # one byte repeated: the size is that of the content
        if block & 1:
            return at
    return None


def expand_into(sources: Sequence[bytes], frames: NDArray[np.int64], target: memoryview, threads: int) -> None:
    """Decompress many frames, so many at a time, each to its place in `target`.

    frames   [n, 5]: the source of each, where it starts there, its bytes, where its content starts in `target`, and
             the bytes of that

    Raises `ValueError` if one is damaged or holds another number of bytes; all that was begun is then over.
    """
    views, rows = [memoryview(source) for source in sources], iter(frames.tolist())
    workers = min(threads, len(frames))
    if workers <= 1:
        _expand_rows(views, rows, target)
        return
    # All take from one list, so that none is left with more than the others. The C code lets go of Python's lock.
    works = [_pool(threads).submit(_expand_rows, views, rows, target) for _ in range(workers)]
    errors = [error for work in works if (error := work.exception()) is not None]
    if errors:
        raise errors[0]


def _expand_rows(views: Sequence[memoryview], rows: Iterator[list[int]], target: memoryview) -> None:
    """Decompress until there is none left. Straight into the target: copied there, it would take Python's lock."""
    decompressor = zstandard.ZstdDecompressor()
    try:
        for source, start, length, place, size in rows:
            frame = views[source][start : start + length]
            check_frame(frame, size)
            if decompressor.stream_reader(frame).readinto(target[place : place + size]) != size:
                raise ValueError("a frame ends early")
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from error


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rekindle-expand")


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _density(size: NDArray[np.int32]) -> int:
    """How many codes of these magnitudes stand in a byte: as many as leave few strays."""
    allowed = size.size * _RARE
    for per_byte in (4, 3, 2):
        if np.count_nonzero(size > _RADIX[per_byte] // 2 - 1) <= allowed:
            return per_byte
    return 1


def _table(per_byte: int) -> NDArray[np.int16]:
    """The codes of every byte; the last symbol of the alphabet becomes the code just beyond its reach."""
    radix = _RADIX[per_byte]
    values = np.arange(256)[:, None] // radix ** np.arange(per_byte - 1, -1, -1) % radix
    return (values - (radix // 2 - 1)).astype(np.int16)


TABLES = {per_byte: _table(per_byte) for per_byte in _RADIX}  # byte -> codes, [256, per_byte]
