"""A job in a thread of its own, so that a cancelled step does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rekindle.errors import Cancelled

_LOOK_SECONDS = 0.005


def stop_if(cancelled: Callable[[], bool] | None) -> None:
    """Raise `Cancelled` if it says so."""
    if cancelled is not None and cancelled():
        raise Cancelled("The request was cancelled.")


class ThreadedJob:
    """A job, started at once."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._after: Callable[[], None] | None = None
        threading.Thread(target=self._do, name="rekindle-fill", daemon=True).start()

    def done(self, cancelled: Callable[[], bool] | None) -> bool:
        """Wait for it; False if cancelled. Raises what it raised."""
        while not self._over.wait(None if cancelled is None else _LOOK_SECONDS):
            if cancelled is not None and cancelled():
                return False
        if self._error is not None:
            raise self._error
        return True

    def abandon(self, after: Callable[[], None]) -> None:
        """Call `after` once it is over."""
        with self._lock:
            if not self._over.is_set():
                self._after = after
                return
        after()

    def _do(self) -> None:
        try:
            self._job()
        except BaseException as error:  # noqa: BLE001  (raised again by `done`)
            self._error = error
        finally:
            with self._lock:
                self._over.set()
            if self._after is not None:
                self._after()
