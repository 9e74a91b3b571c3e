"""Plan and prefill prompts with passages: KV from other prompts is reused with selective recompute."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rekindle.cache.context import Context
from rekindle.cache.cost import Rates
from rekindle.cache.deadline import NoAnswer
from rekindle.cache.lookup import CacheLookup
from rekindle.cache.prefill import Prefill, PrefillResult
from rekindle.cache.stored_kv import StoredKv
from rekindle.chunks.match import ChunksToKeep, add_text, calibration_of, free_spans, match_chunks, useful_texts
from rekindle.chunks.recompute import ChunkFeeds, SelectiveRecompute, has_new_text
from rekindle.chunks.scores import ChunkScorer
from rekindle.chunks.select import RecomputePolicy, recompute_policy_for
from rekindle.core.chunk import ChunkDigest, ChunkMatch, ChunkMatches, LoadableVariant, PromptLayout
from rekindle.core.keys import TOKEN_BYTES, KvSpace, token_bytes
from rekindle.core.kv import Span
from rekindle.core.plan import Compute, Load, Plan, RefusedChunks, ReuseChunks, Step, tokens_of
from rekindle.core.request import Request
from rekindle.core.scope import AppRef
from rekindle.engine.hooks import LOOK_LAYERS
from rekindle.errors import InvalidSetting, KvLost
from rekindle.settings import Settings
from rekindle.store.text_index import SINK_TOKENS
from rekindle.store.tiered import TieredStore
from rekindle.store.variants import StoredVariant

log = logging.getLogger("rekindle.cache")

_NEVER_REUSED = 32  # the last tokens of a prompt are computed: they ask
_PASS_TOKENS = 4  # times `prefill_tokens`: the largest pass of a prompt with reused chunks


class ChunkPrefill:
    """Chunk reuse of a session. The budget comes from the settings, else from the model's calibration."""

    scores_on_accelerator = False  # it made a prompt of 32,768 tokens 14 % slower, and chose no better tokens

    def __init__(self, kv: StoredKv, settings: Settings) -> None:
        """Raises `InvalidSetting`."""
        if settings.deterministic and settings.reuse == "approximate":
            raise InvalidSetting("reuse='approximate' and deterministic exclude each other: leave one of them out.")
        self.kv = kv
        self._settings = settings
        self.recompute_policy = recompute_policy_for(
            kv.engine.capabilities.recompute, settings.recompute_budget, calibration_of(kv.engine)
        )

    def allowed(self, request: Request) -> bool:
        """Whether a request may reuse chunks of other prompts."""
        level = self._settings.reuse if request.reuse is None else request.reuse
        can = self.kv.engine.capabilities
        return level == "approximate" and can.recompute != "none" and can.spans and not self._settings.deterministic

    def search(
        self, kv_space: KvSpace, tokens: Sequence[int], passages: ChunkMatches | None, start: int
    ) -> ChunkMatches | None:
        """Look up the documents of a prompt, and other text behind its first `start` tokens, whose KV is found already;
        None if it has no documents and no text is found. Raises `NoAnswer`."""
        if passages is not None and start < passages.prompt_layout.question:
            passages = self.find(kv_space, tokens, passages)
        spans = free_spans(passages, max(start, SINK_TOKENS), len(tokens) - _NEVER_REUSED)
        found = self.kv.ask_store(lambda: self._store.text.find(kv_space, tokens, spans)) if spans else []
        texts = useful_texts(passages, found)
        return add_text(passages, tokens, texts, start) if texts else passages

    def find(self, kv_space: KvSpace, tokens: Sequence[int], passages: ChunkMatches) -> ChunkMatches:
        """Look the documents up in the store. Raises `NoAnswer`."""
        spans = zip(passages.digests[1:], passages.prompt_layout.chunks, strict=True)
        wanted = {digest: token_bytes(tokens[span.start : span.stop]) for digest, span in spans}
        found = self.kv.ask_store(lambda: self._store.variants.find(kv_space, wanted))
        missing = {digest: data for digest, data in wanted.items() if digest not in found}
        span = Span(0, sum(map(len, missing.values())) // TOKEN_BYTES)
        if tiers := self.kv.tiers_to_ask(kv_space, span):
            nothing = dict[ChunkDigest, list[StoredVariant]]()
            look = partial(self._store.shared.find_chunks, kv_space, missing, tiers)
            found = {**found, **self.kv.ask_shared(look, span, nothing)}
        texts = {chunk.span: chunk for chunk in passages.picked if chunk.span in passages.prompt_layout.texts}
        return replace(passages, picked=tuple(texts.get(one.span, one) for one in self.match(passages, found)))

    def match(
        self, passages: ChunkMatches, found: Mapping[ChunkDigest, Sequence[LoadableVariant]]
    ) -> tuple[ChunkMatch, ...]:
        """The chunks of a prompt, each with the variant to reuse."""
        return match_chunks(passages.prompt_layout, passages.digests, found)

    def plan(self, lookup: CacheLookup, exact: Plan) -> Plan:
        """A plan that reuses chunks, if it is expected to be faster than the exact one; else the exact one."""
        passages, rates = lookup.passages, self.kv.costs.rates
        assert passages is not None
        token_limit = _PASS_TOKENS * self.kv.engine.prefill_tokens
        return plan_chunk_reuse(
            exact, passages.prompt_layout, passages.picked, self.recompute_policy, rates, token_limit
        )

    def run(self, work: Prefill, context: Context, lookup: CacheLookup, plan: Plan) -> PrefillResult:
        """Run a plan. Raises `Cancelled`, and what the engine raises."""
        passages = lookup.passages
        assert passages is not None
        scorer = self.scorer(passages, len(lookup.tokens), plan)
        work = replace(work, probe=None if scorer is None else scorer.probe)
        result = self.run_unnoted(work, context, lookup, plan)
        self.note_result(context, passages, result, scorer)
        return result

    def scorer(self, passages: ChunkMatches, tokens: int, plan: Plan) -> ChunkScorer | None:
        """A scorer of documents while they are computed; None if all are stored, or the engine shall not be read."""
        engine = self.kv.engine
        read = engine.capabilities.probes and (engine.device == "cpu" or self.scores_on_accelerator)
        if not read or _all_stored(passages, plan, texts=False):
            return None
        return ChunkScorer(passages.prompt_layout, tokens, len(engine.layout.layers))

    def run_unnoted(self, work: Prefill, context: Context, lookup: CacheLookup, plan: Plan) -> PrefillResult:
        """Run a plan without `note_result`."""
        return (self.kv.run if plan.reuse_chunks is None else self._reuse)(work, context, lookup, plan)

    def note_result(
        self, context: Context, passages: ChunkMatches, result: PrefillResult, scorer: ChunkScorer | None
    ) -> None:
        """Note in the context where the KV of the passages came from, and which of them to store."""
        context.chunk_reuse = passages.report(result.plan, result.recomputed_positions, context.chunk_reuse)
        context.watched = None if _all_stored(passages, result.plan) else ChunksToKeep(passages, result.plan, scorer)

    def _reuse(self, work: Prefill, context: Context, lookup: CacheLookup, plan: Plan) -> PrefillResult:
        passages, kv = lookup.passages, self.kv
        assert passages is not None
        saved = kv.costs.rates.compute_seconds(Span(0, plan.tokens))
        recompute = SelectiveRecompute(
            work, passages.prompt_layout, passages.reused_in(plan), self.recompute_policy, kv.deadlines
        )
        parts = _parts_seconds(
            plan.loads,
            recompute.chunks,
            [step.span for step in plan.computes],
            passages.prompt_layout,
            self.recompute_policy,
            kv.costs.rates,
            plan.tokens,
        )
        timeout, started = kv.load_timeout(saved), time.perf_counter()
        try:
            result = self._load(recompute, context, lookup, plan, timeout)
        except (KvLost, NoAnswer) as error:
            log.info("computing instead: %s", error)
            if (late := time.perf_counter() - started) >= timeout:  # else it would be tried again every time
                kv.costs.reused_chunks(parts, late)
            context.truncate(plan.reused if plan.in_engine else 0)
            instead = plan.without_chunk_reuse(kv.steps.spans(plan.reused, plan.tokens))
            return replace(kv.run(work, context, lookup, instead), lost=str(error))
        kv.costs.reused_chunks(parts, time.perf_counter() - started)
        self._record_use(passages, result, saved, lookup.app_ref)
        if plan.loads and not plan.in_engine and lookup.matches.match is not None:
            context.quantized_tokens = lookup.quantized_tokens(plan)
            self._store.record_use(lookup.matches.match.until(plan.reused))
        return result

    def _load(
        self, recompute: SelectiveRecompute, context: Context, lookup: CacheLookup, plan: Plan, timeout_seconds: float
    ) -> PrefillResult:
        opened = partial(ChunkFeeds.open, self._store, lookup, plan, recompute.chunks, timeout_seconds)
        feeds = self.kv.deadlines.ask(opened, timeout_seconds)
        try:
            result = recompute.run(context, plan, feeds)
            self.kv.learn_loads(load for feed in feeds.all for load in feed.loads())
            return result
        finally:
            feeds.close()
            for feed in feeds.all:
                self.kv.note_busy(feed)

    def _record_use(
        self, passages: ChunkMatches, result: PrefillResult, cold_seconds: float, app_ref: AppRef | None
    ) -> None:
        """Record the use of variants, by whom and what it saved."""
        plan = result.plan
        shares = () if plan.reuse_chunks is None else plan.reuse_chunks.shares
        for chunk, recomputed in zip(passages.reused_in(plan), shares, strict=True):
            assert isinstance(chunk.known, StoredVariant)
            share = len(chunk.span) / plan.tokens
            self._store.variants.record_use(chunk.known, recomputed, cold_seconds * share * 1e3)
            self._store.record_use_by(app_ref, chunk.known.pieces)

    @property
    def _store(self) -> TieredStore:
        assert self.kv.store is not None
        return self.kv.store


def _all_stored(passages: ChunkMatches, plan: Plan, *, texts: bool = True) -> bool:
    """Whether there is nothing more to store of the documents of a prompt, and of its other text.

    A document that is computed although it has a variant becomes another one, which fits better the next time.
    """
    stored = {chunk.span for chunk in passages.picked if isinstance(chunk.known, StoredVariant)}
    stored -= {chunk.span for chunk in passages.computed_in(plan)} - passages.prompt_layout.texts
    return all(span in stored for number, span in passages.prompt_layout.numbered if texts or number is not None)


def plan_chunk_reuse(
    exact: Plan,
    prompt_layout: PromptLayout,
    chunks: Sequence[ChunkMatch],
    recompute_policy: RecomputePolicy,
    rates: Rates,
    token_limit: int,
) -> Plan:
    """A plan that reuses chunks, if it is expected to be faster than the exact one; else the exact one, which says what
    it refuses.

    A chunk with only an exact beginning is reused as a whole. No pass may have more than `token_limit`.
    """
    start = exact.reused
    known = [chunk for chunk in chunks if chunk.known is not None and chunk.span.stop > start]
    usable = [chunk for chunk, share in zip(known, recompute_policy.shares(known), strict=True) if share < 1.0]
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
    parts = _parts_seconds(loads, usable, gaps, prompt_layout, recompute_policy, rates, exact.tokens)
    seconds = rates.chunk_seconds(parts)
    shares = tuple(recompute_policy.shares(usable))
    assert exact.predicted_seconds is not None
    if sum(map(len, gaps)) + tokens_of(shares, spans) > token_limit:
        return exact
    if seconds >= exact.predicted_seconds:
        refused = RefusedChunks(sum(map(len, spans)), seconds, exact.predicted_seconds)
        return replace(exact, refused_chunks=refused)
    steps: tuple[Step, ...] = (
        *loads,
        ReuseChunks(
            spans, numbers, recompute_policy.name, recompute_policy.budget, recompute_policy.calibrated, shares
        ),
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


def _parts_seconds(
    loads: Sequence[Load],
    chunks: Sequence[ChunkMatch],
    gaps: Sequence[Span],
    prompt_layout: PromptLayout,
    recompute_policy: RecomputePolicy,
    rates: Rates,
    tokens: int,
) -> float:
    """Predicted seconds of loads and passes."""
    recomputed = _PassWork.scattered(recompute_policy.expected_recomputed(chunks), tokens)
    fresh = _PassWork.of(gaps)
    again = _PassWork.of([Span(prompt_layout.question, tokens)])
    passes = [fresh + recomputed]
    if has_new_text(gaps, prompt_layout):  # which is computed first
        passes = [fresh, recomputed + again]
    elif recompute_policy.looks and recomputed.tokens:  # a first pass of the question through some layers
        passes = [fresh.times(LOOK_LAYERS[1]), fresh + recomputed]
    seconds = sum(rates.work_seconds(work.tokens, work.pairs) for work in passes)
    picked = [chunk.known for chunk in chunks if chunk.known is not None]
    token_bytes = picked[0].size_bytes // max(1, len(chunks[0].span))
    prefix = [(load.tier, len(load.span) * token_bytes) for load in loads]
    return seconds + rates.loads_seconds([*prefix, *((known.tier, known.size_bytes) for known in picked)])
