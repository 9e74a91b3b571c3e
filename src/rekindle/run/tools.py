"""A model's reply, told apart while it arrives: plain text, and calls of tools.

    reply     Let me look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
    content   Let me look.
    calls                             weather, {"city": "Oslo"}

What is not a sound call of a known tool stays text, markers and all: nothing is lost, nothing raises, and how the
reply was cut into pieces makes no difference. Only white space beside a call is left out. JSON is not repaired: a call
with a trailing comma or single quotes is text. A closing marker may be missing.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.core.tools import Tool, ToolCall
from rekindle.run.callread import CallReader, Found
from rekindle.run.toolgrammar import call_grammar
from rekindle.run.toolstyle import ToolStyle, style_of

__all__ = ["CallDelta", "Parsed", "ToolParser", "ToolStyle", "call_grammar", "style_of"]

_GAP = re.compile(r"\s*(?:[;,]\s*)?")  # between two calls
_SPACE = re.compile(r"\s*")
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A whole call, the `index`-th of its reply. Calls come at once: half a call might turn out to be none."""

    index: int
    call: ToolCall

    def as_openai(self) -> dict[str, Any]:
        """The delta as a streamed reply has it."""
        return {"index": self.index, **self.call.as_openai()}


@dataclass(frozen=True, slots=True)
class Parsed:
    """What became certain: text, and calls. Which of them came first is not said."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


def new_call_id() -> str:
    """A fresh id; nine letters and digits, because some templates refuse any other."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class ToolParser:
    """Tells text and calls apart. Give it the pieces of a reply in order, then `finish`."""

    def __init__(self, style: ToolStyle, tools: Sequence[Tool], new_id: Callable[[], str] = new_call_id) -> None:
        self._reader = CallReader(style, tools)
        self._new_id = new_id
        self._held = ""  # not yet certain
        self._trying = True  # a call may begin at the first letter held; else one is searched for
        self._bare = True  # it needs no marker: the reply begins here, or a call stands before it
        self._closes: tuple[str, ...] = ()  # what may close the call that stands before; none does, none stands there
        self._after_call = False
        self._said = ""  # the last letter given out as text
        self._count = 0

    def add(self, text: str) -> Parsed:
        """What became certain with this piece; the possible beginning of a call waits."""
        self._held += text
        return self._advance(final=False)

    def finish(self) -> Parsed:
        """What is left. A call whose closing marker never came is a call; half a call is text."""
        return self._advance(final=True)

    @property
    def count(self) -> int:
        """How many calls there were so far."""
        return self._count

    def _advance(self, *, final: bool) -> Parsed:
        content: list[str] = []
        calls: list[CallDelta] = []
        while self._held:
            before = len(self._held), self._trying
            if self._trying:
                self._try(content, calls, final=final)
            else:
                self._search(content, final=final)
            if before == (len(self._held), self._trying):
                break
        return Parsed("".join(content), tuple(calls))

    def _try(self, content: list[str], calls: list[CallDelta], *, final: bool) -> None:
        """Read a call at the first letter held, if there is one; wait if that cannot be told yet."""
        if self._after_call and self._close(final=final):
            return
        lead = _leading(_GAP if self._after_call else _SPACE, self._held)
        if lead == len(self._held) and not final:
            return
        if lead == len(self._held) and self._after_call and not self._held.strip():
            self._held = ""  # white space behind the last call
            return
        outcome = self._reader.read(self._held, lead, bare=self._bare, final=final)
        if isinstance(outcome, Found):
            for written in outcome.calls:
                calls.append(CallDelta(self._count, ToolCall(self._new_id(), written.name, written.arguments)))
                self._count += 1
            self._held = self._held[outcome.stop :]
            self._trying = self._bare = self._after_call = True
            self._closes = outcome.closes
        elif outcome == "refused":
            if self._after_call and not self._said:
                space = _leading(_SPACE, self._held)
                self._held, lead = self._held[space:], lead - space
            # Past the marker, so that it is not found again; a call may well begin inside of what was none.
            self._give(content, lead + max(self._reader.marker_length, 1))
            self._trying = self._bare = self._after_call = False

    def _close(self, *, final: bool) -> bool:
        """Drop the marker that closes a call; True while it cannot be told whether there is one."""
        at = _leading(_SPACE, self._held)
        rest = self._held[at:]
        found = next((mark for mark in self._closes if rest.startswith(mark)), None)
        if found is not None:
            self._held = rest[len(found) :]
            return True
        return not final and any(mark.startswith(rest) for mark in self._closes)

    def _search(self, content: list[str], *, final: bool) -> None:
        """Give out text up to where a call might begin."""
        at = self._reader.search(self._held, self._said)
        edge = len(self._held) if at is None else at
        partial = 0 if final else self._reader.held_back(self._held)
        if len(self._held) - partial < edge:  # a marker that begins earlier may still come
            at, edge = None, len(self._held) - partial
        # White space before a call goes with it, so it waits until it is known to stand before none.
        self._give(content, edge if final and at is None else len(self._held[:edge].rstrip()))
        self._trying = at is not None

    def _give(self, content: list[str], length: int) -> None:
        given, self._held = self._held[:length], self._held[length:]
        content.append(given)
        self._said = given[-1:] or self._said


def _leading(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.match(text)
    return 0 if found is None else found.end()


def with_calls(reply: Reply, request: Request, template: str) -> Reply:
    """The reply with the calls in its text told apart, if the request allows any."""
    if not request.tools or request.tool_choice.mode == "none":
        return reply
    parser = ToolParser(style_of(template), request.tools)
    first, rest = parser.add(reply.text), parser.finish()
    calls = tuple(delta.call for delta in (*first.calls, *rest.calls))
    return replace(reply, text=first.content + rest.content, tool_calls=calls)
