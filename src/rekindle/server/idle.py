"""Working ahead in a server: whenever nobody asked for a while, until somebody does.

A request stops it within a token, before it takes its place in line. It works for those who asked since the server
started: nobody else's documents are looked at.
"""

from __future__ import annotations

import logging
import threading
import time

from rekindle.core.request import Request
from rekindle.errors import RekindleError
from rekindle.run.idle import Idle, IdleOptions
from rekindle.run.session import Session

log = logging.getLogger("rekindle.idle")

_MOST_REMEMBERED = 32  # tenants and salts
_PAUSE_SECONDS = 60.0  # after everything was done, or something was in the way


class Idler:
    """A thread that works ahead. `arrive` and `leave` may be called from any thread, and do not wait for it."""

    def __init__(self, session: Session, options: IdleOptions, quiet_seconds: float) -> None:
        self._session = session
        self._options = options
        self._quiet_seconds = quiet_seconds
        self._changed = threading.Condition()
        self._stop = threading.Event()  # of the work that goes on
        self._here = 0  # requests
        self._quiet_from = time.monotonic()
        self._closed = False
        self._whose: dict[tuple[str | None, str | None], Idle] = {}  # who asked last stands last
        self._thread = threading.Thread(target=self._work, name="rekindle-idle", daemon=True)
        self._thread.start()

    def arrive(self, request: Request) -> None:
        """A request is here: stop, and remember for whom to work later."""
        whose = (request.tenant, request.cache_salt)
        with self._changed:
            self._here += 1
            self._stop.set()
            known = self._whose.pop(whose) if whose in self._whose else Idle(self._session, self._options, *whose)
            self._whose[whose] = known
            while len(self._whose) > _MOST_REMEMBERED:
                del self._whose[next(iter(self._whose))]

    def leave(self) -> None:
        """It is answered, or gone."""
        with self._changed:
            self._here -= 1
            self._quiet_from = time.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop for good; returns when nothing is computed any more. Idempotent."""
        with self._changed:
            self._closed = True
            self._stop.set()
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while (stop := self._next()) is not None:
            for idle in reversed(list(self._whose.values())):
                if not stop.is_set():
                    _work_for(idle, stop)
            with self._changed:
                if not stop.is_set():
                    self._quiet_from = time.monotonic() + _PAUSE_SECONDS - self._quiet_seconds

    def _next(self) -> threading.Event | None:
        """Wait until nobody asked for long enough; what stops the work that begins now. None: the server stops."""
        with self._changed:
            while not self._closed:
                left = self._quiet_from + self._quiet_seconds - time.monotonic()
                if not self._here and self._whose and left <= 0:
                    self._stop = threading.Event()
                    return self._stop
                self._changed.wait(None if self._here or not self._whose else max(0.0, left))
            return None


def _work_for(idle: Idle, stop: threading.Event) -> None:
    try:
        idle.run(stop)
    except RekindleError as error:  # what users ask tells them the same
        log.warning("Nothing could be done ahead: %s", error)
