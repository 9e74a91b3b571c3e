"""What a prompt was spared, for its reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rekindle.cache.lookup import CacheLookup
from rekindle.cache.prefill import PrefillResult
from rekindle.chunks.select import RecomputePolicy
from rekindle.core.kv import Span
from rekindle.core.plan import Plan
from rekindle.core.reply import ChunkReuse, Reuse
from rekindle.remote.slices import RAW


def spared(
    known: CacheLookup, plan: Plan, filled: PrefillResult | None, miss: str | None, recompute_policy: RecomputePolicy
) -> Reuse:
    """What a prompt is spared by a plan; once it is filled, what it was really spared."""
    tiers = Counter({load.tier: 0 for load in plan.loads})
    for load in plan.loads:
        tiers[load.tier] += len(load.span)
    chunks = _chunks(known, plan) if filled is None else filled.context.chunk_reuse
    stayed, moved = (
        _reused_before(chunks, plan),
        _tokens(plan.reuse_chunks.spans) if plan.reuse_chunks is not None else 0,
    )
    tiers["engine"] -= stayed  # they are still there from the last request
    from_chunks = stayed + moved
    recompute = plan.reuse_chunks is not None
    near = known.quantized_tokens(plan) if filled is None else min(filled.context.quantized_tokens, plan.reused)
    is_quantized = near > 0
    streamed = 0 if plan.stream is None else plan.stream.tokens
    if plan.stream is not None and plan.stream.level != RAW:
        near = known.quantized_tokens(plan) + streamed
        is_quantized = near > 0 or plan.stream.brings  # also what is less than a token's worth
    recomputed = len(filled.recomputed_positions) if filled is not None else _expected(known, plan, recompute_policy)
    return Reuse(
        level="off" if known.off else "approximate" if from_chunks else "quantized" if is_quantized else "exact",
        computed=len(known.tokens) - plan.reused - moved + recomputed - streamed,
        engine=tiers["engine"],
        memory=tiers["memory"],
        disk=tiers["disk"] + tiers["coded"],
        quantized=near,
        from_chunks=from_chunks,
        recomputed=recomputed,
        streamed=streamed,
        timeline=() if filled is None or filled.streamed is None else tuple(filled.streamed.events),
        load_seconds=0.0 if filled is None else filled.load_seconds,
        predicted_seconds=plan.predicted_seconds,
        cold_seconds=plan.cold_seconds,
        miss=miss,
        chunks=chunks if from_chunks or known.passages is not None else (),
        recompute_policy=recompute_policy.name if recompute else None,
        budget=recompute_policy.budget if recompute else None,
        calibrated=recompute_policy.calibrated if recompute else None,
    )


def _chunks(known: CacheLookup, plan: Plan) -> tuple[ChunkReuse, ...]:
    """Where the KV of the passages will come from."""
    before = known.passages_before(plan)
    return before if known.passages is None else known.passages.report(plan, (), before)


def _expected(known: CacheLookup, plan: Plan, recompute_policy: RecomputePolicy) -> int:
    return 0 if known.passages is None else recompute_policy.expected_recomputed(known.passages.reused_in(plan))


def _tokens(spans: Sequence[Span]) -> int:
    return sum(map(len, spans))


def _reused_before(chunks: Sequence[ChunkReuse], plan: Plan) -> int:
    """How many tokens of passages were reused by earlier requests; what stands behind them is computed."""
    return sum(max(0, min(chunk.stop, plan.reused) - chunk.start) for chunk in chunks if chunk.source == "reused")
