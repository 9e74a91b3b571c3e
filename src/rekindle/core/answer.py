"""An answer from documents."""

from __future__ import annotations

import html
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

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


Origin = Literal["user", "abstract", "history", "passage"]  # who asked: a user; else what it was foreseen from


@dataclass(frozen=True, slots=True)
class Stored:
    """An earlier answer that took part in this one.

    way             direct: it is this answer, and the model was not asked; verified: a draft, which the model checked
    question        what it answered
    origin          user, or what that question was foreseen from: abstract, history, passage
    made            when it was written, in seconds since 1970
    similarity      of the two questions (cosine)
    saved_seconds   what answering took then, if it was not done again now
    """

    way: Literal["direct", "verified"]
    question: str
    origin: Origin
    made: float
    similarity: float
    saved_seconds: float | None = None

    def __str__(self) -> str:
        day = time.strftime("%Y-%m-%d", time.localtime(self.made))
        if self.way == "direct":
            return f"stored answer of {day} to {self.question!r} ({self.similarity:.3f} alike)"
        return f"checked against the answer of {day} to {self.question!r}"


@dataclass(frozen=True)
class Answer(Reply):
    """A reply with its sources. `timings.first_token_seconds` counts from the question, retrieval included.

    left_out    passages that were retrieved and did not fit into the context
    stored      the earlier answer that took part in it; None if none did
    refused     why the stored answer to the nearest question was not given, if `answers` is direct
    """

    question: str = ""
    sources: tuple[Source, ...] = ()
    retrieval: str = "fused"
    retrieve_seconds: float = 0.0
    left_out: int = 0
    stored: Stored | None = None
    refused: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain values, for JSON."""
        own = ("question", "retrieval", "retrieve_seconds", "left_out", "refused")
        told = {name: getattr(self, name) for name in own}
        told["stored"] = None if self.stored is None else asdict(self.stored)
        return {**Reply.as_dict(self), **told, "sources": [asdict(source) for source in self.sources]}

    def summary(self) -> str:
        """One line for people: sizes, times, and how many passages."""
        left = f" ({self.left_out} did not fit)" if self.left_out else ""
        parts = [f"{len(self.sources)} passages{left} in {self.retrieve_seconds * 1e3:.0f} ms"]
        if self.stored is not None:
            parts.append(str(self.stored))
        return ", ".join([Reply.summary(self), *parts])

    def _repr_html_(self) -> str:
        items = "".join(
            f"<li value='{source.number}'>{html.escape(source.title)} "
            f"<span style='color:gray'>{html.escape(source.source)}</span></li>"
            for source in self.sources
        )
        return f"{Reply._repr_html_(self)}<ol>{items}</ol>"
