"""How long a model stays in memory after its last request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class KeepAlive:
    """Counts the users of a model, and frees it after `seconds` without any. Thread-safe."""

    def __init__(self, seconds: float | None, rest: Callable[[], None]) -> None:
        """None: for ever."""
        self._seconds = seconds
        self._rest = rest
        self._lock = threading.Lock()
        self.users = 0
        self.last_used = time.monotonic()
        self._leaves_at = 0.0
        self._closed = False
        self._timer: threading.Timer | None = None
        with self._lock:
            self._start()

    @contextmanager
    def use(self) -> Iterator[None]:
        """The model stays while this lasts."""
        with self._lock:
            self.users += 1
            self._stop()
        try:
            yield
        finally:
            with self._lock:
                self.users -= 1
                self.last_used = time.monotonic()
                self._start()

    def stay(self, seconds: float | None) -> None:
        """Set how long the model stays loaded after its last request; None: for ever."""
        with self._lock:
            if not self._closed:
                self._seconds = seconds
                self._stop()
                self._start()

    @property
    def seconds_left(self) -> float | None:
        """Until it is freed; None while it is used, or if it stays for ever."""
        with self._lock:
            return None if self._timer is None else max(0.0, self._leaves_at - time.monotonic())

    def rest(self) -> None:
        """Free the model now, unless it is used."""
        with self._lock:
            if not self.users and not self._closed:
                self._stop()
                self._rest()

    def close(self) -> None:
        """Let nothing rest any more."""
        with self._lock:
            self._closed, self._seconds = True, None
            self._stop()

    def _start(self) -> None:
        if self._seconds is not None and not self.users:
            self._timer = threading.Timer(self._seconds, self._over)
            self._timer.daemon = True
            self._leaves_at = time.monotonic() + self._seconds
            self._timer.start()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over(self) -> None:
        with self._lock:  # a request that comes now waits until the model is freed, and loads it again
            if not self.users and self._seconds is not None:
                self._rest()
