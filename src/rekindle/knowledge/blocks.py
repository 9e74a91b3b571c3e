"""The blocks of a text: paragraphs with their lines joined, lists line by line, code as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rekindle.knowledge.sentences import gap

_WIDEST_WRAP = 160  # characters: wider lines were not wrapped by hand or by a mail program
_FILLED = 0.8  # of the widest line: a line that had room for the next word was ended on purpose

_FENCE = re.compile(r"\s{0,8}(```|~~~)")
_INDENTED = re.compile(r"(?: {4}|\t)")
_CODE = re.compile(r"[{};=]|\w\(|^\s*(?:def|class|return|import|from|if|for)\b|^\s*(?:#|//|\$)")
# Bullets, numbers, letters, rows of a table, stamps of time, quoted mail.
_ITEM = re.compile(r"\s{0,12}(?:[-*•‣·+◦>|]|\d{1,3}[.)]|\(?[a-zA-Z0-9]\)|\[[^\]]{1,30}\]|\d{1,2}:\d\d\b)(?:\s|$)")
_TABLE = re.compile(r"\|.{0,2000}\|\s{0,4}$|[^\t]{1,200}\t")
_NAMED = re.compile(r"[^\W_][\w .,'’/()&-]{0,60}:(?:\s|$)")  # "Name: what was said", "column: value, column: value"


@dataclass(frozen=True, slots=True)
class Line:
    """A line that means something by being one; `item` if it is read as a whole: of a list, a table, a talk."""

    text: str
    item: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Lines between two blank ones. Those of code keep their indentation."""

    lines: tuple[Line, ...]
    code: bool = False


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a text, in order. All that is not white space is in exactly one."""
    lines = text.splitlines()
    fences = _fences(lines)
    gathered: list[str] = []
    number = 0
    while number < len(lines):
        close = fences.get(number)
        if close is None and not _blank(lines[number]):
            gathered.append(lines[number])
            number += 1
            continue
        if gathered:
            yield _block(gathered)
            gathered = []
        if close is not None:
            yield _code(lines[number : close + 1])
        number = number + 1 if close is None else close + 1
    if gathered:
        yield _block(gathered)


def _blank(line: str) -> bool:
    return not line or line.isspace()


def _fences(lines: Sequence[str]) -> dict[int, int]:
    """Where fenced blocks open and close. A fence that nothing closes is an ordinary line."""
    pairs: dict[int, int] = {}
    opened: tuple[int, str] | None = None
    for number, line in enumerate(lines):
        if not (found := _FENCE.match(line)):
            continue
        if opened is None:
            opened = number, found[1]
        elif found[1] == opened[1]:
            pairs[opened[0]] = number
            opened = None
    return pairs


def _block(lines: Sequence[str]) -> Block:
    if all(map(_INDENTED.match, lines)) and 2 * sum(map(bool, map(_CODE.search, lines))) >= len(lines):
        return _code(lines)
    if len(lines) == 1:
        return Block((Line(" ".join(lines[0].split()), _is_item(lines[0], True)),))
    return Block(tuple(_unwrapped(lines)))


def _code(lines: Sequence[str]) -> Block:
    return Block(tuple(Line(line.rstrip()) for line in lines if not _blank(line)), code=True)


def _is_item(line: str, named: bool) -> bool:
    """`named`: whether a name and a colon, in small letters, are enough."""
    if _ITEM.match(line) or _TABLE.match(line):
        return True
    return bool(_NAMED.match(line)) and (named or not line[0].islower())


def _unwrapped(lines: Sequence[str]) -> Iterator[Line]:
    """The lines, those joined again that were parted only because the page was full."""
    width = max(map(len, lines))
    filled = _FILLED * width if width <= _WIDEST_WRAP else width + 1
    running = 3 * sum(map(_goes_on, lines[1:])) >= len(lines) - 1
    gathered: list[str] = []
    item = named = True
    last_length = 0
    for raw in lines:
        text = " ".join(raw.split())
        starts_item = _is_item(raw, named)
        full = last_length + 1 + len(text.split(" ", 1)[0]) > filled and (running or _goes_on(raw))
        continues = bool(gathered) and not starts_item and (full or (item and raw[:2].isspace()))
        if gathered and not continues:
            yield Line(_joined(gathered), item)
            gathered = []
        if not continues:
            item = named = starts_item
        gathered.append(text)
        last_length = len(raw.rstrip())
    yield Line(_joined(gathered), item)


def _goes_on(line: str) -> bool:
    """Whether a line begins as the middle of a sentence does: lines of a bill are all as long, but begin anew."""
    first = line.lstrip()[:1]
    return first.isalpha() and not first.isupper()


def _joined(lines: Sequence[str]) -> str:
    if all(map(str.isascii, lines)):
        return " ".join(lines)
    pieces = [lines[0]]
    for before, line in pairwise(lines):
        pieces += gap(before, line), line
    return "".join(pieces)
