"""The operating system, as far as the store needs it: the one place where platforms differ.

Tests put a failing `Files` in its place, so every call that can fail goes through here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
# On macOS, fsync alone stops at the drive's cache.
_FULL_SYNC: int | None = None if sys.platform == "win32" else getattr(fcntl, "F_FULLFSYNC", None)


@dataclass(frozen=True)
class Handle:
    """An open file. The lock serves systems that can only read at a position of the handle's own."""

    descriptor: int
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Files:
    """Files of one machine. `positioned`: whether reads and writes can name their offset."""

    positioned: bool = hasattr(os, "preadv") and hasattr(os, "pwrite")
    full_sync: int | None = _FULL_SYNC
    sharing_violations: bool = sys.platform == "win32"  # whether an open file cannot be removed

    def make_folder(self, path: Path) -> None:
        """Make a folder, and those above it, that nobody else can enter."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(self, path: Path) -> Handle:
        """A new file that only its owner can read. Raises `FileExistsError` if there is one."""
        return Handle(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | _FLAGS, 0o600))

    def open(self, path: Path) -> Handle:
        """An existing file, to read."""
        return Handle(os.open(path, os.O_RDONLY | _FLAGS))

    def write_at(self, handle: Handle, offset: int, data: memoryview) -> None:
        """Write all of `data`."""
        data = data.cast("B")
        while len(data):
            done = self.write_some(handle, offset, data)
            offset += done
            data = data[done:]

    def write_some(self, handle: Handle, offset: int, data: memoryview) -> int:
        """Write as much as the system takes at once."""
        if self.positioned:
            return os.pwrite(handle.descriptor, data, offset)
        with handle.lock:
            os.lseek(handle.descriptor, offset, os.SEEK_SET)
            return os.write(handle.descriptor, data)

    def read_at(self, handle: Handle, offset: int, out: memoryview) -> None:
        """Fill all of `out`. Raises `EOFError` if the file ends before."""
        out = out.cast("B")
        while len(out):
            done = self.read_some(handle, offset, out)
            if done == 0:
                raise EOFError(f"the file ends at byte {offset}")
            offset += done
            out = out[done:]

    def read_some(self, handle: Handle, offset: int, out: memoryview) -> int:
        """Read as much as the system gives at once; 0 at the end of the file."""
        if self.positioned:
            return os.preadv(handle.descriptor, [out], offset)
        with handle.lock:
            os.lseek(handle.descriptor, offset, os.SEEK_SET)
            data = os.read(handle.descriptor, len(out))
        out[: len(data)] = data
        return len(data)

    def sync(self, handle: Handle) -> None:
        """Return when the file's bytes are on the medium."""
        if sys.platform != "win32" and self.full_sync is not None:
            try:
                fcntl.fcntl(handle.descriptor, self.full_sync)
                return
            except OSError as error:  # some file systems do not know it
                if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY):
                    raise
        os.fsync(handle.descriptor)

    def close(self, handle: Handle) -> None:
        """Close it."""
        os.close(handle.descriptor)

    def size(self, handle: Handle) -> int:
        """Length of an open file."""
        return os.fstat(handle.descriptor).st_size

    def remove(self, path: Path) -> bool:
        """Remove a file, or a folder that somebody put in its place.

        False if another process has it open and the system minds: try again later.
        """
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except PermissionError:
            if self.sharing_violations:
                return False
            raise
        return True

    def names(self, folder: Path) -> list[str]:
        """The names in a folder; none if it is not there."""
        try:
            return [path.name for path in folder.iterdir()]
        except FileNotFoundError:
            return []

    def free_bytes(self, folder: Path) -> int:
        """What is free on the medium of a folder."""
        return shutil.disk_usage(folder).free

    def try_lock(self, path: Path) -> Handle | None:
        """Lock a file, made if missing, until the handle is closed or the process ends. None if another has it."""
        while True:
            handle = Handle(os.open(path, os.O_CREAT | os.O_RDWR | _FLAGS, 0o600))
            if not _lock(handle.descriptor):
                os.close(handle.descriptor)
                return None
            # Between opening and locking, whoever held it may have removed it: then this lock guards nothing.
            with contextlib.suppress(OSError):
                if os.path.samestat(path.stat(), os.fstat(handle.descriptor)):
                    return handle
            os.close(handle.descriptor)


def _lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
