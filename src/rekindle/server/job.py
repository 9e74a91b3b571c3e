"""One request on its way through the session: a thread computes, its events go straight to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from rekindle.cache.prefix_cache import PromptPrefill
from rekindle.core.reply import Reply, Reuse, TextPiece
from rekindle.core.request import Request
from rekindle.engine.fairness import Requester, taking
from rekindle.session.session import Session


@dataclass(frozen=True)
class Planned:
    """The planned reuse of the prompt, known before prefill."""

    reuse: Reuse
    prefill: PromptPrefill | None = None  # None for a stored answer


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
    """A request being answered."""

    def __init__(self, session: Session, request: Request, turn: Requester) -> None:
        self._session = session
        self.request = request
        self._turn = turn
        self._cancelled = threading.Event()
        self._time_is_up = threading.Event()

    def cancel(self) -> None:
        """Stop within a token."""
        self._cancelled.set()

    def end(self) -> None:
        """End the reply with what it has, within a token."""
        self._time_is_up.set()

    async def run(self, threads: Executor, on_event: Callable[[Event], None]) -> None:
        """Compute the reply in a thread; `on_event` is called on the event loop. Cancelling stops the work.

        Raises what the session raises, after the last event.
        """
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(on_event, event)

        running = loop.run_in_executor(threads, self._work, emit)
        try:
            await asyncio.shield(running)
        finally:
            self.cancel()
            await _ended(running)

    def _work(self, emit: Callable[[Event], None]) -> None:
        with taking(self._turn):
            planned = lambda prefill, reuse: emit(Planned(reuse, prefill))  # noqa: E731
            stream = self._session.answer(self.request, self._cancelled, planned, self._time_is_up)
            for piece in stream:
                emit(piece)
            emit(Finished(stream.reply))


async def _ended(running: asyncio.Future[None]) -> None:
    """Wait for the thread even if cancelled meanwhile: its slot is not free before."""
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue
    if not running.cancelled():
        running.exception()  # marked as seen
