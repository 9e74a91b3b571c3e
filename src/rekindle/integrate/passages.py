"""Passages of the library on their way through other people's code, and what a reply tells them.

A framework hands passages on as texts with metadata. When they come back to be quoted, those that are still what the
library has are known again by their number, so that `forget` finds the KV that is computed from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.core.document import Quote
from rekindle.core.reply import Reply
from rekindle.knowledge.library import Chunk
from rekindle.run.knowledge import quote_of
from rekindle.run.session import Session

_OURS = frozenset({"source", "title", "document", "chunk"})


@dataclass(frozen=True, slots=True)
class Given:
    """A text that somebody wants quoted, and what is noted about it."""

    text: str
    about: Mapping[str, Any]

    @property
    def chunk(self) -> int | None:
        """Its number in a library; None if it does not seem to come from one."""
        chunk = self.about.get("chunk")
        ours = self.about.keys() >= _OURS and isinstance(chunk, int) and not isinstance(chunk, bool)
        return chunk if ours else None


def metadata_of(chunk: Chunk) -> dict[str, Any]:
    """What a framework is told about a passage."""
    return {"source": chunk.source, "title": chunk.title, "document": chunk.name, "chunk": chunk.id}


def id_of(chunk: Chunk) -> str:
    """A name that stays as long as the document does not change."""
    return f"{chunk.name}:{chunk.place}"


def quotes_of(
    session: Session, given: Sequence[Given], tenant: str | None, cache_salt: str | None
) -> list[Quote | dict[str, str]]:
    """The texts as a request takes them; passages of the library of that tenant and salt as `ask` quotes them.

    A passage that was forgotten since it was retrieved is quoted, but no KV of it is kept.
    """
    numbers = [item.chunk for item in given if item.chunk is not None]
    known = session.knowledge.library(tenant, cache_salt).chunks(numbers) if numbers else {}
    return [_quote(item, known) for item in given]


def _quote(item: Given, known: Mapping[int, Chunk]) -> Quote | dict[str, str]:
    number, title = item.chunk, item.about.get("title")
    plain = {"text": item.text, "title": title if isinstance(title, str) else ""}
    if number is None:
        return plain
    if number not in known:
        return Quote(plain["text"], plain["title"], number)
    # Whoever changed the text has another one now: its tokens must not stand for those of the passage.
    return quote_of(known[number]) if known[number].passage.shown == item.text else plain


def told_of(reply: Reply) -> dict[str, Any]:
    """What a reply tells beside its text, as plain values: where its KV came from and where the time went."""
    usage = reply.usage
    left = {"quoted_passages": usage.quoted_passages, "dropped_messages": usage.dropped_messages}
    return {"rekindle": {**asdict(reply.reuse), **left}, "timings": asdict(reply.timings)}
