"""Where a model's files are, what they contain by digest, and looking at files that may be missing or unreadable.

Files are read once: their digests are remembered by size, times and inode.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rekindle.core.identity import digest_of_fields
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder

_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model found on this machine.

    `folder` holds the files in Hugging Face form (config, safetensors, tokenizer). A model that came as GGUF has
    `gguf`; its `folder` may not exist yet and is where an engine writes the converted form, once. Of a model split
    into several GGUF files, `gguf` is the first. A model that came as an ONNX graph, or was exported to one, has
    `onnx`.
    """

    name: str
    folder: Path
    gguf: Path | None = None
    onnx: Path | None = None

    @property
    def converted(self) -> bool:
        """Whether the Hugging Face form is there."""
        return (self.folder / "config.json").is_file()

    @property
    def parts(self) -> tuple[Path, ...]:
        """The GGUF files, in order: one, several if the model is split, none if it did not come as GGUF."""
        gguf = self.gguf
        return () if gguf is None else tuple(gguf.with_name(name) for name in part_names(gguf.name))


def part_names(name: str) -> tuple[str, ...]:
    """The names of all files of a split GGUF model, in order; of another, its own name.

    `x-00002-of-00003.gguf` is one of `x-00001-of-00003.gguf`, `x-00002-of-00003.gguf`, `x-00003-of-00003.gguf`.
    """
    found = _PART.search(name)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        return (name,)
    begin = name[: found.start()]
    return tuple(f"{begin}-{number:05}-of-{found[2]}{found[3]}" for number in range(1, int(found[2]) + 1))


_LARGEST_TEXT_BYTES = 1 << 20


def find_paths(folder: Path, pattern: str) -> list[Path]:
    """Paths in the folder that match the pattern, sorted; none if it cannot be read."""
    try:
        return sorted(folder.glob(pattern))
    except (OSError, ValueError):  # ValueError: not a valid path
        return []


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def modified_seconds(path: Path) -> float:
    """Modification time in seconds since 1970; 0 if unknown."""
    try:
        return path.stat().st_mtime
    except (OSError, ValueError):
        return 0.0


def read_text(path: Path) -> str:
    """The text of a small file, or its first megabyte; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST_TEXT_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def as_path(text: str) -> Path:
    """A path from settings, with `~` and `$NAME` expanded."""
    path = Path(os.path.expandvars(text))
    try:
        return path.expanduser()
    except RuntimeError:  # a user without a home
        return path


_PIECE_BYTES = 64 << 20
_REMEMBERED = 1000  # files

BytesProgress = Callable[[int, int], None]  # bytes done, bytes in all


def digest_of_files(paths: Sequence[Path], progress: BytesProgress | None = None) -> str:
    """One digest over the contents of the files, in the order given; their names do not count.

    `progress` gets nothing of files whose digest is remembered.
    """
    memory = JsonMemo(home_folder() / "digests.json", _REMEMBERED)
    sizes = [path.stat().st_size for path in paths]
    digests, done, total = [], 0, sum(sizes)
    for path, size in zip(paths, sizes, strict=True):
        key = file_version(path)
        digest = memory.recall(key)
        if not isinstance(digest, str):
            digest = _digest_of_file(path, size, partial(_report, progress, total, done))
            memory.keep(key, digest)
            _report(progress, total, done, size)
        digests.append(digest)
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


def file_version(path: Path) -> str:
    """A text that changes whenever the file does, without reading it. Raises `OSError`."""
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
