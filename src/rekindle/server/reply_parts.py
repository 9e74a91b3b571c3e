"""A reply while it comes, split into thoughts, text and tool calls: what every protocol writes its stream from."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from rekindle.core.reply import SampledToken, TextPiece
from rekindle.core.request import Request
from rekindle.server.job import ChoiceEvent, Finished
from rekindle.text.base import Tokenizer
from rekindle.text.reasoning import ParsedReply, ReplyParser
from rekindle.text.tools.parse import CallDelta


@dataclass(frozen=True)
class ThoughtDelta:
    """A piece of a thought."""

    text: str


PartContent = ThoughtDelta | str | CallDelta | Finished


@dataclass(frozen=True)
class ReplyPart:
    """A part of the n-th reply: a piece of a thought or of the text, a whole tool call, or its end.

    `drawn` are the tokens since the part before, if logprobs were asked for: text that is held back because it may
    begin a stop string or a tool call delays theirs too.
    """

    choice: int
    part: PartContent
    drawn: tuple[SampledToken, ...] = ()


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
