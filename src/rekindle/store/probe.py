"""How fast memory and the files of a cache folder can be read: measured once for a folder, again where it moves.

The file has no name where the system allows that, is gone when it is closed, and is only written where the limit leaves
room. The fastest of its pieces counts, so a machine that stands still meanwhile changes nothing. Read past the system's
cache (Linux), it says how fast the disk is; elsewhere nobody knows.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from rekindle.core.identity import digest_of_fields
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder
from rekindle.store.disk import DiskStore
from rekindle.store.failures import FAILURES

_PIECE_BYTES, _PIECES, _LEAST_PIECES = 1 << 20, 8, 3
_MAX_SECONDS = 2.0  # after that no further piece is read
_REMEMBERED = 64  # folders


@dataclass(frozen=True)
class ReadSpeeds:
    """Bytes a second: of a copy in memory, of a file that was just written, and of the disk itself; None: unknown."""

    memory: float
    cached: float
    disk: float | None


def read_speeds(disk: DiskStore, *, again: bool = False) -> ReadSpeeds | None:
    """The speeds of a cache folder, as remembered unless `again`; None if it has no room for a probe, or fails."""
    memo = JsonMemo(home_folder() / "probes.json", _REMEMBERED)
    try:
        folder = disk.folder.stat()
        name = digest_of_fields(platform.node(), str(disk.folder), str(folder.st_dev), str(folder.st_ino))
        known = None if again else _recalled(memo.recall(name))
        if known is None and (known := _probe(disk)) is not None:
            memo.keep(name, astuple(known))
        return known
    except FAILURES:
        return None


def _probe(disk: DiskStore) -> ReadSpeeds | None:
    content, target = os.urandom(_PIECE_BYTES * _PIECES), mmap.mmap(-1, _PIECE_BYTES)  # aligned, as a disk wants it
    source, copy = np.frombuffer(content, np.uint8).reshape(_PIECES, -1), np.frombuffer(target, np.uint8)
    memory = _fastest(lambda piece: np.copyto(copy, source[piece]))
    with disk.database.reading() as connection:
        if not disk.room.allows(connection, len(content)):
            return None
    with tempfile.TemporaryFile(dir=disk.folder, buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())

        def read(piece: int) -> None:
            file.seek(piece * _PIECE_BYTES)
            if file.readinto(target) != _PIECE_BYTES:
                raise OSError("the file of the probe was cut off")

        return ReadSpeeds(memory, _fastest(read), _fastest(read) if _passes_by_the_cache(file.fileno()) else None)


def _fastest(read: Callable[[int], object]) -> float:
    """Bytes a second of the fastest piece, of all that are read in time."""
    least, ends = math.inf, time.monotonic() + _MAX_SECONDS
    for piece in range(_PIECES):
        started = time.perf_counter()
        read(piece)
        least = min(least, time.perf_counter() - started)
        if piece + 1 >= _LEAST_PIECES and time.monotonic() > ends:
            break
    return _PIECE_BYTES / max(least, 1e-9)


def _passes_by_the_cache(handle: int) -> bool:
    """Let reads of an open file go to the disk; False if this system or this disk cannot."""
    direct = getattr(os, "O_DIRECT", None)
    if direct is None:
        return False
    import fcntl  # where there is O_DIRECT

    with contextlib.suppress(OSError):
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | direct)
        return True
    return False


def _recalled(remembered: Any) -> ReadSpeeds | None:
    if not isinstance(remembered, list) or len(remembered) != 3:
        return None
    memory, cached, direct = (speed if _is_speed(speed) else None for speed in remembered)
    return None if memory is None or cached is None else ReadSpeeds(memory, cached, direct)


def _is_speed(value: object) -> bool:
    return isinstance(value, float) and 1e3 < value < 1e14
