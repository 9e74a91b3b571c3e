"""Warm start: an adapter's first request over a context that only the model has computed.

the model's KV space         [context ....................][another question]    exact
this adapter's               nothing yet, and nothing is written to it
its warm-started KV space    [context, partly recomputed ..][question][reply]    what the request leaves

The tokens that the question attends to are recomputed with the adapter, the others follow their mean change: of the
ways that `bench warmstart` compares, the nearest to computing everything. Later requests of the adapter find what is in
the warm-started KV space as they find any prefix; requests without `approximate` never do.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from rekindle.cache.context import Context
from rekindle.cache.deadline import NoAnswer
from rekindle.cache.lookup import CacheLookup
from rekindle.cache.matches import Matches, find_matches
from rekindle.cache.prefill import Prefill, PrefillResult, TimedFeed
from rekindle.cache.stored_kv import StoredKv
from rekindle.chunks.prefill import PASS_TOKENS, parts_seconds, plan_chunk_reuse
from rekindle.chunks.recompute import ChunkFeeds, SelectiveRecompute
from rekindle.chunks.scores import unscored
from rekindle.chunks.select import Positions, RecomputePolicy, StaleTokens, choose_top, clean
from rekindle.core.chunk import ChunkMatch, PromptLayout, Variant, chunk_digest
from rekindle.core.kv import Span
from rekindle.core.plan import Plan, Tier
from rekindle.errors import KvLost
from rekindle.settings import Settings
from rekindle.store.tiered import TieredStore

log = logging.getLogger("rekindle.cache")

WARM_BUDGET = 0.5  # docs/concepts/chunks.md has what it costs and keeps
MIN_TOKENS = 64  # that the model must know
_MIN_FACTOR = 4  # times as many as the adapter itself knows, whose own are exact


@dataclass(frozen=True)
class AdapterPolicy(RecomputePolicy):
    """Recomputes what the question attends to; the rest follows the mean change in full."""

    budget: float = WARM_BUDGET
    name: str = "adapter"
    spread: float = 1.0

    def choose(self, stale: StaleTokens, chunks: object) -> Positions:  # noqa: ARG002
        """The positions to recompute."""
        return stale.positions[:0] if stale.seen is None else choose_top(stale, clean(stale.seen), self.budget)


@dataclass(frozen=True, eq=False)
class _ModelKv:
    """What the model knows of a prompt, as KV to recompute in part."""

    variant: Variant
    tier: Tier
    size_bytes: int
    id: int = 0


class WarmStart:
    """Warm starts of a session."""

    def __init__(self, kv: StoredKv, settings: Settings) -> None:
        self._kv = kv
        given = settings.recompute_budget
        self._policy = AdapterPolicy() if given is None else AdapterPolicy(given)

    def fits(self, own: CacheLookup) -> bool:
        """Whether a prompt may start from the model's KV: one of an adapter, whose passages are not reused."""
        can, space = self._kv.engine.capabilities, own.kv_space
        free = own.passages is None or not any(chunk.known for chunk in own.passages.picked)
        few = _MIN_FACTOR * own.matches.length < len(own.tokens)
        return free and few and space.adapter is not None and space.codec == "raw" and can.recompute == "scattered"

    def find(self, own: CacheLookup) -> Matches | None:
        """What the model has of a prompt; None if it is too little. Raises `NoAnswer`."""
        store, space = self._store, replace(own.kv_space, adapter=None)
        found = self._kv.ask_store(lambda: find_matches(store, space, own.tokens))
        needed = max(MIN_TOKENS, _MIN_FACTOR * own.matches.length)
        return None if min(found.length, len(own.tokens) - 1) < needed else replace(found, kv_space=space)

    def plan(self, lookup: CacheLookup, exact: Plan) -> Plan:
        """A plan that starts from the model's KV, if that is expected to be faster than `exact`; else that one."""
        layout, chunk = _as_chunk(lookup)
        token_limit = PASS_TOKENS * self._kv.engine.prefill_tokens
        return plan_chunk_reuse(exact, layout, [chunk], self._policy, self._kv.costs.rates, token_limit)

    def run(self, work: Prefill, context: Context, lookup: CacheLookup, plan: Plan) -> PrefillResult:
        """Run such a plan; what cannot be loaded is computed. Raises `Cancelled`, and what the engine raises."""
        kv, found = self._kv, lookup.model_kv
        assert found is not None and found.match is not None and found.kv_space is not None
        layout, chunk = _as_chunk(lookup)
        saved = kv.costs.rates.compute_seconds(Span(0, plan.tokens))
        timeout, match, space = kv.load_timeout(saved), found.match.until(len(chunk.span)), found.kv_space
        recompute = SelectiveRecompute(work, layout, (chunk,), self._policy, kv.deadlines)
        started = time.perf_counter()
        try:
            feed = kv.deadlines.ask(lambda: TimedFeed.open(self._store, space, match, timeout), timeout)
            try:
                result = recompute.run(context, plan, ChunkFeeds((), (feed,)))
            finally:
                feed.close()
                kv.note_busy(feed)
        except (KvLost, NoAnswer) as error:
            log.info("computing instead: %s", error)
            context.truncate(0)
            return replace(work.run(context, kv.plan_computing(lookup, plan)), lost=str(error))
        took, gaps = time.perf_counter() - started, [step.span for step in plan.computes]
        parts = parts_seconds((), [chunk], gaps, layout, self._policy, kv.costs.rates, plan.tokens)
        kv.costs.reused_chunks(parts, took)
        self._store.record_use(match, max(0.0, saved - took) * 1e3, lookup.app_ref)
        return result

    @property
    def _store(self) -> TieredStore:
        assert self._kv.store is not None
        return self._kv.store


def _as_chunk(lookup: CacheLookup) -> tuple[PromptLayout, ChunkMatch]:
    """The tokens that the model knows, as one passage at its own place, with the question behind it."""
    found, last = lookup.model_kv, len(lookup.tokens) - 1
    assert found is not None
    span = Span(0, min(found.length, last))
    layout, digest = PromptLayout(0, (span,)), chunk_digest(lookup.tokens[: span.stop])
    variant = unscored(layout, 1, (chunk_digest(()), digest), 0.0)
    tiers = {run.tier for run in found.stored}
    tier: Tier = tiers.pop() if len(tiers) == 1 else "coded" if "coded" in tiers else "disk"
    return layout, ChunkMatch(span, digest, _ModelKv(variant, tier, found.load_bytes(span.stop)))
