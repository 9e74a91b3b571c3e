"""Splitting a reply into plain text and tool calls while it arrives.

    reply     Let me look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
    content   Let me look.
    calls                             weather, {"city": "Oslo"}

What is not a valid call of a known tool stays text, with its markers: nothing is lost, nothing raises, and the result
does not depend on how the reply is cut into pieces. Only white space beside a call is dropped. JSON is not repaired: a
call with a trailing comma or single quotes is text. A closing marker may be missing. `JsonScanner` finds where a value
in a growing text ends.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from rekindle.core.tools import Tool, ToolCall
from rekindle.text.tools.styles import ToolStyle

_IN_STRING = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)
_OUTSIDE = re.compile(r"[\s\w:,+\-.]*")
_DEEPEST = 64  # levels of nesting; JSON parsers give up at a few hundred
_CLOSING = {"{": "}", "[": "]"}
_JSON_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as a model wrote it: the name of a known tool and the JSON text of its arguments."""

    name: str
    arguments: str


class JsonScanner:
    """Finds the end of a JSON object or list at `start` of a growing text, reading each character once."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._open: list[str] = []  # the closing brackets expected, the innermost last
        self._in_string = False
        self.end: int | None = None
        self.broken = False

    def read(self, text: str) -> None:
        """Read on: afterwards `end` is set, or `broken` is, or more text is needed."""
        while self.end is None and not self.broken:
            reach = (_IN_STRING if self._in_string else _OUTSIDE).match(text, self._at)
            assert reach is not None
            self._at = reach.end()
            if self._at >= len(text) or (self._in_string and text[self._at] == "\\"):
                return
            self._enter_or_leave(text[self._at])
            self._at += 1
            if not self._open and not self.broken:
                self.end = self._at

    def _enter_or_leave(self, letter: str) -> None:
        if letter == '"':
            self._in_string = not self._in_string
        elif letter in _CLOSING and len(self._open) < _DEEPEST:
            self._open.append(_CLOSING[letter])
        elif self._open and letter == self._open[-1]:
            self._open.pop()
        else:
            self.broken = True


def parse_calls(text: str, known: Container[str], *, announced: bool) -> list[RawCall] | None:
    """The calls in a JSON value; None if it is not JSON, not a call, or names an unknown tool.

    `announced`: a marker introduced the call, so it may omit its arguments.
    """
    if not is_json(text):
        return None
    if text.startswith("["):
        found = [parse_calls(item, known, announced=announced) for item in _items(text)]
        return [call for calls in found for call in calls or ()] if found and all(found) else None
    if not text.startswith("{"):
        return None
    members = _members(text)
    for wrapper in ("tool_calls", "tool_call", "function"):
        if members.get(wrapper, "").startswith(("{", "[")):
            return parse_calls(members[wrapper], known, announced=announced)
    name = next((json.loads(members[key]) for key in ("name", "tool_name", "function") if key in members), None)
    if not isinstance(name, str) or name not in known:
        return None
    given = next((members[key] for key in ("arguments", "parameters") if key in members), None)
    arguments = parse_arguments("{}" if given is None and announced else given)
    return None if arguments is None else [RawCall(name, arguments)]


def parse_arguments(text: str | None) -> str | None:
    """The JSON text of an object, which models also write as a JSON string, null or ""; None for anything else."""
    if text is not None and text.startswith('"'):
        text = str(json.loads(text)).strip()
    if text is None or text in ("null", ""):
        return None if text is None else "{}"
    return text if text.startswith("{") and is_json(text) else None


def is_json(text: str) -> bool:
    """Whether a text is one JSON value, strictly, in valid Unicode."""
    try:
        json.loads(text, parse_constant=_refuse)
        text.encode("utf-8")
    except (ValueError, RecursionError):
        return False
    return True


def _members(text: str) -> dict[str, str]:
    """The members of an object, each value as its own text."""
    members: dict[str, str] = {}

    def read(at: int) -> int:
        key, at = _decode(text, at)
        start = _skip_space(text, _skip_space(text, at) + 1)
        _, stop = _decode(text, start)
        members[key] = text[start:stop]
        return stop

    _walk(text, read)
    return members


def _items(text: str) -> list[str]:
    """The items of a list, each as its own text."""
    items: list[str] = []

    def read(at: int) -> int:
        _, stop = _decode(text, at)
        items.append(text[at:stop])
        return stop

    _walk(text, read)
    return items


def _walk(text: str, read: Callable[[int], int]) -> None:
    """Call `read` for every element between the brackets of valid JSON."""
    at = _skip_space(text, 1)
    while text[at] not in "}]":
        at = _skip_space(text, read(at))
        if text[at] == ",":
            at = _skip_space(text, at + 1)


def _decode(text: str, at: int) -> tuple[Any, int]:
    return json.JSONDecoder().raw_decode(text, at)


def _skip_space(text: str, at: int) -> int:
    space = _JSON_SPACE.match(text, at)
    return at if space is None else space.end()


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON.")


_GAP = re.compile(r"\s*(?:[;,]\s*)?")  # between two calls
_SPACE = re.compile(r"\s*")
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The `index`-th call of a reply. Calls are never split: half a call might turn out to be text."""

    index: int
    call: ToolCall

    def as_openai(self) -> dict[str, Any]:
        return {"index": self.index, **self.call.as_openai()}


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Text and calls that became certain. Their order relative to each other is not recorded."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


