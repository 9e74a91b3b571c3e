"""Fair sharing between apps: the app with the fewest tokens computed so far goes first.

An app that comes back after a pause must not starve the others until it has caught up, so its counter is raised to the
smallest one of the active apps.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_MAX_APPS = 1024  # remembered


@dataclass(frozen=True)
class Requester:
    """Who a step is computed for: an app, and whether it is in the background."""

    app: str = ""
    background: bool = False


_NOBODY = Requester()
IDLE = Requester(background=True)  # work ahead of any request
CURRENT: ContextVar[Requester] = ContextVar("rekindle_turn", default=_NOBODY)


@contextmanager
def taking(turn: Requester) -> Iterator[None]:
    """Inside the block, this thread computes for `turn`."""
    token = CURRENT.set(turn)
    try:
        yield
    finally:
        CURRENT.reset(token)


class FairShare:
    """Number of tokens computed for each app. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, float] = {}  # the app that left longest ago first
        self._here: Counter[str] = Counter()

    def enter(self, app: str) -> None:
        """A request of an app begins; it ends with `leave`."""
        with self._lock:
            if not self._here[app]:
                others = [self._served[other] for other, count in self._here.items() if count]
                self._served[app] = max(self._served.pop(app, 0.0), min(others, default=0.0))
            self._here[app] += 1

    def leave(self, app: str) -> None:
        """A request of an app ended."""
        with self._lock:
            self._here[app] -= 1
            if self._here[app] <= 0:
                del self._here[app]
                self._served[app] = self._served.pop(app, 0.0)
                for old in [old for old in self._served if not self._here[old]][:-_MAX_APPS]:
                    del self._served[old]
            self._here += Counter()  # drop zeros

    def serve(self, app: str, tokens: int) -> None:
        """Count tokens that were computed for an app."""
        with self._lock:
            if app in self._served:
                self._served[app] += tokens

    def served(self, app: str) -> float:
        """Number of tokens computed for an app."""
        return self._served.get(app, 0.0)
