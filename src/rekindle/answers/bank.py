"""The bank of questions and their answers: one for each tenant, in the library of their documents.

    look     what is known of a question: the answer that may be given at once, and drafts
    keep     an answer, if what it came from is still there
    open     questions that wait for an answer: foreseen, changed by a document, or served from another one's

A stored answer is given only as long as its evidence, the passages that are retrieved for its question, is what it was.
Every change of documents raises the library's generation; an answer of an earlier one is looked at again before it is
given. So there is no moment in which an old answer could slip through.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rekindle.answers.guard import disagreement, same_evidence
from rekindle.core.answer import Origin
from rekindle.core.keys import token_bytes, token_ids
from rekindle.core.reply import FinishReason
from rekindle.knowledge.library import Library
from rekindle.knowledge.retrieve import Retrieval
from rekindle.knowledge.rows import note_answers, owner_of
from rekindle.knowledge.vectors import Floats, Vectors, stored

State = Literal["open", "fresh", "stale"]
Policy = Literal["utility", "lfu"]
DRAFT_SIMILARITY = 0.6  # an answer to a question so near may well begin like this one's
_NEAREST, _MOST_DRAFTS = 32, 3
_ROW_BYTES = 256  # what a row takes beside its texts

# Finds the passages for a question now: its text, how many, and in which way. Their ids, the best first.
Retrieve = Callable[[str, int, Retrieval], Sequence[int]]


@dataclass(frozen=True)
class Question:
    """A question, as far as its answer depends on it.

    vector      of its text
    terms       a digest of what else the answer depends on: the model, its instructions, how tokens are drawn
    evidence    the passages that were retrieved for it, the best first
    documents   those they stand in, and those that the question itself was made from
    generation  of the library, from before they were retrieved
    """

    text: str
    vector: Floats
    terms: str
    top_k: int
    retrieval: Retrieval
    evidence: tuple[int, ...]
    documents: tuple[int, ...]
    generation: int


@dataclass(frozen=True)
class Text:
    """An answer: its text and tokens, how it ended, and what writing it took."""

    text: str
    tokens: tuple[int, ...]
    tokenizer: str
    finish: FinishReason
    seconds: float


@dataclass(frozen=True)
class Entry:
    """A question in the bank. `answer` is None while there is none."""

    id: int
    question: str
    terms: str
    origin: Origin
    top_k: int
    retrieval: Retrieval
    evidence: tuple[int, ...]
    generation: int
    state: State
    answer: Text | None
    made: float
    asked: float | None
    uses: int
    saved: float


@dataclass(frozen=True)
class Near:
    """A question in the bank, and how near it is to the one that is asked (cosine)."""

    entry: Entry
    similarity: float


@dataclass(frozen=True)
class Found:
    """What the bank knows of a question.

    direct    whose answer may be given at once
    refused   why that of the nearest may not be, if it is near enough
    drafts    answers to questions like it, the nearest first
    """

    direct: Near | None = None
    refused: str | None = None
    drafts: tuple[Near, ...] = ()


class Bank:
    """The questions and answers of one library. Used from several threads and processes."""

    def __init__(
        self,
        library: Library,
        embedder: str,
        dimensions: int,
        *,
        limit_bytes: int = 100 << 20,
        policy: Policy = "utility",
        clock: Callable[[], float] = time.time,
        soon: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        """`soon` does what nobody should wait for: who asks a question does not wait for who ingests."""
        self.library = library
        self._embedder = embedder
        self._vectors = Vectors(library, dimensions, "answers")
        self._limit_bytes = limit_bytes
        self._policy = policy
        self._clock = clock
        self._soon = soon

    def look(
        self, question: Question, retrieve: Retrieve, threshold: float | None = None, *, guarded: bool = True
    ) -> Found:
        """What is known of a question. An answer to give at once is looked for if a threshold is given (cosine)."""
        near = self.nearest(question.vector, _NEAREST)
        drafts = tuple(one for one in near if one.entry.answer is not None and one.similarity >= DRAFT_SIMILARITY)
        refused = None
        for one in near if threshold is not None else ():
            assert threshold is not None
            if not one.similarity >= threshold and one.entry.question != question.text:
                continue
            reason = self._refusal(question, one.entry, retrieve, guarded=guarded)
            if reason is None:
                return Found(one, None, drafts[:_MOST_DRAFTS])
            refused = refused or f"{reason} ({one.entry.question!r})"
        return Found(None, refused, drafts[:_MOST_DRAFTS])

    def nearest(self, vector: Floats, most: int) -> list[Near]:
        """The nearest questions, the nearest first."""
        found = self._vectors.snapshot(self._embedder).nearest(vector, most)
        entries = {entry.id: entry for entry in self.entries([near.id for near in found])}
        return [Near(entries[near.id], near.score) for near in found if near.id in entries]

    def _refusal(self, question: Question, entry: Entry, retrieve: Retrieve, *, guarded: bool) -> str | None:
        """Why the answer of an entry must not be given for a question; None if it may."""
        if entry.answer is None or entry.state != "fresh":
            return "it has no answer that is up to date"
        if entry.terms != question.terms:
            return "it was answered by another model or in another way"
        if guarded and entry.question != question.text:
            reason = disagreement(question.text, entry.question)
            if reason is not None:
                return reason
        if not self.is_current(entry, retrieve):
            return "its passages have changed"
        return "other passages answer it" if guarded and not same_evidence(question.evidence, entry.evidence) else None

    def is_current(self, entry: Entry, retrieve: Retrieve) -> bool:
        """Whether the evidence of an answer is still what it was; what was seen is noted soon."""
        generation = self.library.generation
        if entry.generation == generation:
            return True
        same = tuple(retrieve(entry.question, entry.top_k, entry.retrieval)) == entry.evidence
        self._soon(lambda: self._note(entry, generation, same=same))
        return same

    def _note(self, entry: Entry, generation: int, *, same: bool) -> None:
        change = f"generation={generation}" if same else "state='stale'"
        with self.library.writing() as connection:  # unless it was answered anew meanwhile
            found = (entry.id, entry.generation)
            connection.execute(f"UPDATE answers SET {change} WHERE id=? AND generation=? AND state='fresh'", found)

    def keep(self, question: Question, answer: Text | None, origin: Origin = "user") -> int | None:
        """Keep a question, with its answer if there is one; its id.

        None if a passage it came from is gone by now, or the library has another embedder's vectors. An open question
        does not replace an answer that is there, nor does one that was cut off replace a whole one.
        """
        if not self.library.present(question.evidence):  # looked at again below, when nobody else writes
            return None
        now = self._clock()
        with self.library.writing() as connection:
            if owner_of(connection) != self._embedder or not _present(connection, question.evidence):
                return None
            id = _put(connection, question, answer, origin, stored(question.vector[None])[0], now)
            self._make_room(connection, now, id)
            note_answers(connection)
        return id

    def served(self, id: int, saved_seconds: float) -> None:
        """Count that an answer was given, or was a good draft, and what that saved."""
        with self.library.writing() as connection:
            connection.execute(
                "UPDATE answers SET uses=uses+1, used=?, saved=saved+? WHERE id=?", (self._clock(), saved_seconds, id)
            )

    def entries(self, ids: Sequence[int] | None = None, where: str = "1", most: int = -1) -> list[Entry]:
        """Questions by id, or those for which an SQL condition holds."""
        if ids is not None:
            where = f"id IN ({','.join(str(int(id)) for id in ids)})"
        with self.library.reading() as connection:
            rows = connection.execute(f"{_SELECT} WHERE {where} LIMIT ?", (most,)).fetchall()
        return [entry for entry in map(_entry, rows) if entry is not None]

    def open(self, most: int) -> list[Entry]:
        """Questions that wait for an answer: first those whose documents changed, then those that users asked."""
        order = "ORDER BY state='stale' DESC, asked IS NOT NULL DESC, id"
        return self.entries(where=f"state!='fresh' {order}", most=most)

    def history(self, most: int) -> list[Entry]:
        """What users asked last, the oldest of it first."""
        return self.entries(where="asked IS NOT NULL ORDER BY asked DESC, id DESC", most=most)[::-1]

    def outdated(self, retrieve: Retrieve, most: int = 1000) -> int:
        """Look again at answers that were found before documents changed, and note it; how many of them are stale."""
        generation, stale = self.library.generation, 0
        for entry in self.entries(where=f"state='fresh' AND generation!={generation}", most=most):
            same = tuple(retrieve(entry.question, entry.top_k, entry.retrieval)) == entry.evidence
            self._note(entry, generation, same=same)
            stale += not same
        return stale

    def counts(self) -> dict[str, float]:
        """How much there is: questions, fresh, open, stale, bytes, uses, saved seconds."""
        with self.library.reading() as connection:
            rows = connection.execute(
                "SELECT count(*), coalesce(sum(state='fresh'),0), coalesce(sum(state='open'),0), "
                "coalesce(sum(state='stale'),0), coalesce(sum(size),0), coalesce(sum(uses),0), coalesce(sum(saved),0) "
                "FROM answers"
            ).fetchone()
        return dict(zip(("questions", "fresh", "open", "stale", "bytes", "uses", "saved_seconds"), rows, strict=True))

    def remove(self, ids: Sequence[int] | None = None) -> int:
        """Remove questions with their answers, by id or all; how many those were."""
        chosen = "1" if ids is None else f"id IN ({','.join(str(int(id)) for id in ids)})"
        with self.library.writing() as connection:
            count = connection.execute(f"DELETE FROM answers WHERE {chosen}").rowcount
            connection.execute("DELETE FROM grounds WHERE answer NOT IN (SELECT id FROM answers)")
            note_answers(connection)
        return count

    def _make_room(self, connection: sqlite3.Connection, now: float, new: int) -> None:
        (total,) = connection.execute("SELECT sum(size) FROM answers").fetchone()
        while total > self._limit_bytes:
            row = connection.execute(
                f"SELECT id, size FROM answers WHERE id!=:new ORDER BY {_WORTH[self._policy]} LIMIT 1",
                {"new": new, "now": now},
            ).fetchone()
            if row is None:  # it alone is too large
                row = (new, total)
            connection.execute("DELETE FROM answers WHERE id=?", (row[0],))
            connection.execute("DELETE FROM grounds WHERE answer=?", (row[0],))
            total -= row[1]


# What goes first. By worth: what a use saves, how often that happens, and what it takes; what is stale saves nothing.
_WORTH: dict[Policy, str] = {
    "lfu": "uses, used",
    "utility": "(state='fresh') * (seconds + 0.001) * (uses + 0.5) / (max(1.0, :now - used) * size), used",
}
_COLUMNS = (
    "id, question, terms, origin, top_k, retrieval, evidence, generation, state, text, tokens, tokenizer, finish, "
    "seconds, made, asked, uses, saved"
)
_TEXTS = frozenset({"question", "terms", "origin", "retrieval", "state", "text", "tokenizer", "finish"})
# Texts are read as bytes: SQLite would refuse all rows for the sake of a damaged one.
_READ = ", ".join(f"CAST({name} AS BLOB)" if name in _TEXTS else name for name in _COLUMNS.split(", "))
_SELECT = f"SELECT {_READ} FROM answers"


def _entry(row: Sequence[object]) -> Entry | None:
    """A row as an entry; None if it is damaged."""
    given = dict(zip(_COLUMNS.split(", "), row, strict=True))
    names = ("text", "tokens", "tokenizer", "finish", "seconds")
    try:
        given |= {name: value.decode() for name, value in given.items() if name in _TEXTS and isinstance(value, bytes)}
        text, tokens, *others = (given.pop(name) for name in names)
        answer = None if text is None else Text(str(text), token_ids(tokens), *others)  # type: ignore[arg-type]
        evidence = tuple(np.frombuffer(given.pop("evidence"), "<i8").tolist())  # type: ignore[call-overload]
    except (ValueError, TypeError):
        return None
    return Entry(**given, evidence=evidence, answer=answer)  # type: ignore[arg-type]


def _present(connection: sqlite3.Connection, chunks: Sequence[int]) -> bool:
    wanted = ",".join(str(int(id)) for id in chunks)
    (count,) = connection.execute(f"SELECT count(*) FROM chunks WHERE id IN ({wanted})").fetchone()
    return int(count) == len(chunks)


def _is_cut(answer: Text) -> bool:
    return answer.finish != "stop"


def _put(
    connection: sqlite3.Connection, question: Question, answer: Text | None, origin: Origin, vector: bytes, now: float
) -> int:
    evidence = np.array(question.evidence, "<i8").tobytes()
    text, tokens = (None, None) if answer is None else (answer.text, token_bytes(answer.tokens))
    size = _ROW_BYTES + len(question.text.encode()) + len(vector) + len(evidence)
    size += 0 if text is None or tokens is None else len(text.encode()) + len(tokens)
    old = connection.execute(
        "SELECT id, state, finish, evidence FROM answers WHERE question=? AND terms=?", (question.text, question.terms)
    ).fetchone()
    if (
        old is not None
        and old[1] == "fresh"
        and (answer is None or (_is_cut(answer) and old[2:] == ("stop", evidence)))
    ):
        if origin == "user":
            connection.execute("UPDATE answers SET asked=? WHERE id=?", (now, old[0]))
        return int(old[0])
    values = {
        "vector": vector, "top_k": question.top_k, "retrieval": question.retrieval, "evidence": evidence,
        "generation": question.generation, "state": "open" if answer is None else "fresh", "text": text,
        "tokens": tokens, "tokenizer": None if answer is None else answer.tokenizer,
        "finish": None if answer is None else answer.finish, "seconds": 0.0 if answer is None else answer.seconds,
        "made": now, "used": now, "size": size,
    }  # fmt: skip
    if origin == "user":
        values["asked"] = now
    if old is None:
        values |= {"question": question.text, "terms": question.terms, "origin": origin}
        names, marks = ",".join(values), ",".join("?" * len(values))
        id = connection.execute(f"INSERT INTO answers ({names}) VALUES ({marks})", list(values.values())).lastrowid
    else:
        id = old[0]
        sets = ",".join(f"{name}=?" for name in values)
        connection.execute(f"UPDATE answers SET {sets} WHERE id=?", [*values.values(), id])
    assert id is not None
    connection.executemany(
        "INSERT OR IGNORE INTO grounds VALUES (?,?)", [(id, document) for document in question.documents]
    )
    return int(id)