def new_call_id() -> str:
    """A new call id: nine letters and digits, because some templates refuse any other."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class ToolParser:
    """Splits a reply into text and calls. Call `add` for each piece in order, then `finish`."""

    def __init__(self, style: ToolStyle, tools: Sequence[Tool], new_id: Callable[[], str] = new_call_id) -> None:
        self._reader = CallReader(style, tools)
        self._new_id = new_id
        self._held = ""  # not yet certain
        self._trying = True  # a call may begin at the first character held; else search for one
        self._bare = True  # a call here needs no marker: the reply begins here, or a call precedes it
        self._closes: tuple[str, ...] = ()  # markers that may close the preceding call
        self._after_call = False
        self._last_character = ""  # of the text given out so far
        self._count = 0

    def add(self, text: str) -> ParsedText:
        """What became certain with this piece; the possible start of a call is held back."""
        self._held += text
        return self._advance(final=False)

    def finish(self, *, cut: bool = False, forced: bool = False) -> ParsedText:
        """The rest. A call without its closing marker is a call; half a call is text.

        Where the reply was `cut`, half a call is dropped: one behind a marker, or any if it was `forced`.
        """
        if cut and self._begins_call(forced=forced):
            self._held = ""
        return self._advance(final=True)

    def _begins_call(self, *, forced: bool) -> bool:
        """Whether what is held back begins a call that is not complete, or ends the one before."""
        rest = self._held.strip()
        if self._after_call and any(mark.startswith(rest) for mark in self._closes):
            return True
        if (len(rest) > 1 or self._after_call) and rest and self._reader.held_back(rest) == len(rest):
            return True  # a part of a marker
        if not rest or not self._trying:
            return False
        lead = _leading(_GAP if self._after_call else _SPACE, self._held)
        waits = not isinstance(self._reader.read(self._held, lead, bare=self._bare, final=True), ReadCalls)
        return waits and (forced or self._reader.marker_length > 0)

    @property
    def count(self) -> int:
        """Number of calls so far."""
        return self._count

    def _advance(self, *, final: bool) -> ParsedText:
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
        return ParsedText("".join(content), tuple(calls))

    def _try(self, content: list[str], calls: list[CallDelta], *, final: bool) -> None:
        """Read a call at the first character held; wait if more text is needed to tell."""
        if self._after_call and self._close(final=final):
            return
        lead = _leading(_GAP if self._after_call else _SPACE, self._held)
        if lead == len(self._held) and not final:
            return
        if lead == len(self._held) and self._after_call and not self._held.strip():
            self._held = ""  # white space behind the last call
            return
        outcome = self._reader.read(self._held, lead, bare=self._bare, final=final)
        if isinstance(outcome, ReadCalls):
            for written in outcome.calls:
                calls.append(CallDelta(self._count, ToolCall(self._new_id(), written.name, written.arguments)))
                self._count += 1
            self._held = self._held[outcome.stop :]
            self._trying = self._bare = self._after_call = True
            self._closes = outcome.closes
        elif outcome == "refused":
            if self._after_call and not self._last_character:
                space = _leading(_SPACE, self._held)
                self._held, lead = self._held[space:], lead - space
            # Skip the marker, so that it is not found again; a call may still begin inside the refused text.
            self._give(content, lead + max(self._reader.marker_length, 1))
            self._trying = self._bare = self._after_call = False

    def _close(self, *, final: bool) -> bool:
        """Drop a closing marker; True if one was dropped or may still come."""
        at = _leading(_SPACE, self._held)
        rest = self._held[at:]
        found = next((mark for mark in self._closes if rest.startswith(mark)), None)
        if found is not None:
            self._held = rest[len(found) :]
            return True
        return not final and any(mark.startswith(rest) for mark in self._closes)

    def _search(self, content: list[str], *, final: bool) -> None:
        """Give out text up to where a call may begin."""
        at = self._reader.search(self._held, self._last_character)
        edge = len(self._held) if at is None else at
        partial = 0 if final else self._reader.held_back(self._held)
        if len(self._held) - partial < edge:  # a marker that begins earlier may still come
            at, edge = None, len(self._held) - partial
        # White space before a call is dropped, so hold it until it is clear that no call follows.
        self._give(content, edge if final and at is None else len(self._held[:edge].rstrip()))
        self._trying = at is not None

    def _give(self, content: list[str], length: int) -> None:
        given, self._held = self._held[:length], self._held[length:]
        content.append(given)
        self._last_character = given[-1:] or self._last_character


def _leading(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.match(text)
    return 0 if found is None else found.end()


_FENCES = ("```json", "```tool_call", "```")
_FIRST_KEYS = (
    "name", "arguments", "parameters", "type", "function", "id", "tool_name", "tool_call", "tool_calls",
    "tool_call_id",
)  # fmt: skip
_BEGINNING = re.compile(r'\[?\s*\{\s*"(?P<key>[^"\\]*)(?P<over>")?(?:\s*:\s*"(?P<value>[^"\\]*)(?P<known>")?)?')
_BEFORE_KEY = re.compile(r"\[?\s*(?:\{\s*)?")
_CALL_ID = re.compile(r"[A-Za-z0-9]{0,9}")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_QUOTE, _BARE_KEY = '<|"|>', re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
_FUNCTION, _FUNCTION_END = "<function=", "</function>"


@dataclass(frozen=True, slots=True)
class ReadCalls:
    """Calls read from the text up to `stop`, and the markers that may close them."""

    calls: tuple[RawCall, ...]
    stop: int
    closes: tuple[str, ...]


Outcome = ReadCalls | Literal["waiting", "refused"]


class CallReader:
    """Reads calls of `tools` in one style at a known place of a growing text."""

    def __init__(self, style: ToolStyle, tools: Sequence[Tool]) -> None:
        self._style = style
        self._tools = {tool.name: tool for tool in tools}
        self._scanner: tuple[int, JsonScanner] | None = None
        bare = [f"{name}{mark}" for name in self._tools for mark in ("{", *style.joints)] if style.anywhere else []
        self._marks = (*style.opens, *bare, *(("[{",) if style.anywhere else ()))
        self._beginnings = {mark[:length] for mark in self._marks for length in range(1, len(mark))}
        self._longest = max(map(len, self._beginnings), default=0)
        # Not inside a longer word that ends with the name of a tool.
        inside = [r"(?<![\w-])" * (mark in bare) + re.escape(mark) for mark in self._marks]
        self._inside = re.compile("|".join(inside) or r"(?!)")
        self.marker_length = 0  # of the marker at which the last `read` began

    def search(self, text: str, before: str) -> int | None:
        """Where a call may begin in a text that follows the character `before`."""
        found = self._inside.search(before + text, len(before))
        return None if found is None else found.start() - len(before)

    def held_back(self, text: str) -> int:
        """Number of characters at the end of the text that may begin a marker."""
        lengths = range(min(len(text), self._longest), 0, -1)
        return next((length for length in lengths if text[-length:] in self._beginnings), 0)

    def read(self, text: str, at: int, *, bare: bool, final: bool) -> Outcome:
        """Read a call at `at`; `bare`: it needs no marker; `final`: no more text follows."""
        start, opened, last, closes = at, False, "", self._style.closes
        self.marker_length = 0
        while (mark := self._mark(text, at, final=final)) is not None:
            if mark == "waiting":
                return "waiting"
            at, opened, last = _skip(text, at + len(mark)), opened or mark not in _FENCES, mark
            closes = (*closes, "```") if mark in _FENCES else closes
            self.marker_length = self.marker_length or (len(mark) if opened else 0)
        bare = bare or any(text.startswith(mark, start) for mark in self._marks)
        outcome: Outcome = "refused"
        if at == len(text):
            outcome = "waiting"
        elif last == _FUNCTION and self._style.form == "xml":
            outcome = self._xml(text, at, final=final)
        elif opened and self._style.form == "bare-keys":
            outcome = self._bare_keys(text, at, final=final)
        elif opened or bare:
            outcome = self._body(text, at, opened=opened)
        if outcome == "waiting" and final:
            outcome = "refused"
        if outcome != "waiting":
            self._scanner = None
        return ReadCalls(outcome.calls, outcome.stop, closes) if isinstance(outcome, ReadCalls) else outcome

    def _mark(self, text: str, at: int, *, final: bool) -> str | None:
        marks = (*self._style.opens, *_FENCES)
        if at < len(text) and not final and any(m.startswith(text[at:]) and m != text[at:] for m in marks):
            return "waiting"
        return next((mark for mark in marks if text.startswith(mark, at)), None)

    def _body(self, text: str, at: int, *, opened: bool) -> Outcome:
        if text[at] in "{[":
            looks = "call" if opened else self._looks_like_call(text, at)
            return self._objects(text, at, opened=opened) if looks == "call" else looks
        return self._named(text, at) if self._style.form != "object" else "refused"

    def _looks_like_call(self, text: str, at: int) -> Literal["call", "waiting", "refused"]:
        """Whether JSON without a marker begins like a call: other JSON is given out at once."""
        found = _BEGINNING.match(text, at)
        if found is None:
            space = _BEFORE_KEY.match(text, at)
            return "waiting" if space is not None and space.end() == len(text) else "refused"
        key, value = found["key"], found["value"]
        if not found["over"]:
            return "waiting" if found.end() == len(text) and _begins_any(key, _FIRST_KEYS) else "refused"
        if key not in _FIRST_KEYS:
            return "refused"
        if key not in ("name", "tool_name"):
            return "call"
        if value is None:
            return "waiting" if re.fullmatch(r"\s*:?\s*", text[found.end() :]) else "refused"
        if not found["known"]:
            return "waiting" if found.end() == len(text) and _begins_any(value, self._tools) else "refused"
        return "call" if value in self._tools else "refused"

    def _objects(self, text: str, at: int, *, opened: bool) -> Outcome:
        stop = self._end(text, at)
        if not isinstance(stop, int):
            return stop
        calls = parse_calls(text[at:stop], self._tools, announced=opened)
        return "refused" if calls is None else ReadCalls(tuple(calls), stop, ())

    def _named(self, text: str, at: int) -> Outcome:
        """`name`, joints or an id, and an object."""
        waiting = False
        for name in sorted(self._tools, key=len, reverse=True):
            if text.startswith(name, at):
                place = self._arguments_at(text, at + len(name))
                if isinstance(place, int):
                    stop = self._end(text, place)
                    if not isinstance(stop, int):
                        return stop
                    arguments = text[place:stop]
                    return ReadCalls((RawCall(name, arguments),), stop, ()) if is_json(arguments) else "refused"
                waiting = waiting or place == "waiting"
            waiting = waiting or name.startswith(text[at:])
        return "waiting" if waiting else "refused"

    def _arguments_at(self, text: str, at: int) -> int | Literal["waiting", "refused"]:
        id_allowed = self._style.call_ids
        while (at := _skip(text, at)) < len(text):
            if text[at] == "{":
                return at
            joint = next((mark for mark in self._style.joints if text.startswith(mark, at)), None)
            if joint is not None:
                at += len(joint)
                continue
            if _begins_any(text[at:], self._style.joints):
                return "waiting"
            letters = _CALL_ID.match(text, at)
            if not id_allowed or letters is None or (len(letters.group()) < 9 and letters.end() < len(text)):
                return "refused"
            if len(letters.group()) < 9:
                return "waiting"
            at, id_allowed = letters.end(), False
        return "waiting"

    def _xml(self, text: str, at: int, *, final: bool) -> Outcome:
        """`name>`, an element for each argument, `</function>`."""
        head, over, _ = text[at:].partition(">")
        if head not in self._tools and (over or not _begins_any(head, self._tools)):
            return "refused"
        stop = text.find(_FUNCTION_END, at)
        if stop < 0 and not final:
            return "waiting"
        stop = len(text) if stop < 0 else stop
        body, place, members = text[at + len(head) + 1 : stop], 0, {}
        while (element := _PARAMETER.match(body, place)) is not None:
            members[element[1].strip()] = element[2]
            place = element.end()
        if not over or body[place:].strip():
            return "refused"
        schemas = self._tools[head].parameters.get("properties", {})
        written = (f"{_quoted(key)}: {_typed(value, schemas.get(key))}" for key, value in members.items())
        return ReadCalls((RawCall(head, "{" + ", ".join(written) + "}"),), stop, ())

    def _bare_keys(self, text: str, at: int, *, final: bool) -> Outcome:
        """`name{key:<|"|>value<|"|>,other:3}`, up to the closing marker."""
        head, over, _ = text[at:].partition("{")
        if head not in self._tools and (over or not _begins_any(head, self._tools)):
            return "refused"
        stop = text.find(self._style.closes[0], at)
        if stop < 0 and not final:
            return "waiting"
        stop = len(text) if stop < 0 else stop
        parts = text[at + len(head) : stop].strip().split(_QUOTE)
        written = "".join(_quoted(p) if number % 2 else _BARE_KEY.sub(r'\1"\2":', p) for number, p in enumerate(parts))
        arguments = parse_arguments(written)
        return "refused" if arguments is None else ReadCalls((RawCall(head, arguments),), stop, ())

    def _end(self, text: str, at: int) -> int | Literal["waiting", "refused"]:
        if self._scanner is None or self._scanner[0] != at:
            self._scanner = (at, JsonScanner(at))
        scanner = self._scanner[1]
        scanner.read(text)
        if scanner.broken:
            return "refused"
        return "waiting" if scanner.end is None else scanner.end


def _skip(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def _begins_any(beginning: str, words: Sequence[str] | dict[str, Tool]) -> bool:
    return any(word.startswith(beginning) for word in words)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _typed(value: str, schema: Any) -> str:
    """The JSON of a value that the model wrote as plain text."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    return value if kind not in (None, "string") and is_json(value) else _quoted(value)
