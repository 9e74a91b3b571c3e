"""The folder of the libraries: where it is, and how much all of them may take on disk.

The limit includes damaged files and logs: whatever adds documents asks for more than it will need before it writes, so
that the limit holds at every moment. Removing never asks.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle.core.size import human_bytes
from rekindle.errors import CacheUnusable, LibraryFull
from rekindle.machine import data_folder
from rekindle.settings import Settings
from rekindle.store.files import Files

LIBRARIES = "knowledge"


def knowledge_folder(settings: Settings) -> Path:
    """The folder of the libraries: the setting, else beside a named cache folder, else the user's data folder.

    Never inside a cache folder, which people and programs empty.
    """
    if settings.library is not None:
        return Path(settings.library)
    if settings.cache not in (None, "off"):
        cache = Path(str(settings.cache)).expanduser().resolve()  # the same library for every path to the same cache
        return Path(f"{cache}-library")
    return data_folder() / LIBRARIES


_RESERVE_BYTES = 8 << 20  # what SQLite writes at the end of a transaction: its page cache, the new index entries
_WRITTEN = 4  # times each byte is written: as text, in the word index, in the log, and then in the file
_WAIT_SECONDS, _PAUSE_SECONDS = 60.0, 0.01


@dataclass(frozen=True)
class LibraryLimit:
    """A size limit for all libraries of a folder; None: no limit."""

    folder: Path
    limit_bytes: int | None = None

    def used_bytes(self) -> int:
        return sum(_size(path) for path in self.folder.expanduser().glob("*"))

    @contextmanager
    def growing(self) -> Iterator[None]:
        """Keep other processes from adding documents meanwhile: two additions may each fit, but not both."""
        if self.limit_bytes is None:
            yield
            return
        files, lock = Files(), self.folder.expanduser() / "growing.lock"
        files.make_folder(lock.parent)
        until = time.monotonic() + _WAIT_SECONDS
        while (held := files.try_lock(lock)) is None:
            if time.monotonic() > until:
                raise CacheUnusable(f"Another process has been writing to {self.folder} for too long. Try again.")
            time.sleep(_PAUSE_SECONDS)
        try:
            yield
        finally:
            files.close(held)

    def allows(self, connection: sqlite3.Connection, new_bytes: int) -> bool:
        """Whether `new_bytes` may be added to the library that `connection` has a transaction on."""
        if self.limit_bytes is None:
            return True
        (file,) = (row[2] for row in connection.execute("PRAGMA database_list") if row[1] == "main")
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        unwritten = max(0, int(pages) * int(page_bytes) - _size(Path(file)))  # in the log so far
        return self.used_bytes() + unwritten + _WRITTEN * new_bytes + _RESERVE_BYTES <= self.limit_bytes

    def check(self, connection: sqlite3.Connection, new_bytes: int) -> None:
        """Raises `LibraryFull` if `new_bytes` may not be added."""
        if not self.allows(connection, new_bytes):
            assert self.limit_bytes is not None
            raise LibraryFull(
                f"The libraries in {self.folder} take {human_bytes(self.used_bytes())}, and library_limit is "
                f"{human_bytes(self.limit_bytes)}: there is no room for more. Forget documents you do not need "
                "(rekindle forget), or raise library_limit."
            )


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
