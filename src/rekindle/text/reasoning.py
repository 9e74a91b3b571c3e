"""Splitting a reply into thoughts, text and tool calls while it arrives.

    reply      <think>\nOslo, so I look.\n</think>\n\nLet me look.<tool_call>...</tool_call>
    thinking   Oslo, so I look.
    content                                          Let me look.

Line ends around a thought belong to its markers: templates write them again. A thought that never ends is all of the
reply. What thoughts say about tool calls is no call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rekindle.core.reply import Reply
from rekindle.core.request import Message, Request, Think
from rekindle.text.base import Tokenizer
from rekindle.text.detokenize import held_back
from rekindle.text.tools.parse import CallDelta, ParsedText, ToolParser
from rekindle.text.tools.styles import detect_style


@dataclass(frozen=True, slots=True)
class ThoughtStyle:
    """How a family of models marks its thoughts.

    opens, closes   markers around a thought
    drops           markers in the rest of a reply, which are no text
    tokens          spellings of control tokens in all of these and in tool calls: replies show them only where named
    anywhere        thoughts may begin anywhere; else only at the start of a reply, as others may write the marker
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    drops: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    anywhere: bool = False


THINK = ThoughtStyle(("<think>",), ("</think>",), tokens=("<think>", "</think>"))
MISTRAL_THINK = ThoughtStyle(("[THINK]",), ("[/THINK]",), tokens=("[THINK]", "[/THINK]"))
GEMMA_CHANNEL = ThoughtStyle(
    ("<|channel>thought",),
    ("<channel|>",),
    tokens=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    anywhere=True,
)
_TURN = "<|start|>assistant"
_SHOWN = ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>")
HARMONY_CHANNEL = ThoughtStyle(
    (f"{_TURN}<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>"),
    ("<|end|>",),
    (*(_TURN + shown for shown in _SHOWN), *_SHOWN, "<|end|>"),
    tokens=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
    anywhere=True,
)
_STYLES = (
    ("<|channel|>", HARMONY_CHANNEL), ("<|channel>", GEMMA_CHANNEL), ("[THINK]", MISTRAL_THINK), ("<think>", THINK),
    ("</think>", THINK),
)  # fmt: skip


def detect_thoughts(template: str) -> ThoughtStyle | None:
    """How the model of a chat template marks its thoughts; None if the template knows of none."""
    return next((style for mark, style in _STYLES if mark in template), None)


def reply_markers(tokenizer: Tokenizer) -> dict[int, str]:
    """The control tokens that structure a model's replies, with their spellings. `decode` leaves them out."""
    style = detect_thoughts(tokenizer.template)
    found = {} if style is None else {tokenizer.token_of(mark): mark for mark in style.tokens}
    return {token: mark for token, mark in found.items() if token is not None and not tokenizer.decode([token])}


