"""Exact vector search: the vectors of a library in memory, all compared with the query.

A hundred thousand vectors of 384 numbers take about ten milliseconds, so an approximate index is not worth building
(`python -m benchmarks knowledge` compares one).
"""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rekindle.knowledge.library import Library

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

    def nearest(self, query: Floats, most: int) -> list[Neighbor]:
        """The nearest rows, the nearest first; ties in the order of their ids."""
        if not len(self.ids):
            return []
        scores = self.matrix @ query  # [passages]
        found = np.arange(len(scores))
        if most < len(scores):
            last = np.partition(scores, len(scores) - most)[-most]
            found = np.flatnonzero(scores >= last)  # ties with the last one included
        ordered = found[np.lexsort((self.ids[found], -scores[found]))]
        return [Neighbor(int(self.ids[at]), float(scores[at])) for at in ordered[:most]]


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
