"""A stored answer as a reply: its text, what it came from, and that nothing was computed."""

from __future__ import annotations

from rekindle.answers.bank_rows import AnswerText, BankEntry
from rekindle.core.reply import AnswerSource, Reply, Reuse, StoredAnswer, Timings, Usage
from rekindle.core.request import ReuseLevel
from rekindle.knowledge.library import Library


def given_reply(answer: AnswerText, passages: int, level: ReuseLevel) -> Reply:
    """The reply: `usage` and `reuse` say that nothing was read or written."""
    usage = Usage(0, 0, quoted_passages=passages)
    return Reply(answer.text, answer.tokens, answer.finish, usage, Timings(0.0, 0.0, None), Reuse(level, computed=0))


def given_sources(library: Library, entry: BankEntry, similarity: float) -> tuple[AnswerSource, ...]:
    """The passages that a stored answer came from, numbered as there. All of them still exist, else it is not given."""
    chunks = library.chunks(entry.evidence)
    kept = [chunks[id] for id in entry.evidence if id in chunks]
    return tuple(
        AnswerSource(number, chunk.name, chunk.source, chunk.title, chunk.passage.shown, similarity)
        for number, chunk in enumerate(kept, start=1)
    )


def given_stored(entry: BankEntry, similarity: float) -> StoredAnswer:
    """What to say of an answer that was given."""
    saved = None if entry.answer is None else entry.answer.seconds
    return StoredAnswer("direct", entry.question, entry.origin, entry.made, similarity, saved)
