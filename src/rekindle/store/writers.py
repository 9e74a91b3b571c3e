"""Who is writing into a folder, and whether they still live: a locked file each, which the system unlocks at death."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from pathlib import Path

from rekindle.store.files import Files, Handle

_ATTEMPTS = 20


class Writers:
    """The writers of one folder, as seen by one of them."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder = folder
        self._files = files
        self._lock = threading.Lock()
        self._own: tuple[str, Handle] | None = None
        self._process = os.getpid()

    def own_name(self) -> str:
        """This writer's name; locked from the first call on."""
        with self._lock:
            if self._process != os.getpid():  # forked: the name is the parent's
                self._own, self._process = None, os.getpid()
            if self._own is None or not (self._folder / self._own[0]).exists():
                self._files.make_folder(self._folder)
                taken = self._take_name()
                self._release()
                self._own = taken
            return self._own[0]

    def is_own(self, name: str) -> bool:
        """Whether that is this writer."""
        return self._own is not None and self._own[0] == name and self._process == os.getpid()

    def is_dead(self, name: str) -> bool:
        """Whether that writer has died. Its file, if any, is removed."""
        if self.is_own(name):
            return False
        path = self._folder / name
        if not path.exists():
            return True
        try:
            handle = self._files.try_lock(path)
        except OSError:  # not a file that a writer made
            with contextlib.suppress(OSError):
                self._files.remove(path)
            return True
        if handle is None:
            return False
        self._remove(path, handle)
        return True

    def clear(self) -> None:
        """Remove what dead writers left."""
        for name in self._files.names(self._folder):
            self.is_dead(name)

    def close(self) -> None:
        """Be a writer no more. Idempotent; a forked child leaves its parent's name alone."""
        with self._lock:
            if self._process == os.getpid():
                self._release()

    def _take_name(self) -> tuple[str, Handle]:
        for _ in range(_ATTEMPTS):
            name = secrets.token_hex(8)
            handle = self._files.try_lock(self._folder / name)
            if handle is not None:
                return name, handle
            # Somebody who looks for dead writers had it for a moment, between its making and its locking.
        raise OSError(f"cannot lock a file in {self._folder}")

    def _release(self) -> None:
        if self._own is not None:
            (name, handle), self._own = self._own, None
            self._remove(self._folder / name, handle)

    def _remove(self, path: Path, handle: Handle) -> None:
        if self._files.sharing_violations:  # an open file cannot be removed there
            self._close(handle)
        with contextlib.suppress(OSError):
            self._files.remove(path)
        if not self._files.sharing_violations:
            self._close(handle)

    def _close(self, handle: Handle) -> None:
        with contextlib.suppress(OSError):
            self._files.close(handle)
