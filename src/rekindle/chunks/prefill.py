"""Plan and prefill prompts with passages: KV from other prompts is reused with selective recompute."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rekindle.cache.context import Context
from rekindle.cache.cost import Costs, Rates
from rekindle.cache.deadline import DeadlineCaller, NoAnswer
from rekindle.cache.lookup import CacheLookup
from rekindle.cache.planner import PrefillSteps, make_plan
from rekindle.cache.prefill import Prefill, PrefillResult, TimedFeed
from rekindle.chunks.match import ChunkCache, ChunksToKeep
from rekindle.chunks.recompute import SelectiveRecompute
from rekindle.chunks.scores import ChunkScorer
from rekindle.chunks.select import LOOK_LAYERS, RecomputePolicy
from rekindle.core.chunk import MIN_CHUNK_TOKENS, ChunkMatch, ChunkMatches, PromptLayout
from rekindle.core.kv import Span
from rekindle.core.plan import Compute, Load, Plan, ReuseChunks, Step
from rekindle.errors import KvLost
from rekindle.store.tiered import TieredStore

log = logging.getLogger("rekindle.cache")

RunPlan = Callable[[Prefill, Context, CacheLookup, Plan], PrefillResult]  # runs a plan without chunk reuse


@dataclass(frozen=True)
class TimeLimits:
    """Timeouts: of a lookup, and of a load by the seconds it saves."""

    look: Callable[[], float]
    load: Callable[[float], float]


@dataclass(frozen=True)
class ChunkPrefill:
    """Prefill with chunk reuse. `left` is called with feeds that may still be busy."""

    store: TieredStore
    chunks: ChunkCache
    costs: Costs
    cut: PrefillSteps
    asking: DeadlineCaller
    run_plan: RunPlan
    left: Callable[[TimedFeed], None]
    times: TimeLimits

    def plan(self, known: CacheLookup) -> Plan:
        """The plan for a prompt."""
        exact = make_plan(known.matches, self.costs.rates, self.cut)
        if known.passages is None:
            return exact
        prompt_layout, picked = known.passages.prompt_layout, known.passages.picked
        return plan_chunk_reuse(
            exact, prompt_layout, picked, self.chunks.recompute_policy, self.costs.rates, self.chunks.token_limit
        )

    def fill(self, work: Prefill, context: Context, known: CacheLookup, plan: Plan) -> PrefillResult:
        """Run a plan. Raises `Cancelled`, and what the engine raises."""
        passages = known.passages
        assert passages is not None
        scoring = self.chunks.scoring(passages, len(known.tokens))
        work = replace(work, probe=None if scoring is None else scoring.probe)
        filled = self.run(work, context, known, plan)
        self.note_result(context, passages, filled, scoring)
        return filled

    def note_result(
        self, context: Context, passages: ChunkMatches, filled: PrefillResult, scoring: ChunkScorer | None
    ) -> None:
        """Note in the context where the KV of the passages came from, and which of them to store."""
        context.chunk_reuse = passages.report(filled.plan, filled.recomputed_positions, context.chunk_reuse)
        context.watched = ChunksToKeep(passages, filled.plan, scoring)

    def run(self, work: Prefill, context: Context, known: CacheLookup, plan: Plan) -> PrefillResult:
        """Run a plan without `note_result`."""
        return (self.run_plan if plan.reuse_chunks is None else self._reuse)(work, context, known, plan)

    def _reuse(self, work: Prefill, context: Context, known: CacheLookup, plan: Plan) -> PrefillResult:
        passages = known.passages
        assert passages is not None
        saved = self.costs.rates.compute_seconds(Span(0, plan.tokens)) or 0.0
        recompute = SelectiveRecompute(
            work, passages.prompt_layout, passages.reused_in(plan), self.chunks.recompute_policy, self.asking
        )
        try:
            filled = recompute.load(self.store, known, context, plan, self.times.load(saved), self.left)
        except (KvLost, NoAnswer) as error:
            log.info("computing instead: %s", error)
            context.truncate(plan.reused if plan.in_engine else 0)
            instead = plan.without_chunk_reuse(self.cut.spans(plan.reused, plan.tokens))
            return replace(self.run_plan(work, context, known, instead), lost=str(error))
        self.chunks.note_use(passages, self.store, self.costs, filled, saved, known.app_ref)
        if plan.loads and not plan.in_engine and known.matches.match is not None:
            context.quantized_tokens = known.quantized_tokens(plan)
            self.store.record_use(known.matches.match.until(plan.reused))
        return filled


def plan_chunk_reuse(
    exact: Plan,
    prompt_layout: PromptLayout,
    chunks: Sequence[ChunkMatch],
    recompute_policy: RecomputePolicy,
    rates: Rates,
    token_limit: int,
) -> Plan:
    """A plan that reuses chunks, if it is expected to be faster than the exact one; else the exact one.

    A chunk with only an exact beginning is reused as a whole. No pass may have more than `token_limit`.
    """
    start = exact.reused
    usable = [
        chunk
        for chunk in chunks
        if chunk.known is not None and chunk.span.stop > start and recompute_policy.pays(chunk)
    ]
    if not usable:
        return exact
    start = min(start, usable[0].span.start)
    loads = tuple(
        replace(load, span=Span(load.span.start, min(load.span.stop, start)))
        for load in exact.loads
        if load.span.start < start
    )
    spans = tuple(chunk.span for chunk in usable)
    numbers = tuple(chunk.known.id for chunk in usable if chunk.known is not None)
    gaps = _gaps(start, spans, exact.tokens)
    seconds = _seconds(loads, usable, gaps, prompt_layout, recompute_policy, rates, exact.tokens)
    recomputed = sum(map(len, gaps)) + recompute_policy.expected_recomputed(usable)
    limits = [limit for limit in (exact.predicted_seconds, exact.cold_seconds) if limit is not None]
    if recomputed > token_limit or (seconds is not None and seconds >= min(limits, default=math.inf)):
        return exact
    steps: tuple[Step, ...] = (
        *loads,
        ReuseChunks(spans, numbers, recompute_policy.name, recompute_policy.budget),
        *map(Compute, gaps),
    )
    return Plan(exact.tokens, steps, seconds, exact.cold_seconds)


def _gaps(start: int, spans: Sequence[Span], stop: int) -> list[Span]:
    """The gaps between the spans, from `start` to `stop`."""
    gaps, place = [], start
    for span in (*spans, Span(stop, stop)):
        if span.start > place:
            gaps.append(Span(place, span.start))
        place = span.stop
    return gaps


@dataclass(frozen=True)
class _PassWork:
    """Work of one pass: new tokens, and pairs of tokens in attention."""

    tokens: int
    pairs: float

    @classmethod
    def of(cls, spans: Sequence[Span]) -> _PassWork:
        return cls(sum(map(len, spans)), sum(len(span) * (span.start + len(span) / 2) for span in spans))

    @classmethod
    def scattered(cls, count: int, among: int) -> _PassWork:
        """Tokens at random positions: on average in the middle."""
        return cls(count, count * among / 2)

    def times(self, share: float) -> _PassWork:
        return _PassWork(round(self.tokens * share), self.pairs * share)

    def __add__(self, other: _PassWork) -> _PassWork:
        return _PassWork(self.tokens + other.tokens, self.pairs + other.pairs)


def _seconds(
    loads: Sequence[Load],
    chunks: Sequence[ChunkMatch],
    gaps: Sequence[Span],
    prompt_layout: PromptLayout,
    recompute_policy: RecomputePolicy,
    rates: Rates,
    tokens: int,
) -> float | None:
    """Predicted seconds; None if a cost is unknown."""
    recomputed = _PassWork.scattered(recompute_policy.expected_recomputed(chunks), tokens)
    fresh = _PassWork.of(gaps)
    again = _PassWork.of([Span(prompt_layout.question, tokens)])
    passes = [fresh + recomputed]
    if any(len(gap) >= MIN_CHUNK_TOKENS for gap in gaps[:-1]):  # new text is computed first
        passes = [fresh, recomputed + again]
    elif recompute_policy.looks:  # a first pass of the question through some layers
        passes = [fresh.times(LOOK_LAYERS[1]), fresh + recomputed]
    costs = [rates.work_seconds(work.tokens, work.pairs) for work in passes]
    picked = [chunk.known for chunk in chunks if chunk.known is not None]
    token_bytes = picked[0].size_bytes // max(1, len(chunks[0].span))
    costs += [rates.load_seconds(load.tier, len(load.span) * token_bytes) for load in loads]
    for tier in {known.tier for known in picked}:
        costs.append(rates.load_seconds(tier, sum(known.size_bytes for known in picked if known.tier == tier)))
    measured = [cost for cost in costs if cost is not None]
    return sum(measured) if len(measured) == len(costs) else None
