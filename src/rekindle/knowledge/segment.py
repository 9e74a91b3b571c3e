"""Text segmentation: blocks (paragraphs, lists, code), sentences and words, in any script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_TEXT = """
a about all also am an and any are as at be been but by can could did do does for from had has have he her hers him his
how i if in into is it its just me my no not of on or our ours she should so some than that the their them then there
these they this those to was we were what when where which who whom whose why will with would you your yours s t
"""

STOPWORDS = frozenset(_TEXT.split())


def read_word_lists(path: Path) -> dict[str, str]:
    """The sections of a file of word lists, by their names: `[name]` on a line, then words."""
    parts = re.split(r"^\[(\w+)\]$", path.read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


# Scripts without spaces between words, and their punctuation: Thai to Tibetan, Myanmar, Khmer, kana, Han, full width.
_DENSE = (
    r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3001-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uf900-\ufaff\uff01-\uff9f\U00020000-\U0003ffff"
)
_LONG_WORD = 24  # characters: longer runs are no words, and cost a model as many tokens as several
_MARKS = r"[\u0300-\u036f\u200d\ufe00-\ufe0f\U0001f3fb-\U0001f3ff]{0,8}"  # they belong to the character before
_DENSE_CHARACTER = re.compile(f"[{_DENSE}]")
_SPACED_WORD = re.compile(rf"[^\s{_DENSE}]{{1,{_LONG_WORD}}}")
_ATOM = re.compile(rf"(?:[{_DENSE}]{{1,8}}|[^\s{_DENSE}]{{1,{_LONG_WORD}}}){_MARKS}")

_DENSE_LETTERS = re.compile(rf"(?:(?![\u3001-\u3004\u3008-\u3020\u3030\uff01-\uff0f\uff1a-\uff20])[{_DENSE}])+")


def character_pairs(text: str) -> list[str]:
    """All pairs of neighbouring letters in scripts without spaces: what a word index has of them in place of words."""
    runs = _DENSE_LETTERS.findall(text)
    return [pair for run in runs for pair in ([run] if len(run) == 1 else map("".join, pairwise(run)))]


# Every repetition is bounded, so that no text can make a search slower than its length.
_CLOSING = "\"'”’»)\\]*_」』）】"
_OPENING = "\"'“‘«([*_¿¡—–-"
_STOP = re.compile(rf"[.!?…][{_CLOSING}]{{0,4}} |[。！？｡][{_CLOSING}]{{0,4}} ?(?![。！？｡])")
_CLAUSE = re.compile(r"[,;:—–)] |[，、；：] ?")
_WORD_GAP = re.compile(" ")

_TITLES = """
mr mrs ms dr prof rev hon gen col capt lt sgt st mt messrs mme mlle hr vs cf viz al eg ie resp dept bzw ggf evtl
inkl exkl sog vgl
"""
_NEVER_LAST = frozenset(_TITLES.split())
_ABBREVIATIONS = """
no nos nr p pp fig figs vol art sec ch eq par tab ca approx ver op jan feb mar apr jun jul aug sep sept oct nov
dec
"""
_BEFORE_NUMBERS = frozenset(_ABBREVIATIONS.split())
_OFTEN_LAST = frozenset({"a.m", "p.m", "u.s", "u.k", "u.n", "e.u"})  # abbreviations that may still end a sentence
_MONTH = re.compile(
    r"(?:januar|februar|märz|april|mai|juni|juli|august|september|oktober|november|dezember"
    r"|januari|februari|mars|maj|augusti|kesä|januára)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of a text, and whether a space precedes it."""

    text: str
    spaced: bool


