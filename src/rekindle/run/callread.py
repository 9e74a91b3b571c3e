"""One call at a known place of a growing text, in any of the conventions: read it, wait for more, or refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rekindle.core.tools import Tool
from rekindle.run.calljson import Extent, WrittenCall, calls_in, is_json
from rekindle.run.toolstyle import ToolStyle

_FENCES = ("```json", "```tool_call", "```")
_FIRST_KEYS = (
    "name", "arguments", "parameters", "type", "function", "id", "tool_name", "tool_call", "tool_calls",
    "tool_call_id",
)  # fmt: skip
_BEGINNING = re.compile(r'\[?\s*\{\s*"(?P<key>[^"\\]*)(?P<over>")?(?:\s*:\s*"(?P<value>[^"\\]*)(?P<known>")?)?')
_BEFORE_KEY = re.compile(r"\[?\s*(?:\{\s*)?")
_CALL_ID = re.compile(r"[A-Za-z0-9]{0,9}")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION, _FUNCTION_END = "<function=", "</function>"


@dataclass(frozen=True, slots=True)
class Found:
    """Calls, the text up to `stop` that was read for them, and the markers that may close them."""

    calls: tuple[WrittenCall, ...]
    stop: int
    closes: tuple[str, ...]


Outcome = Found | Literal["waiting", "refused"]


class CallReader:
    """Reads calls of some tools in one style."""

    def __init__(self, style: ToolStyle, tools: Sequence[Tool]) -> None:
        self._style = style
        self._tools = {tool.name: tool for tool in tools}
        self._extent: tuple[int, Extent] | None = None
        bare = [f"{name}{mark}" for name in self._tools for mark in ("{", *style.joints)] if style.anywhere else []
        self._marks = (*style.opens, *bare, *(("[{",) if style.anywhere else ()))
        self._beginnings = {mark[:length] for mark in self._marks for length in range(1, len(mark))}
        self._longest = max(map(len, self._beginnings), default=0)
        # Not inside a longer word, which only ends like the name of a tool.
        inside = [r"(?<![\w-])" * (mark in bare) + re.escape(mark) for mark in self._marks]
        self._inside = re.compile("|".join(inside) or r"(?!)")
        self.marker_length = 0  # of the marker with which the text began that was read last

    def search(self, text: str, before: str) -> int | None:
        """Where a call may begin inside a text that follows the letter `before`."""
        found = self._inside.search(before + text, len(before))
        return None if found is None else found.start() - len(before)

    def held_back(self, text: str) -> int:
        """How many of the text's last letters may be the beginning of a mark."""
        lengths = range(min(len(text), self._longest), 0, -1)
        return next((length for length in lengths if text[-length:] in self._beginnings), 0)

    def read(self, text: str, at: int, *, bare: bool, final: bool) -> Outcome:
        """Read what begins at `at`; `bare`: it needs no marker. `final`: nothing follows the text."""
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
        elif opened or bare:
            outcome = self._body(text, at, opened=opened)
        if outcome == "waiting" and final:
            outcome = "refused"
        if outcome != "waiting":
            self._extent = None
        return Found(outcome.calls, outcome.stop, closes) if isinstance(outcome, Found) else outcome

    def _mark(self, text: str, at: int, *, final: bool) -> str | None:
        marks = (*self._style.opens, *_FENCES)
        if at < len(text) and not final and any(m.startswith(text[at:]) and m != text[at:] for m in marks):
            return "waiting"
        return next((mark for mark in marks if text.startswith(mark, at)), None)

    def _body(self, text: str, at: int, *, opened: bool) -> Outcome:
        if text[at] in "{[":
            promise = "kept" if opened else self._promise(text, at)
            return self._objects(text, at, opened=opened) if promise == "kept" else promise
        return self._named(text, at) if self._style.form != "object" else "refused"

    def _promise(self, text: str, at: int) -> Literal["kept", "waiting", "refused"]:
        """Whether what no marker announced begins like a call: other JSON shall not wait for its end."""
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
            return "kept"
        if value is None:
            return "waiting" if re.fullmatch(r"\s*:?\s*", text[found.end() :]) else "refused"
        if not found["known"]:
            return "waiting" if found.end() == len(text) and _begins_any(value, self._tools) else "refused"
        return "kept" if value in self._tools else "refused"

    def _objects(self, text: str, at: int, *, opened: bool) -> Outcome:
        stop = self._end(text, at)
        if not isinstance(stop, int):
            return stop
        calls = calls_in(text[at:stop], self._tools, announced=opened)
        return "refused" if calls is None else Found(tuple(calls), stop, ())

    def _named(self, text: str, at: int) -> Outcome:
        """`name`, what may stand behind it, and an object."""
        waiting = False
        for name in sorted(self._tools, key=len, reverse=True):
            if text.startswith(name, at):
                place = self._arguments_at(text, at + len(name))
                if isinstance(place, int):
                    stop = self._end(text, place)
                    if not isinstance(stop, int):
                        return stop
                    arguments = text[place:stop]
                    return Found((WrittenCall(name, arguments),), stop, ()) if is_json(arguments) else "refused"
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
        return Found((WrittenCall(head, "{" + ", ".join(written) + "}"),), stop, ())

    def _end(self, text: str, at: int) -> int | Literal["waiting", "refused"]:
        if self._extent is None or self._extent[0] != at:
            self._extent = (at, Extent(at))
        extent = self._extent[1]
        extent.read(text)
        if extent.broken:
            return "refused"
        return "waiting" if extent.end is None else extent.end


def _skip(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def _begins_any(beginning: str, words: Sequence[str] | dict[str, Tool]) -> bool:
    return any(word.startswith(beginning) for word in words)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _typed(value: str, schema: Any) -> str:
    """The JSON of a value that was written as plain text."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    return value if kind not in (None, "string") and is_json(value) else _quoted(value)
