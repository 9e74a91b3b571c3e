"""The chunks of one prompt, and the variants that would be reused for them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rekindle.core.chunk import ChunkDigest, PromptLayout, Variant, chunk_digest
from rekindle.core.kv import Span
from rekindle.core.plan import Plan, Tier
from rekindle.core.reply import ChunkReuse


class LoadableVariant(Protocol):
    """A variant that can be loaded."""

    @property
    def id(self) -> int:
        """Its number in the store."""

    @property
    def variant(self) -> Variant:
        """Its chunk, span and scores."""

    @property
    def tier(self) -> Tier:
        """Where its KV is."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its KV."""


@dataclass(frozen=True, eq=False)
class ChunkMatch:
    """A chunk of a prompt, the variant that would be reused for it, and the scores that decided."""

    span: Span
    digest: ChunkDigest
    known: LoadableVariant | None = None
    impact: float | None = None  # CCI
    overlap: float | None = None  # beta
    disorder: float | None = None  # gamma
    overhead: float | None = None  # CFO with alpha 1


@dataclass(frozen=True, eq=False)
class ChunkMatches:
    """The chunks of one prompt: their positions, digests, and the variant of each that would be reused."""

    prompt_layout: PromptLayout
    digests: tuple[ChunkDigest, ...]  # the head's first
    picked: tuple[ChunkMatch, ...] = ()

    @classmethod
    def of(cls, prompt_layout: PromptLayout, tokens: Sequence[int]) -> ChunkMatches:
        """The chunks of a prompt, before any lookup."""
        spans = (Span(0, prompt_layout.head), *prompt_layout.chunks)
        return cls(prompt_layout, tuple(chunk_digest(tokens[span.start : span.stop]) for span in spans))

    def reused_in(self, plan: Plan) -> tuple[ChunkMatch, ...]:
        """Those that the plan reuses, in order."""
        spans = plan.reuse_chunks.spans if plan.reuse_chunks is not None else ()
        return tuple(chunk for chunk in self.picked if chunk.span in spans)

    def report(
        self, plan: Plan, recomputed: Sequence[int], before: Sequence[ChunkReuse] = ()
    ) -> tuple[ChunkReuse, ...]:
        """Where the KV of each chunk came from; `before` is the report of the context that was continued.

        Tokens may have been in other passages then: what was reused stays so.
        """
        reused_chunks = {chunk.span: chunk for chunk in self.reused_in(plan)}
        stale = [chunk for chunk in before if chunk.source == "reused"]
        reports: list[ChunkReuse] = []
        for number, span in self.prompt_layout.numbered:
            stood = [chunk for chunk in stale if _share(chunk, span)]
            if span in reused_chunks:
                reports.append(_reused(number, reused_chunks[span], recomputed))
            elif stood:
                own = tuple(position for chunk in stood for position in chunk.recomputed_positions if position in span)
                whole = replace(stood[0], number=number, start=span.start, stop=span.stop)
                reports.append(replace(whole, recomputed=len(own), recomputed_positions=own))
            else:
                after = any(chunk.source == "reused" and chunk.start < span.start for chunk in (*reports, *before))
                reports.append(ChunkReuse(number, span.start, span.stop, "computed" if after else "exact"))
        hidden = [rest for chunk in stale for rest in _uncovered(chunk, self.prompt_layout.chunks)]
        return tuple(sorted((*reports, *hidden), key=lambda chunk: chunk.start))


def _share(chunk: ChunkReuse, span: Span) -> bool:
    """Whether they have tokens in common."""
    return chunk.start < span.stop and chunk.stop > span.start


def _uncovered(chunk: ChunkReuse, spans: Sequence[Span]) -> list[ChunkReuse]:
    """The parts of a reused passage that are in no passage now."""
    rests, place = [], chunk.start
    for span in (*spans, Span(chunk.stop, chunk.stop)):
        if span.stop <= place or place >= chunk.stop:
            continue
        if (stop := min(span.start, chunk.stop)) > place:
            own = tuple(position for position in chunk.recomputed_positions if place <= position < stop)
            rests.append(
                replace(chunk, number=None, start=place, stop=stop, recomputed=len(own), recomputed_positions=own)
            )
        place = span.stop
    if place < chunk.stop:
        own = tuple(position for position in chunk.recomputed_positions if position >= place)
        rests.append(replace(chunk, number=None, start=place, recomputed=len(own), recomputed_positions=own))
    return rests


def _reused(number: int, chunk: ChunkMatch, recomputed: Sequence[int]) -> ChunkReuse:
    assert chunk.known is not None
    start, stop = bisect_left(recomputed, chunk.span.start), bisect_left(recomputed, chunk.span.stop)
    own = tuple(recomputed[start:stop])
    scores = (chunk.impact, chunk.overlap, chunk.disorder, chunk.overhead, chunk.known.variant.drift)
    return ChunkReuse(number, chunk.span.start, chunk.span.stop, "reused", len(own), own, *scores)
