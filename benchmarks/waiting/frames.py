"""Many zstd frames decompressed at a time, by all cores of the host, straight to where their content belongs."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import zstandard
from numpy.typing import NDArray

from rekindle.codec.packing import LARGEST_RATIO


def check_frame(frame: memoryview, size: int) -> None:
    """Raises `ValueError` unless a frame says that it holds `size` bytes, can, and ends where it should: before
    memory is taken for it."""
    try:
        reported, header = zstandard.frame_content_size(frame), zstandard.frame_header_size(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from error
    if reported != size or size > len(frame) * LARGEST_RATIO:
        raise ValueError(f"a frame holds {reported} bytes instead of {size}")
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
    """Decompress many frames, several at a time, each to its place in `target`.

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
