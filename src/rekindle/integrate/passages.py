"""Passages of the library on their way through other people's code, and what a reply tells them.

A framework hands passages on as texts with metadata. When they come back to be quoted, those that are still what the
library has are known again by their number, so that `forget` finds the KV that is computed from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.core.document import Quote, title_above
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


def quotes_of(session: Session, items: Sequence[Any], tenant: str | None, cache_salt: str | None) -> list[Any]:
    """The items as a request takes documents: each `Given` becomes a quote, others stay as they are.

    Passages of the library of that tenant and salt become what `Session.ask` makes of them. One that was forgotten
    since it was retrieved is quoted, but no KV of it is kept.
    """
    numbers = [item.chunk for item in items if isinstance(item, Given) and item.chunk is not None]
    known = session.knowledge.library(tenant, cache_salt).chunks(numbers) if numbers else {}
    return [_quote(item, known) if isinstance(item, Given) else item for item in items]


def _quote(item: Given, known: Mapping[int, Chunk]) -> Quote | dict[str, str]:
    number, noted = item.chunk, item.about.get("title")
    title = title_above(noted, item.text) if isinstance(noted, str) else ""
    plain = {"text": item.text, "title": title}
    if number is None:
        return plain
    if number not in known:
        return Quote(item.text, title, number)
    # Whoever changed the text has another one now: its tokens must not stand for those of the passage.
    return quote_of(known[number]) if known[number].passage.shown == item.text else plain


def told_of(reply: Reply) -> dict[str, Any]:
    """What a reply tells beside its text, as plain values: where its KV came from and where the time went."""
    usage = reply.usage
    left = {"quoted_passages": usage.quoted_passages, "dropped_messages": usage.dropped_messages}
    return {"rekindle": {**asdict(reply.reuse), **left}, "timings": asdict(reply.timings)}
