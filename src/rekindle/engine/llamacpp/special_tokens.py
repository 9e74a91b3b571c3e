"""Where llama.cpp's tokenizer may get a text in pieces: the time it takes grows with the square of the special tokens.

llama.cpp finds special tokens before anything else, longer ones first, and tokenizes what is between them by itself. A
text that is cut where a special token begins has the same tokens in pieces.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.text.chat_template import match_any

_MAX_SPECIAL_TOKENS = 256  # in a piece: they take a fraction of a millisecond
_WHITESPACE = frozenset(" \t\n\v\f\r")


class SpecialTokens:
    """The special tokens that llama.cpp finds in a text, by their spellings."""

    def __init__(self, spellings: Iterable[str], taking_before: Iterable[str] = (), *, strips: bool = False) -> None:
        """`taking_before` are those that take the whitespace before them; `strips`: some take it, before or after."""
        known = [spelling for spelling in spellings if spelling]
        self._pattern = match_any(known)
        self._longest = max(map(len, known), default=0)
        self._taking_before = frozenset(taking_before)
        self._strips = strips

    def cut(self, text: str) -> list[str]:
        """The text in pieces whose tokens, one after the other, are the tokens of the text."""
        found = [match.span() for match in self._pattern.finditer(text)]
        if len(found) <= _MAX_SPECIAL_TOKENS:
            return [text]
        cuts, count, certain, stop = [0], 0, False, 0
        for start, end in found:
            follows = certain and start == stop
            certain = self._wins(text, start, end) and (follows or self._begins_alone(text, start))
            count, stop = count + 1, end
            if certain and count > _MAX_SPECIAL_TOKENS:
                cuts.append(start)
                count = 0
        return [text[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(text)], strict=True)]

    def _wins(self, text: str, start: int, end: int) -> bool:
        """Whether the token at `start` is found before those that begin inside of it, and stays where it is."""
        spelling = text[start:end]
        if spelling in self._taking_before or (self._strips and not _WHITESPACE.isdisjoint(spelling)):
            return False
        inside = (self._pattern.match(text, at) for at in range(start + 1, end))
        return all(other is None or len(other.group()) < len(spelling) or other.group() == spelling for other in inside)

    def _begins_alone(self, text: str, start: int) -> bool:
        """Whether no special token that begins before `start` goes on past it."""
        before = (self._pattern.match(text, at) for at in range(max(0, start - self._longest + 1), start))
        return all(other is None or other.end() <= start for other in before)
