"""One request on its way through the session: a thread computes, its events go straight to the event loop.

`reply_parts` splits them into thoughts, text and tool calls: what every protocol writes its stream from.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass

from rekindle.cache.prefix_cache import PromptPrefill
from rekindle.core.reply import PromptProgress, Reply, Reuse, SampledToken, TextPiece
from rekindle.core.request import Request
from rekindle.engine.fairness import Requester, taking
from rekindle.session.session import Session
from rekindle.text.base import Tokenizer
from rekindle.text.reasoning import ParsedReply, ReplyParser
from rekindle.text.tools.parse import CallDelta


@dataclass(frozen=True)
class Planned:
    """The planned reuse of the prompt, known before prefill."""

    reuse: Reuse
    prefill: PromptPrefill | None = None  # None for a stored answer


@dataclass(frozen=True)
class Finished:
    """The whole reply."""

    reply: Reply


Event = Planned | PromptProgress | TextPiece | Finished


@dataclass(frozen=True)
class ChoiceEvent:
    """An event of the n-th choice of a request."""

    choice: int
    event: Event


class ReplyJob:
    """A request being answered. If its client `watches`, the events say how far its prompt is read."""

    def __init__(self, session: Session, request: Request, turn: Requester, *, watches: bool) -> None:
        self._session = session
        self.request = request
        self._turn = turn
        self._watches = watches
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
            for piece in stream.watched(emit) if self._watches else stream:
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


@dataclass(frozen=True)
class ThoughtDelta:
    """A piece of a thought."""

    text: str


PartContent = ThoughtDelta | str | CallDelta | Finished


@dataclass(frozen=True)
class ReplyPart:
    """A part of the n-th reply: a piece of a thought or of the text, a whole tool call, or its end.

    `drawn` are the tokens since the part before, if logprobs were asked for: text that is held back because it may
    begin a stop string or a tool call delays theirs too. `progress` comes before all text, if the client watches.
    """

    choice: int
    part: PartContent
    drawn: tuple[SampledToken, ...] = ()
    progress: PromptProgress | None = None


async def reply_parts(
    events: AsyncGenerator[ChoiceEvent, None], request: Request, tokenizer: Tokenizer, count: int = 1
) -> AsyncGenerator[ReplyPart, None]:
    """The parts of `count` replies to a request."""
    splitters = [_ReplySplitter(request, tokenizer) for _ in range(count)]
    async with aclosing(events):
        async for item in events:
            if isinstance(item.event, (TextPiece, Finished)):
                splitter = splitters[item.choice]
                for part in splitter.add(item.event) if isinstance(item.event, TextPiece) else splitter.end(item.event):
                    yield ReplyPart(item.choice, part, splitter.take_drawn())
            elif isinstance(item.event, PromptProgress):
                yield ReplyPart(item.choice, "", progress=item.event)


class _ReplySplitter:
    """One reply on its way."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._parser = ReplyParser(request, tokenizer)
        self._drawn: list[SampledToken] = []  # not in any part yet
        self._taken = 0

    def add(self, piece: TextPiece) -> list[PartContent]:
        self._drawn += piece.logprobs
        return self._parts(self._parser.add(piece))

    def end(self, finished: Finished) -> list[PartContent]:
        self._drawn = list(finished.reply.logprobs[self._taken :])
        return [*self._parts(self._parser.finish(cut=finished.reply.cut)), finished]

    def _parts(self, parsed: ParsedReply) -> list[PartContent]:
        thought = [ThoughtDelta(parsed.thinking)] if parsed.thinking else []
        return [*thought, *([parsed.content] if parsed.content else []), *parsed.calls]

    def take_drawn(self) -> tuple[SampledToken, ...]:
        drawn, self._drawn = tuple(self._drawn), []
        self._taken += len(drawn)
        return drawn
