"""Digests of model files. Files are read once; digests are remembered by size, times and inode."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rekindle.core.identity import digest_of_fields
from rekindle.json_file import JsonMemo
from rekindle.settings.folders import home_folder

_PIECE_BYTES = 64 << 20
_REMEMBERED = 1000  # files

BytesProgress = Callable[[int, int], None]  # bytes done, bytes in all


def digest_of_files(paths: Sequence[Path], progress: BytesProgress | None = None) -> str:
    """One digest over the contents of the files, in the order given; their names do not count."""
    memory = JsonMemo(home_folder() / "digests.json", _REMEMBERED)
    sizes = [path.stat().st_size for path in paths]
    digests, done, total = [], 0, sum(sizes)
    for path, size in zip(paths, sizes, strict=True):
        key = _memo_key(path)
        digest = memory.recall(key)
        if not isinstance(digest, str):
            digest = _digest_of_file(path, size, partial(_report, progress, total, done))
            memory.keep(key, digest)
        digests.append(digest)
        _report(progress, total, done, size)
        done += size
    return digest_of_fields("rekindle/files/1", *digests)


def _digest_of_file(path: Path, size: int, read: Callable[[int], None]) -> str:
    """SHA-256 over the SHA-256 of 64 MiB pieces, which all cores compute; `read` reports progress."""
    offsets = range(0, max(size, 1), _PIECE_BYTES)
    state = hashlib.sha256()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for offset, piece in zip(offsets, pool.map(lambda start: _digest_of_piece(path, start), offsets), strict=True):
            state.update(piece)
            if offset + _PIECE_BYTES < size:  # the end is reported with the file
                read(offset + _PIECE_BYTES)
    return state.hexdigest()


def _report(progress: BytesProgress | None, total: int, before: int, read: int) -> None:
    if progress is not None:
        progress(before + read, total)


def _digest_of_piece(path: Path, offset: int) -> bytes:
    state = hashlib.sha256()
    left = _PIECE_BYTES
    with path.open("rb") as file:
        file.seek(offset)
        while left and (data := file.read(min(left, 1 << 20))):
            state.update(data)
            left -= len(data)
    return state.digest()


def _memo_key(path: Path) -> str:
    about = path.stat()
    # The change time too: an edit that sets the modification time back still changes it.
    fields = (
        str(path.resolve()),
        about.st_size,
        about.st_mtime_ns,
        about.st_ctime_ns,
        about.st_ino,
        about.st_dev,
    )
    return ":".join(map(str, fields))
