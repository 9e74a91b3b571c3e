"""Which stored variant fits each passage of a prompt, and which passages of a prompt to store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rekindle.cache.context import Context
from rekindle.cache.writer import BackgroundJob, WriteGuard
from rekindle.chunks.scores import ChunkScorer, context_impact, disorder, fix_overhead, overlap, preference, unscored
from rekindle.chunks.select import OURS
from rekindle.core.chunk import ChunkDigest, ChunkMatch, ChunkMatches, LoadableVariant, PromptLayout, Variant
from rekindle.core.keys import KvSpace
from rekindle.core.kv import Kv, Span
from rekindle.core.plan import Plan
from rekindle.core.scope import AppRef
from rekindle.engine.base import Engine
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder
from rekindle.store.tiered import TieredStore

_MODELS = 64  # number of stored calibrations


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


class WriteVariants:
    """Records the chunks of a prompt that was just stored."""

    def __init__(
        self, kv_space: KvSpace, tokens: Sequence[int], variants: Sequence[Variant], guard: WriteGuard | None
    ) -> None:
        self._kv_space, self._tokens, self._variants, self._guard = kv_space, tokens, variants, guard

    def do(self, store: TieredStore) -> str:
        if _is_barred(self._guard):
            return "barred"
        store.variants.keep(self._kv_space, self._tokens, self._variants)
        return "noted"

    def detached_bytes(self) -> int:
        return 0


class WriteNonprefixKv:
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
        self._kv_space, self._tokens, self._kv, self._variant = kv_space, tokens, kv, variant
        self._guard, self._app_ref = guard, app_ref

    def do(self, store: TieredStore) -> str:
        if _is_barred(self._guard):
            return "barred"
        present = None if self._guard is None else self._guard.present
        kept = store.variants.keep_nonprefix(
            self._kv_space, self._tokens, self._kv, self._variant, app=self._app_ref, present=present
        )
        return kept.outcome

    def detached_bytes(self) -> int:
        """Size of its copy of the KV."""
        return len(self._kv.span) * self._kv.layout.token_bytes


def _is_barred(guard: WriteGuard | None) -> bool:
    return guard is not None and not guard.allows


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
