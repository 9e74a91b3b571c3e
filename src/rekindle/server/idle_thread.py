"""Idle work in a server: whenever no request came for a while, until one comes.

A request stops it within a token, before it is queued. It works only for tenants that sent requests since the server
started: nobody else's documents are touched.
"""

from __future__ import annotations

import logging
import threading
import time

from rekindle.core.request import Request
from rekindle.errors import RekindleError
from rekindle.idle.idle import Idle, IdleOptions
from rekindle.idle.idle_calibration import IdleCalibration
from rekindle.session.session import Session

log = logging.getLogger("rekindle.idle")

_MAX_REMEMBERED = 32  # tenants and salts
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
        self._quiet_from = time.monotonic()
        self._closed = False
        self._calibration = IdleCalibration(session, options)
        self._whose: dict[tuple[str | None, str | None], Idle] = {}  # most recent last
        self._thread = threading.Thread(target=self._work, name="rekindle-idle", daemon=True)
        self._thread.start()

    def arrive(self, request: Request) -> None:
        """A request arrived: stop, and remember its tenant for later."""
        whose = (request.tenant, request.cache_salt)
        with self._changed:
            self._active += 1
            self._stop.set()
            known = self._whose.pop(whose) if whose in self._whose else Idle(self._session, self._options, *whose)
            self._whose[whose] = known
            while len(self._whose) > _MAX_REMEMBERED:
                del self._whose[next(iter(self._whose))]

    def leave(self) -> None:
        """A request ended."""
        with self._changed:
            self._active -= 1
            self._quiet_from = time.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop for good, and wait for the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._stop.set()
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while (stop := self._next()) is not None:
            work: list[Idle | IdleCalibration] = [*reversed(list(self._whose.values())), self._calibration]
            for idle in work:
                if not stop.is_set():
                    _work_for(idle, stop)
            with self._changed:
                if not stop.is_set():
                    self._quiet_from = time.monotonic() + _PAUSE_SECONDS - self._quiet_seconds

    def _next(self) -> threading.Event | None:
        """Wait for a long enough pause; the event that stops the work that begins now. None: the server stops."""
        with self._changed:
            while not self._closed:
                left = self._quiet_from + self._quiet_seconds - time.monotonic()
                if not self._active and self._whose and left <= 0:
                    self._stop = threading.Event()
                    return self._stop
                self._changed.wait(None if self._active or not self._whose else max(0.0, left))
            return None


def _work_for(idle: Idle | IdleCalibration, stop: threading.Event) -> None:
    try:
        idle.run(stop)
    except RekindleError as error:  # users get the same error when they ask
        log.warning("Idle work failed: %s", error)
