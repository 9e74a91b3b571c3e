"""A reply while it comes, split into text and tool calls: what every protocol writes its stream from."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from rekindle.core.reply import SampledToken, TextPiece
from rekindle.core.request import Request
from rekindle.server.job import ChoiceEvent, Finished
from rekindle.text.tools.parse import CallDelta, ParsedText, ToolParser
from rekindle.text.tools.styles import detect_style


@dataclass(frozen=True)
class ReplyPart:
    """A part of the n-th reply: text, a whole tool call, or its end.

    `drawn` are the tokens since the part before, if logprobs were asked for: text that is held back because it may
    begin a stop string or a tool call delays theirs too.
    """

    choice: int
    part: str | CallDelta | Finished
    drawn: tuple[SampledToken, ...] = ()


async def reply_parts(
    events: AsyncGenerator[ChoiceEvent, None], request: Request, template: str, count: int = 1
) -> AsyncGenerator[ReplyPart, None]:
    """The parts of `count` replies to a request, by a model with that chat template."""
    splitters = [_ReplySplitter(request, template) for _ in range(count)]
    async with aclosing(events):
        async for item in events:
            if isinstance(item.event, (TextPiece, Finished)):
                splitter = splitters[item.choice]
                for part in splitter.add(item.event) if isinstance(item.event, TextPiece) else splitter.end(item.event):
                    yield ReplyPart(item.choice, part, splitter.take_drawn())


class _ReplySplitter:
    """One reply on its way."""

    def __init__(self, request: Request, template: str) -> None:
        calls = request.tools and request.tool_choice.mode != "none"
        self._parser = ToolParser(detect_style(template), request.tools) if calls else None
        self._drawn: list[SampledToken] = []  # not in any part yet
        self._taken = 0

    def add(self, piece: TextPiece) -> list[str | CallDelta | Finished]:
        self._drawn += piece.logprobs
        return self._parts(ParsedText(str(piece)) if self._parser is None else self._parser.add(piece))

    def end(self, finished: Finished) -> list[str | CallDelta | Finished]:
        self._drawn = list(finished.reply.logprobs[self._taken :])
        rest = ParsedText() if self._parser is None else self._parser.finish()
        return [*self._parts(rest), finished]

    def _parts(self, parsed: ParsedText) -> list[str | CallDelta | Finished]:
        return [*([parsed.content] if parsed.content else []), *parsed.calls]

    def take_drawn(self) -> tuple[SampledToken, ...]:
        drawn, self._drawn = tuple(self._drawn), []
        self._taken += len(drawn)
        return drawn
