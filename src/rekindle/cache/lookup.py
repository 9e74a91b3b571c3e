"""The result of looking a prompt up; what of it is reused, for the reply, and why not more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rekindle.cache.context import Context, cut_passages
from rekindle.cache.inflight import InflightPrefill
from rekindle.cache.matches import Matches
from rekindle.cache.planner import PrefillSteps
from rekindle.cache.prefill import PrefillResult
from rekindle.cache.writer import WriteGuard
from rekindle.core.chunk import ChunkMatches
from rekindle.core.keys import KvSpace
from rekindle.core.plan import SHARED_TIERS, Plan
from rekindle.core.reply import SOURCES, ChunkReuse, Reuse
from rekindle.core.scope import AppRef
from rekindle.store.prefix_index import Piece
from rekindle.store.variants import StoredVariant


@dataclass(frozen=True)
class CacheLookup:
    """What is stored of a prompt, and the parked context it can continue, which is taken until it is parked again."""

    kv_space: KvSpace
    tokens: Sequence[int]
    matches: Matches
    parked: Context | None = None
    trouble: str | None = None
    off: bool = False  # no lookup, and nothing is written
    guard: WriteGuard | None = None  # decides whether its KV may be written
    inflight: InflightPrefill | None = None  # others may wait for it
    passages: ChunkMatches | None = None  # if passages may come from other prompts
    app_ref: AppRef | None = None  # the app that asks
    parked_goes_on: bool = False  # the parked context had more tokens than the prompt shares with it

    def passages_before(self, plan: Plan) -> tuple[ChunkReuse, ...]:
        """The passages in the part of the context that a plan continues."""
        return cut_passages(self.parked.chunk_reuse, plan.reused) if self.parked is not None and plan.in_engine else ()

    @property
    def has_documents(self) -> bool:
        """Whether passages may be reused that were given as documents, not only text that was found."""
        return self.passages is not None and len(self.passages.prompt_layout.texts) < len(
            self.passages.prompt_layout.chunks
        )

    @property
    def source(self) -> KvSpace:
        """The KV space of the stored prefix."""
        return self.matches.kv_space or self.kv_space

    @property
    def stored_tokens(self) -> int:
        """Number of tokens stored on this machine in the prompt's own KV space."""
        return self.matches.local_tokens if self.matches.kv_space is None else 0

    @property
    def forks(self) -> bool:
        """Whether something stored goes on otherwise where the reuse can end at the latest."""
        matches, match = self.matches, self.matches.match
        in_store = match is not None and match.forks and match.length == matches.length
        return in_store or (self.parked_goes_on and matches.in_engine == matches.length)

    def quantized_tokens(self, plan: Plan) -> int:
        """Number of tokens that a plan reuses whose KV was quantized."""
        if plan.in_engine:
            return 0 if self.parked is None else min(self.parked.quantized_tokens, plan.reused)
        return self.matches.quantized_tokens(plan.reused)


def stored_pieces(known: CacheLookup, plan: Plan) -> list[Piece]:
    """The stored pieces of a prompt that it may load: its prefix, unless a parked context has it, then its passages."""
    prefix = () if known.matches.match is None or plan.in_engine else known.matches.match.pieces
    picked = () if known.passages is None else known.passages.picked
    passages = [chunk.known for chunk in picked if chunk.span.stop > known.matches.length]
    return [*prefix, *(piece for one in passages if isinstance(one, StoredVariant) for piece in one.pieces)]


def why_missed(known: CacheLookup, plan: Plan, cut: PrefillSteps, lost: str | None) -> str | None:
    """Why not more is reused, in a word; None if all that is stored is, and the rest is new. See `Reuse`."""
    last = len(known.tokens) - 1
    if known.off:
        return "off"
    if known.trouble is not None:
        return "late"
    if lost is not None:
        return "lost"
    if plan.reuse_chunks is None and (
        _refuses_chunks(known, plan) or plan.reused < cut.reusable(min(known.matches.length, last))
    ):
        return "slower"
    if plan.reused == last:
        return None
    if not known.matches.length:
        return "unknown"
    return "differs" if known.forks else None


def _refuses_chunks(known: CacheLookup, plan: Plan) -> bool:
    return known.passages is not None and known.passages.knows_more_than(plan.reused)


