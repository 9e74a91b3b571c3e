"""What was reused for a prompt, for its reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from rekindle.cache.lookup import CacheLookup
from rekindle.cache.prefill import PrefillResult
from rekindle.core.keys import KvSpace
from rekindle.core.plan import SHARED_TIERS, Plan
from rekindle.core.reply import SOURCES, ChunkReuse, Reuse


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