def count_words(text: str) -> int:
    """The number of words in a text.

    In scripts without spaces (Chinese, Japanese, Thai) each character counts as a word, because models spend a token
    or more on each; in runs longer than any word (a URL, base64) every 24 characters do.
    """
    if not text.isascii() and (dense := len(_DENSE_CHARACTER.findall(text))):
        return dense + len(_SPACED_WORD.findall(text))
    parts = text.split()
    if max(map(len, parts), default=0) <= _LONG_WORD:
        return len(parts)
    return sum(-(-len(part) // _LONG_WORD) for part in parts)


def line_separator(before: str, after: str) -> str:
    """What joins two lines into one: a space, except in scripts without spaces."""
    dense = _DENSE_CHARACTER.match(before, len(before) - 1) and _DENSE_CHARACTER.match(after)
    return "" if dense else " "


def split_sentences(line: str) -> list[TextPart]:
    """The sentences of a line whose words are separated by single spaces."""
    return _cut(line, (found.end() for found in _STOP.finditer(line) if _ends(line, found)))


def break_up(text: str, measure: Callable[[str], int], limit: int) -> Iterator[TextPart]:
    """A text in parts of at most `limit`: whole if it fits, else clauses, else words, else pieces of words."""
    return _finer(TextPart(text, True), measure, limit, 0)


def _finer(part: TextPart, measure: Callable[[str], int], limit: int, level: int) -> Iterator[TextPart]:
    text = part.text
    if len(text) <= 1 or measure(text) <= limit:
        yield part
        return
    pattern = (_CLAUSE, _WORD_GAP, _ATOM)[level] if level < 3 else None
    ends = (found.end() for found in pattern.finditer(text)) if pattern else iter((len(text) // 2,))
    for number, finer in enumerate(_cut(text, ends)):
        spaced = finer.spaced if number else part.spaced
        yield from _finer(TextPart(finer.text, spaced), measure, limit, level + 1)


def _cut(text: str, ends: Iterator[int]) -> list[TextPart]:
    """The text cut at these offsets."""
    parts: list[TextPart] = []
    start, spaced = 0, True
    for end in (*ends, len(text)):
        piece = text[start:end]
        if stripped := piece.strip():
            parts.append(TextPart(stripped, spaced or piece[0].isspace()))
            spaced = piece[-1].isspace()
        start = end
    return parts


def _ends(line: str, stop: re.Match[str]) -> bool:
    """Whether a sentence ends at this stop: a possible start follows, and it is no abbreviation."""
    mark = line[stop.start()]
    if mark in "。！？｡":
        return True
    following = line[stop.end() : stop.end() + 16].lstrip(_OPENING)
    if not following or following[0].islower():
        return False
    if mark != "." or stop.end() - stop.start() > 2:  # a closing quote or bracket: the stop is not an abbreviation's
        return True
    space = line.rfind(" ", max(0, stop.start() - _LONG_WORD), stop.start())
    word = line[max(space + 1, stop.start() - _LONG_WORD) : stop.start()].lstrip(_OPENING)
    return _last_word(word, following, at_start=space < 0 or line[space - 1] in ".!?:")


def _last_word(word: str, following: str, at_start: bool) -> bool:
    """Whether a word followed by a stop can end a sentence."""
    if word.isdigit() and len(word) <= 3:  # "1. Wheels" begins an item, "3. Mai" is an ordinal
        return not at_start and not _MONTH.match(following)
    if len(word) == 1:  # an initial, but "I" more often is the pronoun
        return not word.isupper() or word == "I"
    plain = word.casefold()
    if "." in plain.strip("."):  # e.g., z.B., J.R.; but a number or a name of a file can end a sentence
        return plain in _OFTEN_LAST or any(len(part) > 1 or part.isdigit() for part in plain.split("."))
    if plain in _BEFORE_NUMBERS:
        return not following[0].isdigit()
    return plain not in _NEVER_LAST


_WIDEST_WRAP = 160  # characters: wider lines were not wrapped by hand or by a mail program
_FILLED = 0.8  # of the widest line: a shorter line was ended on purpose

_FENCE = re.compile(r"\s{0,8}(```|~~~)")
_INDENTED = re.compile(r"(?: {4}|\t)")
_CODE = re.compile(r"[{};=]|\w\(|^\s*(?:def|class|return|import|from|if|for)\b|^\s*(?:#|//|\$)")
# Bullets, numbers, letters, table rows, timestamps, quoted mail.
_ITEM = re.compile(r"\s{0,12}(?:[-*•‣·+◦>|]|\d{1,3}[.)]|\(?[a-zA-Z0-9]\)|\[[^\]]{1,30}\]|\d{1,2}:\d\d\b)(?:\s|$)")
_TABLE = re.compile(r"\|.{0,2000}\|\s{0,4}$|[^\t]{1,200}\t")
_NAMED = re.compile(r"[^\W_][\w .,'’/()&-]{0,60}:(?:\s|$)")  # "Name: what was said", "column: value, column: value"


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line; `item` if it is a unit of its own: of a list, a table, a dialogue."""

    text: str
    item: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Lines between blank lines. Code keeps its indentation."""

    lines: tuple[TextLine, ...]
    code: bool = False


def split_blocks(text: str) -> Iterator[Block]:
    """The blocks of a text, in order. Everything but white space is in exactly one."""
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
    """Where fenced blocks open and close. An unclosed fence is an ordinary line."""
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
        return Block((TextLine(" ".join(lines[0].split()), _is_item(lines[0], True)),))
    return Block(tuple(_unwrapped(lines)))


def _code(lines: Sequence[str]) -> Block:
    return Block(tuple(TextLine(line.rstrip()) for line in lines if not _blank(line)), code=True)


def _is_item(line: str, named: bool) -> bool:
    """`named`: whether a lower-case name with a colon is enough."""
    if _ITEM.match(line) or _TABLE.match(line):
        return True
    return bool(_NAMED.match(line)) and (named or not line[0].islower())


def _unwrapped(lines: Sequence[str]) -> Iterator[TextLine]:
    """The lines, with hard-wrapped ones joined again."""
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
            yield TextLine(_joined(gathered), item)
            gathered = []
        if not continues:
            item = named = starts_item
        gathered.append(text)
        last_length = len(raw.rstrip())
    yield TextLine(_joined(gathered), item)


def _goes_on(line: str) -> bool:
    """Whether a line begins like the middle of a sentence: the lines of an invoice may be equally long, but do not."""
    first = line.lstrip()[:1]
    return first.isalpha() and not first.isupper()


def _joined(lines: Sequence[str]) -> str:
    if all(map(str.isascii, lines)):
        return " ".join(lines)
    pieces = [lines[0]]
    for before, line in pairwise(lines):
        pieces += line_separator(before, line), line
    return "".join(pieces)
