"""Passages for a question: by words (BM25), by embeddings, or hybrid.

fused      reciprocal rank fusion of both rankings and, with double weight, of `weighted`, which knows how far one
           passage is ahead of the next. The constant is 5: measured on five sets of questions, it keeps what either
           ranking finds alone, while the usual 60 does not
weighted   both scores scaled to 0..1 and averaged, as PerCache does it
bm25, embedding   one of them alone

Vector search is exact: the vectors of a library are in memory, and all are compared with the query. A hundred thousand
vectors of 384 numbers take about ten milliseconds, so an approximate index is not worth building
(`python -m benchmarks knowledge` compares one).
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import InvalidPrompt, InvalidSetting, NothingKnown, nearest
from rekindle.knowledge.library import Chunk, Library
from rekindle.knowledge.relevance import CERTAIN, SHARE_OF_BEST, embedding_scale, relevance_of
from rekindle.knowledge.salvage import Loss
from rekindle.knowledge.word_index import Index, any_of, postings_of, question_words, word_shares

if TYPE_CHECKING:  # a stored answer in the same words is given without an embedder
    from rekindle.engine.embedding.embedder import Embedder

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
STORED_DTYPE = np.dtype("<f2")  # half precision: a cosine is off by less than 0.001


@dataclass(frozen=True, slots=True)
class Neighbor:
    """A passage and its cosine similarity."""

    id: int
    score: float


@dataclass(frozen=True)
class VectorSnapshot:
    """The vectors at one moment."""

    ids: Ids  # [passages]
    matrix: Floats  # [passages, dimensions], rows of unit length

    def nearest(self, query: Floats, max_count: int) -> list[Neighbor]:
        """The nearest rows, the nearest first; ties in the order of their ids."""
        if not len(self.ids):
            return []
        scores = self.matrix @ query  # [passages]
        found = np.arange(len(scores))
        if max_count < len(scores):
            last = np.partition(scores, len(scores) - max_count)[-max_count]
            found = np.flatnonzero(scores >= last)  # ties with the last one included
        ordered = found[np.lexsort((self.ids[found], -scores[found]))]
        return [Neighbor(int(self.ids[at]), float(scores[at])) for at in ordered[:max_count]]


class VectorIndex:
    """The vectors of a library's passages or questions, reloaded when they change. Used from several threads."""

    def __init__(self, library: Library, dimensions: int, table: Literal["chunks", "answers"] = "chunks") -> None:
        self._library = library
        self._table = table
        self._changes = "generation" if table == "chunks" else table  # the counter of changes in `about`
        self._dimensions = dimensions
        self._lock = threading.Lock()
        self._state: tuple[str, str, int] | None = None  # embedder, file, generation
        self._snapshot = self._empty()

    def snapshot(self, embedder: str) -> VectorSnapshot:
        """The library's current vectors of that embedder; empty if they are another one's."""
        with self._library.reading() as connection:
            about = dict(connection.execute("SELECT name, value FROM about").fetchall())
            state = (about.get("embedder", embedder), about.get("made", ""), int(about.get(self._changes, 0)))
            if state[0] != embedder:
                return self._empty()
            with self._lock:
                if self._state != state:
                    old = self._snapshot if self._state and self._state[:2] == state[:2] else self._empty()
                    self._snapshot = self._read(connection, old)
                    self._state = state
                return self._snapshot

    def _empty(self) -> VectorSnapshot:
        return VectorSnapshot(np.empty(0, np.int64), np.empty((0, self._dimensions), np.float32))

    def _read(self, connection: sqlite3.Connection, old: VectorSnapshot) -> VectorSnapshot:
        rows = connection.execute(f"SELECT id FROM {self._table} WHERE vector IS NOT NULL ORDER BY id").fetchall()
        ids = np.fromiter((row[0] for row in rows), np.int64, len(rows))
        stays = np.isin(old.ids, ids)
        # Ids only grow, so new rows follow old ones. A vector is only recomputed for another embedder.
        last = int(old.ids[-1]) if len(old.ids) else 0
        added = np.setdiff1d(ids[ids <= last], old.ids)
        if len(added):  # embedded later than their neighbours: rare, so simply reload
            return self._read(connection, self._empty())
        new = connection.execute(
            f"SELECT vector FROM {self._table} WHERE vector IS NOT NULL AND id > ? ORDER BY id", (last,)
        ).fetchall()
        size = self._dimensions * STORED_DTYPE.itemsize
        whole = (row[0] if isinstance(row[0], bytes) and len(row[0]) == size else bytes(size) for row in new)
        data = np.frombuffer(b"".join(whole), STORED_DTYPE).reshape(-1, self._dimensions)  # a damaged vector is zero
        kept = old.matrix if stays.all() else old.matrix[stays]
        return VectorSnapshot(ids, np.concatenate([kept, data.astype(np.float32)]) if len(new) else kept)


