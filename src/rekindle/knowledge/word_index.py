"""The words that a question is searched by, and the share of them that a passage has, from the index of words (FTS5).

In scripts without spaces, pairs of letters are the words.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Literal

from rekindle.knowledge.segment import STOPWORDS, character_pairs

Index = Literal["words", "pairs"]

_MAX_WORDS = 64
_WORD = re.compile(r"\w+")


def question_words(question: str) -> Iterator[tuple[Index, Sequence[str]]]:
    """What a question is searched by in each index, without English stop words unless it has no others."""
    words = list(dict.fromkeys(_WORD.findall(question.lower())))
    yield "words", ([word for word in words if word not in STOPWORDS] or words)[:_MAX_WORDS]
    yield "pairs", list(dict.fromkeys(character_pairs(question)))[:_MAX_WORDS]


def any_of(words: Sequence[str]) -> str:
    """An FTS5 query for any of the words, quoted so that none is taken for syntax."""
    return " OR ".join(f'"{word}"' for word in words)


def postings_of(connection: sqlite3.Connection, index: Index, words: Sequence[str]) -> dict[str, int]:
    """The number of passages that have each word."""
    count = f"SELECT count(*) FROM {index} WHERE {index} MATCH ?"
    return {word: int(connection.execute(count, (any_of([word]),)).fetchone()[0]) for word in words}


def word_shares(connection: sqlite3.Connection, question: str, ids: Sequence[int]) -> dict[int, float]:
    """How much of a question's words each of some passages has, from 0 to 1: rare words count more.

    Words that no passage has count, too: a question about something else is found nowhere.
    """
    (passages,) = connection.execute("SELECT count(*) FROM chunks").fetchone()
    having, total = dict.fromkeys(ids, 0.0), 0.0
    some = ",".join(str(int(id)) for id in ids)
    for index, words in question_words(question):
        found = f"SELECT rowid FROM {index} WHERE {index} MATCH ? AND rowid IN ({some})"
        for word, postings in postings_of(connection, index, words).items():
            weight = math.log(1 + (max(0, passages - postings) + 0.5) / (postings + 0.5))
            total += weight
            for (id,) in connection.execute(found, (any_of([word]),)) if postings and some else ():
                having[id] += weight
    return {id: weight / total if total else 0.0 for id, weight in having.items()}
