"""The bank of questions and their answers: one for each tenant, in the library of its documents.

    lookup   the answer that may be given at once, and answers to similar questions as drafts
    keep     store a question with its answer, if the passages it came from are still there
    terms    how users' questions were asked, the commonest first

A stored answer is given only while its evidence, the passages retrieved for its question, is unchanged. Every change
of documents raises the library's generation; an answer of an earlier generation is checked again before it is given,
so no stale answer can slip through. An answer that a token limit cut off is only a draft.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rekindle.answers.ask_terms import AskTerms
from rekindle.answers.bank_rows import RELEVANT, SELECT, AnswerText, BankEntry, entry_of
from rekindle.answers.citations import only_cites
from rekindle.answers.guard import disagreement, is_doubt, same_evidence
from rekindle.core.keys import token_bytes
from rekindle.core.reply import QuestionOrigin
from rekindle.knowledge.library import Library
from rekindle.knowledge.retrieve import Floats, Retrieval, VectorIndex, to_stored
from rekindle.knowledge.rows import bump_answers, claim_embedder, embedder_of

DRAFT_SIMILARITY = 0.6  # (cosine) from here on, the other question's answer may well begin like this one's
_NEAREST, _MAX_DRAFTS = 32, 3
_OTHER_PASSAGES = "other passages answer it"
_ROW_BYTES = 256  # size of a row without its texts
_MAX_TERMS = 64  # ways of asking that are remembered

# Finds the passages for a question now: (text, top_k, retrieval) -> ids, the best first.
Retrieve = Callable[[str, int | None, Retrieval], Sequence[int]]


@dataclass(frozen=True)
class BankQuestion:
    """A question, with everything its answer depends on.

    vector      of its text
    terms       a digest of what else the answer depends on: the model, its instructions, how tokens are drawn
    top_k       number of passages; None: the relevant ones; 0: its documents came with it, `terms` has their digest
    evidence    the passages that were retrieved for it, the best first
    documents   those they stand in, and those that the question itself was made from
    generation  of the library, from before they were retrieved
    asked_with  what `terms` is a digest of, as far as it can be learnt
    """

    text: str
    vector: Floats
    terms: str
    top_k: int | None
    retrieval: Retrieval
    evidence: tuple[int, ...]
    documents: tuple[int, ...]
    generation: int
    asked_with: AskTerms | None = None


@dataclass(frozen=True)
class SimilarQuestion:
    """A question in the bank, and its cosine similarity to the one that is asked."""

    entry: BankEntry
    similarity: float


@dataclass(frozen=True)
class BankLookup:
    """What the bank holds for a question.

    direct    the question whose answer may be given at once
    refused   why the most similar one's answer may not, if it is similar enough
    doubted   the most similar one whose answer may be given if a model says that the questions are the same
    drafts    answers to similar questions, the most similar first
    """

    direct: SimilarQuestion | None = None
    refused: str | None = None
    doubted: SimilarQuestion | None = None
    drafts: tuple[SimilarQuestion, ...] = ()


class AnswerBank:
    """The questions and answers of one library. Used from several threads and processes."""

    def __init__(
        self,
        library: Library,
        embedder: str,
        dimensions: int,
        *,
        limit_bytes: int = 100 << 20,
        clock: Callable[[], float] = time.time,
        soon: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        """`soon` runs writes that nobody should wait for: asking a question never waits for an ingestion."""
        self.library = library
        self._embedder = embedder
        self._vectors = VectorIndex(library, dimensions, "answers")
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._soon = soon

    def lookup(self, question: BankQuestion, retrieve: Retrieve, threshold: float | None = None) -> BankLookup:
        """Look a question up. Only with a `threshold` (cosine) is an answer to give at once looked for."""
        near = self.nearest(question.vector, _NEAREST)
        drafts = tuple(one for one in near if one.entry.answer is not None and one.similarity >= DRAFT_SIMILARITY)
        refused, doubted = None, None
        for one in near if threshold is not None else ():
            assert threshold is not None
            if not one.similarity >= threshold and one.entry.question != question.text:
                continue
            reason = self._refusal(question, one.entry, retrieve)
            if reason is None:
                return BankLookup(one, drafts=drafts[:_MAX_DRAFTS])
            refused = refused or f"{reason} ({one.entry.question!r})"
            if doubted is None and self._is_doubted(question, one.entry, retrieve):
                doubted = one
        return BankLookup(None, refused, doubted, drafts[:_MAX_DRAFTS])

    def nearest(self, vector: Floats, max_count: int) -> list[SimilarQuestion]:
        """The most similar questions, the most similar first."""
        found = self._vectors.snapshot(self._embedder).nearest(vector, max_count)
        entries = {entry.id: entry for entry in self.entries([near.id for near in found])}
        return [SimilarQuestion(entries[near.id], near.score) for near in found if near.id in entries]

    def _refusal(self, question: BankQuestion, entry: BankEntry, retrieve: Retrieve) -> str | None:
        """Why the answer of an entry must not be given for a question; None if it may."""
        unfit = self._unfit(question, entry)
        if unfit is not None:
            return unfit
        reason = self.difference(question, entry)
        # Looking whether it is current may take a search: not for a question that asks something else.
        if reason in (None, _OTHER_PASSAGES) and not self.is_current(entry, retrieve):
            return "its passages have changed"
        return reason

    def _unfit(self, question: BankQuestion, entry: BankEntry) -> str | None:
        """Why the answer of an entry may not be given for any question under these terms."""
        if entry.answer is None or entry.state != "fresh":
            return "it has no answer that is up to date"
        if not entry.answer.is_complete:
            return "its answer was cut off by a token limit"
        if entry.terms != question.terms:
            return "it was answered by another model or in another way"
        return None

    def _is_doubted(self, question: BankQuestion, entry: BankEntry, retrieve: Retrieve) -> bool:
        """Whether nothing but words that rules do not know speaks against the answer of an entry."""
        return (
            self._unfit(question, entry) is None
            and is_doubt(question.text, entry.question)
            and same_evidence(question.evidence, entry.evidence)
            and self.is_current(entry, retrieve)
        )

    def difference(self, question: BankQuestion, entry: BankEntry) -> str | None:
        """Why two questions that are near each other are not the same; None if they are."""
        reason = None if entry.question == question.text else disagreement(question.text, entry.question)
        if reason is None and not same_evidence(question.evidence, entry.evidence):
            return _OTHER_PASSAGES
        return reason

    def is_current(self, entry: BankEntry, retrieve: Retrieve) -> bool:
        """Whether the evidence of an answer is unchanged; the finding is recorded in the background.

        Of a question with documents of its own, they are a part of its terms.
        """
        generation = self.library.generation
        if entry.generation == generation or entry.top_k == 0:
            return True
        same = tuple(retrieve(entry.question, entry.top_k, entry.retrieval)) == entry.evidence
        self._soon(lambda: self._note(entry, generation, same=same))
        return same

    def _note(self, entry: BankEntry, generation: int, *, same: bool) -> None:
        change = f"generation={generation}" if same else "state='stale'"
        with self.library.writing() as connection:  # unless it was answered again meanwhile
            found = (entry.id, entry.generation)
            connection.execute(f"UPDATE answers SET {change} WHERE id=? AND generation=? AND state='fresh'", found)

    def keep(self, question: BankQuestion, answer: AnswerText | None, origin: QuestionOrigin = "user") -> int | None:
        """Store a question, with its answer if there is one, and return its id.

        None if a passage it came from was removed, the library is full, or it has another embedder's vectors. A
        question without an answer does not replace one with an answer, nor a truncated answer a complete one. A reply
        that only cites is no answer.
        """
        if answer is not None and only_cites(answer.text):
            answer = None
        if not self.library.has_passages(question.evidence):  # checked again below, inside the transaction
            return None
        now = self._clock()
        with self.library.writing() as connection:
            if embedder_of(connection) is None:  # a library without documents
                claim_embedder(connection, self._embedder)
            if embedder_of(connection) != self._embedder or not _present(connection, question.evidence):
                return None
            if not self.library.limit.allows(connection, _ROW_BYTES + (len(answer.text) if answer else 0)):
                return None
            id = _put(connection, question, answer, origin, to_stored(question.vector[None])[0], now)
            if origin == "user":
                _count_terms(connection, question, now)
            self._make_room(connection, now, id)
            bump_answers(connection)
        return id

    def record_use(self, id: int, saved_seconds: float) -> None:
        """Count that an answer was given or was a good draft, and the time that saved."""
        with self.library.writing() as connection:
            connection.execute(
                "UPDATE answers SET uses=uses+1, used=?, saved=saved+? WHERE id=?", (self._clock(), saved_seconds, id)
            )

    def entries(self, ids: Sequence[int] | None = None, where: str = "1", max_count: int = -1) -> list[BankEntry]:
        """Questions by id, or those for which an SQL condition holds."""
        if ids is not None:
            where = f"id IN ({','.join(str(int(id)) for id in ids)})"
        with self.library.reading() as connection:
            rows = connection.execute(f"{SELECT} WHERE {where} LIMIT ?", (max_count,)).fetchall()
        return [entry for entry in map(entry_of, rows) if entry is not None]

    def history(self, max_count: int) -> list[BankEntry]:
        """The questions users asked last, the oldest first."""
        return self.entries(where="asked IS NOT NULL ORDER BY asked DESC, id DESC", max_count=max_count)[::-1]

    def mark_stale(self, retrieve: Retrieve, max_count: int = 1000) -> int:
        """Check answers from before documents changed again, mark those that are stale, and return their number."""
        generation, stale = self.library.generation, 0
        for entry in self.entries(
            where=f"state='fresh' AND top_k!=0 AND generation!={generation}", max_count=max_count
        ):
            same = tuple(retrieve(entry.question, entry.top_k, entry.retrieval)) == entry.evidence
            self._note(entry, generation, same=same)
            stale += not same
        return stale

    def terms(self, digest: str | None = None) -> list[tuple[str, AskTerms, int]]:
        """How users asked, the commonest first: digest, terms, and how often. Only those of one digest, if it is given.

        They may be of another model: then nothing that this one prepares has their digest.
        """
        chosen, values = ("1", []) if digest is None else ("digest=?", [digest])
        with self.library.reading() as connection:
            rows = connection.execute(
                f"SELECT digest, content, uses FROM terms WHERE {chosen} ORDER BY uses DESC, used DESC", values
            ).fetchall()
        found = [(row[0], AskTerms.from_json(row[1]), row[2]) for row in rows]
        return [(name, terms, uses) for name, terms, uses in found if terms is not None]

    def counts(self) -> dict[str, float]:
        """Totals: questions, fresh, open, stale, bytes, uses, saved_seconds."""
        with self.library.reading() as connection:
            rows = connection.execute(
                "SELECT count(*), coalesce(sum(state='fresh'),0), coalesce(sum(state='open'),0), "
                "coalesce(sum(state='stale'),0), coalesce(sum(size),0), coalesce(sum(uses),0), coalesce(sum(saved),0) "
                "FROM answers"
            ).fetchone()
        return dict(zip(("questions", "fresh", "open", "stale", "bytes", "uses", "saved_seconds"), rows, strict=True))

    def remove(self, ids: Sequence[int] | None = None) -> int:
        """Remove questions with their answers, by id or all, and return their number."""
        chosen = "1" if ids is None else f"id IN ({','.join(str(int(id)) for id in ids)})"
        with self.library.writing() as connection:
            count = connection.execute(f"DELETE FROM answers WHERE {chosen}").rowcount
            connection.execute("DELETE FROM grounds WHERE answer NOT IN (SELECT id FROM answers)")
            if ids is None:
                connection.execute("DELETE FROM terms")
            bump_answers(connection)
        return count

    def _make_room(self, connection: sqlite3.Connection, now: float, new: int) -> None:
        (total,) = connection.execute("SELECT sum(size) FROM answers").fetchone()
        while total > self._limit_bytes:
            row = connection.execute(
                f"SELECT id, size FROM answers WHERE id!=:new ORDER BY {_WORTH} LIMIT 1",
                {"new": new, "now": now},
            ).fetchone()
            if row is None:  # it alone is too large
                row = (new, total)
            connection.execute("DELETE FROM answers WHERE id=?", (row[0],))
            connection.execute("DELETE FROM grounds WHERE answer=?", (row[0],))
            total -= row[1]


# Eviction order, the least valuable first: seconds saved per use, times use rate, per byte. Stale answers save nothing.
_WORTH = "(state='fresh') * (seconds + 0.001) * (uses + 0.5) / (max(1.0, :now - used) * size), used"


def _present(connection: sqlite3.Connection, chunks: Sequence[int]) -> bool:
    wanted = ",".join(str(int(id)) for id in chunks)
    (count,) = connection.execute(f"SELECT count(*) FROM chunks WHERE id IN ({wanted})").fetchone()
    return int(count) == len(chunks)


def _count_terms(connection: sqlite3.Connection, question: BankQuestion, now: float) -> None:
    """Count how a user asked; what was used least recently goes."""
    content = None if question.asked_with is None else question.asked_with.to_json()
    if content is None:
        return
    connection.execute(
        "INSERT INTO terms VALUES (?,?,1,?) "
        "ON CONFLICT (digest) DO UPDATE SET content=excluded.content, uses=uses+1, used=excluded.used",
        (question.terms, content, now),
    )
    connection.execute(
        "DELETE FROM terms WHERE digest NOT IN (SELECT digest FROM terms ORDER BY used DESC LIMIT ?)", (_MAX_TERMS,)
    )


def _put(
    connection: sqlite3.Connection,
    question: BankQuestion,
    answer: AnswerText | None,
    origin: QuestionOrigin,
    vector: bytes,
    now: float,
) -> int:
    evidence = np.array(question.evidence, "<i8").tobytes()
    text, tokens = (None, None) if answer is None else (answer.text, token_bytes(answer.tokens))
    top_k = RELEVANT if question.top_k is None else question.top_k
    size = _ROW_BYTES + len(question.text.encode()) + len(vector) + len(evidence)
    size += 0 if text is None or tokens is None else len(text.encode()) + len(tokens)
    old = connection.execute(
        "SELECT id, state, finish, evidence FROM answers WHERE question=? AND terms=?", (question.text, question.terms)
    ).fetchone()
    is_draft = answer is not None and not answer.is_complete
    if old is not None and old[1] == "fresh" and (answer is None or (is_draft and old[2:] == ("stop", evidence))):
        if origin == "user":
            connection.execute("UPDATE answers SET asked=? WHERE id=?", (now, old[0]))
        return int(old[0])
    values = {
        "vector": vector, "top_k": top_k, "retrieval": question.retrieval, "evidence": evidence,
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
