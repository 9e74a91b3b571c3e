"""Chunks: passages that may occur in any prompt; and their variants: the KV of a chunk from one prompt.

prompt    [head .......][1] [chunk a ....][2] [chunk b ......][question ......]
                 ^ system prompt and template: a chunk of its own, the first

A chunk is identified by its tokens alone, a variant also by what came before it.

Non-prefix KV of a chunk was computed after reused KV, so it is not what a full prefill would give. It has a KV space of
its own, where exact lookups never find it. Every variant is a chain of one extent there, used as a whole. Its first
tokens are its name, a digest of the chunk and of what came before it, so that no two variants share a block:

    chain   [name, as 4 tokens][the chunk's tokens ...........]
    KV      [zeros ...........][as it was computed at its span ]
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle.core.keys import TOKEN_BYTES, KvSpace, token_bytes
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.core.plan import Plan, Tier
from rekindle.core.reply import ChunkReuse

MIN_CHUNK_TOKENS = 16  # computing a shorter one is faster than looking it up

ChunkDigest = NewType("ChunkDigest", bytes)  # 16 bytes

_CHUNK = hashlib.blake2b(b"rekindle/chunk/1", digest_size=16)


def chunk_digest(tokens: Sequence[int] | bytes) -> ChunkDigest:
    """The key of a chunk, from its tokens (or their bytes, see `token_bytes`)."""
    state = _CHUNK.copy()
    state.update(tokens if isinstance(tokens, bytes) else token_bytes(tokens))
    return ChunkDigest(state.digest())


@dataclass(frozen=True)
class PromptLayout:
    """The positions of chunks in a prompt, after a head of `head` tokens. The question follows the last chunk."""

    head: int
    chunks: tuple[Span, ...]
    numbers: tuple[int | None, ...] = ()  # of each in the prompt, None for text that is no document; by default from 1

    @property
    def numbered(self) -> list[tuple[int | None, Span]]:
        return list(zip(self.numbers or range(1, len(self.chunks) + 1), self.chunks, strict=True))

    @property
    def texts(self) -> frozenset[Span]:
        """Those that are no documents."""
        return frozenset(span for number, span in self.numbered if number is None)

    @property
    def question(self) -> int:
        """The position where the question begins."""
        return self.chunks[-1].stop


@dataclass(frozen=True)
class EarlierChunk:
    """A chunk that preceded another, and the attention the other paid to it."""

    digest: ChunkDigest
    tokens: int
    mass: float  # sum over the other's tokens, mean over heads and layers


@dataclass(frozen=True, eq=False)
class ChunkScores:
    """Attention in a chunk when its KV was computed: mean over heads and the observed layers.

    outside    [tokens] the share of each token's attention that left the chunk
    received   [tokens] the mass that each token received from all tokens of the prompt
    intra      the mass that the tokens paid to their own chunk, summed
    earlier    the chunks before it, in order, the head first
    """

    outside: NDArray[np.float16]
    received: NDArray[np.float16]
    intra: float
    earlier: tuple[EarlierChunk, ...]


def unmeasured(tokens: int, before: int) -> ChunkScores:
    """Scores of text whose attention nobody measured, `before` tokens into its prompt: half of it went to other text,
    which is not before it now."""
    halves = np.full(tokens, 0.5, dtype=np.float16)
    earlier = (EarlierChunk(chunk_digest(b""), before, 0.5 * tokens),) if before else ()
    return ChunkScores(halves, halves, 0.5 * tokens, earlier)


@dataclass(frozen=True, eq=False)
class Variant:
    """The KV of a chunk from one prompt.

    `span` is its position there. `drift` is the share of the tokens before it whose KV came from other prompts.
    """

    digest: ChunkDigest
    span: Span
    scores: ChunkScores
    drift: float = 0.0

    @property
    def before(self) -> tuple[ChunkDigest, ...]:
        """The chunks it was computed after, in order, the head first."""
        return tuple(chunk.digest for chunk in self.scores.earlier)

    @property
    def chain_name(self) -> ChunkDigest:
        """What its own chain begins with, if it is non-prefix KV."""
        return chunk_digest(b"".join((self.digest, *self.before)))


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
    change: float = 1.0  # of its context since its KV was computed; 0: nothing is recomputed

    @property
    def dependence(self) -> float:
        """The share of its tokens' attention that went to what has changed."""
        outside = 1.0 if self.known is None else float(self.known.variant.scores.outside.mean(dtype=float))
        return self.change * (outside if outside <= 1.0 else 1.0)  # also for what is no number


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

    def knows_more_than(self, tokens: int) -> bool:
        """Whether some chunk that does not end within the first `tokens` tokens has a variant."""
        return any(chunk.known is not None and chunk.span.stop > tokens for chunk in self.picked)

    def reused_in(self, plan: Plan) -> tuple[ChunkMatch, ...]:
        """Those that the plan reuses, in order."""
        spans = plan.reuse_chunks.spans if plan.reuse_chunks is not None else ()
        return tuple(chunk for chunk in self.picked if chunk.span in spans)

    def computed_in(self, plan: Plan) -> tuple[ChunkMatch, ...]:
        """Those with a variant that a plan computes all the same, because all of their tokens would be recomputed."""
        if plan.reuse_chunks is None:
            return ()
        spans = plan.reuse_chunks.spans
        known = [chunk for chunk in self.picked if chunk.known is not None and chunk.span.stop > plan.reused]
        return tuple(chunk for chunk in known if chunk.span not in spans)

    def report(
        self, plan: Plan, recomputed: Sequence[int], before: Sequence[ChunkReuse] = ()
    ) -> tuple[ChunkReuse, ...]:
        """Where the KV of each chunk came from; `before` is the report of the context that was continued.

        Tokens may have been in other passages then: what was reused stays so.
        """
        reused_chunks = {chunk.span: chunk for chunk in self.reused_in(plan)}
        shares = self._shares(plan)
        stale = [chunk for chunk in before if chunk.source == "reused"]
        reports: list[ChunkReuse] = []
        for number, span in self.prompt_layout.numbered:
            stood = [chunk for chunk in stale if _share(chunk, span)]
            if span in reused_chunks:
                reports.append(replace(_reused(number, reused_chunks[span], recomputed), share=shares[span]))
            elif stood:
                own = tuple(position for chunk in stood for position in chunk.recomputed_positions if position in span)
                whole = replace(stood[0], number=number, start=span.start, stop=span.stop)
                reports.append(replace(whole, recomputed=len(own), recomputed_positions=own))
            elif number is not None:
                after = any(chunk.source == "reused" and chunk.start < span.start for chunk in (*reports, *before))
                source: Literal["computed", "exact"] = "computed" if after else "exact"
                reports.append(ChunkReuse(number, span.start, span.stop, source, share=shares.get(span)))
        hidden = [rest for chunk in stale for rest in _uncovered(chunk, self.prompt_layout.chunks)]
        return tuple(sorted((*reports, *hidden), key=lambda chunk: chunk.start))

    def _shares(self, plan: Plan) -> dict[Span, float]:
        """The share that a plan recomputes of each chunk it reuses; 1 for known ones that it computes instead."""
        if plan.reuse_chunks is None:
            return {}
        computed = [chunk.span for chunk in self.computed_in(plan)]
        return dict.fromkeys(computed, 1.0) | dict(zip(plan.reuse_chunks.spans, plan.reuse_chunks.shares, strict=True))


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


