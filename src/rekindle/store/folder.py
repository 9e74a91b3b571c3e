"""A cache folder: how it is recognised and created, and which files in it are ours.

    CACHEDIR.TAG        the marker: the signature of the convention, our name, the version of the format
    catalog.sqlite      with its log; one that could not be read is set aside as catalog.sqlite.broken-NUMBER
    extents/HEX.kv      KV
    writers/HEX         locks of writing processes

A folder without the marker belongs to someone else: it is never changed, unless it is empty. In a folder with the
marker only regular files of exactly these names are written or removed, and no symbolic link is followed. The marker is
written first and is checked again before every write and removal: without it, neither happens.

A cache of an older format is emptied when it is opened, under a lock:

    marker: format 1  ->  marker: format 2, being emptied  ->  our files removed  ->  marker: format 2

The first step stops processes of the older version. A process that is killed before the last leaves a marker that makes
the next one empty the folder again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rekindle.errors import CacheUnusable
from rekindle.store.catalog.schema import is_of_another_program
from rekindle.store.files import Files

log = logging.getLogger("rekindle.store")

MARKER, CATALOG, EXTENTS, WRITERS = "CACHEDIR.TAG", "catalog.sqlite", "extents", "writers"
FORMAT = 2
OLD_LIBRARIES = "knowledge"  # where earlier versions kept documents
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
_BEING_EMPTIED = b"# Files of an older format are being removed: opening the cache goes on with that."
_EMPTYING_TEXT = b"\n".join([*_TEXT.split(b"\n")[:2], _BEING_EMPTIED, b""])
_MARKER_BYTES = 4096
_HEX = "[0-9a-f]{16}"
_LOCK = "0" * 16  # in the folder of writers: held while the cache is emptied
_WAIT_SECONDS = 60.0  # for another process that empties it
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


def has_room(path: Path) -> bool:
    """Whether a cache could be made in that folder, which need not be there, or the disk is full."""
    folder = path.expanduser().absolute()
    existing = next((place for place in (folder, *folder.parents) if place.exists()), None)
    return existing is None or Files().has_room(existing)


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
        """Make the folder a cache if it is missing or empty, empty a cache of an older format, else `check` it."""
        while (found := self._format()) != FORMAT:
            if found is None:
                self._mark()
            else:
                self._begin_anew()
        self._check_places()

    def check(self) -> None:
        """Raises `CacheUnusable` if the folder is not a cache of ours, or something else is in the place of our files;
        `OSError` if it cannot be read."""
        if self._format() != FORMAT:
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

    def _format(self) -> int | None:
        """The format in our marker, 0 while the folder is being emptied; None without a marker.

        Raises `CacheUnusable` if the marker is another program's, or of a newer format.
        """
        try:
            found = self._files.status(self._marker)
            version = None if found is None else (found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)
            if version is not None and version == self._read:
                return FORMAT
            lines = self._files.read(self._marker, _MARKER_BYTES).split(b"\n")
        except FileNotFoundError:
            return None
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
        if (number := int(named[1])) > FORMAT:
            raise CacheUnusable(
                f"{self.path} was made by a newer Rekindle (format {number}, this one knows {FORMAT}). Upgrade, or "
                "choose another folder for the cache."
            )
        if lines[2:3] == [_BEING_EMPTIED]:
            return 0
        if number == FORMAT:
            self._read = version
        return number

    def _begin_anew(self) -> None:
        """Remove all our files from a cache of an older format, and mark it with this one."""
        self._check_places()
        try:
            if is_of_another_program(self._files.read(self.path / CATALOG, 100)):
                raise CacheUnusable(f"{self.path / CATALOG} is not a Rekindle catalog. Choose another folder.")
        except FileNotFoundError:
            pass
        try:
            with self._emptying() as is_first:
                if not is_first:
                    return
                self._write_marker(_EMPTYING_TEXT, replace=True)
                self._remove_own()
                self._write_marker(_TEXT, replace=True)
        except OSError as error:
            raise CacheUnusable(
                f"{self.path} is a cache of an older format and cannot be emptied: {error}. Delete it, or choose "
                "another folder for the cache."
            ) from error
        log.warning("%s was a cache of an older format: its KV was removed, and the cache starts empty.", self.path)

    @contextmanager
    def _emptying(self) -> Iterator[bool]:
        """Hold the lock for emptying the folder; False if another process has done it."""
        self._files.make_folder(self.path / WRITERS)
        path = self.path / WRITERS / _LOCK
        lock = self._files.lock(path, _WAIT_SECONDS)
        try:
            yield self._format() != FORMAT
        finally:
            if self._files.sharing_violations:  # an open file cannot be removed there
                self._files.close(lock)
            with contextlib.suppress(OSError):
                self._files.remove(path)
            if not self._files.sharing_violations:
                self._files.close(lock)

    def _remove_own(self) -> None:
        """Remove all our files but the marker and the lock; the catalog last, its log before it."""
        going = [self.path / part / name for part in (EXTENTS, WRITERS, "") for name in self.own_files(part)]
        going += [self.path / name for name in self._files.names(self.path) if self._is_draft(name)]
        for path in [*going, *reversed(self._catalogs)]:
            if path.name != _LOCK and not self._files.remove(path):
                raise PermissionError(errno.EACCES, "another process has it open", str(path))
        for folder in (*self._parts, self.path):
            self._files.sync_folder(folder)

    def _mark(self) -> None:
        """Put the marker into an empty folder, atomically; another process may do the same at the same time."""
        names = [name for name in self._files.names(self.path) if not self._is_draft(name)]
        if self._format() is not None:  # another process was first; it creates everything else after its marker
            return
        if names:
            library = self.path / OLD_LIBRARIES
            first = f"move its documents from {library} to {self.path}-library; then " if OLD_LIBRARIES in names else ""
            raise CacheUnusable(
                f"{self.path} is not empty and has no {MARKER} of ours, so it is taken for somebody else's. Choose "
                "another folder for the cache; if this one is the cache of an older Rekindle, "
                f"{first}you may delete it."
            )
        self._files.make_folder(self.path)
        try:
            self._write_marker(_TEXT, replace=False)
        except OSError:
            if self._format() is None:  # else another process was first
                raise

    def _write_marker(self, text: bytes, *, replace: bool) -> None:
        """Put a marker into the folder, atomically, and return when it is on the medium."""
        draft = self.path / f"{MARKER}.{secrets.token_hex(8)}"
        handle = self._files.create(draft)
        try:
            try:
                self._files.write_at(handle, 0, memoryview(text))
                self._files.sync(handle)
            finally:
                self._files.close(handle)
            if replace:
                self._files.replace(draft, self._marker)
            else:
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
            begun = self._files.read(self.path / name, _MARKER_BYTES)
            return any(text.startswith(begun) for text in (_TEXT, _EMPTYING_TEXT))
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
