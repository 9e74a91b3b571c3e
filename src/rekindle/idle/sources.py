"""Where questions are predicted from: abstracts of documents, and earlier questions. No model runs here.

The position is recorded in the library, so that documents take turns.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rekindle.answers.bank import AnswerBank
from rekindle.core.identity import digest_of_fields
from rekindle.knowledge.retrieve import STORED_DTYPE, Floats

_MAX_ASKED = 10  # earlier questions per prompt
_LIBRARY = "library"  # the row of the abstract of all documents


@dataclass(frozen=True)
class LibraryState:
    """A fingerprint of the library; when it changes, there may be idle work again."""

    generation: int
    asked: float | None
    abstracts: int
    stale: int


@dataclass(frozen=True)
class AbstractBatch:
    """Abstracts of parts of documents to predict from, and how many times all of them have had their turn.

    documents   all that the abstracts may quote
    about       abstracts of documents that have several parts, or of all documents
    """

    documents: tuple[int, ...]
    texts: tuple[str, ...]
    trips: int
    about: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecentQuestions:
    """Users' latest questions, the oldest first, and the documents that they may quote."""

    questions: tuple[str, ...]
    documents: tuple[int, ...]
    latest: str


class QuestionSources:
    """What a library and its bank offer to predict questions from."""

    def __init__(self, bank: AnswerBank) -> None:
        self._library = bank.library
        self._bank = bank

    def state(self) -> LibraryState:
        with self._library.reading() as connection:
            row = connection.execute(
                "SELECT (SELECT max(asked) FROM answers), (SELECT count(*) FROM abstracts), "
                "(SELECT count(*) FROM answers WHERE state='stale')"
            ).fetchone()
        return LibraryState(self._library.generation, *row)

    def predicted(self, state: LibraryState, model: str) -> Literal["none", "some", "all"]:
        """Whether questions were predicted from this state of the library with this model, also before a restart; all:
        the last round brought no new one."""
        known = self._library.about("foreseen-state")
        return "all" if known == f"{model} {state} all" else "some" if known == f"{model} {state}" else "none"

    def mark_predicted(self, state: LibraryState, model: str, all_of_them: bool) -> None:
        self._set("foreseen-state", f"{model} {state}{' all' if all_of_them else ''}")

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

    def document_abstracts(self) -> dict[int, str]:
        """The abstracts of documents, in order of their ids."""
        with self._library.reading() as connection:
            return dict(connection.execute("SELECT document, text FROM abstracts ORDER BY document").fetchall())

    def parts_of(self, document: int) -> dict[int, str]:
        """The abstracts of a document's parts, by place."""
        with self._library.reading() as connection:
            rows = connection.execute("SELECT place, text FROM part_abstracts WHERE document=?", (document,))
            return dict(rows.fetchall())

    def put_part(self, document: int, place: int, text: str) -> None:
        """Store the abstract of a part, if the document still exists."""
        with self._library.writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO part_abstracts (document, place, text) SELECT id, ?, ? FROM documents "
                "WHERE id=?",
                (place, text, document),
            )

    def merged(self, texts: Sequence[str]) -> str | None:
        """What was merged of these abstracts."""
        return self._merged(digest_of_fields(*texts))

    def put_merged(self, texts: Sequence[str], text: str, documents: Sequence[int]) -> None:
        """Store what was merged of abstracts of these documents, if all of them still exist."""
        self._put_merged({digest_of_fields(*texts): text}, documents)

    def put_library_abstract(self, text: str, documents: Sequence[int], used: Iterable[Sequence[str]]) -> None:
        """Store it, if all its documents still exist; of what was merged, only what it `used` stays."""
        if self._merged(_LIBRARY) == text:
            return
        self._put_merged({_LIBRARY: text}, documents)
        kept = {_LIBRARY, *(digest_of_fields(*texts) for texts in used)}
        with self._library.writing() as connection:
            marks = ",".join("?" * len(kept))
            connection.execute(f"DELETE FROM merged_abstracts WHERE inputs NOT IN ({marks})", list(kept))

    def _merged(self, inputs: str) -> str | None:
        with self._library.reading() as connection:
            row = connection.execute("SELECT text FROM merged_abstracts WHERE inputs=?", (inputs,)).fetchone()
        return None if row is None else str(row[0])

    def _put_merged(self, texts: Mapping[str, str], documents: Sequence[int]) -> None:
        ids = ",".join(str(int(id)) for id in documents)
        with self._library.writing() as connection:
            (present,) = connection.execute(f"SELECT count(*) FROM documents WHERE id IN ({ids})").fetchone()
            if present == len(documents):
                connection.executemany("INSERT OR REPLACE INTO merged_abstracts VALUES (?,?)", list(texts.items()))

    def next_abstracts(self, max_count: int) -> AbstractBatch:
        """The parts whose turn it is, and the abstracts of their documents."""
        with self._library.reading() as connection:
            rows = connection.execute("SELECT id, document, text FROM part_abstracts").fetchall()
        parts = {id: (document, text) for id, document, text in rows}
        last, trips = self._place("abstracts")
        chosen = rotate(parts, last)[:max_count]
        if chosen:
            self._note("abstracts", chosen[-1], trips + (chosen[-1] == max(parts) or chosen[-1] <= last))
        documents, texts = tuple(dict.fromkeys(parts[id][0] for id in chosen)), tuple(parts[id][1] for id in chosen)
        whole = self.document_abstracts()
        about = [whole[document] for document in documents if document in whole and whole[document] not in texts]
        return AbstractBatch(documents, texts, trips, tuple(about))

    def next_library_abstract(self) -> AbstractBatch | None:
        """The abstract of all documents, once after each change; it may quote any of them."""
        text = self._merged(_LIBRARY)
        if text is None or self._library.about("foreseen-library") == digest_of_fields(text):
            return None
        return AbstractBatch(tuple(self.document_abstracts()), (), 0, (text,))

    def mark_library_used(self, batch: AbstractBatch) -> None:
        """Record that questions were predicted from the abstract of all documents."""
        self._set("foreseen-library", digest_of_fields(*batch.about))

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