def _reused(number: int | None, chunk: ChunkMatch, recomputed: Sequence[int]) -> ChunkReuse:
    assert chunk.known is not None
    start, stop = bisect_left(recomputed, chunk.span.start), bisect_left(recomputed, chunk.span.stop)
    own = tuple(recomputed[start:stop])
    variant = chunk.known.variant
    scores = (chunk.impact, chunk.overlap, chunk.disorder, chunk.overhead, variant.drift, chunk.change)
    return ChunkReuse(
        number, chunk.span.start, chunk.span.stop, "reused", len(own), own, *scores, found_at=variant.span.start
    )


DIGEST_TOKENS = 16 // TOKEN_BYTES
NONPREFIX_SUFFIX = "/nonprefix"  # of a codec's name


def nonprefix(kv_space: KvSpace) -> KvSpace:
    """The KV space beside `kv_space` for its non-prefix KV: same model, tenant, salt and adapter."""
    return replace(kv_space, codec=kv_space.codec + NONPREFIX_SUFFIX)


def is_nonprefix(codec: str) -> bool:
    """Whether a KV space of that codec holds non-prefix KV."""
    return codec.endswith(NONPREFIX_SUFFIX)


def chain_tokens(variant: Variant, tokens: bytes) -> bytes:
    """The tokens of a variant's own chain."""
    return variant.chain_name + tokens


def chain_kv(kv: Kv) -> Kv:
    """The KV of a variant's own chain: a copy, with zeros for the name."""
    layers = tuple(LayerKv(_behind_name(layer.keys), _behind_name(layer.values)) for layer in kv.layers)
    return Kv(Span(0, DIGEST_TOKENS + len(kv.span)), kv.layout, layers)


def _behind_name(array: NDArray[Any]) -> NDArray[Any]:
    heads, _, dim = array.shape
    return np.concatenate([np.zeros((heads, DIGEST_TOKENS, dim), array.dtype), array], axis=1)