def to_stored(vectors: Floats) -> list[bytes]:
    """Vectors as they are stored."""
    return [row.tobytes() for row in vectors.astype(STORED_DTYPE)]


Retrieval = Literal["fused", "weighted", "bm25", "embedding"]

MAX_PASSAGES = 1000
PASSAGES = 5  # among which relevant ones are chosen unless somebody says how many
_DEPTH = 100  # of each ranking
_RANK_CONSTANT = 5
_MIXED_COUNTS = 2.0
_MAX_POSTINGS = 20_000  # read by a BM25 search at most: the commonest words are left out beyond it


@dataclass(frozen=True, slots=True)
class Hit:
    """A retrieved passage, and its rank in each ranking (from 1; None: not in it).

    relevance   0: as if it had nothing to do with the question, 1: as if it answered it (see `knowledge/relevance`);
                None if nothing here can judge that
    """

    chunk: Chunk
    score: float
    bm25_rank: int | None = None
    embedding_rank: int | None = None
    relevance: float | None = None


@dataclass(frozen=True, slots=True)
class RetrievalResult:
    """The passages found, the best first, and where the time went."""

    hits: tuple[Hit, ...]
    retrieval: Retrieval
    embed_seconds: float
    search_seconds: float
    vector: Floats | None = None  # of the question
    losses: tuple[Loss, ...] = ()  # what the library lost to damage, until that is acknowledged

    @property
    def seconds(self) -> float:
        return self.embed_seconds + self.search_seconds

    @property
    def uncertain(self) -> bool:
        """Whether none of the passages is so relevant that it is likely to answer."""
        known = [hit.relevance for hit in self.hits if hit.relevance is not None]
        return bool(known) and max(known) < CERTAIN

    def relevant(self) -> RetrievalResult:
        """The same without passages that are much less relevant than the best one; only the first one if uncertain."""
        known = [hit.relevance for hit in self.hits if hit.relevance is not None]
        least = SHARE_OF_BEST * max(known, default=0.0)
        kept = tuple(hit for hit in self.hits if hit.relevance is None or hit.relevance >= least)
        return replace(self, hits=self.hits[:1] if self.uncertain else kept)


class Retriever:
    """Finds passages in a library. Used from several threads. `embedder` is only called when needed."""

    def __init__(self, library: Library, embedder: Callable[[], Embedder]) -> None:
        self._library = library
        self._embedder = embedder
        self._vectors: VectorIndex | None = None

    def retrieve(self, question: str, top_k: int = 5, retrieval: Retrieval = "fused") -> RetrievalResult:
        """The passages most likely to answer a question. Equal passages count once.

        Raises `NothingKnown` for an empty library, `InvalidPrompt`, and `InvalidSetting`.
        """
        check_retrieval(top_k, retrieval)
        check_question(question)
        started = time.perf_counter()
        vector = self._embed(question) if retrieval != "bm25" else None
        embedded = time.perf_counter()
        depth = max(_DEPTH, 2 * top_k)
        with self._library.reading():  # one snapshot: a document may be replaced meanwhile
            words = self.search_bm25(question, depth) if retrieval != "embedding" else {}
            meanings = self.search_embedding(vector, depth) if vector is not None else {}
            found = self._hits(_ranked(words, meanings, retrieval), words, meanings, top_k)
            judged = self._judged(question, found, meanings, by_words=retrieval != "embedding")
        if not found and not self._library.counts()["chunks"]:
            raise NothingKnown("Nothing was ingested yet. Do that first: rekindle ingest FOLDER")
        return RetrievalResult(judged, retrieval, embedded - started, time.perf_counter() - embedded, vector)

    def search_bm25(self, question: str, max_count: int) -> dict[int, float]:
        """Passages with words of the question, the best first: id -> BM25 score.

        In scripts without spaces, pairs of letters are the words.
        """
        with self._library.reading() as connection:
            found, in_pairs = (
                _search(connection, index, words, max_count) for index, words in question_words(question)
            )
        if not in_pairs:
            return found
        both = _added(found, in_pairs)
        return {id: both[id] for id in sorted(both, key=lambda id: (-both[id], id))[:max_count]}

    def search_embedding(self, vector: Floats, max_count: int) -> dict[int, float]:
        """Passages with similar embeddings, the nearest first: id -> cosine."""
        assert self._vectors is not None
        snapshot = self._vectors.snapshot(self._embedder().digest)
        return {neighbor.id: neighbor.score for neighbor in snapshot.nearest(vector, max_count)}

    def _embed(self, question: str) -> Floats:
        embedder = self._embedder()
        if self._vectors is None:
            self._vectors = VectorIndex(self._library, embedder.dimensions)
        vector: Floats = embedder.embed_questions([question]).vectors[0]
        return vector

    def _judged(
        self, question: str, hits: Sequence[Hit], meanings: Mapping[int, float], *, by_words: bool
    ) -> tuple[Hit, ...]:
        """The passages with their relevance."""
        ids = [hit.chunk.id for hit in hits]
        furthest = min(meanings.values(), default=0.0)  # others are no nearer
        cosines = {id: meanings.get(id, furthest) for id in ids} if meanings else None
        scale = embedding_scale(self._embedder()) if meanings else None
        with self._library.reading() as connection:
            shares = word_shares(connection, question, ids) if by_words else None
        found = relevance_of(ids, cosines, shares, scale)
        return tuple(replace(hit, relevance=relevance) for hit, relevance in zip(hits, found, strict=True))

    def _hits(
        self, ranked: Mapping[int, float], words: Mapping[int, float], meanings: Mapping[int, float], top_k: int
    ) -> list[Hit]:
        """The first passages that still exist, without duplicates."""
        bm25_rank = {id: rank for rank, id in enumerate(words, start=1)}
        embedding_rank = {id: rank for rank, id in enumerate(meanings, start=1)}
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
                hits.append(Hit(chunk, ranked[id], bm25_rank.get(id), embedding_rank.get(id)))
                if len(hits) == top_k:
                    return hits
        return hits


