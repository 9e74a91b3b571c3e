"""Texts, and whether a record of a request quotes one of them.

Records hold short pieces of prompts with signs for spaces, cut anywhere: so it is letters and digits that are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rekindle.core.visible import visible

_PIECE_BYTES = 16  # letters in UTF-8: about twenty characters with spaces
_LEAST_LINE = 20
_LEAST_LETTERS = 8  # of a line of other signs


class Snippets:
    """Texts to be found again. Holds only letters and digits of them."""

    def __init__(self, texts: Sequence[str]) -> None:
        wholes = [_letters(visible(text)) for text in texts]
        lines = [_letters(visible(line)) for text in texts for line in text.splitlines() if len(line) >= _LEAST_LINE]
        self._long = [whole for whole in wholes if len(whole) >= _PIECE_BYTES]
        self._short = {whole for whole in wholes if 0 < len(whole) < _PIECE_BYTES}
        self._short |= {line for line in lines if _LEAST_LETTERS <= len(line) < _PIECE_BYTES}

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
