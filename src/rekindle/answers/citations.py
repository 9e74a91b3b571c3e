"""Citations in a reply: the numbers of passages, like [1]."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rekindle.core.document import Passage
from rekindle.core.reply import AnswerSource, SourceQuote
from rekindle.knowledge.sentence import best_sentence

_CITATION = re.compile(r"\\?\[[\s\d,;–-]*\d[\s\d,;–-]*(?:\\?\]|$)")
_AROUND = re.compile(r"the|answer|is|in|see|sources?|passages?|documents?|numbers?|and")


def only_cites(text: str) -> bool:
    """Whether a reply names passages and says nothing: "[1]", "The answer is: [1], [2]"."""
    rest, count = _CITATION.subn(" ", text)
    return count > 0 and all(map(_AROUND.fullmatch, re.findall(r"\w+", rest.lower())))


def quote_under(reply: str, question: str, sources: Sequence[AnswerSource]) -> SourceQuote | None:
    """The sentence to show under a reply: of the best source, or of the one that a reply names that says nothing."""
    numbers = re.findall(r"\d+", reply) if only_cites(reply) else []
    named = (source for number in numbers for source in sources if source.number == int(number))
    source = next(named, sources[0] if sources else None)
    if source is None:
        return None
    passage = Passage(source.text.removeprefix(source.heading).strip(), f"{source.title}\n{source.heading}")
    return SourceQuote(source.number, best_sentence(question, passage))
