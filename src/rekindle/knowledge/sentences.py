"""Sentences of a text, and how many words it has, in any script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Scripts without spaces between words, and their punctuation: Thai to Tibetan, Myanmar, Khmer, kana, Han, full width.
_DENSE = (
    r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3001-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uf900-\ufaff\uff01-\uff9f\U00020000-\U0003ffff"
)
_LONG_WORD = 24  # characters: what is longer is no word of a language, and costs a model as many tokens as several
_MARKS = r"[\u0300-\u036f\u200d\ufe00-\ufe0f\U0001f3fb-\U0001f3ff]{0,8}"  # belong to the character before them
_DENSE_CHARACTER = re.compile(f"[{_DENSE}]")
_SPACED_WORD = re.compile(rf"[^\s{_DENSE}]{{1,{_LONG_WORD}}}")
_ATOM = re.compile(rf"(?:[{_DENSE}]{{1,8}}|[^\s{_DENSE}]{{1,{_LONG_WORD}}}){_MARKS}")

# Every repetition is bounded, so that no text can make a search slower than its length.
_CLOSING = "\"'”’»)\\]*_」』）】"
_OPENING = "\"'“‘«([*_¿¡—–-"
_STOP = re.compile(rf"[.!?…][{_CLOSING}]{{0,4}} |[。！？｡][{_CLOSING}]{{0,4}} ?(?![。！？｡])")
_CLAUSE = re.compile(r"[,;:—–)] |[，、；：] ?")
_WORD_GAP = re.compile(" ")

_NEVER_LAST = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "rev",
        "hon",
        "gen",
        "col",
        "capt",
        "lt",
        "sgt",
        "st",
        "mt",
        "messrs",
        "mme",
        "mlle",
        "hr",
        "vs",
        "cf",
        "viz",
        "al",
        "eg",
        "ie",
        "resp",
        "dept",
        "bzw",
        "ggf",
        "evtl",
        "inkl",
        "exkl",
        "sog",
        "vgl",
    ]
)
_BEFORE_NUMBERS = frozenset(
    [
        "no",
        "nos",
        "nr",
        "p",
        "pp",
        "fig",
        "figs",
        "vol",
        "art",
        "sec",
        "ch",
        "eq",
        "par",
        "tab",
        "ca",
        "approx",
        "ver",
        "op",
        "jan",
        "feb",
        "mar",
        "apr",
        "jun",
        "jul",
        "aug",
        "sep",
        "sept",
        "oct",
        "nov",
        "dec",
    ]
)
_OFTEN_LAST = frozenset(
    ["a.m", "p.m", "u.s", "u.k", "u.n", "e.u"]
)  # of the forms with stops inside, the few that end sentences
_MONTHS = [
    "januar",
    "februar",
    "märz",
    "april",
    "mai",
    "juni",
    "juli",
    "august",
    "september",
    "oktober",
    "november",
    "dezember",
    "januari",
    "februari",
    "mars",
    "maj",
    "augusti",
    "kesä",
    "januára",
]
_MONTH = re.compile(rf"(?:{'|'.join(_MONTHS)})\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a text, and whether a space stood before it."""

    text: str
    spaced: bool


def words(text: str) -> int:
    """How many words a text has.

    Where words are not parted by spaces (Chinese, Japanese, Thai) each character counts as one, for models spend a
    token or more on each; and of a longer run than any word (an address, base64) every 24 characters.
    """
    if not text.isascii() and (dense := len(_DENSE_CHARACTER.findall(text))):
        return dense + len(_SPACED_WORD.findall(text))
    parts = text.split()
    if max(map(len, parts), default=0) <= _LONG_WORD:
        return len(parts)
    return sum(-(-len(part) // _LONG_WORD) for part in parts)


def gap(before: str, after: str) -> str:
    """What stands between two lines that are made one: a space, except inside a script that has none."""
    dense = _DENSE_CHARACTER.match(before, len(before) - 1) and _DENSE_CHARACTER.match(after)
    return "" if dense else " "


def sentences(line: str) -> list[Part]:
    """The sentences of a line whose words are parted by single spaces."""
    return _cut(line, (found.end() for found in _STOP.finditer(line) if _ends(line, found)))


def broken(text: str, measure: Callable[[str], int], limit: int) -> Iterator[Part]:
    """A text as parts of at most `limit`: whole if it is, else its clauses, else its words, else pieces of them."""
    return _finer(Part(text, True), measure, limit, 0)


def _finer(part: Part, measure: Callable[[str], int], limit: int, level: int) -> Iterator[Part]:
    text = part.text
    if len(text) <= 1 or measure(text) <= limit:
        yield part
        return
    pattern = (_CLAUSE, _WORD_GAP, _ATOM)[level] if level < 3 else None
    ends = (found.end() for found in pattern.finditer(text)) if pattern else iter((len(text) // 2,))
    for number, finer in enumerate(_cut(text, ends)):
        spaced = finer.spaced if number else part.spaced
        yield from _finer(Part(finer.text, spaced), measure, limit, level + 1)


def _cut(text: str, ends: Iterator[int]) -> list[Part]:
    """The text cut at these places."""
    parts: list[Part] = []
    start, spaced = 0, True
    for end in (*ends, len(text)):
        piece = text[start:end]
        if stripped := piece.strip():
            parts.append(Part(stripped, spaced or piece[0].isspace()))
            spaced = piece[-1].isspace()
        start = end
    return parts


def _ends(line: str, stop: re.Match[str]) -> bool:
    """Whether a sentence ends at this stop: something that can begin one follows, and it is no abbreviation's."""
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
    """Whether a word with a stop behind it can be the last of a sentence."""
    if word.isdigit() and len(word) <= 3:  # "1. Wheels" opens an item, "3. Mai" is an ordinal
        return not at_start and not _MONTH.match(following)
    if len(word) == 1:  # an initial, but "I" more often is the pronoun
        return not word.isupper() or word == "I"
    plain = word.casefold()
    if "." in plain.strip("."):  # e.g., z.B., J.R.; but a number or a name of a file can end a sentence
        return plain in _OFTEN_LAST or any(len(part) > 1 or part.isdigit() for part in plain.split("."))
    if plain in _BEFORE_NUMBERS:
        return not following[0].isdigit()
    return plain not in _NEVER_LAST
