"""One request on its way through the session: a thread computes, the event loop reads its events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from rekindle.core.reply import Reply, Reuse, TextPiece
from rekindle.core.request import Request
from rekindle.engine.fairness import Requester, taking
from rekindle.session.session import Session


@dataclass(frozen=True)
class Planned:
    """The planned reuse of the prompt, known before prefill."""

    reuse: Reuse


@dataclass(frozen=True)
class Finished:
    """The whole reply."""

    reply: Reply


Event = Planned | TextPiece | Finished


@dataclass(frozen=True)
class ChoiceEvent:
    """An event of the n-th choice of a request."""

    choice: int
    event: Event


class ReplyJob:
    """A request being answered. `events` is read once, by one task."""

    def __init__(self, session: Session, request: Request, turn: Requester) -> None:
        self._session = session
        self._request = request
        self._turn = turn
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop within a token."""
        self._cancelled.set()

    async def events(self, threads: Executor) -> AsyncGenerator[Event, None]:
        """The events in order. Raises what the session raises. Closing the generator stops the work."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()

        def emit(event: Event | BaseException) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        running = loop.run_in_executor(threads, self._work, emit)
        try:
            while True:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self.cancel()
            await _ended(running)

    def _work(self, emit: Callable[[Event | BaseException], None]) -> None:
        try:
            with taking(self._turn):
                stream = self._session.answer(self._request, self._cancelled, lambda reuse: emit(Planned(reuse)))
                for piece in stream:
                    emit(piece)
                emit(Finished(stream.reply))
        except BaseException as error:  # noqa: BLE001  (raised again by the reader)
            emit(error)


async def _ended(running: asyncio.Future[None]) -> None:
    """Wait for the thread even if cancelled meanwhile: its slot is not free before."""
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            continue
