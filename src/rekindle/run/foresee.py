"""Where questions are foreseen from: documents, their abstracts, and what users asked before. No model is asked here.

What is next is noted in the library, so that each time other documents have their turn.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rekindle.answers.bank import Bank
from rekindle.knowledge.library import Library
from rekindle.knowledge.vectors import STORED, Floats
from rekindle.predict.passages import questions_about, words_of
from rekindle.predict.populate import rotated
from rekindle.predict.queries import Predicted

_MOST_ASKED = 10  # earlier questions that are looked at
_MOST_VISITED = 200  # documents that are looked through for questions at a time
_QUESTIONS = 8  # of a document, that are ever tried


@dataclass(frozen=True)
class News:
    """What there may be something to do after: documents changed, a user asked, abstracts came, answers went stale."""

    generation: int
    asked: float | None
    abstracts: int
    stale: int


@dataclass(frozen=True)
class Abstracts:
    """Abstracts to guess from, and how often all documents had their turn before."""

    documents: tuple[int, ...]
    texts: tuple[str, ...]
    trips: int


@dataclass(frozen=True)
class Asked:
    """What users asked last, the oldest of it first, and the documents that this may quote."""

    questions: tuple[str, ...]
    documents: tuple[int, ...]
    latest: str


class Foresight:
    """What a library and its bank offer to foresee questions from."""

    def __init__(self, library: Library, bank: Bank) -> None:
        self._library = library
        self._bank = bank
        self._frequencies: tuple[int, Counter[str]] | None = None

    def news(self) -> News:
        """What is known now, as far as there may be something to do when it changes."""
        with self._library.reading() as connection:
            row = connection.execute(
                "SELECT (SELECT max(asked) FROM answers), (SELECT count(*) FROM abstracts), "
                "(SELECT count(*) FROM answers WHERE state='stale')"
            ).fetchone()
        return News(self._library.generation, *row)

    def bare(self, settle_seconds: float) -> list[int]:
        """Documents without an abstract; none as long as documents keep coming."""
        with self._library.reading() as connection:
            (newest,) = connection.execute("SELECT max(added) FROM documents").fetchone()
            if newest is None or time.time() - newest < settle_seconds:
                return []
            rows = connection.execute(
                "SELECT id FROM documents WHERE id NOT IN (SELECT document FROM abstracts) ORDER BY id"
            ).fetchall()
        return [row[0] for row in rows]

    def put_abstract(self, document: int, text: str) -> None:
        """Keep what a document is about, if it is still there."""
        with self._library.writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO abstracts SELECT ?1, ?2, ?3 WHERE EXISTS (SELECT 1 FROM documents WHERE id=?1)",
                (document, text, time.time()),
            )

    def next_abstracts(self, most: int) -> Abstracts:
        """The abstracts whose turn it is."""
        with self._library.reading() as connection:
            texts = dict(connection.execute("SELECT document, text FROM abstracts").fetchall())
        last, trips = self._place("abstracts")
        chosen = rotated(texts, last)[:most]
        if chosen:
            self._note("abstracts", chosen[-1], trips + (chosen[-1] == max(texts) or chosen[-1] <= last))
        return Abstracts(tuple(chosen), tuple(texts[id] for id in chosen), trips)

    def asked(self) -> Asked | None:
        """What users asked last; None if that was looked at before."""
        entries = self._bank.history(_MOST_ASKED)
        latest = str(max((entry.asked or 0.0 for entry in entries), default=0.0))
        if not entries or self._library.about("foreseen-history") == latest:
            return None
        ids = ",".join(str(entry.id) for entry in entries)
        with self._library.reading() as connection:
            rows = connection.execute(f"SELECT DISTINCT document FROM grounds WHERE answer IN ({ids})").fetchall()
        return Asked(tuple(entry.question for entry in entries), tuple(row[0] for row in rows), latest)

    def looked_at(self, asked: Asked) -> None:
        """Note that questions were guessed from these."""
        self._set("foreseen-history", asked.latest)

    def from_passages(self) -> Iterator[list[Predicted]]:
        """Questions that documents answer, the best first, one document after the other."""
        with self._library.reading() as connection:
            ids = [row[0] for row in connection.execute("SELECT id FROM documents").fetchall()]
        last, _ = self._place("passages")
        frequencies = self._counted()
        for id in rotated(ids, last)[:_MOST_VISITED]:
            chunks = self._library.chunks_of(id)
            if not chunks:
                continue
            self._note("passages", id)
            text = "\n".join(chunk.passage.text for chunk in chunks)
            above = chunks[0].passage.heading
            found = questions_about(chunks[0].title, f"{above}\n{text}" if above else text, _QUESTIONS, frequencies)
            yield [Predicted(question, "passage", (id,)) for question in found]

    def cosines(self, chunks: Sequence[int], vector: Floats) -> list[float]:
        """How near passages are to a question; 0 for one that has no vector."""
        with self._library.reading() as connection:
            marks = ",".join(str(int(id)) for id in chunks)
            rows = dict(connection.execute(f"SELECT id, vector FROM chunks WHERE id IN ({marks})").fetchall())
        return [float(np.frombuffer(rows[id], STORED) @ vector) if rows.get(id) else 0.0 for id in chunks]

    def first_foreseen(self) -> list[int]:
        """The passages that stand first in the prompts of known questions."""
        with self._library.reading() as connection:
            rows = connection.execute("SELECT evidence FROM answers WHERE length(evidence) >= 8").fetchall()
        return [int(np.frombuffer(row[0][:8], "<i8")[0]) for row in rows]

    def passages(self) -> list[int]:
        """All of them."""
        with self._library.reading() as connection:
            return [row[0] for row in connection.execute("SELECT id FROM chunks ORDER BY id").fetchall()]

    def _counted(self) -> Counter[str]:
        """In how many documents each word stands; read again where documents changed."""
        generation = self._library.generation
        if self._frequencies is None or self._frequencies[0] != generation:
            counts: Counter[str] = Counter()
            with self._library.reading() as connection:
                rows = connection.execute("SELECT document, group_concat(text, char(10)) FROM chunks GROUP BY document")
                for _, text in rows:
                    counts.update(words_of(text))
            self._frequencies = (generation, counts)
        return self._frequencies[1]

    def _place(self, what: str) -> tuple[int, int]:
        """The document that had its turn last, and how often all of them had it."""
        last, _, trips = (self._library.about(f"foreseen-{what}") or "0 0").partition(" ")
        return int(last), int(trips)

    def _note(self, what: str, last: int, trips: int = 0) -> None:
        self._set(f"foreseen-{what}", f"{last} {trips}")

    def _set(self, name: str, value: str) -> None:
        with self._library.writing() as connection:
            connection.execute("INSERT OR REPLACE INTO about VALUES (?,?)", (name, value))
