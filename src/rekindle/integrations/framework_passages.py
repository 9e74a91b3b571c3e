"""What the LangChain and LlamaIndex adapters share: passages of the library as texts with metadata, and back.

A framework passes passages on as texts with metadata. When they come back to be quoted, those that still match the
library are recognized by their chunk id, so that `forget` finds the KV computed from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.core.document import Quote, title_above
from rekindle.core.reply import Reply
from rekindle.knowledge.library import Chunk
from rekindle.session.library import quote_of
from rekindle.session.session import Session

_OURS = frozenset({"source", "title", "document", "chunk"})


@dataclass(frozen=True, slots=True)
class FrameworkPassage:
    """A text to be quoted, with its metadata."""

    text: str
    metadata: Mapping[str, Any]

    @property
    def chunk(self) -> int | None:
        """Its id in a library; None if it does not come from one."""
        chunk = self.metadata.get("chunk")
        ours = self.metadata.keys() >= _OURS and isinstance(chunk, int) and not isinstance(chunk, bool)
        return chunk if ours else None


def metadata_of(chunk: Chunk) -> dict[str, Any]:
    """The metadata of a passage for a framework."""
    return {"source": chunk.source, "title": chunk.title, "document": chunk.name, "chunk": chunk.id}


def id_of(chunk: Chunk) -> str:
    """An id that is stable while the document does not change."""
    return f"{chunk.name}:{chunk.place}"


def quotes_of(session: Session, items: Sequence[Any], tenant: str | None, cache_salt: str | None) -> list[Any]:
    """The items as a request takes documents: each `FrameworkPassage` becomes a quote, others stay unchanged.

    Passages of that tenant's and salt's library are quoted as `Session.ask` does. One that was forgotten since it was
    retrieved is quoted, but no KV of it is kept.
    """
    numbers = [item.chunk for item in items if isinstance(item, FrameworkPassage) and item.chunk is not None]
    known = session.knowledge.library(tenant, cache_salt).chunks(numbers) if numbers else {}
    return [_quote(item, known) if isinstance(item, FrameworkPassage) else item for item in items]


def _quote(item: FrameworkPassage, known: Mapping[int, Chunk]) -> Quote | dict[str, str]:
    number, noted = item.chunk, item.metadata.get("title")
    title = title_above(noted, item.text) if isinstance(noted, str) else ""
    plain = {"text": item.text, "title": title}
    if number is None:
        return plain
    if number not in known:
        return Quote(item.text, title, number)
    # The text was changed since: its tokens must not stand for those of the passage.
    return quote_of(known[number]) if known[number].passage.shown == item.text else plain


def reply_metadata(reply: Reply) -> dict[str, Any]:
    """Reuse and timings of a reply, as plain values."""
    usage = reply.usage
    left = {"quoted_passages": usage.quoted_passages, "dropped_messages": usage.dropped_messages}
    return {"rekindle": {**asdict(reply.reuse), **left}, "timings": asdict(reply.timings)}
