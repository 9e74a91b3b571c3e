"""Who is writing into a folder, and whether they still live: a locked file each, which the system unlocks at death."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading

from rekindle.errors import CacheUnusable
from rekindle.store.files import NO_LOCKS, Files, Handle
from rekindle.store.folder import WRITERS, CacheFolder, is_own_name

_ATTEMPTS = 20


class Writers:
    """The writers of one folder, as seen by one of them."""

    def __init__(self, place: CacheFolder, files: Files) -> None:
        self._place = place
        self._folder = place.path / WRITERS
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
                self._place.make_part(WRITERS)
                taken = self._take_name()
                self._release()
                self._own = taken
            return self._own[0]

    def is_own(self, name: str) -> bool:
        return self._own is not None and self._own[0] == name and self._process == os.getpid()

    def is_dead(self, name: str) -> bool:
        """Whether that writer has died. Its file, if any, is removed."""
        if self.is_own(name):
            return False
        if not is_own_name(WRITERS, name) or not (self._folder / name).exists():
            return True
        try:
            handle = self._files.try_lock(self._folder / name)
        except OSError as error:  # not a file that a writer made; without locks nobody can tell, so it lives
            return error.errno not in NO_LOCKS
        if handle is None:
            return False
        self._remove(name, handle)
        return True

    def clear(self) -> None:
        """Remove what dead writers left."""
        for name in self._place.own_files(WRITERS):
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
            self._remove(name, handle)

    def _remove(self, name: str, handle: Handle) -> None:
        if self._files.sharing_violations:  # an open file cannot be removed there
            self._close(handle)
        with contextlib.suppress(OSError, CacheUnusable):
            self._place.remove(WRITERS, name)
        if not self._files.sharing_violations:
            self._close(handle)

    def _close(self, handle: Handle) -> None:
        with contextlib.suppress(OSError):
            self._files.close(handle)
