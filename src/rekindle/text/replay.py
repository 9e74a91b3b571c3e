"""Where the replies stand in a rendered chat, so that the tokens which the model generated can replace them.

The chat is rendered a second time with marks: in place of the text of a reply (or the name of its first call), of its
thoughts, and behind the message that follows.

    <|start|>assistant\n  <think>THOUGHT</think>MARK  <|end|>  <|start|>user\nAnd now?FOLLOWER<|end|>
                        ^ behind the header         ^ before the first token that ends a reply

What lies between the two places is the reply, however the template writes thoughts and calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rekindle.core.request import Message
from rekindle.core.tools import ToolCall
from rekindle.text.base import Written


@dataclass(frozen=True)
class TextAround:
    """The text of a chat around the replies that were cut out of it: one more than `replies`, their indices."""

    around: tuple[str, ...]
    replies: tuple[int, ...]

    def is_of(self, text: str) -> bool:
        """Whether `text` is this text with something in place of each reply."""
        first, *inner, last = self.around
        if not text.startswith(first) or not text.endswith(last):
            return False
        place, end = len(first), len(text) - len(last)
        for part in inner:
            place = text.find(part, place, end)
            if place < 0:
                return False
            place += len(part)
        return place <= end


class ReplyMarks:
    """Marks for the `written` replies of a chat. `nonce` is in no text: letters and digits, which stay in any JSON."""

    def __init__(self, nonce: str, written: Written) -> None:
        self._nonce, self._written = nonce, written

    def mark(self, messages: Sequence[Message]) -> list[Message]:
        """The chat with marks."""
        marked = list(messages)
        for at, reply in self._written.items():
            extra = dict(messages[at].extra)
            if reply.thinking:
                extra["reasoning_content"] = self._mark("thought", at)
            if calls := extra.get("tool_calls"):
                first = ToolCall.parse(calls[0])
                extra["tool_calls"] = [replace(first, name=self._mark("reply", at)).as_openai(), *calls[1:]]
            content = messages[at].content if calls else self._mark("reply", at)
            marked[at] = Message("assistant", content, extra)
        for at in self._written:
            if at + 1 not in self._written:
                follower = messages[at + 1]
                said = follower.content.rstrip()  # templates may trim the rest
                content = said + self._mark("follower", at) + follower.content[len(said) :]
                marked[at + 1] = replace(follower, content=content)
        return marked

    def names(self, messages: Sequence[Message]) -> dict[str, str]:
        """The names of calls that marks stand for."""
        calls = {at: messages[at].extra.get("tool_calls") for at in self._written}
        return {self._mark("reply", at): ToolCall.parse(made[0]).name for at, made in calls.items() if made}

    def cut_out(
        self, text: str, headers: Mapping[int, str], stops: Sequence[str], names: Mapping[str, str]
    ) -> TextAround:
        """The text around the replies that are found, without marks.

        headers   what stands before each reply; empty if it is unknown: then it begins with its mark
        stops     spellings of the tokens that end a reply
        names     what marks stand for in other places
        """
        cuts = {at: cut for at in sorted(self._written) if (cut := self._cut(text, at, headers[at], stops)) is not None}
        edges = [(0, 0), *cuts.values(), (len(text), len(text))]
        around = [text[a:b] for (_, a), (b, _) in pairwise(edges)]
        meant = {**names, **{self._mark("follower", at): "" for at in self._written}}
        for mark, name in meant.items():
            around = [part.replace(mark, name) for part in around]
        return TextAround(tuple(around), tuple(cuts))

    def _cut(self, text: str, at: int, header: str, stops: Sequence[str]) -> tuple[int, int] | None:
        """Where a reply begins and ends; None if the template does not write it, or not its thoughts."""
        mark = first = text.find(self._mark("reply", at))
        if self._written[at].thinking:
            first = text.find(self._mark("thought", at), 0, max(mark, 0))
        follower = "reply" if at + 1 in self._written else "follower"
        bound = text.find(self._mark(follower, at + (follower == "reply")), max(mark, 0))
        begins = text.rfind(header, 0, max(first, 0))
        ends = [place for stop in stops if (place := text.find(stop, mark, bound)) >= 0]
        if min(mark, first, bound, begins) < 0 or not ends:
            return None
        return begins + len(header), min(ends)

    def _mark(self, kind: str, at: int) -> str:
        return f"{self._nonce}{kind}{at}x"
