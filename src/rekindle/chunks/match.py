"""The chunk cache of a session: find passages stored by other prompts, and store those of this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rekindle.cache.context import Context
from rekindle.cache.cost import Costs
from rekindle.cache.prefill import PrefillResult
from rekindle.cache.writer import BackgroundJob, WriteGuard
from rekindle.chunks.scores import ChunkScorer, context_impact, disorder, fix_overhead, overlap, preference, unscored
from rekindle.chunks.select import OURS, recompute_policy_for
from rekindle.core.chunk import ChunkDigest, ChunkMatch, ChunkMatches, LoadableVariant, PromptLayout, Variant
from rekindle.core.keys import KvSpace, token_bytes
from rekindle.core.kv import Kv, Span
from rekindle.core.plan import Plan
from rekindle.core.request import Request
from rekindle.core.scope import AppRef
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder
from rekindle.settings import Settings
from rekindle.store.tiered import TieredStore
from rekindle.store.variants import StoredVariant

_MODELS = 64  # number of stored calibrations
_PASS_TOKENS = 4  # times `prefill_tokens`: the largest pass of a prompt with reused chunks


class ChunkCache:
    """Chunk reuse of a session. The budget comes from the settings, else from the model's calibration."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        """Raises `InvalidSetting`."""
        self._engine = engine
        self._settings = settings
        if settings.deterministic and settings.reuse == "approximate":
            raise InvalidSetting("reuse='approximate' and deterministic exclude each other: leave one of them out.")
        self.recompute_policy = recompute_policy_for(
            engine.capabilities.recompute, settings.recompute_budget, calibration_of(engine)
        )
        self.token_limit = _PASS_TOKENS * engine.prefill_tokens

    def allowed(self, request: Request) -> bool:
        """Whether a request may reuse chunks of other prompts."""
        level = self._settings.reuse if request.reuse is None else request.reuse
        able = self._engine.capabilities.recompute != "none" and self._engine.capabilities.spans
        return level == "approximate" and able and not self._settings.deterministic

    def find(
        self, store: TieredStore, kv_space: KvSpace, tokens: Sequence[int], passages: ChunkMatches
    ) -> ChunkMatches:
        """Look the chunks up in the store."""
        spans = passages.prompt_layout.chunks
        wanted = {
            digest: token_bytes(tokens[span.start : span.stop])
            for digest, span in zip(passages.digests[1:], spans, strict=True)
        }
        found = store.variants.find(kv_space, wanted)
        return replace(passages, picked=match_chunks(passages.prompt_layout, passages.digests, found))

    def scoring(self, passages: ChunkMatches, tokens: int) -> ChunkScorer | None:
        """A scorer of chunks while they are computed; None if the engine has no probes."""
        layers = len(self._engine.layout.layers)
        return ChunkScorer(passages.prompt_layout, tokens, layers) if self._engine.capabilities.probes else None

    @staticmethod
    def note_use(
        passages: ChunkMatches,
        store: TieredStore,
        costs: Costs,
        filled: PrefillResult,
        cold_seconds: float,
        app_ref: AppRef | None,
    ) -> None:
        """Record the use of variants, by whom and what it saved, and the time to load them."""
        plan, tiers = filled.plan, {load.tier for load in filled.plan.loads} - {"engine"}
        size_bytes = 0
        for chunk in passages.reused_in(plan):
            assert isinstance(chunk.known, StoredVariant)
            share = len(chunk.span) / plan.tokens
            store.variants.record_use(chunk.known, chunk.overhead or 0.0, cold_seconds * share * 1e3)
            store.record_use_by(app_ref, chunk.known.pieces)
            size_bytes += chunk.known.size_bytes
            tiers.add(chunk.known.tier)
        if len(tiers) == 1:
            tokens = sum(len(chunk.span) for chunk in passages.reused_in(plan))
            prefix = 0 if plan.in_engine else plan.reused
            costs.loaded(tiers.pop(), size_bytes * (tokens + prefix) // tokens, filled.load_seconds)


class ChunksToKeep:
    """The chunks of a prompt to store once its context is released."""

    def __init__(self, passages: ChunkMatches, plan: Plan, scoring: ChunkScorer | None) -> None:
        self._passages = passages
        self._plan = plan
        self._scoring = scoring

    def jobs(self, context: Context, guard: WriteGuard | None) -> list[BackgroundJob]:
        """Write jobs for the chunks, to run after the job of the prompt itself."""
        exact, nonprefix = [], []
        first = context.exact_tokens
        reused_chunks = [chunk for chunk in context.chunk_reuse if chunk.source == "reused"]
        for number, span in enumerate(self._passages.prompt_layout.chunks, start=1):
            stale = sum(other.stop - other.start for other in reused_chunks if other.stop <= span.start)
            variant = self._variant(number, span, stale / span.start)
            if variant is not None and span.stop <= first:
                exact.append(variant)
            elif variant is not None and span.stop <= len(context.tokens):
                nonprefix.append(variant)
        tokens = context.tokens[:first]
        jobs: list[BackgroundJob] = [WriteVariants(context.kv_space, tokens, exact, guard)] if exact else []
        for variant in nonprefix:
            chunk = context.tokens[variant.span.start : variant.span.stop]
            kv = context.sequence.export(variant.span)
            jobs.append(WriteNonprefixKv(context.kv_space, chunk, kv, variant, guard, context.app_ref))
        return jobs

    def _variant(self, number: int, span: Span, drift: float) -> Variant | None:
        """The variant to store; None if its KV is from another prompt, or is stored already."""
        reused, prompt_layout, digests = self._plan.reuse_chunks, self._passages.prompt_layout, self._passages.digests
        if reused is not None and span in reused.spans:
            return None
        scored = None if self._scoring is None else self._scoring.variant(number, digests, drift)
        stored = any(chunk.span == span and chunk.known is not None for chunk in self._passages.picked)
        if scored is not None or (span.stop <= self._plan.reused and stored):
            return scored
        return unscored(prompt_layout, number, digests, drift)


class _Guarded:
    """A write job that runs only if its guard allows it."""

    def __init__(self, guard: WriteGuard | None) -> None:
        self._guard = guard

    def do(self, store: TieredStore) -> str:
        """Run it if still allowed; returns the outcome."""
        if self._guard is not None and not self._guard.allows:
            return "barred"
        return self._do(store)

    def _do(self, store: TieredStore) -> str:
        raise NotImplementedError

    def detached_bytes(self) -> int:
        return 0


class WriteVariants(_Guarded):
    """Records the chunks of a prompt that was just stored."""

    def __init__(
        self, kv_space: KvSpace, tokens: Sequence[int], variants: Sequence[Variant], guard: WriteGuard | None
    ) -> None:
        super().__init__(guard)
        self._kv_space, self._tokens, self._variants = kv_space, tokens, variants

    def _do(self, store: TieredStore) -> str:
        store.variants.keep(self._kv_space, self._tokens, self._variants)
        return "noted"


class WriteNonprefixKv(_Guarded):
    """Stores a chunk computed behind reused ones, where only chunk reuse finds it."""

    def __init__(
        self,
        kv_space: KvSpace,
        tokens: Sequence[int],
        kv: Kv,
        variant: Variant,
        guard: WriteGuard | None,
        app_ref: AppRef | None = None,
    ) -> None:
        super().__init__(guard)
        self._kv_space, self._tokens, self._kv, self._variant, self._app_ref = kv_space, tokens, kv, variant, app_ref

    def _do(self, store: TieredStore) -> str:
        present = None if self._guard is None else self._guard.present
        kept = store.variants.keep_nonprefix(
            self._kv_space, self._tokens, self._kv, self._variant, app=self._app_ref, present=present
        )
        return kept.outcome

    def detached_bytes(self) -> int:
        """Size of its copy of the KV."""
        return len(self._kv.span) * self._kv.layout.token_bytes


def calibration_of(engine: Engine, recompute_policy: str = OURS) -> float | None:
    """The calibrated budget of a model; None without calibration."""
    known = _calibrations().recall(engine.identity(engine.regime(1)).digest)
    budget = known.get(recompute_policy) if isinstance(known, dict) else None
    return float(budget) if isinstance(budget, (int, float)) and budget >= 0.0 else None


def remember_budgets(engine: Engine, budgets: Mapping[str, float]) -> None:
    """Store budgets for a model, by recompute policy."""
    model = engine.identity(engine.regime(1)).digest
    known = _calibrations().recall(model)
    _calibrations().keep(model, {**(known if isinstance(known, dict) else {}), **budgets})


def _calibrations() -> JsonMemo:
    return JsonMemo(home_folder() / "recompute.json", _MODELS)


def match_chunks(
    prompt_layout: PromptLayout, digests: Sequence[ChunkDigest], found: Mapping[ChunkDigest, Sequence[LoadableVariant]]
) -> tuple[ChunkMatch, ...]:
    """The chunks of a prompt in order, each with the variant that fits best; `digests` has the head's first."""
    picked = []
    for number, span in enumerate(prompt_layout.chunks, start=1):
        digest, before = digests[number], digests[:number]
        known = min(found.get(digest, ()), key=lambda one: preference(one.variant, before), default=None)
        if known is None:
            picked.append(ChunkMatch(span, digest))
            continue
        variant = known.variant
        scores = (
            context_impact(variant.scores, len(span)),
            overlap(variant, before),
            disorder(variant, before),
            fix_overhead(variant, before),
        )
        picked.append(ChunkMatch(span, digest, known, *scores))
    return tuple(picked)
