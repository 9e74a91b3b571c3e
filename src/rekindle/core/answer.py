"""An answer from documents."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.core.reply import Reply


@dataclass(frozen=True, slots=True)
class Source:
    """A passage that the model was given. It is data: shown as it is, whatever it says.

    number      how the answer calls it: [1]
    document    the name of its document in the library
    source      where that document came from
    score       of the retrieval; comparable within one answer
    cut         whether only its beginning fit
    """

    number: int
    document: str
    source: str
    title: str
    text: str
    score: float
    cut: bool = False


@dataclass(frozen=True)
class Answer(Reply):
    """A reply with its sources. `timings.first_token_seconds` counts from the question, retrieval included.

    left_out    passages that were retrieved and did not fit into the context
    """

    question: str = ""
    sources: tuple[Source, ...] = ()
    retrieval: str = "fused"
    retrieve_seconds: float = 0.0
    left_out: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain values, for JSON."""
        own = ("question", "retrieval", "retrieve_seconds", "left_out")
        told = {name: getattr(self, name) for name in own}
        return {**Reply.as_dict(self), **told, "sources": [asdict(source) for source in self.sources]}

    def summary(self) -> str:
        """One line for people: sizes, times, and how many passages."""
        left = f" ({self.left_out} did not fit)" if self.left_out else ""
        return f"{Reply.summary(self)}, {len(self.sources)} passages{left} in {self.retrieve_seconds * 1e3:.0f} ms"

    def _repr_html_(self) -> str:
        items = "".join(
            f"<li value='{source.number}'>{html.escape(source.title)} "
            f"<span style='color:gray'>{html.escape(source.source)}</span></li>"
            for source in self.sources
        )
        return f"{Reply._repr_html_(self)}<ol>{items}</ol>"
