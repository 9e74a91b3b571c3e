"""Idle work in a server: whenever no request came for a while, until one comes.

A request stops it within a token, before it is queued. It works for every tenant that has documents, those who asked
last first, also after a restart and for documents that came without a question.
"""

from __future__ import annotations

import logging
import threading
import time

from rekindle.core.request import Request
from rekindle.core.scope import scope_of
from rekindle.errors import RekindleError
from rekindle.idle.idle import Idle, IdleCalibration, IdleOptions
from rekindle.session.session import Session

log = logging.getLogger("rekindle.idle")

_MAX_REMEMBERED = 256  # tenants and salts
_PAUSE_SECONDS = 60.0  # after everything was done, or load or battery forbade it


class IdleThread:
    """A thread that does idle work. `arrive` and `leave` may be called from any thread, and never wait."""

    def __init__(self, session: Session, options: IdleOptions, quiet_seconds: float) -> None:
        self._session = session
        self._options = options
        self._quiet_seconds = quiet_seconds
        self._changed = threading.Condition()
        self._stop = threading.Event()  # of the current work
        self._active = 0  # requests
        self._news = 0  # how often there may have been new work
        self._quiet_from = time.monotonic()
        self._closed = False
        self._calibration = IdleCalibration(session, options)
        self._whose: dict[tuple[str, str], Idle] = {}  # tenants and salts that asked, most recent last
        self._thread = threading.Thread(target=self._work, name="rekindle-idle", daemon=True)
        self._thread.start()

    def arrive(self, request: Request | None = None) -> None:
        """A request arrived: stop, and remember its tenant for later. None: it is not known yet."""
        with self._changed:
            self._active += 1
            self._stop.set()
        if request is not None:
            scope = scope_of(self._session.settings, request.tenant, request.cache_salt)
            self._idle_of((scope.tenant, scope.salt), asked=True)

    def leave(self) -> None:
        """A request ended."""
        with self._changed:
            self._active -= 1
        self.look_again()

    def look_again(self) -> None:
        """There may be work: a request ended, or documents came."""
        with self._changed:
            self._news += 1
            self._quiet_from = time.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop for good, and wait for the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._stop.set()
            self._changed.notify_all()
        self._thread.join()

    def _idle_of(self, owner: tuple[str, str], *, asked: bool = False) -> Idle:
        """The idle work of a tenant and salt; that of those who asked longest ago is forgotten first."""
        with self._changed:
            found = self._whose.get(owner) or Idle(self._session, self._options, *owner)
            others = {other: idle for other, idle in self._whose.items() if other != owner}
            if asked:
                self._whose = {**others, owner: found}
            elif owner not in self._whose:
                self._whose = {owner: found, **others}
            while len(self._whose) > _MAX_REMEMBERED:
                del self._whose[next(iter(self._whose))]
            return found

    def _work(self) -> None:
        while (stop := self._next()) is not None:
            with self._changed:
                news, asked = self._news, list(reversed(self._whose))
            owners = [] if self._session.left else [*asked, *self._session.knowledge.owners()]
            for owner in dict.fromkeys(owners):
                if not stop.is_set():
                    _work_for(self._idle_of(owner), stop)
            if not stop.is_set() and not self._session.left:
                _work_for(self._calibration, stop)
            with self._changed:
                if not stop.is_set() and news == self._news:
                    self._quiet_from = time.monotonic() + _PAUSE_SECONDS - self._quiet_seconds

    def _next(self) -> threading.Event | None:
        """Wait for a long enough pause; the event that stops the work that begins now. None: the server stops."""
        with self._changed:
            while not self._closed:
                left = self._quiet_from + self._quiet_seconds - time.monotonic()
                if not self._active and left <= 0:
                    self._stop = threading.Event()
                    return self._stop
                self._changed.wait(None if self._active else max(0.0, left))
            return None


def _work_for(idle: Idle | IdleCalibration, stop: threading.Event) -> None:
    try:
        idle.run(stop)
    except RekindleError as error:  # users get the same error when they ask
        log.warning("Idle work failed: %s", error)
