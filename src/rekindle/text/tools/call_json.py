"""JSON in which models write tool calls: where a value in a growing text ends, and which calls it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, NoReturn

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
