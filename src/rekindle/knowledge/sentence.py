"""The sentence of a passage that is likely to answer a question: it is shown under the answer.

It has the most of the question's words: those that are rare in the passage count more, those that its title or headings
have count half, since the whole passage is about them. Words are compared by how they
begin, so that "opens" is "open" in every language that adds endings; in scripts without spaces, by pairs of letters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rekindle.core.document import Passage
from rekindle.knowledge.segment import STOPWORDS, character_pairs, split_blocks, split_sentences

_BEGINNING = 4  # letters: of longer words, two thirds
_MAX_SENTENCES = 200
_MAX_CHARACTERS = 400  # that are shown of one
_WORD = re.compile(r"\w+")


def best_sentence(question: str, passage: Passage) -> str:
    """The sentence or line of a passage that has most of a question's words; the first one if none has any."""
    sentences = _sentences(passage.text)
    asked = _beginnings(question)
    held = [{word for word in asked if _holds(sentence, word)} for sentence in sentences]
    worth = {word: math.log(1 + len(sentences) / (1 + sum(word in words for words in held))) for word in asked}
    worth |= {word: worth[word] / 2 for word in asked if _holds(passage.heading, word)}
    best = max(range(len(sentences)), key=lambda at: (sum(worth[word] for word in held[at]), -at))
    text = sentences[best]
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS].rstrip()} ..."


def _sentences(text: str) -> Sequence[str]:
    lines = [line.text for block in split_blocks(text) for line in block.lines]
    return [part.text for line in lines for part in split_sentences(line)][:_MAX_SENTENCES] or [text.strip()]


def _beginnings(text: str) -> set[str]:
    """How the words of a question begin, and the pairs of letters in scripts without spaces."""
    words = set(_WORD.findall(text.lower()))
    named = {word for word in words if word not in STOPWORDS} or words
    return {word[: max(_BEGINNING, math.ceil(len(word) * 2 / 3))] for word in named} | set(character_pairs(text))


def _holds(sentence: str, beginning: str) -> bool:
    return re.search(rf"\b{re.escape(beginning)}", sentence.lower()) is not None or (
        len(beginning) == 2 and not beginning.isascii() and beginning in sentence
    )
