"""Waiting for the engine's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rekindle.errors import Cancelled, OutOfMemory

_LOOK_SECONDS = 0.05  # how often a wait checks for cancellation
_LONELY_LOOKS = 20
_LONGEST_SECONDS = 600.0
T = TypeVar("T")


class MemoryGate:
    """Counts running requests; those without memory wait for others to end. Thread-safe."""

    def __init__(self, make: Callable[[], None]) -> None:
        """`make` frees memory that is not in use."""
        self._make = make
        self._changed = threading.Condition()
        self._changes = 0
        self._running = 0
        self._waiting = 0  # of those, for memory

    def enter(self) -> None:
        """Count a request, until `leave`."""
        with self._changed:
            self._running += 1

    def is_alone(self) -> bool:
        """Whether at most one request runs."""
        with self._changed:
            return self._running <= 1

    def take(self, get: Callable[[], T], cancelled: Callable[[], bool]) -> T:
        """Call `get` until it does not raise `OutOfMemory`: parked contexts are closed first, then others must end.

        Raises `OutOfMemory` if no other request holds memory, and `Cancelled`.
        """
        try:
            return get()
        except OutOfMemory:
            pass
        with self._changed:
            self._waiting += 1
        try:
            return self._wait_for(get, cancelled)
        finally:
            with self._changed:
                self._waiting -= 1

    def leave(self) -> None:
        """A counted request has ended."""
        with self._changed:
            self._running -= 1
            self._changes += 1
            self._changed.notify_all()

    def _wait_for(self, get: Callable[[], T], cancelled: Callable[[], bool]) -> T:
        lonely, started = 0, time.monotonic()
        while True:
            with self._changed:
                seen, others = self._changes, self._running - self._waiting
            self._make()
            try:
                return get()
            except OutOfMemory:
                lonely = 0 if others else lonely + 1
                if lonely > _LONELY_LOOKS:  # and no memory is about to be freed
                    raise
            with self._changed:
                if self._changes == seen:
                    self._changed.wait(_LOOK_SECONDS)
            _still_wanted(started, cancelled)


def _still_wanted(started: float, cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise Cancelled("The request was cancelled.")
    if time.monotonic() - started > _LONGEST_SECONDS:
        raise OutOfMemory(
            f"Other requests of this session did not end within {_LONGEST_SECONDS:.0f} s, and there is no room beside "
            "them. Read their streams to the end, or close them."
        )