class ThoughtParser:
    """Splits a reply into thoughts and the rest. Call `add` for each piece in order, then `finish`."""

    def __init__(self, style: ThoughtStyle, *, begun: bool) -> None:
        """`begun`: the prompt ends inside a thought."""
        self._style = style
        self._thinking = begun
        self._starting = True  # nothing but white space so far
        self._held = ""
        self._trims = begun  # line ends at this place belong to a marker

    def add(self, text: str) -> tuple[str, str]:
        """The thought and the text that became certain; what may begin a marker is held back."""
        self._held += text
        return self._advance(final=False)

    def finish(self) -> tuple[str, str]:
        """The rest."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> tuple[str, str]:
        thought: list[str] = []
        said: list[str] = []
        while True:
            piece, found = self._next(final=final)
            (thought if self._thinking else said).append(piece)
            if found is None:
                return "".join(thought), "".join(said)
            self._thinking = found in self._style.opens
            self._trims = True

    def _next(self, *, final: bool) -> tuple[str, str | None]:
        """The text before the next marker, or before what may be one, and the marker."""
        if self._trims:
            self._held = self._held.lstrip("\n")
            self._trims = not self._held
        marks = self._marks()
        places = [(at, -len(mark), mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if places:
            at, _, mark = min(places)
            piece, self._held = self._held[:at], self._held[at + len(mark) :]
            self._starting = False
            ends = self._thinking or mark in self._style.opens
            return (piece.rstrip("\n") if ends else piece), mark
        cut = len(self._held) - (0 if final else held_back(self._held, marks))
        if self._thinking or not final:
            cut = len(self._held[:cut].rstrip("\n"))  # they may belong to a marker
        piece, self._held = self._held[:cut], "" if final else self._held[cut:]
        self._starting = self._starting and not piece.strip()
        return piece, None

    def _marks(self) -> tuple[str, ...]:
        if self._thinking:
            return self._style.closes
        opens = self._style.anywhere or (self._starting and self._may_open())
        return (*(self._style.opens if opens else ()), *self._style.drops)

    def _may_open(self) -> bool:
        """Whether the reply begins with a marker, or with a part of one."""
        start = self._held.lstrip()
        return any(start.startswith(mark) or mark.startswith(start) for mark in self._style.opens)


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """Thoughts, text and calls that became certain, in this order."""

    thinking: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ReplyParser:
    """Splits the reply to a request. Call `add` for each piece in order, then `finish`."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        chat = isinstance(request.prompt, tuple) and isinstance(request.prompt[0], Message)
        style = detect_thoughts(tokenizer.template) if chat else None
        self._thoughts = None if style is None else ThoughtParser(style, begun=_is_begun(style, request, tokenizer))
        tools = [tool for tool in request.tools if request.tool_choice.permits(tool)]
        self._forced = request.tool_choice.forces
        self._calls = ToolParser(detect_style(tokenizer.template), tools) if tools else None

    def add(self, text: str) -> ParsedReply:
        """What became certain with this piece."""
        thought, said = ("", text) if self._thoughts is None else self._thoughts.add(text)
        return _parsed(thought, ParsedText(said) if self._calls is None else self._calls.add(said))

    def finish(self, *, cut: bool = False) -> ParsedReply:
        """The rest; `cut`: the reply ended before the model was done, so half a call is no text."""
        thought, said = ("", "") if self._thoughts is None else self._thoughts.finish()
        if self._calls is None:
            return ParsedReply(thought, said)
        first = self._calls.add(said)
        rest = self._calls.finish(cut=cut, forced=self._forced)
        return ParsedReply(thought, first.content + rest.content, (*first.calls, *rest.calls))


def _is_begun(style: ThoughtStyle, request: Request, tokenizer: Tokenizer) -> bool:
    """Whether the prompt of a chat ends inside a thought."""
    text = request.continued_text
    if text is not None:
        return max(map(text.rfind, style.opens)) > max(map(text.rfind, style.closes))
    free = request.grammar is None and not request.tool_choice.forces  # else the first token is no thought
    return free and request.add_generation_prompt and tokenizer.begins_thought(request.think)


def _parsed(thought: str, rest: ParsedText) -> ParsedReply:
    return ParsedReply(thought, rest.content, rest.calls)


def parse_reply(reply: Reply, request: Request, tokenizer: Tokenizer) -> Reply:
    """The reply with the thoughts and calls in its text parsed."""
    parser = ReplyParser(request, tokenizer)
    first, rest = parser.add(reply.text), parser.finish(cut=reply.cut)
    calls = tuple(delta.call for delta in (*first.calls, *rest.calls))
    text, thinking = first.content + rest.content, first.thinking + rest.thinking
    return replace(reply, text=text, thinking=thinking, tool_calls=calls)


_READS = {name: re.compile(rf"[.'\"]{name}\b(?!_)") for name in ("thinking", "reasoning")}


def thought_for_template(message: dict[str, object], template: str) -> dict[str, object]:
    """A message whose `reasoning_content` also has the name that the template reads.

    One family refuses a thought beside text in a message with calls: there the text stays.
    """
    thought = message.get("reasoning_content")
    if not thought:
        return message
    names = [name for name, reads in _READS.items() if reads.search(template)]
    if "thinking" in names and message.get("tool_calls") and message.get("content"):
        names.remove("thinking")
    return {**message, **dict.fromkeys(names, thought)}


_SWITCH = re.compile(r"(?<![.'\"\w])(enable_thinking|thinking|reasoning_effort)\b")


def has_think_switch(template: str) -> bool:
    """Whether a template reads one of the variables that say whether to think."""
    return _SWITCH.search(template) is not None


def think_variables(think: Think | None) -> dict[str, object]:
    """The variables of templates for `think`, by the names that families of models have for it."""
    if think is None:
        return {}
    effort = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {"enable_thinking": think is not False, "thinking": think is not False, **effort}
