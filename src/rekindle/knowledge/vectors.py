"""Vectors of passages in memory, all of them compared with a question's.

A hundred thousand of 384 numbers are read through in about ten milliseconds: no index that has to be built, kept and
trusted is worth less than that (`rekindle bench knowledge` measures one beside it).
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
STORED = np.dtype("<f2")  # half precision: a cosine is off by less than 0.001


@dataclass(frozen=True, slots=True)
class Near:
    """A passage and how near it is: the cosine."""

    id: int
    score: float


@dataclass(frozen=True)
class Snapshot:
    """The vectors as of one moment."""

    ids: Ids  # [passages]
    matrix: Floats  # [passages, dimensions], rows of unit length

    def nearest(self, query: Floats, most: int) -> list[Near]:
        """The nearest passages, the nearest first; equal ones in the order they came."""
        if not len(self.ids):
            return []
        scores = self.matrix @ query  # [passages]
        found = np.arange(len(scores))
        if most < len(scores):
            last = np.partition(scores, len(scores) - most)[-most]
            found = np.flatnonzero(scores >= last)  # more than asked for where several are as near as the last one
        ordered = found[np.lexsort((self.ids[found], -scores[found]))]
        return [Near(int(self.ids[at]), float(scores[at])) for at in ordered[:most]]


class Vectors:
    """The vectors of a library's passages or questions, read again where they changed. Used from several threads."""

    def __init__(self, library: Library, dimensions: int, table: Literal["chunks", "answers"] = "chunks") -> None:
        self._library = library
        self._table = table
        self._changes = "generation" if table == "chunks" else table  # what counts them
        self._dimensions = dimensions
        self._lock = threading.Lock()
        self._state: tuple[str, str, int] | None = None  # whose vectors, of which file, and of which generation
        self._snapshot = self._empty()

    def snapshot(self, embedder: str) -> Snapshot:
        """What the library has now of that embedder's; nothing if its vectors are another one's."""
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

    def _empty(self) -> Snapshot:
        return Snapshot(np.empty(0, np.int64), np.empty((0, self._dimensions), np.float32))

    def _read(self, connection: sqlite3.Connection, old: Snapshot) -> Snapshot:
        rows = connection.execute(f"SELECT id FROM {self._table} WHERE vector IS NOT NULL ORDER BY id").fetchall()
        ids = np.fromiter((row[0] for row in rows), np.int64, len(rows))
        stays = np.isin(old.ids, ids)
        # Ids only grow, so what is new stands behind what is old. A vector that was made anew has a new embedder.
        last = int(old.ids[-1]) if len(old.ids) else 0
        added = np.setdiff1d(ids[ids <= last], old.ids)
        if len(added):  # embedded later than those around it: rare, and simplest begun again
            return self._read(connection, self._empty())
        new = connection.execute(
            f"SELECT vector FROM {self._table} WHERE vector IS NOT NULL AND id > ? ORDER BY id", (last,)
        ).fetchall()
        size = self._dimensions * STORED.itemsize
        whole = (row[0] if isinstance(row[0], bytes) and len(row[0]) == size else bytes(size) for row in new)
        data = np.frombuffer(b"".join(whole), STORED).reshape(-1, self._dimensions)  # one that is damaged is far off
        kept = old.matrix if stays.all() else old.matrix[stays]
        return Snapshot(ids, np.concatenate([kept, data.astype(np.float32)]) if len(new) else kept)


def stored(vectors: Floats) -> list[bytes]:
    """Vectors as they are kept."""
    return [row.tobytes() for row in vectors.astype(STORED)]
