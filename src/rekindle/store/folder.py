"""A cache folder: how it is recognised and created, and which files in it are ours.

    CACHEDIR.TAG        the marker: the signature of the convention, our name, the version of the format
    catalog.sqlite      with its log; one that could not be read is set aside as catalog.sqlite.broken-NUMBER
    extents/HEX.kv      KV
    writers/HEX         locks of writing processes

A folder without the marker belongs to someone else: it is never changed, unless it is empty. In a folder with the
marker only regular files of exactly these names are written or removed, and no symbolic link is followed. The marker is
written first and is checked again before every write and removal: without it, neither happens.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from rekindle.errors import CacheUnusable
from rekindle.store.files import Files

MARKER, CATALOG, EXTENTS, WRITERS = "CACHEDIR.TAG", "catalog.sqlite", "extents", "writers"
FORMAT = 2
_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"
_FORMAT_LINE = re.compile(rb"# Rekindle cache, format ([0-9]{1,9})")
_TEXT = (
    _SIGNATURE
    + f"""
# Rekindle cache, format {FORMAT}
# This folder holds intermediate results of language models, which can be computed again. Deleting all of it is safe.
# Backup programs skip folders with such a file: https://bford.info/cachedir/
""".encode()
)
_MARKER_BYTES = 4096
_HEX = "[0-9a-f]{16}"
_DRAFT = re.compile(rf"{re.escape(MARKER)}\.{_HEX}")
# Files that may be removed, by the folder they are in: "" is the cache folder itself.
_REMOVABLE: Mapping[str, re.Pattern[str]] = {
    "": re.compile(rf"{re.escape(CATALOG)}\.broken-[0-9]+(?:-wal|-shm)?"),
    EXTENTS: re.compile(rf"{_HEX}\.kv"),
    WRITERS: re.compile(_HEX),
}
_SQLITE_SUFFIXES = ("", "-wal", "-shm", "-journal")


def is_own_name(part: str, name: object) -> bool:
    """Whether a file of this name in that part of a cache folder is ours. Names also come from the catalog."""
    return isinstance(name, str) and _REMOVABLE[part].fullmatch(name) is not None


def may_hold_cache(path: Path) -> bool:
    """Whether opening that folder is worth trying: it has a marker or a catalog, ours or not. Creates nothing."""
    files = Files()
    try:
        return any(files.status(path.expanduser() / name) is not None for name in (MARKER, CATALOG))
    except (OSError, RuntimeError):  # opening it says why
        return True


class CacheFolder:
    """A folder that is a cache, or can become one. A link to the folder is followed, once."""

    def __init__(self, path: Path, files: Files) -> None:
        """Changes nothing. Raises `CacheUnusable` for an invalid path."""
        try:
            self.path = path.expanduser().resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise CacheUnusable(f"The cache folder {path} cannot be used: {error}.") from error
        self._files = files
        self._marker = self.path / MARKER
        self._parts = [self.path / name for name in (EXTENTS, WRITERS)]
        self._catalogs = [self.path / f"{CATALOG}{suffix}" for suffix in _SQLITE_SUFFIXES]
        self._read: tuple[int, ...] | None = None  # the marker that was read and found to be ours

    def claim(self) -> None:
        """Make the folder a cache if it is missing or empty, else `check` it."""
        while not self._is_marked():
            self._mark()
        self._check_places()

    def check(self) -> None:
        """Raises `CacheUnusable` if the folder is not a cache of ours, or something else is in the place of our files;
        `OSError` if it cannot be read."""
        if not self._is_marked():
            raise CacheUnusable(
                f"{self.path / MARKER} is gone, so nothing is written to this folder or removed from it any more. "
                "Delete the whole folder if it is a cache, or choose another one."
            )
        self._check_places()

    def make_part(self, part: str) -> None:
        """Make a folder inside it, if it is missing."""
        self.claim()
        if self._files.status(self.path / part) is None:
            self._files.make_folder(self.path / part)

    def own_files(self, part: str) -> list[str]:
        """The names of the files that are ours and may be removed, in a part of the folder."""
        return [name for name in self._files.names(self.path / part) if self._is_own(part, name)]

    def foreign(self, part: str) -> list[str]:
        """The names of everything else there."""
        return [name for name in self._files.names(self.path / part) if not self._is_own(part, name)]

    def remove(self, part: str, name: str) -> bool:
        """Remove a file of ours, if it exists. Other files stay, whatever their name.

        False if the system refuses because another process has it open: try again later. Raises as `check` does.
        """
        if self._is_own(part, name):
            self.check()
            return self._files.remove(self.path / part / name)
        return True

    def _is_own(self, part: str, name: str) -> bool:
        if not is_own_name(part, name):
            return False
        found = self._files.status(self.path / part / name)
        return found is not None and stat.S_ISREG(found.st_mode)

    def _is_marked(self) -> bool:
        """Whether it has our marker. Raises `CacheUnusable` if it is another program's, or of another format."""
        try:
            found = self._files.status(self._marker)
            version = None if found is None else (found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)
            if version is not None and version == self._read:
                return True
            lines = self._files.read(self._marker, _MARKER_BYTES).split(b"\n")
        except FileNotFoundError:
            return False
        except NotADirectoryError as error:
            raise CacheUnusable(f"{self.path} is not a folder. Choose a folder for the cache.") from error
        except PermissionError as error:
            raise CacheUnusable(f"The cache folder {self.path} cannot be used: {error}.") from error
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
                raise
            lines = []  # a link, a folder, a FIFO, a socket
        named = _FORMAT_LINE.fullmatch(lines[1]) if len(lines) > 1 and lines[0] == _SIGNATURE else None
        if named is None:
            raise CacheUnusable(
                f"{self.path} is the cache of another program: its {MARKER} is not ours. "
                "Choose another folder for the cache."
            )
        if (number := int(named[1])) != FORMAT:
            raise CacheUnusable(
                f"{self.path} was made by another Rekindle (format {number}, this one knows {FORMAT}). "
                f"{'Upgrade' if number > FORMAT else 'Delete it'}, or choose another folder for the cache."
            )
        self._read = version
        return True

    def _mark(self) -> None:
        """Put the marker into an empty folder, atomically; another process may do the same at the same time."""
        names = [name for name in self._files.names(self.path) if not self._is_draft(name)]
        if self._is_marked():  # another process was first; it creates everything else after its marker
            return
        if names:
            raise CacheUnusable(
                f"{self.path} is not empty and has no {MARKER} of ours, so it is taken for somebody else's. Choose "
                "another folder for the cache."
            )
        self._files.make_folder(self.path)
        try:
            self._write_marker()
        except OSError:
            if not self._is_marked():  # else another process was first
                raise

    def _write_marker(self) -> None:
        """Put the marker into the folder, atomically, and return when it is on the medium."""
        draft = self.path / f"{MARKER}.{secrets.token_hex(8)}"
        handle = self._files.create(draft)
        try:
            try:
                self._files.write_at(handle, 0, memoryview(_TEXT))
                self._files.sync(handle)
            finally:
                self._files.close(handle)
            self._files.place(draft, self._marker)
            self._files.sync_folder(self.path)  # else power loss could leave a catalog without the marker
        finally:
            with contextlib.suppress(OSError):
                self._files.remove(draft)

    def _is_draft(self, name: str) -> bool:
        """Whether that is the draft of a marker of another process, maybe a dead one."""
        if not _DRAFT.fullmatch(name):
            return False
        try:
            return _TEXT.startswith(self._files.read(self.path / name, _MARKER_BYTES))
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _check_places(self) -> None:
        """Raises `CacheUnusable` if anything else is in the place of our files."""
        for path in self._parts:
            found = self._files.status(path)
            if found is not None and not stat.S_ISDIR(found.st_mode):
                raise CacheUnusable(f"{path} is not a folder. Move it away, or choose another cache folder.")
        for path in self._catalogs:
            found = self._files.status(path)
            if found is None:
                continue
            if not stat.S_ISREG(found.st_mode):
                raise CacheUnusable(f"{path} is not a regular file. Move it away, or choose another cache folder.")
            if found.st_nlink > 1:  # writing to it would change a file elsewhere
                raise CacheUnusable(
                    f"{path} is also a file somewhere else (a hard link). Replace it by a copy, or choose another "
                    "cache folder."
                )
