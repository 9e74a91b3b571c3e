"""What was done when idle: what each thing took, and what it saved later. Kept in the library, without any text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from rekindle.engine.base import Engine
from rekindle.knowledge.library import Library

Action = Literal[
    "refresh", "true-answer", "abstract", "guess-abstract", "guess-history", "prefill", "answer", "decode", "restore",
    "warm",
]  # fmt: skip
_MOST_ROWS = 10_000


@dataclass(frozen=True)
class Did:
    """Something that was done.

    refresh        an answer was found anew, because its documents changed
    true-answer    a question got its own answer, that had been given another one's
    abstract       a document was summed up
    guess-abstract, guess-history   questions were guessed
    prefill        a foreseen question was read by the model: its KV is there
    answer         it was answered, too
    decode         a question that had only been read was answered
    restore        the KV of a known question was gone, and is there again
    warm           what questions begin with was computed: the instructions, a passage

    what       for people: a question, the name of a document
    answer     the question in the bank
    tokens     that were computed, of prompt and reply; not those of drafts that were wrong
    flop       see `flop`; None if it was stopped
    joules     of the whole processor meanwhile; None where the machine does not tell
    finished   False if it was stopped: then nothing came of it
    """

    action: Action
    what: str
    answer: int | None
    seconds: float
    tokens: int = 0
    flop: float | None = None
    joules: float | None = None
    finished: bool = True


@dataclass(frozen=True)
class Worked:
    """What was done in one way, all together, and how often and how much it helped since."""

    action: str
    count: int
    seconds: float
    tokens: int
    tflop: float
    joules: float | None
    uses: int
    saved_seconds: float


def flop(engine: Engine, computed: int, context: int) -> float:
    """Operations that computing the last `computed` tokens of a context of `context` tokens takes.

    Two for each weight and token; and where attention compares a token with one before it, two for the product of
    query and key and two for the sum of values, for each number of the query in every layer. The table of embeddings
    counts as a layer, though a prompt needs only its last token there: that is a little too much, never too little.
    """
    pairs = computed * context - computed * (computed - 1) / 2
    return 2.0 * engine.parameters * computed + 4.0 * engine.attention * pairs


def note_work(library: Library, did: Did) -> None:
    """Write down what was done."""
    row = (time.time(), did.action, did.answer, did.seconds, did.tokens, did.flop, did.joules)
    with library.writing() as connection:
        id = connection.execute(
            "INSERT INTO work (at, action, answer, seconds, tokens, flop, joules) VALUES (?,?,?,?,?,?,?)", row
        ).lastrowid
        connection.execute("DELETE FROM work WHERE id<=?", ((id or 0) - _MOST_ROWS,))


def worked(library: Library) -> list[Worked]:
    """What was done by now, action by action. What an answer saved counts for what was last done about it."""
    with library.reading() as connection:
        rows = connection.execute(
            "SELECT w.action, count(*), sum(w.seconds), sum(w.tokens), coalesce(sum(w.flop), 0) / 1e12, sum(w.joules), "
            "coalesce(sum(a.uses), 0), coalesce(sum(a.saved), 0) FROM work w LEFT JOIN answers a ON a.id=w.answer "
            "AND w.id=(SELECT max(id) FROM work WHERE answer=w.answer AND action!='restore') "
            "GROUP BY w.action ORDER BY min(w.id)"
        ).fetchall()
    return [Worked(*row) for row in rows]


@dataclass(frozen=True)
class Entry:
    """A line of the log: when, what, and the question it was about, if that is still known."""

    at: float
    action: str
    seconds: float
    tokens: int
    tflop: float | None
    joules: float | None
    question: str | None
    origin: str | None
    uses: int | None
    saved_seconds: float | None


def last_work(library: Library, most: int) -> list[Entry]:
    """What was done last, the newest first."""
    with library.reading() as connection:
        rows = connection.execute(
            "SELECT w.at, w.action, w.seconds, w.tokens, w.flop / 1e12, w.joules, a.question, a.origin, a.uses, "
            "a.saved FROM work w LEFT JOIN answers a ON a.id=w.answer ORDER BY w.id DESC LIMIT ?",
            (most,),
        ).fetchall()
    return [Entry(*row) for row in rows]
