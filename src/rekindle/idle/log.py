"""The log of idle work: what each action cost, and what it saved later. Kept in the library, without any text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from rekindle.knowledge.library import Library

Action = Literal[
    "refresh", "true-answer", "abstract", "merge", "guess-abstract", "guess-history", "judge", "prefill", "answer",
    "decode", "restore", "warm",
]  # fmt: skip
_MAX_ROWS = 10_000


@dataclass(frozen=True)
class IdleAction:
    """One action of idle work.

    refresh        a question was answered again because its documents changed
    true-answer    a question that had been given another one's answer got its own
    abstract       a document or a part of it was summarized
    merge          several abstracts became one
    guess-abstract, guess-history   questions were generated
    judge          the model decided whether passages answer a predicted question
    prefill        a predicted question was prefilled
    answer         a predicted question was answered
    decode         a question that had only been prefilled was answered
    restore        evicted KV of a stored question was computed again
    warm           a prompt beginning was prefilled: the instructions, a passage

    what       for people: a question, the name of a document
    answer     id of the question in the bank
    tokens     computed tokens of prompt and reply, without rejected drafts
    finished   False if it was stopped: then it had no effect
    """

    action: Action
    what: str
    answer: int | None
    seconds: float
    tokens: int = 0
    finished: bool = True


@dataclass(frozen=True)
class ActionSummary:
    """All actions of one kind together: what they cost, and what they saved until the next one on the same answer."""

    action: str
    count: int
    seconds: float
    tokens: int
    uses: int
    saved_seconds: float


def record_action(library: Library, did: IdleAction) -> None:
    with library.writing() as connection:
        before = connection.execute("SELECT uses, saved FROM answers WHERE id=?", (did.answer,)).fetchone() or (0, 0.0)
        row = (time.time(), did.action, did.answer, did.seconds, did.tokens, *before)
        id = connection.execute(
            "INSERT INTO work (at, action, answer, seconds, tokens, uses, saved) VALUES (?,?,?,?,?,?,?)", row
        ).lastrowid
        connection.execute("DELETE FROM work WHERE id<=?", ((id or 0) - _MAX_ROWS,))


def prediction_yield(library: Library) -> tuple[int, float]:
    """How often predicted questions were used, and the seconds of work that predicting and preparing them took."""
    with library.reading() as connection:
        (hits,) = connection.execute("SELECT coalesce(sum(uses), 0) FROM answers WHERE origin != 'user'").fetchone()
        (seconds,) = connection.execute(
            "SELECT coalesce(sum(seconds), 0) FROM work "
            "WHERE action IN ('abstract', 'merge', 'guess-abstract', 'guess-history', 'judge', 'prefill', 'answer', "
            "'decode')"
        ).fetchone()
    return int(hits), float(seconds)


# What an answer was used and saved counts for the last action on it before that.
_CREDITED = (
    "WITH credited AS (SELECT w.id, coalesce(lead(w.uses) OVER later, a.uses) - w.uses AS uses, "
    "coalesce(lead(w.saved) OVER later, a.saved) - w.saved AS saved FROM work w JOIN answers a ON a.id=w.answer "
    "WHERE w.action!='restore' WINDOW later AS (PARTITION BY w.answer ORDER BY w.id)) "
)


def summarize_actions(library: Library) -> list[ActionSummary]:
    """Totals by kind of action."""
    with library.reading() as connection:
        rows = connection.execute(
            f"{_CREDITED}SELECT w.action, count(*), sum(w.seconds), sum(w.tokens), "
            "coalesce(sum(c.uses), 0), coalesce(sum(c.saved), 0) FROM work w LEFT JOIN credited c ON c.id=w.id "
            "GROUP BY w.action ORDER BY min(w.id)"
        ).fetchall()
    return [ActionSummary(*row) for row in rows]


@dataclass(frozen=True)
class LogEntry:
    """A line of the log, with its question if that is still stored."""

    at: float
    action: str
    seconds: float
    tokens: int
    question: str | None
    origin: str | None
    uses: int | None
    saved_seconds: float | None


def recent_actions(library: Library, max_count: int) -> list[LogEntry]:
    """The last actions, the newest first."""
    with library.reading() as connection:
        rows = connection.execute(
            f"{_CREDITED}SELECT w.at, w.action, w.seconds, w.tokens, a.question, a.origin, "
            "c.uses, c.saved FROM work w LEFT JOIN answers a ON a.id=w.answer LEFT JOIN credited c ON c.id=w.id "
            "ORDER BY w.id DESC LIMIT ?",
            (max_count,),
        ).fetchall()
    return [LogEntry(*row) for row in rows]
