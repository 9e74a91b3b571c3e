"""The admission queue: which request is answered next.

A fixed number of requests is answered at the same time; the others wait. Foreground goes before background, then the
app that was served least, then first come, first served. Background requests never take the last free slot.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rekindle.engine.fairness import FairShare, Requester
from rekindle.server.errors import ApiError

_MEASURES = 0.2  # weight of the newest sample in the average
_FIRST_SECONDS = 2.0  # assumed duration of a request before any was measured


@dataclass(eq=False)
class _Waiting:
    turn: Requester
    arrival: int
    called: asyncio.Future[None]


class AdmissionQueue:
    """The requests of one server. Used by one event loop."""

    def __init__(self, places: int, max_waiting: int, shares: FairShare) -> None:
        self.places = places
        self._max_waiting = max_waiting
        self._shares = shares
        self._waiting: list[_Waiting] = []
        self._arrivals = itertools.count()
        self._request_seconds = _FIRST_SECONDS
        self.running = 0
        self.refused = 0

    @property
    def waiting(self) -> int:
        """The number of queued requests."""
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, turn: Requester) -> AsyncIterator[None]:
        """Wait for a slot and hold it. Raises `ApiError` 429 if the queue is full."""
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

    async def _stand(self, turn: Requester) -> None:
        if self.is_free(turn):  # then those that wait may not take this slot
            self.running += 1
            return
        if len(self._waiting) >= self._max_waiting:
            self.refused += 1
            seconds = math.ceil(self._request_seconds * (len(self._waiting) + 1) / self.places)
            raise ApiError(
                429,
                f"The queue is full ({len(self._waiting)} waiting). Try again in {seconds} s, or start the server "
                "with a longer --queue.",
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
            elif own.called.done() and not own.called.cancelled():  # admitted and cancelled at the same time
                self.running -= 1
                self._call()
            raise

    def is_free(self, turn: Requester) -> bool:
        """Whether a slot is free for it now."""
        reserved = 1 if turn.background and self.places > 1 else 0
        return self.running < self.places - reserved

    def _call(self) -> None:
        """Admit the next requests while slots are free."""
        for one in sorted(self._waiting, key=self._rank):
            if not self.is_free(one.turn):
                continue
            self._waiting.remove(one)
            if not one.called.done():
                self.running += 1
                one.called.set_result(None)

    def _rank(self, one: _Waiting) -> tuple[object, ...]:
        return one.turn.background, self._shares.served(one.turn.app), one.arrival