def report_reuse(
    lookup: CacheLookup,
    plan: Plan,
    result: PrefillResult | None,
    miss: str | None,
    bits_calibrated: Callable[[KvSpace], bool],
) -> Reuse:
    """What a plan reuses; with a result, what really was."""
    tiers = Counter({load.tier: 0 for load in plan.loads})
    for load in plan.loads:
        tiers[load.tier] += len(load.span)
    chunks = _chunks(lookup, plan) if result is None else result.context.chunk_reuse
    reused, stream = plan.reuse_chunks, plan.stream
    stayed, moved = _reused_before(chunks, plan), 0 if reused is None else sum(map(len, reused.spans))
    tiers["engine"] -= stayed  # still there from the last request
    from_chunks = stayed + moved
    quantized = lookup.quantized_tokens(plan) if result is None else min(result.context.quantized_tokens, plan.reused)
    is_quantized = quantized > 0
    calibrated_bits = bits_calibrated(lookup.kv_space) if is_quantized else None
    streamed = 0 if stream is None else stream.tokens
    if stream is not None and stream.is_quantized:
        quantized = lookup.quantized_tokens(plan) + streamed
        is_quantized = quantized > 0 or stream.brings  # also what is less than a token's worth
    came = None if result is None else result.streamed
    expected = 0 if reused is None else reused.expected_recomputed
    recomputed = expected if result is None else len(result.recomputed_positions)
    return Reuse(
        level="off" if lookup.off else "approximate" if from_chunks else "quantized" if is_quantized else "exact",
        computed=len(lookup.tokens) - plan.reused - moved + recomputed - streamed,
        engine=tiers["engine"],
        memory=tiers["memory"],
        disk=tiers["disk"] + tiers["coded"],
        shared={tier: tiers[tier] for tier in SHARED_TIERS if tiers[tier]},
        quantized=quantized,
        calibrated_bits=calibrated_bits,
        from_chunks=from_chunks,
        recomputed=recomputed,
        streamed=streamed,
        streamed_slices={} if came is None else came.slices,
        streamed_kl=None if came is None else came.kl,
        timeline=() if came is None else tuple(came.events),
        load_seconds=0.0 if result is None else result.load_seconds,
        predicted_seconds=plan.predicted_seconds,
        cold_seconds=plan.cold_seconds,
        miss=miss,
        origin_miss=None if result is None else result.context.origin_miss,
        chunks=chunks if from_chunks or lookup.passages is not None else (),
        recompute_policy=None if reused is None else reused.recompute_policy,
        budget=None if reused is None else reused.budget,
        calibrated=None if reused is None else reused.calibrated,
        refused_chunks=plan.refused_chunks if miss == "slower" else None,
    )


def source_spans(lookup: CacheLookup, plan: Plan, chunks: Sequence[ChunkReuse]) -> list[tuple[int, int, str]]:
    """Where the KV of each run of tokens comes from: start, stop, and a key of `SOURCES`."""
    names = list(SOURCES)
    sources = np.full(plan.tokens, names.index("computed"))  # [tokens]

    def paint(start: int, stop: int, source: str) -> None:
        sources[start:stop] = names.index(source)

    for load in plan.loads:
        source = "disk" if load.tier == "coded" else "remote" if load.tier in SHARED_TIERS else load.tier
        paint(load.span.start, load.span.stop, source)
    for found in () if plan.in_engine else lookup.matches.stored:
        if found.quantized:
            paint(found.span.start, min(found.span.stop, plan.reused), "quantized")
    if plan.stream is not None:  # computed from the front, fetched from the back
        stop, level = plan.stream.span.stop, "quantized" if plan.stream.is_quantized else "remote"
        paint(stop - plan.stream.tokens, stop, level)
    for chunk in chunks:
        if chunk.source == "reused":
            paint(chunk.start, chunk.stop, "passages")
            sources[[at for at in chunk.recomputed_positions if at < plan.tokens]] = names.index("recomputed")
    edges = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), plan.tokens]
    return [(start, stop, names[sources[start]]) for start, stop in pairwise(edges)]


def _chunks(lookup: CacheLookup, plan: Plan) -> tuple[ChunkReuse, ...]:
    """Where the KV of the passages will come from."""
    before = lookup.passages_before(plan)
    return before if lookup.passages is None else lookup.passages.report(plan, (), before)


def _reused_before(chunks: Sequence[ChunkReuse], plan: Plan) -> int:
    """Number of tokens of passages that earlier requests reused; what follows them is computed."""
    return sum(max(0, min(chunk.stop, plan.reused) - chunk.start) for chunk in chunks if chunk.source == "reused")
