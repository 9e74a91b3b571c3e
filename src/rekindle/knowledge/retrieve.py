"""Passages for a question: by their words (BM25), by their meaning (embeddings), and by both.

fused      reciprocal ranks of both, added: what both rank high comes first. The constant is small, so that the first
           places count: measured on four sets of questions, 5 keeps what either way finds alone, the usual 60 does not
weighted   both scores stretched to 0..1 and averaged, as PerCache does it
bm25, embedding   one of them alone
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rekindle.engine.embedder import Embedder
from rekindle.errors import InvalidPrompt, InvalidSetting, NothingKnown, nearest
from rekindle.knowledge.library import Chunk, Library
from rekindle.knowledge.stopwords import STOPWORDS
from rekindle.knowledge.vectors import Floats, Vectors

Retrieval = Literal["fused", "weighted", "bm25", "embedding"]

MOST_PASSAGES = 1000
_DEPTH = 100  # of each ranking
_RANK_CONSTANT = 5
_MOST_WORDS = 64
_MOST_POSTINGS = 20_000  # that a search by words reads: beyond it, the commonest words are left out
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found, and where each way of looking ranked it (from 1; None: not among its first)."""

    chunk: Chunk
    score: float
    word_rank: int | None = None
    meaning_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What was found, the best first, and where the time went."""

    hits: tuple[Hit, ...]
    retrieval: Retrieval
    embed_seconds: float
    search_seconds: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.embed_seconds + self.search_seconds


class Retriever:
    """Finds passages in a library. Used from several threads. `embedder` is called when it is first needed."""

    def __init__(self, library: Library, embedder: Callable[[], Embedder]) -> None:
        self._library = library
        self._embedder = embedder
        self._vectors: Vectors | None = None

    def retrieve(self, question: str, top_k: int = 5, retrieval: Retrieval = "fused") -> Retrieved:
        """The passages that are most likely to answer a question. Equal passages count once.

        Raises `NothingKnown` for an empty library, `InvalidPrompt`, and `InvalidSetting`.
        """
        check_retrieval(top_k, retrieval)
        check_question(question)
        started = time.perf_counter()
        vector = self._embed(question) if retrieval != "bm25" else None
        embedded = time.perf_counter()
        depth = max(_DEPTH, 2 * top_k)
        words = self.by_words(question, depth) if retrieval != "embedding" else {}
        meanings = self.by_meaning(vector, depth) if vector is not None else {}
        found = self._hits(_ranked(words, meanings, retrieval), words, meanings, top_k)
        if not found and not self._library.counts()["chunks"]:
            raise NothingKnown("Nothing was ingested yet. Do that first: rekindle ingest FOLDER")
        return Retrieved(tuple(found), retrieval, embedded - started, time.perf_counter() - embedded)

    def by_words(self, question: str, most: int) -> dict[int, float]:
        """Passages with words of the question, the best first: id -> BM25."""
        words = list(dict.fromkeys(_WORD.findall(question.lower())))
        wanted = [word for word in words if word not in STOPWORDS] or words
        if not wanted:
            return {}
        with self._library.reading() as connection:
            rows = connection.execute(
                "SELECT rowid, -bm25(words) AS score FROM words WHERE words MATCH ? ORDER BY score DESC, rowid LIMIT ?",
                (_any(_affordable(connection, wanted[:_MOST_WORDS])), most),
            ).fetchall()
        return dict(rows)

    def by_meaning(self, vector: Floats, most: int) -> dict[int, float]:
        """Passages that mean something like the question, the nearest first: id -> cosine."""
        assert self._vectors is not None
        snapshot = self._vectors.snapshot(self._embedder().digest)
        return {near.id: near.score for near in snapshot.nearest(vector, most)}

    def _embed(self, question: str) -> Floats:
        embedder = self._embedder()
        if self._vectors is None:
            self._vectors = Vectors(self._library, embedder.dimensions)
        vector: Floats = embedder.embed([question]).vectors[0]
        return vector

    def _hits(
        self, ranked: Mapping[int, float], words: Mapping[int, float], meanings: Mapping[int, float], top_k: int
    ) -> list[Hit]:
        """The first passages that are still there and say something new."""
        word_rank = {id: rank for rank, id in enumerate(words, start=1)}
        meaning_rank = {id: rank for rank, id in enumerate(meanings, start=1)}
        ordered = sorted(ranked, key=lambda id: (-ranked[id], id))
        hits: list[Hit] = []
        seen: set[str] = set()
        for start in range(0, len(ordered), 2 * top_k):
            some = ordered[start : start + 2 * top_k]
            chunks = self._library.chunks(some)
            for id in some:
                chunk = chunks.get(id)
                if chunk is None or chunk.passage.shown in seen:
                    continue
                seen.add(chunk.passage.shown)
                hits.append(Hit(chunk, ranked[id], word_rank.get(id), meaning_rank.get(id)))
                if len(hits) == top_k:
                    return hits
        return hits


def check_question(question: str) -> None:
    """Raises `InvalidPrompt` for a question that asks nothing."""
    if not question.strip():
        raise InvalidPrompt("The question is empty. Ask something.")


def check_retrieval(top_k: int, retrieval: str) -> None:
    """Raises `InvalidSetting` for what cannot be asked for."""
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= MOST_PASSAGES:
        raise InvalidSetting(f"top_k={top_k!r} makes no sense. Use 1 to {MOST_PASSAGES:,} passages.")
    if retrieval not in get_args(Retrieval):
        raise InvalidSetting(f"retrieval={retrieval!r} is unknown.{nearest(str(retrieval), get_args(Retrieval))}")


def _ranked(words: Mapping[int, float], meanings: Mapping[int, float], retrieval: Retrieval) -> dict[int, float]:
    if retrieval == "bm25":
        return dict(words)
    if retrieval == "embedding":
        return dict(meanings)
    scored = _stretched if retrieval == "weighted" else _inverse_ranks
    parts = [scored(words), scored(meanings)]
    return {id: sum(part.get(id, 0.0) for part in parts) for part in parts for id in part}


def _inverse_ranks(scores: Mapping[int, float]) -> dict[int, float]:
    return {id: 1.0 / (_RANK_CONSTANT + rank) for rank, id in enumerate(scores, start=1)}


def _stretched(scores: Mapping[int, float]) -> dict[int, float]:
    """Scores from 0, the lowest, to 1, the highest; halved, because two are added."""
    if not scores:
        return {}
    values = np.fromiter(scores.values(), np.float64, len(scores))
    low, width = values.min(), np.ptp(values)
    return {id: 0.5 * (float((score - low) / width) if width else 1.0) for id, score in scores.items()}


def _affordable(connection: sqlite3.Connection, words: Sequence[str]) -> Sequence[str]:
    """The words, without the commonest ones if reading all their postings would take long.

    One that stands anywhere always stays.
    """
    (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM chunks").fetchone()
    if last <= _MOST_POSTINGS:
        return words
    postings = {
        word: connection.execute("SELECT count(*) FROM words WHERE words MATCH ?", (_any([word]),)).fetchone()[0]
        for word in words
    }
    chosen: list[str] = []
    read = 0
    for word in sorted(words, key=lambda word: int(postings[word])):
        if read and read + postings[word] > _MOST_POSTINGS:
            break
        chosen.append(word)
        read += postings[word]
    return chosen


def _any(words: Sequence[str]) -> str:
    """A query for any of the words. Quoted, so that none of them is taken for syntax."""
    return " OR ".join(f'"{word}"' for word in words)
