"""The rows of a bank of answers: what a question and its answer are, and reading them.

Kept apart from `answers/bank`, so that a command that only reads a row imports neither the guard nor retrieval.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from rekindle.answers.citations import only_cites
from rekindle.core.keys import token_ids
from rekindle.core.reply import AnswerSource, FinishReason, QuestionOrigin, Reply, Reuse, StoredAnswer, Timings, Usage
from rekindle.core.request import ReuseLevel
from rekindle.knowledge.library import Library
from rekindle.knowledge.rows import embedder_of

if TYPE_CHECKING:
    from rekindle.knowledge.retrieve import Retrieval

State = Literal["open", "fresh", "stale"]


@dataclass(frozen=True)
class AnswerText:
    """An answer: its text and tokens, how it ended, and how long writing it took."""

    text: str
    tokens: tuple[int, ...]
    tokenizer: str
    finish: FinishReason
    seconds: float

    @property
    def is_complete(self) -> bool:
        """Whether the model ended it: what a token limit cut off is only a draft."""
        return self.finish == "stop"


@dataclass(frozen=True)
class BankEntry:
    """A question in the bank. `answer` is None while there is none."""

    id: int
    question: str
    terms: str
    origin: QuestionOrigin
    top_k: int | None
    retrieval: Retrieval
    evidence: tuple[int, ...]
    generation: int
    state: State
    answer: AnswerText | None
    made: float
    asked: float | None
    uses: int
    saved: float


RELEVANT = -1  # in the column top_k: as many passages as are relevant
_COLUMNS = (
    "id, question, terms, origin, top_k, retrieval, evidence, generation, state, text, tokens, tokenizer, finish, "
    "seconds, made, asked, uses, saved"
)
_TEXTS = frozenset({"question", "terms", "origin", "retrieval", "state", "text", "tokenizer", "finish"})
# Texts are read as bytes: otherwise SQLite would refuse all rows because of one damaged text.
_READ = ", ".join(f"CAST({name} AS BLOB)" if name in _TEXTS else name for name in _COLUMNS.split(", "))
SELECT = f"SELECT {_READ} FROM answers"


def entry_of(row: Sequence[object]) -> BankEntry | None:
    """A row as an entry; None if it is damaged."""
    fields = dict(zip(_COLUMNS.split(", "), row, strict=True))
    names = ("text", "tokens", "tokenizer", "finish", "seconds")
    try:
        fields |= {
            name: value.decode() for name, value in fields.items() if name in _TEXTS and isinstance(value, bytes)
        }
        text, tokens, *others = (fields.pop(name) for name in names)
        has_answer = text is not None and not only_cites(str(text))  # earlier versions kept such replies
        answer = AnswerText(str(text), token_ids(tokens), *others) if has_answer else None  # type: ignore[arg-type]
        fields["top_k"] = None if fields["top_k"] == RELEVANT else fields["top_k"]
        evidence = tuple(np.frombuffer(fields.pop("evidence"), "<i8").tolist())  # type: ignore[call-overload]
    except (ValueError, TypeError):
        return None
    return BankEntry(**fields, evidence=evidence, answer=answer)  # type: ignore[arg-type]


def same_wording(library: Library, question: str, terms: str, embedder: str) -> BankEntry | None:
    """The question in these very words, if its answer is complete and no document changed since.

    Neither retrieval nor the embedder is needed then: `embedder` is its digest.
    """
    with library.reading() as connection:
        if embedder_of(connection) != embedder:
            return None
        row = connection.execute(
            f"{SELECT} WHERE question=? AND terms=? AND state='fresh' AND finish='stop' AND generation=?",
            (question.strip(), terms, library.generation),
        ).fetchone()
    return None if row is None else entry_of(row)


def answered_wordings(library: Library, terms: str, max_count: int) -> list[str]:
    """The latest questions under these terms that have a complete answer."""
    with library.reading() as connection:
        rows = connection.execute(
            "SELECT CAST(question AS BLOB) FROM answers WHERE terms=? AND state='fresh' AND finish='stop' "
            "ORDER BY id DESC LIMIT ?",
            (terms, max_count),
        ).fetchall()
    return [row[0].decode("utf-8", "replace") for row in rows]


def note_given(library: Library, entry: BankEntry) -> None:
    """Count that a user asked a question of the bank again, in the same words, and was given its answer."""
    now = time.time()
    saved = 0.0 if entry.answer is None else entry.answer.seconds
    with library.writing() as connection:
        connection.execute(
            "UPDATE answers SET asked=?, used=?, uses=uses+1, saved=saved+? WHERE id=?", (now, now, saved, entry.id)
        )
        connection.execute("UPDATE terms SET uses=uses+1, used=? WHERE digest=?", (now, entry.terms))


def given_reply(answer: AnswerText, passages: int, level: ReuseLevel) -> Reply:
    """The reply: `usage` and `reuse` say that nothing was read or written."""
    usage = Usage(0, 0, quoted_passages=passages)
    return Reply(answer.text, answer.tokens, answer.finish, usage, Timings(0.0, 0.0, None), Reuse(level, computed=0))


def given_sources(library: Library, entry: BankEntry, similarity: float) -> tuple[AnswerSource, ...]:
    """The passages that a stored answer came from, numbered as there. All of them still exist, else it is not given."""
    chunks = library.chunks(entry.evidence)
    kept = [chunks[id] for id in entry.evidence if id in chunks]
    return tuple(
        AnswerSource(
            number,
            chunk.name,
            chunk.source,
            chunk.title,
            chunk.passage.shown,
            similarity,
            heading=chunk.passage.heading,
        )
        for number, chunk in enumerate(kept, start=1)
    )


def given_stored(entry: BankEntry, similarity: float) -> StoredAnswer:
    """What to say of an answer that was given."""
    saved = None if entry.answer is None else entry.answer.seconds
    return StoredAnswer("direct", entry.question, entry.origin, entry.made, similarity, saved)
