"""What a purge looks for: runs of tokens in chains, and texts in records of requests.

Many runs are found in many chains in one pass: every window of a run's first tokens is hashed, the hash of every window
of the chains is looked up in a table of bits, and only what is found there is compared.

Records hold short pieces of prompts with signs for spaces, cut anywhere: so letters and digits alone are compared.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.keys import TOKEN_BYTES
from rekindle.errors import InvalidSetting
from rekindle.text.visible import visible

MIN_TOKENS = 8  # of the beginning of a run, for it to count where a chain ends before the run does
_TABLE_BITS = 20
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(64 - _TABLE_BITS)
_PIECE_BYTES = 16  # letters in UTF-8: about twenty characters with spaces
_MIN_LINE = 20
_MIN_LETTERS = 8  # of a line of other signs


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens, four bytes each, and the digest of the tokenizer that made them."""

    tokenizer: str
    tokens: bytes

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) % TOKEN_BYTES:
            raise InvalidSetting("A run of tokens has at least one, of four bytes each.")


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of a chain's end, of which those from number `own` on are looked at; the others are context."""

    tokens: bytes
    own: int


class TokenRuns:
    """Any number of runs, to be found together."""

    def __init__(self, runs: Iterable[bytes]) -> None:
        self._runs: dict[bytes, list[bytes]] = defaultdict(list)  # by their first tokens
        for run in dict.fromkeys(runs):
            self._runs[run[: MIN_TOKENS * TOKEN_BYTES]].append(run)
        self.longest = max((len(run) for group in self._runs.values() for run in group), default=0) // TOKEN_BYTES
        self._tables: dict[int, NDArray[np.bool_]] = {}  # by the count of first tokens
        for probe in self._runs:
            count = len(probe) // TOKEN_BYTES
            table = self._tables.setdefault(count, np.zeros(1 << _TABLE_BITS, np.bool_))
            table[_places(_hashes(np.frombuffer(probe, "<u4"), count))] = True

    def __bool__(self) -> bool:
        return bool(self._runs)

    def first(self, segments: Sequence[Segment]) -> list[int | None]:
        """For each segment, where the first run begins that has a token of its own part; None if none has.

        A run counts as a whole, or with its first eight tokens and more where the segment ends.
        """
        joined = b"".join([segment.tokens for segment in segments])
        starts = np.cumsum([0, *[len(segment.tokens) // TOKEN_BYTES for segment in segments]])
        found: list[int | None] = [None] * len(segments)
        tokens = np.frombuffer(joined, "<u4")
        for count, table in self._tables.items():
            if len(tokens) < count:
                continue
            hits = np.flatnonzero(table[_places(_hashes(tokens, count))])
            numbers = np.searchsorted(starts, hits, side="right") - 1
            for hit, number in zip(hits.tolist(), numbers.tolist(), strict=True):
                start, earliest = hit - int(starts[number]), found[number]
                if (earliest is None or start < earliest) and self._is_at(segments[number], start, count):
                    found[number] = start
        return found

    def __contains__(self, tokens: bytes) -> bool:
        """Whether a run stands in the tokens, or begins at their end."""
        return self.first([Segment(tokens, 0)]) != [None]

    def _is_at(self, segment: Segment, start: int, count: int) -> bool:
        """Whether a run with `count` first tokens to compare begins there and reaches the segment's own part."""
        data, offset = segment.tokens, start * TOKEN_BYTES
        probe = data[offset : offset + count * TOKEN_BYTES]
        for run in self._runs.get(probe, ()):  # shorter, across the segment's end: no probe
            part = data[offset : offset + len(run)]
            if offset + len(part) > segment.own * TOKEN_BYTES and run.startswith(part):
                return True
        return False


def _hashes(tokens: NDArray[np.uint32], count: int) -> NDArray[np.uint64]:
    """A hash of every window of `count` tokens: [tokens - count + 1]."""
    windows = len(tokens) - count + 1
    mixed = np.zeros(windows, np.uint64)
    for place in range(count):
        mixed *= _FACTOR
        mixed += tokens[place : place + windows]
        mixed += np.uint64(1)
    return mixed


def _places(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Where hashes stand in a table."""
    places: NDArray[np.uint64] = (hashes * _FACTOR) >> _SHIFT
    return places


class Snippets:
    """Texts to be found again. Holds only letters and digits of them."""

    def __init__(self, texts: Sequence[str]) -> None:
        wholes = [_letters(visible(text)) for text in texts]
        lines = [_letters(visible(line)) for text in texts for line in text.splitlines() if len(line) >= _MIN_LINE]
        self._long = [whole for whole in wholes if len(whole) >= _PIECE_BYTES]
        self._short = {whole for whole in wholes if 0 < len(whole) < _PIECE_BYTES}
        self._short |= {line for line in lines if _MIN_LETTERS <= len(line) < _PIECE_BYTES}

    def quoted(self, records: Sequence[str]) -> list[bool]:
        """For each record, a JSON text, whether it has a whole text, or a substantial part of one.

        One that is no JSON has.
        """
        quoted = [False] * len(records)
        where: dict[bytes, set[int]] = {}
        for number, record in enumerate(records):
            strings = _strings(record)
            quoted[number] = strings is None or any(short in string for string in strings for short in self._short)
            for string in strings or ():
                for start in range(len(string) - _PIECE_BYTES + 1):
                    where.setdefault(string[start : start + _PIECE_BYTES], set()).add(number)
        for text in self._long:
            for start in range(len(text) - _PIECE_BYTES + 1):
                for number in where.get(text[start : start + _PIECE_BYTES], ()):
                    quoted[number] = True
        return quoted


def _strings(record: str) -> list[bytes] | None:
    """The letters of every string in a JSON text; None if it is none."""
    try:
        return [_letters(string) for string in _walk(json.loads(record))]
    except (ValueError, RecursionError):
        return None


def _walk(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from (key, *_walk(part))
    elif isinstance(value, list):
        for part in value:
            yield from _walk(part)


def _letters(text: str) -> bytes:
    return "".join(filter(str.isalnum, text.casefold())).encode("utf-8", "surrogatepass")
