"""Whose turn it is: on whose behalf something is computed, and who was served least.

Every app has a counter of the tokens computed for it. The one with the smallest goes first. An app that comes back
after a pause is not served before all others until it has caught up: its counter is lifted to the smallest of those
that are here.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_MOST_APPS = 1024  # remembered


@dataclass(frozen=True)
class Turn:
    """On whose behalf: an app, and whether somebody looks at it now."""

    app: str = ""
    background: bool = False


_NOBODY = Turn()
IDLE = Turn(background=True)  # what nobody asked for, done ahead
CURRENT: ContextVar[Turn] = ContextVar("rekindle_turn", default=_NOBODY)


@contextmanager
def taking(turn: Turn) -> Iterator[None]:
    """Whatever this thread computes meanwhile is on behalf of `turn`."""
    token = CURRENT.set(turn)
    try:
        yield
    finally:
        CURRENT.reset(token)


class FairShare:
    """How many tokens were computed for each app. Used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, float] = {}  # the one that left longest ago first
        self._here: Counter[str] = Counter()

    def enter(self, app: str) -> None:
        """A request of an app is here, until `leave`."""
        with self._lock:
            if not self._here[app]:
                others = [self._served[other] for other, count in self._here.items() if count]
                self._served[app] = max(self._served.pop(app, 0.0), min(others, default=0.0))
            self._here[app] += 1

    def leave(self, app: str) -> None:
        """A request of an app is over."""
        with self._lock:
            self._here[app] -= 1
            if self._here[app] <= 0:
                del self._here[app]
                self._served[app] = self._served.pop(app, 0.0)
                for old in [old for old in self._served if not self._here[old]][:-_MOST_APPS]:
                    del self._served[old]
            self._here += Counter()  # forget the empty ones

    def serve(self, app: str, tokens: int) -> None:
        """Count tokens that were computed for an app."""
        with self._lock:
            if app in self._served:
                self._served[app] += tokens

    def served(self, app: str) -> float:
        """What an app has had; who has had least goes first."""
        return self._served.get(app, 0.0)
