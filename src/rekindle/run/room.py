"""Who waits for the engine's memory: what only waits makes room, else somebody's request must end first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from rekindle.errors import Cancelled, OutOfMemory

_LOOK_SECONDS = 0.05  # how often one that waits looks whether it is still wanted
_LONELY_LOOKS = 20
T = TypeVar("T")


class Room:
    """Counts the requests that hold memory of the engine. Used from several threads."""

    def __init__(self, make: Callable[[], None]) -> None:
        """`make` frees what nobody uses now."""
        self._make = make
        self._changed = threading.Condition()
        self._changes = 0
        self._running = 0

    def take(self, get: Callable[[], T], cancelled: Callable[[], bool]) -> T:
        """What `get` gives, as soon as there is room for it; it counts as running from then on, until `give`.

        Raises `OutOfMemory` if there is no room though nothing else runs, and `Cancelled`.
        """
        try:
            return self._got(get())
        except OutOfMemory:
            pass
        lonely = 0
        while True:
            with self._changed:
                seen, running = self._changes, self._running
            self._make()  # also what has been left waiting since
            try:
                return self._got(get())
            except OutOfMemory:
                lonely = 0 if running else lonely + 1
                if lonely > _LONELY_LOOKS:  # nor is anybody just about to begin, or to give back what he had
                    raise
            with self._changed:
                if self._changes == seen:
                    self._changed.wait(_LOOK_SECONDS)
            if cancelled():
                raise Cancelled("The request was cancelled.")

    def enter(self) -> None:
        """One that has its room already is running from now on, until `give`."""
        with self._changed:
            self._running += 1

    def give(self) -> None:
        """One that was running has ended."""
        with self._changed:
            self._running -= 1
            self._changes += 1
            self._changed.notify_all()

    def _got(self, thing: T) -> T:
        self.enter()
        return thing
