"""Who is answered next.

So many requests are answered at the same time; the others stand in line. The foreground goes before the background,
then whichever app was served least, then whoever came first. The background never takes the last free place.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rekindle.run.turn import FairShare, Turn
from rekindle.server.problem import Problem

_MEASURES = 0.2  # the weight of the newest
_FIRST_SECONDS = 2.0  # a request takes, while nothing was measured


@dataclass(eq=False)
class _Waiting:
    turn: Turn
    arrival: int
    called: asyncio.Future[None]


class Line:
    """The requests of one server. Used by one event loop."""

    def __init__(self, places: int, most_waiting: int, shares: FairShare) -> None:
        self.places = places
        self._most_waiting = most_waiting
        self._shares = shares
        self._waiting: list[_Waiting] = []
        self._arrivals = itertools.count()
        self._request_seconds = _FIRST_SECONDS
        self.running = 0
        self.refused = 0

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, turn: Turn) -> AsyncIterator[None]:
        """Be answered, as soon as it is one's turn. Raises `Problem` 429 where the line is full."""
        self._shares.enter(turn.app)
        try:
            await self._stand(turn)
            started = time.monotonic()
            try:
                yield
            finally:
                self.running -= 1
                self._request_seconds += _MEASURES * (time.monotonic() - started - self._request_seconds)
                self._call()
        finally:
            self._shares.leave(turn.app)

    async def _stand(self, turn: Turn) -> None:
        if self.is_free(turn):  # then whoever waits may not have this place
            self.running += 1
            return
        if len(self._waiting) >= self._most_waiting:
            self.refused += 1
            seconds = math.ceil(self._request_seconds * (len(self._waiting) + 1) / self.places)
            raise Problem(
                429,
                f"{len(self._waiting)} requests wait already. Try again in {seconds} s, or start the server with a "
                "longer --queue.",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )
        own = _Waiting(turn, next(self._arrivals), asyncio.get_running_loop().create_future())
        self._waiting.append(own)
        self._call()
        try:
            await own.called
        except asyncio.CancelledError:
            if own in self._waiting:
                self._waiting.remove(own)
            elif own.called.done() and not own.called.cancelled():  # called and cancelled at the same time
                self.running -= 1
                self._call()
            raise

    def is_free(self, turn: Turn) -> bool:
        """Whether there is a place at once."""
        reserved = 1 if turn.background and self.places > 1 else 0
        return self.running < self.places - reserved

    def _call(self) -> None:
        """Let in whoever is next, as long as there is a place."""
        for one in sorted(self._waiting, key=self._rank):
            if not self.is_free(one.turn):
                continue
            self._waiting.remove(one)
            if not one.called.done():
                self.running += 1
                one.called.set_result(None)

    def _rank(self, one: _Waiting) -> tuple[object, ...]:
        return one.turn.background, self._shares.served(one.turn.app), one.arrival
