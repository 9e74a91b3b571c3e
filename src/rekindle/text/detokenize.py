"""Incremental detokenizing: whole characters only, and nothing past a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from rekindle.text.base import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_PIECES = 4  # decoded again with each new token, so that spaces and accents join as in the whole text


class Detokenizer:
    """The text of a growing list of tokens, in pieces that are final.

    `context` are the tokens before it, so that a reply that continues a text begins with the right space. `marks` are
    control tokens that are shown, with their spellings.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), marks: Mapping[int, str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks or {}
        self._tokens = list(context)
        self._decoded = len(self._tokens)  # number of tokens whose text was given out
        # Decoding starts at the first of these: where a piece ended, never inside a character.
        self._edges = deque([0, self._decoded], maxlen=_CONTEXT_PIECES)

    def add(self, token: int) -> str:
        """The text that became final with this token; an incomplete character is held back."""
        if token in self._marks:
            text = self.finish() + self._marks[token]
            self._tokens.append(token)
            self._note_edge()
            return text
        self._tokens.append(token)
        before, text = self._decode(self._decoded), self._decode(len(self._tokens))
        if text.endswith(_REPLACEMENT) or len(text) <= len(before):
            return ""
        self._note_edge()
        return text[len(before) :]

    def _note_edge(self) -> None:
        self._decoded = len(self._tokens)
        self._edges.append(self._decoded)

    def finish(self, *, cut: bool = False) -> str:
        """The text that was held back. Where the reply was `cut`, half a character at the end is left out."""
        before, text = self._decode(self._decoded), self._decode(len(self._tokens))
        if not text.startswith(before):  # half a character makes some tokenizers drop the characters before it
            before, text = "", self._tokenizer.decode(self._tokens[self._decoded :])
        text, held = text[len(before) :], self._tokens[self._decoded :]
        self._decoded = len(self._tokens)
        if not cut or not text.endswith(_REPLACEMENT):
            return text
        half = self._half_character(held)  # shown as one replacement, or as one a byte
        return text[: max(len(text) - half, len(text.rstrip(_REPLACEMENT)))] if half else text

    def _half_character(self, tokens: Sequence[int]) -> int:
        """Number of bytes at the end of these tokens that begin a character."""
        pieces = self._tokenizer.pieces()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(pieces[token] for token in tokens))
        return len(decoder.getstate()[0])

    def _decode(self, stop: int) -> str:
        return self._tokenizer.decode(self._tokens[self._edges[0] : stop])


class StopChecker:
    """Looks for stop strings in a growing text; holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """The text that is safe to give out: none once `found` is set."""
        if self.found is not None:
            return ""
        self._held += text
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits)
            safe, self._held = self._held[:at], ""
            return safe
        cut = len(self._held) - held_back(self._held, self._stops)
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def finish(self) -> str:
        """The text that was held back: it began no stop string."""
        safe, self._held = self._held, ""
        return safe


def held_back(text: str, marks: Iterable[str]) -> int:
    """Number of characters at the end of the text that may begin one of the marks."""
    longest = 0
    for mark in marks:
        lengths = range(min(len(text), len(mark) - 1), longest, -1)
        longest = next((length for length in lengths if mark.startswith(text[-length:])), longest)
    return longest
