"""Where questions are predicted from: documents, their abstracts, and earlier questions. No model runs here.

The position is recorded in the library, so that documents take turns.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rekindle.answers.bank import AnswerBank
from rekindle.idle.extracted_questions import extract_questions, topic_words
from rekindle.idle.generated_questions import PredictedQuestion
from rekindle.knowledge.library import Library
from rekindle.knowledge.retrieve import STORED_DTYPE, Floats

_MAX_ASKED = 10  # earlier questions per prompt
_MAX_VISITED = 200  # documents per run
_QUESTIONS = 8  # per document


@dataclass(frozen=True)
class LibraryState:
    """A fingerprint of the library; when it changes, there may be idle work again."""

    generation: int
    asked: float | None
    abstracts: int
    stale: int


@dataclass(frozen=True)
class AbstractBatch:
    """Abstracts to predict from, and how many times all documents have had their turn."""

    documents: tuple[int, ...]
    texts: tuple[str, ...]
    trips: int


@dataclass(frozen=True)
class RecentQuestions:
    """Users' latest questions, the oldest first, and the documents that they may quote."""

    questions: tuple[str, ...]
    documents: tuple[int, ...]
    latest: str


class QuestionSources:
    """What a library and its bank offer to predict questions from."""

    def __init__(self, library: Library, bank: AnswerBank) -> None:
        self._library = library
        self._bank = bank
        self._frequencies: tuple[int, Counter[str]] | None = None

    def state(self) -> LibraryState:
        with self._library.reading() as connection:
            row = connection.execute(
                "SELECT (SELECT max(asked) FROM answers), (SELECT count(*) FROM abstracts), "
                "(SELECT count(*) FROM answers WHERE state='stale')"
            ).fetchone()
        return LibraryState(self._library.generation, *row)

    def was_predicted(self, state: LibraryState, model: str) -> bool:
        """Whether questions were predicted from this state of the library with this model, also before a restart."""
        return self._library.about("foreseen-state") == f"{model} {state}"

    def mark_predicted(self, state: LibraryState, model: str) -> None:
        self._set("foreseen-state", f"{model} {state}")

    def without_abstract(self, settle_seconds: float) -> list[int]:
        """Documents without an abstract; none while documents are being added."""
        with self._library.reading() as connection:
            (newest,) = connection.execute("SELECT max(added) FROM documents").fetchone()
            if newest is None or time.time() - newest < settle_seconds:
                return []
            rows = connection.execute(
                "SELECT id FROM documents WHERE id NOT IN (SELECT document FROM abstracts) ORDER BY id"
            ).fetchall()
        return [row[0] for row in rows]

    def put_abstract(self, document: int, text: str) -> None:
        """Store a document's abstract, if the document still exists."""
        with self._library.writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO abstracts SELECT id, ?, ? FROM documents WHERE id=?",
                (text, time.time(), document),
            )

    def next_abstracts(self, max_count: int) -> AbstractBatch:
        with self._library.reading() as connection:
            texts = dict(connection.execute("SELECT document, text FROM abstracts").fetchall())
        last, trips = self._place("abstracts")
        chosen = rotate(texts, last)[:max_count]
        if chosen:
            self._note("abstracts", chosen[-1], trips + (chosen[-1] == max(texts) or chosen[-1] <= last))
        return AbstractBatch(tuple(chosen), tuple(texts[id] for id in chosen), trips)

    def asked(self) -> RecentQuestions | None:
        """Users' latest questions; None if these were used before."""
        entries = self._bank.history(_MAX_ASKED)
        latest = str(max((entry.asked or 0.0 for entry in entries), default=0.0))
        if not entries or self._library.about("foreseen-history") == latest:
            return None
        ids = ",".join(str(entry.id) for entry in entries)
        with self._library.reading() as connection:
            rows = connection.execute(f"SELECT DISTINCT document FROM grounds WHERE answer IN ({ids})").fetchall()
        return RecentQuestions(tuple(entry.question for entry in entries), tuple(row[0] for row in rows), latest)

    def mark_used(self, asked: RecentQuestions) -> None:
        """Record that questions were predicted from these."""
        self._set("foreseen-history", asked.latest)

    def from_passages(self) -> Iterator[list[PredictedQuestion]]:
        """Questions extracted from one document after the other, the best first."""
        with self._library.reading() as connection:
            ids = [row[0] for row in connection.execute("SELECT id FROM documents").fetchall()]
        last, _ = self._place("passages")
        frequencies = self._counted()
        for id in rotate(ids, last)[:_MAX_VISITED]:
            chunks = self._library.chunks_of(id)
            if not chunks:
                continue
            self._note("passages", id)
            text = "\n".join(chunk.passage.text for chunk in chunks)
            above = chunks[0].passage.heading
            found = extract_questions(chunks[0].title, f"{above}\n{text}" if above else text, _QUESTIONS, frequencies)
            yield [PredictedQuestion(question, "passage", (id,)) for question in found]

    def cosines(self, chunks: Sequence[int], vector: Floats) -> list[float]:
        """Cosine similarity of passages to a question; 0 without a vector."""
        with self._library.reading() as connection:
            marks = ",".join(str(int(id)) for id in chunks)
            rows = dict(connection.execute(f"SELECT id, vector FROM chunks WHERE id IN ({marks})").fetchall())
        return [float(np.frombuffer(rows[id], STORED_DTYPE) @ vector) if rows.get(id) else 0.0 for id in chunks]

    def first_evidence(self) -> list[int]:
        """The first passages of the prompts of stored questions."""
        with self._library.reading() as connection:
            rows = connection.execute("SELECT evidence FROM answers WHERE length(evidence) >= 8").fetchall()
        return [int(np.frombuffer(row[0][:8], "<i8")[0]) for row in rows]

    def passages(self) -> list[int]:
        with self._library.reading() as connection:
            return [row[0] for row in connection.execute("SELECT id FROM chunks ORDER BY id").fetchall()]

    def _counted(self) -> Counter[str]:
        """Document frequency of each word; recomputed when documents change."""
        generation = self._library.generation
        if self._frequencies is None or self._frequencies[0] != generation:
            counts: Counter[str] = Counter()
            with self._library.reading() as connection:
                rows = connection.execute("SELECT document, group_concat(text, char(10)) FROM chunks GROUP BY document")
                for _, text in rows:
                    counts.update(topic_words(text))
            self._frequencies = (generation, counts)
        return self._frequencies[1]

    def _place(self, what: str) -> tuple[int, int]:
        """The document that had its turn last, and the number of completed rounds."""
        last, _, trips = (self._library.about(f"foreseen-{what}") or "0 0").partition(" ")
        return int(last), int(trips)

    def _note(self, what: str, last: int, trips: int = 0) -> None:
        self._set(f"foreseen-{what}", f"{last} {trips}")

    def _set(self, name: str, value: str) -> None:
        with self._library.writing() as connection:
            connection.execute("INSERT OR REPLACE INTO about VALUES (?,?)", (name, value))


def rotate(ids: Iterable[int], after: int) -> list[int]:
    """The ids in order, beginning with the first that is larger than `after`: a round robin."""
    ordered = sorted(ids)
    later = [id for id in ordered if id > after]
    return later + ordered[: len(ordered) - len(later)]