def check_question(question: str) -> None:
    """Raises `InvalidPrompt` for an empty question."""
    if not question.strip():
        raise InvalidPrompt("The question is empty. Ask something.")


def check_retrieval(top_k: int, retrieval: str) -> None:
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= MAX_PASSAGES:
        raise InvalidSetting(f"top_k={top_k!r} makes no sense. Use 1 to {MAX_PASSAGES:,} passages.")
    if retrieval not in get_args(Retrieval):
        raise InvalidSetting(f"retrieval={retrieval!r} is unknown.{nearest(str(retrieval), get_args(Retrieval))}")


def _ranked(words: Mapping[int, float], meanings: Mapping[int, float], retrieval: Retrieval) -> dict[int, float]:
    if retrieval == "bm25":
        return dict(words)
    if retrieval == "embedding":
        return dict(meanings)
    mixed = _added(_stretched(words), _stretched(meanings))
    if retrieval == "weighted":
        return mixed
    in_order = sorted(mixed, key=lambda id: (-mixed[id], id))
    return _added(_inverse_ranks(words), _inverse_ranks(meanings), _inverse_ranks(in_order, _MIXED_COUNTS))


def _inverse_ranks(ids: Iterable[int], counts: float = 1.0) -> dict[int, float]:
    return {id: counts / (_RANK_CONSTANT + rank) for rank, id in enumerate(ids, start=1)}


def _stretched(scores: Mapping[int, float]) -> dict[int, float]:
    """The upper half of the scores, scaled from 0 (lowest) to 0.5 (highest), because two are added.

    Scores further down are noise, and would only make the differences above look small.
    """
    first = dict(islice(scores.items(), max(_DEPTH, len(scores)) // 2))
    if not first:
        return {}
    low, high = min(first.values()), max(first.values())
    return {id: 0.5 * ((score - low) / (high - low) if high > low else 1.0) for id, score in first.items()}


def _added(*parts: Mapping[int, float]) -> dict[int, float]:
    return {id: sum(part.get(id, 0.0) for part in parts) for part in parts for id in part}


def _search(connection: sqlite3.Connection, index: Index, words: Sequence[str], max_count: int) -> dict[int, float]:
    """The passages that an index has for any of some words, the best first: id -> BM25 score."""
    if not words:
        return {}
    rows = connection.execute(
        f"SELECT rowid, -bm25({index}) AS score FROM {index} WHERE {index} MATCH ? ORDER BY score DESC, rowid LIMIT ?",
        (any_of(_affordable(connection, index, words)), max_count),
    ).fetchall()
    return dict(rows)


def _affordable(connection: sqlite3.Connection, index: Index, words: Sequence[str]) -> Sequence[str]:
    """The words, without the commonest ones if reading all their postings would take too long.

    At least one word with postings stays.
    """
    (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM chunks").fetchone()
    if last <= _MAX_POSTINGS:
        return words
    postings = postings_of(connection, index, words)
    chosen: list[str] = []
    read = 0
    for word in sorted(words, key=postings.__getitem__):
        if read and read + postings[word] > _MAX_POSTINGS:
            break
        chosen.append(word)
        read += postings[word]
    return chosen
