"""One request on its way through the session: a thread that computes, and an event loop that listens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from rekindle.core.reply import Piece, Reply, Reuse
from rekindle.core.request import Request
from rekindle.run.session import Session
from rekindle.run.turn import Turn, taking


@dataclass(frozen=True)
class Planned:
    """What the prompt will be spared, known before anything of it is computed."""

    reuse: Reuse


@dataclass(frozen=True)
class Finished:
    """The whole reply."""

    reply: Reply


Event = Planned | Piece | Finished


class Job:
    """A request being answered. `events` is read once, by one task."""

    def __init__(self, session: Session, request: Request, turn: Turn) -> None:
        self._session = session
        self._request = request
        self._turn = turn
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop within a token."""
        self._cancelled.set()

    async def events(self, threads: Executor) -> AsyncGenerator[Event, None]:
        """What happens, in order. Raises what the session raises. Whoever stops reading stops the work."""
        loop = asyncio.get_running_loop()
        happened: asyncio.Queue[Event | BaseException] = asyncio.Queue()

        def tell(event: Event | BaseException) -> None:
            loop.call_soon_threadsafe(happened.put_nowait, event)

        running = loop.run_in_executor(threads, self._work, tell)
        try:
            while True:
                event = await happened.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self.cancel()
            await _ended(running)

    def _work(self, tell: Callable[[Event | BaseException], None]) -> None:
        try:
            with taking(self._turn):
                stream = self._session.answer(self._request, self._cancelled, lambda reuse: tell(Planned(reuse)))
                for piece in stream:
                    tell(piece)
                tell(Finished(stream.reply))
        except BaseException as error:  # noqa: BLE001  (raised again by whoever listens)
            tell(error)


async def _ended(running: asyncio.Future[None]) -> None:
    """Wait for the thread even if one is cancelled meanwhile: its place is not free before."""
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            continue
