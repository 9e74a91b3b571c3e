"""The folder of the libraries: where it is, and how much all of them may take on disk.

Libraries of earlier versions are moved out of a cache folder, once; none is overwritten or removed. The limit includes
damaged files and logs: whatever adds documents asks for more than it will need before it writes, so that the limit
holds at every moment. Removing never asks.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle.core.size import human_bytes
from rekindle.errors import LibraryFull
from rekindle.machine import data_folder, home_folder
from rekindle.settings import Settings
from rekindle.store.files import Files
from rekindle.store.folder import OLD_LIBRARIES

log = logging.getLogger("rekindle.knowledge")

LIBRARIES = OLD_LIBRARIES


def knowledge_folder(settings: Settings) -> Path:
    """The folder of the libraries: the setting, else beside a named cache folder, else the user's data folder.

    Never inside a cache folder, which people and programs empty. Libraries still in one are moved out, once.
    """
    if settings.library is not None:
        return Path(settings.library)
    if settings.cache not in (None, "off"):
        cache = Path(str(settings.cache)).expanduser().resolve()  # the same library for every path to the same cache
        return _moved(cache / LIBRARIES, Path(f"{cache}-library"))
    return _moved(home_folder() / LIBRARIES, data_folder() / LIBRARIES)


def _moved(old: Path, new: Path) -> Path:
    """Move the libraries of `old` to `new`; `new`, or `old` where they cannot be moved."""
    if old == new or not _holds_libraries(old):
        return new
    if _holds_libraries(new):
        log.warning(
            "There are documents in %s, too. Those in %s are used; import what you need from the others.", old, new
        )
        return new
    try:
        Files().make_folder(new.parent)
        if new.is_dir():
            new.rmdir()  # works only if it is empty
        old.rename(new)
        Files().sync_folder(new.parent)
        Files().sync_folder(old.parent)
    except OSError as error:  # another disk, no rights, or other files: leave everything as it is
        if not old.is_dir():  # another process was first
            return new
        log.warning("Documents stay in %s, which a cleaner of caches may empty: they cannot be moved (%s).", old, error)
        return old
    log.warning("Documents were moved from %s to %s: a cache folder is no place for them.", old, new)
    return new


def _holds_libraries(folder: Path) -> bool:
    try:
        return not folder.is_symlink() and any(folder.glob("*.sqlite"))
    except OSError:
        return False


_RESERVE_BYTES = 8 << 20  # what SQLite writes at the end of a transaction: its page cache, the new index entries
_WRITTEN = 4  # times each byte is written: as text, in the word index, in the log, and then in the file
_WAIT_SECONDS = 60.0


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
        held = files.lock(lock, _WAIT_SECONDS)
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
