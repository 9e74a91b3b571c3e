"""Relevance: how well a passage fits a question, on a scale that means the same for every embedder and for words.

A score alone says little: two unrelated texts have a cosine of 0.07 with one embedder and of 0.75 with another. So
each kind of score is measured once with the pairs in `samples/relevance.jsonl`, 24 questions with the passage that
answers each: 0 is what the passages of other questions get, on average, and 1 what the answering ones get. An embedder
that does not tell the two apart is not asked.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from rekindle.engine.embedding.embedder import Embedder
from rekindle.json_file import JsonMemo
from rekindle.knowledge.word_index import word_shares
from rekindle.machine import home_folder

CERTAIN = 0.5  # nearer to passages that answer than to unrelated ones: below this, the best one is uncertain
SHARE_OF_BEST = 0.5  # passages that are less relevant than this share of the best one are left out
_HIGHEST = 1.5  # a single kind of score counts up to here
_MIN_SEPARATION = 1.0  # of the two means, in standard deviations
_MAX_EMBEDDERS = 16  # whose scale is remembered


@dataclass(frozen=True)
class Scale:
    """The average scores of passages that have nothing to do with a question, and of those that answer it."""

    unrelated: float
    answering: float

    @classmethod
    def of(cls, scores: NDArray[np.floating]) -> Scale | None:
        """The scale of scores [questions, passages], of which those on the diagonal belong together.

        None if the two kinds hardly differ.
        """
        own = np.eye(len(scores), dtype=bool)
        answering, unrelated = scores[own], scores[~own]
        gap = float(answering.mean() - unrelated.mean())
        if gap <= _MIN_SEPARATION * float(np.hypot(answering.std(), unrelated.std())):
            return None
        return cls(float(unrelated.mean()), float(answering.mean()))

    def relevance(self, score: float) -> float:
        """The score on this scale."""
        return min(_HIGHEST, (score - self.unrelated) / (self.answering - self.unrelated))


def pairs() -> list[tuple[str, str]]:
    """Questions, each with the passage that answers it."""
    lines = (resources.files("rekindle") / "samples" / "relevance.jsonl").read_text("utf-8").splitlines()
    return [(pair["question"], pair["passage"]) for pair in map(json.loads, lines)]


def embedding_scale(embedder: Embedder) -> Scale | None:
    """The scale of an embedder's cosines, measured when it is first needed and remembered in the home folder."""
    memo = JsonMemo(home_folder() / "relevance.json", _MAX_EMBEDDERS)
    known = memo.recall(embedder.digest)
    if not isinstance(known, list) or len(known) not in (0, 2):
        questions, passages = zip(*pairs(), strict=True)
        vectors = embedder.embed_passages(passages).vectors
        measured = Scale.of(embedder.embed_questions(questions).vectors @ vectors.T)
        known = [] if measured is None else list(astuple(measured))
        memo.keep(embedder.digest, known)
    return Scale(*map(float, known)) if known else None


@cache
def word_scale() -> Scale:
    """The scale of `word_shares`."""
    asked = pairs()
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE chunks (id INTEGER PRIMARY KEY)")
        connection.execute(
            "CREATE VIRTUAL TABLE words USING fts5(title, body, tokenize='porter unicode61 remove_diacritics 2')"
        )
        connection.execute("CREATE VIRTUAL TABLE pairs USING fts5(body)")
        for number, (_, passage) in enumerate(asked):
            connection.execute("INSERT INTO chunks VALUES (?)", (number,))
            connection.execute("INSERT INTO words (rowid, body) VALUES (?, ?)", (number, passage))
        shares = [word_shares(connection, question, range(len(asked))) for question, _ in asked]
    scale = Scale.of(np.array([[of_question[number] for number in range(len(asked))] for of_question in shares]))
    assert scale is not None
    return scale


def relevance_of(
    ids: Sequence[int], cosines: Mapping[int, float] | None, shares: Mapping[int, float] | None, scale: Scale | None
) -> list[float | None]:
    """The relevance of passages: by their cosines, by their shares of the question's words, or the mean of both.

    None for all of them if there is nothing to judge by.
    """
    found: list[float | None] = []
    for id in ids:
        parts = [] if scale is None or cosines is None else [scale.relevance(cosines[id])]
        parts += [] if shares is None else [word_scale().relevance(shares[id])]
        found.append(sum(parts) / len(parts) if parts else None)
    return found
