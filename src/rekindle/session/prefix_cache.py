"""The prefix cache of a session: what is still in the engine, what the store has, what things cost, and the keeper.

Nothing in here fails or delays a request for longer than computing would take: a store that cannot be opened, read or
written, or does not answer, is a store that knows nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import psutil

from rekindle.cache.coders import quantized_coder
from rekindle.cache.context import Context, ParkedContexts
from rekindle.cache.cost import recall_costs, remember_costs
from rekindle.cache.deadline import DeadlineCaller, Late, NoAnswer
from rekindle.cache.explain import Explainer, Prompt
from rekindle.cache.inflight import InflightPrefills
from rekindle.cache.kv_spaces import KvSpaces
from rekindle.cache.lookup import CacheLookup, refused_tiers, why_missed
from rekindle.cache.matches import Matches, lookup
from rekindle.cache.memory_gate import MemoryGate
from rekindle.cache.open_store import open_store
from rekindle.cache.planner import PrefillSteps, make_plan
from rekindle.cache.prefill import IsCancelled, Prefill, PrefillResult, TimedFeed
from rekindle.cache.request_log import Note, Stayed, WasAsked
from rekindle.cache.writer import BackgroundJob, BackgroundWriter, WriteGuard
from rekindle.chunks.match import ChunkCache
from rekindle.chunks.prefill import ChunkPrefill, TimeLimits
from rekindle.core.chunk import ChunkMatches, PromptLayout
from rekindle.core.keys import KvSpace
from rekindle.core.kv import Span
from rekindle.core.plan import Plan, Tier
from rekindle.core.reply import Reuse
from rekindle.core.request import Request
from rekindle.core.scope import Scope
from rekindle.core.size import parse_limit
from rekindle.engine.base import Engine
from rekindle.engine.lora_manager import LoraManager
from rekindle.errors import KvLost, OutOfMemory
from rekindle.session.reuse_report import spared
from rekindle.settings import Settings
from rekindle.store.prefix_index import Match
from rekindle.store.purge import TokenRun
from rekindle.store.tiered import TieredStore

if TYPE_CHECKING:
    from rekindle.remote.fetch import RemoteChunkFetch, RemotePrefixFetch
    from rekindle.remote.remote_kv import Prefetched, RemoteKv

log = logging.getLogger("rekindle.cache")

PIECE_TOKENS = 256  # of a deterministic prefill
EARLY_TOKENS = 256  # a prompt with so many new tokens is kept while its reply is being written
LOOKUP_SECONDS = 0.25  # the longest wait for the catalog
# The shortest deadline of a load, and the one while costs are unknown, else what computing takes; the longest.
LOAD_SECONDS, MAX_LOAD_SECONDS = 1.0, 60.0
CLOSE_SECONDS, REST_SECONDS = 10.0, 60.0


class PrefixCache:
    """One for each session. With `cache="off"` it knows and keeps nothing."""

    def __init__(self, engine: Engine, settings: Settings, adapters: LoraManager) -> None:
        """Raises `InvalidSetting`, and `CacheUnusable` for a folder that was named."""
        self._engine = engine
        self._settings = settings
        crowded = engine.capabilities.crowded  # then parked contexts take no memory that is not taken anyway
        self.store = open_store(settings, share=1.0 if crowded else 0.5, quantized=quantized_coder(engine, settings))
        self.writer = None if self.store is None else BackgroundWriter(self.store)
        self.cut = PrefillSteps(engine.prefill_tokens, PIECE_TOKENS if settings.deterministic else None)
        memory = parse_limit(settings.memory_limit).resolve(psutil.virtual_memory().total)
        # Nothing says how old the KV of a parked context is: with a time to live, there are none.
        parks = self.store is not None and settings.ttl is None and memory > 0
        self.chunks = ChunkCache(engine, settings)
        self._parked = ParkedContexts((sys.maxsize if crowded else memory // 2) if parks else 0)
        self._patience = DeadlineCaller()
        self._slow: TimedFeed | None = None
        self._room, self._inflight = MemoryGate(self.unpark), InflightPrefills()
        self._told = False  # that the store does not answer: once is enough until it does again
        self.kv_spaces = KvSpaces(engine, settings, adapters, self.cut.piece_tokens)
        self.costs = recall_costs(engine)
        self.streams = _streams(engine, settings)
        self.owner_asks = True  # False in a server: whoever asks there may not be the owner of the folder
        self._closed = False

    @property
    def passages(self) -> ChunkPrefill | None:
        """What fills prompts that quote passages; None where nothing is stored."""
        if self.store is None:
            return None
        ask, carry_out = self._patience, self._carry_out
        times = TimeLimits(lambda: LOOKUP_SECONDS, self._load_patience)
        return ChunkPrefill(self.store, self.chunks, self.costs, self.cut, ask, carry_out, self._left_behind, times)

    def lookup(
        self,
        request: Request,
        tokens: Sequence[int],
        cancelled: IsCancelled,
        guard: WriteGuard | None = None,
        prompt_layout: PromptLayout | None = None,
    ) -> CacheLookup:
        """What is known of a prompt that will be computed; waits for whoever computes the same beginning just now.

        Give it to `fill`. What comes of it is kept if `guard` allows that then. Raises `Cancelled`.
        """
        while True:
            known = self.look(request, tokens, prompt_layout)
            known = replace(known, guard=guard, app_ref=request.app_ref(known.kv_space.namespace.scope))
            if known.off or not self._engine.capabilities.spans:
                return known
            inflight, own = self._inflight.join(known.kv_space, tokens, known.matches.length)
            if own:
                return replace(known, inflight=inflight)
            self.forget(known)
            inflight.wait(cancelled)

    def look(self, request: Request, tokens: Sequence[int], prompt_layout: PromptLayout | None = None) -> CacheLookup:
        """What is known of a prompt; `prompt_layout` says where its passages stand. `forget` it afterwards."""
        kv_space = self.kv_spaces.of(request, len(tokens))
        if self.store is None or request.reuse == "off":
            return CacheLookup(kv_space, tokens, Matches(len(tokens)), off=True)
        exact = not self.chunks.allowed(request)
        passages = None if exact or prompt_layout is None else ChunkMatches.of(prompt_layout, tokens)
        parked = self._take_parked(kv_space, tokens, exact=exact)
        in_engine = 0 if parked is None else parked.common(tokens, exact=exact)
        nothing = CacheLookup(kv_space, tokens, Matches(len(tokens), in_engine), parked, passages=passages)
        if in_engine >= len(tokens) - 1:
            return nothing
        try:
            if self._slow is not None and self._slow.filling:
                raise Late("it is still busy with an earlier load")
            find = partial(self._find, self.store, kv_space, tokens, in_engine, request.drafted_tokens)
            found = self._patience.ask(find, LOOKUP_SECONDS)
            if (
                passages is not None
                and request.max_tokens
                and max(in_engine, found.length) < passages.prompt_layout.question
            ):
                look = partial(self.chunks.find, self.store, kv_space, tokens, passages)
                passages = self._patience.ask(look, LOOKUP_SECONDS)
        except NoAnswer as late:
            log.log(logging.DEBUG if self._told else logging.WARNING, "The cache does not answer: %s.", late)
            self._told = True
            return replace(nothing, trouble=f"the cache does not answer: {late}")
        self._told = False
        return replace(nothing, matches=found, passages=passages)

    def _take_parked(self, kv_space: KvSpace, tokens: Sequence[int], *, exact: bool) -> Context | None:
        return self._parked.take(kv_space, tokens, exact=exact)

    def _find(
        self, store: TieredStore, kv_space: KvSpace, tokens: Sequence[int], in_engine: int, follow: int
    ) -> Matches:
        return lookup(store, kv_space, tokens, in_engine, self.kv_spaces.exact(kv_space), follow)

    def prefetch(
        self, request: Request, tokens: Sequence[int], guard: WriteGuard | None, prompt_layout: PromptLayout | None
    ) -> Prefetched | None:
        """Let a prompt that has to wait for its turn come from the origin meanwhile; None if it does not."""
        if self.streams is None:
            return None
        known = self.look(request, tokens, prompt_layout)
        self.forget(known)
        known = replace(known, parked=None, guard=guard, app_ref=request.app_ref(known.kv_space.namespace.scope))
        return self.streams.prefetch(known, self.plan(known), self.costs.rates, self.passages)

    def plan(self, known: CacheLookup) -> Plan:
        """What to do about it."""
        passages = None if known.passages is None else self.passages
        if passages is None:
            return make_plan(known.matches, self.costs.rates, self.cut)
        return passages.plan(known)

    def forget(self, known: CacheLookup) -> None:
        """Give back what `lookup` took."""
        if known.parked is not None:
            self._parked.park(known.parked)

    def fill(self, known: CacheLookup, plan: Plan, capacity: int, cancelled: IsCancelled) -> PrefillResult:
        """Carry out the plan. What cannot be loaded is computed. Raises `Cancelled` and what the engine raises."""
        self._room.enter()
        context, coming = None, None
        try:
            coming = (
                None if self.streams is None else self.streams.start_fetch(known, plan, self.costs.rates, self.passages)
            )
            context = self._going_on(known, plan, capacity)
            if self._engine.capabilities.crowded:
                self.unpark()
            if context is None:
                if plan.in_engine:  # there is no room to go on from it
                    plan = Plan.computing(self._spans(known, plan.tokens), plan.cold_seconds)
                regime = self._engine.regime(len(known.tokens))
                opened = partial(self._engine.open, capacity, regime, known.kv_space.adapter)
                context = Context(known.kv_space, self._room.take(opened, cancelled))
            return self._filled(context, known, plan, cancelled, coming)
        except BaseException:
            if known.inflight is not None:
                known.inflight.land()
            if context is not None:
                context.close()
            self._room.leave()
            raise
        finally:
            if coming is not None:
                coming.close()

    def _filled(
        self,
        context: Context,
        known: CacheLookup,
        plan: Plan,
        cancelled: IsCancelled,
        coming: RemotePrefixFetch | RemoteChunkFetch | None,
    ) -> PrefillResult:
        context.passing, context.inflight, context.guard = known.off, known.inflight, known.guard
        context.prompt_tokens, context.app_ref = len(known.tokens), known.app_ref
        context.stored_tokens = max(known.stored_tokens, context.stored_tokens)
        self.costs.refused(refused_tiers(known, plan, self.cut))
        work = self._prefill(context, known, cancelled)
        passages = None if known.passages is None else self.passages
        if self.streams is None or coming is None:
            carry_out = self._carry_out if passages is None else passages.fill
            return carry_out(work, context, known, plan)
        if passages is not None:
            return self.streams.fill_passages(coming, passages, work, context, known)
        carry = lambda work, plan: self._carry_out(work, context, known, plan)  # noqa: E731
        return self.streams.fill(coming, work, context, known, plan, self.costs.rates, carry)

    def _carry_out(self, work: Prefill, context: Context, known: CacheLookup, plan: Plan) -> PrefillResult:
        if plan.loads and not plan.in_engine:
            return self._load(work, context, known, plan)
        return work.run(context, plan)

    def _going_on(self, known: CacheLookup, plan: Plan, capacity: int) -> Context | None:
        """The context that the plan goes on from, cut to what it shares and with room for more; None for a new one."""
        context = known.parked
        if context is None or not plan.in_engine:
            self.forget(known)
            return None
        try:
            context.truncate(plan.reused)
            context.reserve(capacity)
        except OutOfMemory:
            context.close()
            return None
        self.offer(Stayed(known.kv_space, known.tokens[: plan.reused], self.costs))
        return context

    def _prefill(self, context: Context, known: CacheLookup, cancelled: IsCancelled) -> Prefill:  # noqa: ARG002  (for subclasses)
        replay, alone = not self._settings.deterministic, self._room.is_alone
        return Prefill(self._engine, self.costs, known.tokens, cancelled, replay, alone=alone)

    def _load(self, work: Prefill, context: Context, known: CacheLookup, plan: Plan) -> PrefillResult:
        store, match = self.store, known.matches.match
        assert store is not None and match is not None
        saved = self.costs.rates.compute_seconds(Span(0, plan.reused)) or 0.0
        patience = self._load_patience(saved)
        used = self._used(match, plan.reused)
        try:
            feed = self._patience.ask(lambda: TimedFeed.open(store, known.source, used, patience), patience)
            try:
                filled = self._run(work, context, plan, feed)
            finally:
                feed.close()
                self._left_behind(feed)
        except (KvLost, NoAnswer) as error:
            log.info("computing instead: %s", error)
            context.stored_tokens = 0
            instead = Plan.computing(self._spans(known, plan.tokens), plan.cold_seconds)
            return replace(work.run(context, instead), lost=str(error))
        context.quantized_tokens = known.quantized_tokens(plan)
        tiers: set[Tier] = {load.tier for load in plan.loads}
        if len(tiers) == 1:
            self.costs.loaded(tiers.pop(), known.matches.load_bytes(plan.reused), filled.load_seconds)
        store.record_use(used, max(0.0, saved - filled.load_seconds) * 1e3, known.app_ref)
        return filled

    def _load_patience(self, saved_seconds: float) -> float:
        """How long a load may take."""
        return min(max(LOAD_SECONDS, saved_seconds), MAX_LOAD_SECONDS)

    def _left_behind(self, feed: TimedFeed) -> None:
        if feed.filling:  # a read that hangs: nothing is asked until it is through
            self._slow = feed

    def _spans(self, known: CacheLookup, stop: int) -> list[Span]:  # noqa: ARG002  (for subclasses)
        """The steps that compute the first tokens of a prompt."""
        return self.cut.spans(0, stop)

    def _used(self, match: Match, tokens: int) -> Match:
        """The part of what was found that `tokens` tokens need."""
        return match.until(tokens)

    def _run(self, work: Prefill, context: Context, plan: Plan, feed: TimedFeed) -> PrefillResult:
        return work.run(context, plan, feed)

    def reuse(self, known: CacheLookup, plan: Plan, filled: PrefillResult | None = None) -> Reuse:
        """What a prompt is spared by a plan; once it is filled, what it was really spared."""
        done = plan if filled is None else filled.plan
        miss = self.miss(known, done, None if filled is None else filled.lost)
        return spared(known, done, filled, miss, self.chunks.recompute_policy)

    def miss(self, known: CacheLookup, plan: Plan, lost: str | None = None) -> str | None:
        """Why not everything but the last token is reused, in a word; None if it is. See `Reuse`."""
        return why_missed(known, plan, self.cut, lost)

    def note(
        self, known: CacheLookup, prompt: Prompt, reuse: Reuse, filled: PrefillResult, first_token_seconds: float
    ) -> None:
        """Remember the request, with why it was not faster, for `explain`: in the background."""
        if not known.off:
            explainer, match = self.explainer(known.kv_space), known.matches.match
            self.offer(Note(explainer, prompt, filled.plan, match, reuse, first_token_seconds, known.guard))

    def explainer(self, kv_space: KvSpace) -> Explainer:
        """What explains requests of that KV space. Only the owner of the folder may learn that others know a prompt."""
        engine, own = self._engine, Scope(self._settings.tenant, self._settings.cache_salt)
        everyone, why = self.owner_asks and kv_space.namespace.scope == own, engine.capabilities.opaque
        return Explainer(self.store, engine.tokenizer, self.costs, everyone=everyone, opaque=why)

    def keep_early(self, context: Context) -> None:
        """Keep a long new prompt while its reply is being written: nobody else should have to compute it again."""
        awaited = context.inflight is not None and context.inflight.waiting > 0
        new = min(context.prompt_tokens, context.exact_tokens) - context.stored_tokens
        if not context.passing and new >= (1 if awaited else EARLY_TOKENS):
            self._keep(context, context.prompt_tokens)
        else:
            context.land()

    def keep(self, context: Context) -> None:
        """Store what the context holds, prompt and reply, and park it for the next request."""
        try:
            if context.passing or self._closed:
                context.close()
                return
            if self.cut.piece_tokens:
                self._cut_to_pieces(context)
            if not context.tokens:
                context.close()
                return
            self._keep(context, len(context.tokens))
            for job in (*context.jobs(), WasAsked(context.kv_space, context.tokens, context.app_ref)):
                self.offer(job)
            self._parked.park(context)
        finally:
            context.land()
            self._room.leave()

    def _cut_to_pieces(self, context: Context) -> None:
        """Only what was prefilled in whole pieces is ever reused."""
        context.truncate(min(len(context.tokens), self.cut.reusable(context.prompt_tokens)))

    def _keep(self, context: Context, count: int) -> None:
        count = self.cut.reusable(min(count, context.exact_tokens))
        if self.writer is None or count <= context.stored_tokens:
            context.land()
            return
        job = context.keep(count)
        job.then = None if context.inflight is None else context.inflight.land
        if self.writer.offer(job):
            context.inflight = None  # it lands when the job is done
        else:
            context.land()

    def offer(self, job: BackgroundJob) -> None:
        """Something else to do with the store when there is time."""
        if self.writer is not None:
            self.writer.offer(job)

    def unpark(self, scope: Scope | None = None, app: str | None = None) -> None:
        """Give all contexts back that wait in the engine, or those of one scope, or of one app of it.

        Their KV is in memory or on disk.
        """
        self._parked.clear(scope, app)

    def rest(self) -> bool:
        """Keep everything and give all sequences back, so that the engine can let its model go; False if it cannot."""
        done = self.writer is None or self.writer.flush(REST_SECONDS)
        self.unpark()
        return done

    def purge(
        self, tenant: str, salt: str, runs: Sequence[TokenRun], texts: Sequence[str], *, everything: bool = False
    ) -> None:
        """Remove every trace of some runs of tokens, and of some texts; all KV of the tenant and salt if `everything`.

        Raises `CacheError` if it cannot be done.
        """
        if self.writer is not None:
            self.writer.flush(REST_SECONDS)
        self.unpark(Scope(tenant, salt))
        if self.store is not None:
            if everything:
                self.store.remove_all(tenant, salt)
            self.store.purge(tenant, salt, runs, texts=texts)

    def clear(self) -> int:
        """Remove everything that is kept, of all tenants; how many files went. Raises `CacheError` if it cannot."""
        self.rest()
        return 0 if self.store is None else self.store.clear()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything offered so far is kept; False if that takes longer."""
        return self.writer is None or self.writer.flush(timeout_seconds)

    def close(self) -> None:
        """Keep what is waiting, within a bounded time, and remember what things cost. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._inflight.land()
        remember_costs(self._engine, self.costs)
        idle = self.writer is None or self.writer.close(CLOSE_SECONDS)
        self._parked.clear()
        if self.store is not None and idle:
            try:
                self._patience.ask(self.store.close, CLOSE_SECONDS)
            except NoAnswer as reason:
                log.warning("The cache could not be closed: %s.", reason)
        self._patience.close()
        if self.streams is not None:
            self.streams.close()


def _streams(engine: Engine, settings: Settings) -> RemoteKv | None:
    """What a session streams; None if it has no origin. Raises `InvalidSetting`."""
    if settings.origin is None:
        return None
    from rekindle.remote.remote_kv import RemoteKv  # what checks signatures is not always installed

    return RemoteKv(engine, settings)
