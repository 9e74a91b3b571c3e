"""The operating system calls of the store: the one place where platforms differ.

Tests put a failing `Files` in its place, so every call that can fail goes through here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from rekindle.machine import make_private_folder

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
# A path may be a link, or a FIFO whose opening blocks: neither is a file.
_REGULAR = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_HAS_DIR_FD = os.unlink in os.supports_dir_fd and os.stat in os.supports_dir_fd
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems that cannot lock files
_LEAST_ROOM_BYTES = 512 << 10  # for the log of SQLite and its index
_PAUSE_SECONDS = 0.02  # between two tries to lock
# On macOS, fsync alone stops at the drive's cache.
_FULL_SYNC: int | None = None if sys.platform == "win32" else getattr(fcntl, "F_FULLFSYNC", None)


@dataclass(frozen=True)
class Handle:
    """An open file. The lock serves systems that can only read at the handle's own position."""

    descriptor: int
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Files:
    """Files of one machine. `positioned`: whether reads and writes can name their offset."""

    positioned: bool = hasattr(os, "preadv") and hasattr(os, "pwrite")
    full_sync: int | None = _FULL_SYNC
    sharing_violations: bool = sys.platform == "win32"  # whether an open file cannot be removed

    def make_folder(self, path: Path) -> None:
        """Make a folder, and its parents, that nobody else can enter."""
        make_private_folder(path)

    def create(self, path: Path) -> Handle:
        """A new file that only its owner can read. Raises `FileExistsError`."""
        return Handle(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | _FLAGS, 0o600))

    def open(self, path: Path) -> Handle:
        """Open a regular file to read. Raises `OSError` at once for anything else, also for a link."""
        return _regular(os.open(path, os.O_RDONLY | _REGULAR | _FLAGS), path)

    def read(self, path: Path, limit_bytes: int) -> bytes:
        """A small regular file, or its first bytes."""
        handle = self.open(path)
        try:
            out = memoryview(bytearray(limit_bytes))
            size = 0
            while size < limit_bytes and (done := self.read_some(handle, size, out[size:])):
                size += done
            return bytes(out[:size])
        finally:
            self.close(handle)

    def place(self, draft: Path, path: Path) -> None:
        """Give a finished file its name. Raises `FileExistsError` if something has that name."""
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # some file systems have no hard links
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            draft.rename(path)
        else:
            draft.unlink()

    def replace(self, draft: Path, path: Path) -> None:
        """Give a finished file its name, in place of the file that has it."""
        draft.replace(path)

    def status(self, path: Path) -> os.stat_result | None:
        """The status of a path, of a link itself; None if there is nothing."""
        try:
            return os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def make_private(self, path: Path) -> None:
        """Remove other users' permissions from a regular file, unless it has other hard links."""
        handle = self.open(path)
        try:
            if sys.platform != "win32" and os.fstat(handle.descriptor).st_nlink == 1:
                os.fchmod(handle.descriptor, 0o600)
        finally:
            self.close(handle)

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
            except OSError as error:  # some file systems do not support it
                if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY):
                    raise
        os.fsync(handle.descriptor)

    def sync_file(self, path: Path) -> None:
        """Return when a file is on the medium as it is now: its bytes and its length."""
        handle = Handle(os.open(path, os.O_RDWR | _FLAGS))
        try:
            self.sync(handle)
        finally:
            os.close(handle.descriptor)

    def sync_folder(self, path: Path) -> None:
        """Return when additions to and removals from a folder are on the medium.

        Does nothing if the system does not support it, or the folder does not exist.
        """
        if os.name != "posix":
            return
        try:
            handle = Handle(os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS))
        except FileNotFoundError:
            return
        try:
            self.sync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems do not support it
                raise
        finally:
            os.close(handle.descriptor)

    def close(self, handle: Handle) -> None:
        os.close(handle.descriptor)

    def size(self, handle: Handle) -> int:
        return os.fstat(handle.descriptor).st_size

    def remove(self, path: Path) -> bool:
        """Remove a regular file, and nothing else; a link in place of its folder raises `OSError`.

        False if the system refuses because another process has it open: try again later.
        """
        try:
            self.unlink(path)
        except FileNotFoundError:
            return True
        except PermissionError:
            if self.sharing_violations:
                return False
            raise
        return True

    def unlink(self, path: Path) -> None:
        """Remove the name of a regular file, even if the path to its folder changes meanwhile."""
        if not _HAS_DIR_FD:
            if stat.S_ISREG(os.lstat(path).st_mode):
                path.unlink()
            return
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | _FLAGS)
        try:
            if stat.S_ISREG(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(path.name, dir_fd=folder)
        finally:
            os.close(folder)

    def names(self, folder: Path) -> list[str]:
        """The names in a folder; none if it does not exist."""
        try:
            return [path.name for path in folder.iterdir()]
        except FileNotFoundError:
            return []

    def has_room(self, folder: Path) -> bool:
        """Whether the medium of a folder has room for the log of a transaction."""
        return self.free_bytes(folder) >= _LEAST_ROOM_BYTES

    def free_bytes(self, folder: Path) -> int:
        """Free bytes on the medium of a folder."""
        return shutil.disk_usage(folder).free

    def lock(self, path: Path, wait_seconds: float) -> Handle:
        """`try_lock` until it succeeds. Raises `TimeoutError` if another process holds it for longer than that."""
        deadline = time.monotonic() + wait_seconds
        while (handle := self.try_lock(path)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has kept {path} locked for too long. Try again")
            time.sleep(_PAUSE_SECONDS)
        return handle

    def try_lock(self, path: Path) -> Handle | None:
        """Lock a regular file, created if missing, until the handle is closed or the process ends; None if it is
        locked.

        Raises `OSError` if the path is something else.
        """
        while True:
            handle = _regular(os.open(path, os.O_CREAT | os.O_RDWR | _REGULAR | _FLAGS, 0o600), path)
            try:
                locked = _lock(handle.descriptor)
            except OSError:
                os.close(handle.descriptor)
                raise
            if not locked:
                os.close(handle.descriptor)
                return None
            # Between opening and locking, its former holder may have removed it: then this lock guards nothing.
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(path), os.fstat(handle.descriptor)):
                    return handle
            os.close(handle.descriptor)


def _regular(descriptor: int, path: Path) -> Handle:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return Handle(descriptor)
    os.close(descriptor)
    raise OSError(errno.ENXIO, "not a regular file", str(path))


def _lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise
        return False
    return True
