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

from rekindle.core.chunk import Outline
from rekindle.core.keys import Shelf
from rekindle.core.kv import Span
from rekindle.core.plan import Plan, Tier
from rekindle.core.reply import Reuse
from rekindle.core.request import Request
from rekindle.core.size import parse_limit
from rekindle.engine.base import Engine
from rekindle.errors import KvLost, OutOfMemory
from rekindle.index.prefix import Match
from rekindle.reuse.lookup import Matches, lookup
from rekindle.reuse.planner import Cut, make_plan
from rekindle.run.adapters import Adapters
from rekindle.run.chunks import Chunks, Passages
from rekindle.run.coders import near_coder
from rekindle.run.context import Context, ParkedContexts
from rekindle.run.costs import recall_costs, remember_costs
from rekindle.run.explain import Explainer, Prompt
from rekindle.run.flight import Flights
from rekindle.run.folder import open_store
from rekindle.run.keep import Guard, Job, Keeper
from rekindle.run.known import Known, refused_tiers, spared, why_missed
from rekindle.run.notes import Note, Stayed, WasAsked
from rekindle.run.passages import FillTimes, PassageFill
from rekindle.run.patience import Late, NoAnswer, Patience
from rekindle.run.prefill import Asked, Filled, Prefill, TimedFeed
from rekindle.run.room import Room
from rekindle.run.shelves import Shelves
from rekindle.run.streaming import streams_of
from rekindle.settings import Settings
from rekindle.store.purge import Run
from rekindle.store.tiered import TieredStore

if TYPE_CHECKING:
    from rekindle.run.streams import Sought

log = logging.getLogger("rekindle.cache")

PIECE_TOKENS = 256  # of a deterministic prefill
EARLY_TOKENS = 256  # a prompt with so many new tokens is kept while its reply is being written
LOOKUP_SECONDS = 0.25  # the longest wait for the catalog
# The shortest deadline of a load, and the one while costs are unknown, else what computing takes; the longest.
LOAD_SECONDS, MOST_LOAD_SECONDS = 1.0, 60.0
CLOSE_SECONDS, REST_SECONDS = 10.0, 60.0


class PrefixCache:
    """One for each session. With `cache="off"` it knows and keeps nothing."""

    def __init__(self, engine: Engine, settings: Settings, adapters: Adapters) -> None:
        """Raises `InvalidSetting`, and `CacheUnusable` for a folder that was named."""
        self._engine = engine
        self._settings = settings
        crowded = engine.capabilities.crowded  # then parked contexts take no memory that is not taken anyway
        self.store = open_store(settings, share=1.0 if crowded else 0.5, near=near_coder(engine, settings))
        self.keeper = None if self.store is None else Keeper(self.store)
        self.cut = Cut(engine.prefill_tokens, PIECE_TOKENS if settings.deterministic else None)
        memory = parse_limit(settings.memory_limit).resolve(psutil.virtual_memory().total)
        # Nothing says how old the KV of a parked context is: with a time to live, there are none.
        parks = self.store is not None and settings.ttl is None and memory > 0
        self.chunks = Chunks(engine, settings)
        self._parked = ParkedContexts((sys.maxsize if crowded else memory // 2) if parks else 0)
        self._patience = Patience()
        self._slow: TimedFeed | None = None
        self._room, self._flights = Room(self.unpark), Flights()
        self._told = False  # that the store does not answer: once is enough until it does again
        self.shelves = Shelves(engine, settings, adapters, self.cut.piece_tokens)
        self.costs = recall_costs(engine)
        self.streams = streams_of(engine, settings)
        self._closed = False

    @property
    def passages(self) -> PassageFill | None:
        """What fills prompts that quote passages; None where nothing is stored."""
        if self.store is None:
            return None
        ask, carry_out = self._patience, self._carry_out
        times = FillTimes(lambda: LOOKUP_SECONDS, self._load_patience)
        return PassageFill(self.store, self.chunks, self.costs, self.cut, ask, carry_out, self._left_behind, times)

    def lookup(
        self,
        request: Request,
        tokens: Sequence[int],
        cancelled: Asked,
        guard: Guard | None = None,
        outline: Outline | None = None,
    ) -> Known:
        """What is known of a prompt that will be computed; waits for whoever computes the same beginning just now.

        Give it to `fill`. What comes of it is kept if `guard` allows that then. Raises `Cancelled`.
        """
        while True:
            known = self.look(request, tokens, outline)
            known = replace(known, guard=guard, asker=request.asker(known.shelf.namespace.tenant))
            if known.off or not self._engine.capabilities.spans:
                return known
            flight, own = self._flights.join(known.shelf, tokens, known.matches.length)
            if own:
                return replace(known, flight=flight)
            self.forget(known)
            flight.wait(cancelled)

    def look(self, request: Request, tokens: Sequence[int], outline: Outline | None = None) -> Known:
        """What is known of a prompt; `outline` says where its passages stand. `forget` it when it was looked at."""
        shelf = self.shelves.of(request, len(tokens))
        if self.store is None or request.reuse == "off":
            return Known(shelf, tokens, Matches(len(tokens)), off=True)
        exact = not self.chunks.allowed(request)
        passages = None if exact or outline is None else Passages.of(outline, tokens)
        parked = self._take_parked(shelf, tokens, exact=exact)
        in_engine = 0 if parked is None else parked.common(tokens, exact=exact)
        nothing = Known(shelf, tokens, Matches(len(tokens), in_engine), parked, passages=passages)
        if in_engine >= len(tokens) - 1:
            return nothing
        try:
            if self._slow is not None and self._slow.filling:
                raise Late("it is still busy with an earlier load")
            find = partial(self._find, self.store, shelf, tokens, in_engine, request.drafted_tokens)
            found = self._patience.ask(find, LOOKUP_SECONDS)
            if passages is not None and request.max_tokens and max(in_engine, found.length) < passages.outline.question:
                look = partial(self.chunks.find, self.store, shelf, tokens, passages)
                passages = self._patience.ask(look, LOOKUP_SECONDS)
        except NoAnswer as late:
            log.log(logging.DEBUG if self._told else logging.WARNING, "The cache does not answer: %s.", late)
            self._told = True
            return replace(nothing, trouble=f"the cache does not answer: {late}")
        self._told = False
        return replace(nothing, matches=found, passages=passages)

    def _take_parked(self, shelf: Shelf, tokens: Sequence[int], *, exact: bool) -> Context | None:
        return self._parked.take(shelf, tokens, exact=exact)

    def _find(self, store: TieredStore, shelf: Shelf, tokens: Sequence[int], in_engine: int, follow: int) -> Matches:
        return lookup(store, shelf, tokens, in_engine, self.shelves.exact(shelf), follow)

    def plan(self, known: Known) -> Plan:
        """What to do about it."""
        passages = None if known.passages is None else self.passages
        if passages is None:
            return make_plan(known.matches, self.costs.rates, self.cut)
        return passages.plan(known)

    def forget(self, known: Known) -> None:
        """Give back what `lookup` took."""
        if known.parked is not None:
            self._parked.park(known.parked)

    def fill(self, known: Known, plan: Plan, capacity: int, cancelled: Asked) -> Filled:
        """Carry out the plan. What cannot be loaded is computed. Raises `Cancelled` and what the engine raises."""
        self._room.enter()
        context, coming = None, None
        try:
            coming = None if self.streams is None else self.streams.ask(known, plan, self.costs.rates, self.passages)
            context = self._going_on(known, plan, capacity)
            if self._engine.capabilities.crowded:
                self.unpark()
            if context is None:
                if plan.in_engine:  # there is no room to go on from it
                    plan = Plan.computing(self._spans(known, plan.tokens), plan.cold_seconds)
                regime = self._engine.regime(len(known.tokens))
                opened = partial(self._engine.open, capacity, regime, known.shelf.adapter)
                context = Context(known.shelf, self._room.take(opened, cancelled))
            return self._filled(context, known, plan, cancelled, coming)
        except BaseException:
            if known.flight is not None:
                known.flight.land()
            if context is not None:
                context.close()
            self._room.leave()
            raise
        finally:
            if coming is not None:
                coming.close()

    def _filled(self, context: Context, known: Known, plan: Plan, cancelled: Asked, coming: Sought | None) -> Filled:
        context.passing, context.flight, context.guard = known.off, known.flight, known.guard
        context.prompt_tokens, context.asker = len(known.tokens), known.asker
        context.stored_tokens = max(known.stored_tokens, context.stored_tokens)
        self.costs.refused(refused_tiers(known, plan, self.cut))
        work = self._prefill(context, known, cancelled)
        passages = None if known.passages is None else self.passages
        if passages is not None:
            return passages.fill(work, context, known, plan, coming)
        if self.streams is None or coming is None:
            return self._carry_out(work, context, known, plan)
        carry = lambda work, plan: self._carry_out(work, context, known, plan)  # noqa: E731
        return self.streams.fill(coming, work, context, known, plan, self.costs.rates, carry)

    def _carry_out(self, work: Prefill, context: Context, known: Known, plan: Plan) -> Filled:
        if plan.loads and not plan.in_engine:
            return self._load(work, context, known, plan)
        return work.run(context, plan)

    def _going_on(self, known: Known, plan: Plan, capacity: int) -> Context | None:
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
        self.offer(Stayed(known.shelf, known.tokens[: plan.reused], self.costs))
        return context

    def _prefill(self, context: Context, known: Known, cancelled: Asked) -> Prefill:  # noqa: ARG002  (for subclasses)
        replay, alone = not self._settings.deterministic, self._room.is_alone
        return Prefill(self._engine, self.costs, known.tokens, cancelled, replay, alone=alone)

    def _load(self, work: Prefill, context: Context, known: Known, plan: Plan) -> Filled:
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
        context.near_tokens = known.near_tokens(plan)
        tiers: set[Tier] = {load.tier for load in plan.loads}
        if len(tiers) == 1:
            self.costs.loaded(tiers.pop(), known.matches.load_bytes(plan.reused), filled.load_seconds)
        store.used(used, max(0.0, saved - filled.load_seconds) * 1e3, known.asker)
        return filled

    def _load_patience(self, saved_seconds: float) -> float:
        """How long a load may take."""
        return min(max(LOAD_SECONDS, saved_seconds), MOST_LOAD_SECONDS)

    def _left_behind(self, feed: TimedFeed) -> None:
        if feed.filling:  # a read that hangs: nothing is asked until it is through
            self._slow = feed

    def _spans(self, known: Known, stop: int) -> list[Span]:  # noqa: ARG002  (for subclasses)
        """The steps that compute the first tokens of a prompt."""
        return self.cut.spans(0, stop)

    def _used(self, match: Match, tokens: int) -> Match:
        """The part of what was found that `tokens` tokens need."""
        return match.until(tokens)

    def _run(self, work: Prefill, context: Context, plan: Plan, feed: TimedFeed) -> Filled:
        return work.run(context, plan, feed)

    def reuse(self, known: Known, plan: Plan, filled: Filled | None = None) -> Reuse:
        """What a prompt is spared by a plan; once it is filled, what it was really spared."""
        done = plan if filled is None else filled.plan
        miss = self.miss(known, done, None if filled is None else filled.lost)
        return spared(known, done, filled, miss, self.chunks.mender)

    def miss(self, known: Known, plan: Plan, lost: str | None = None) -> str | None:
        """Why not everything but the last token is reused, in a word; None if it is. See `Reuse`."""
        return why_missed(known, plan, self.cut, lost)

    def note(self, known: Known, prompt: Prompt, reuse: Reuse, filled: Filled, first_token_seconds: float) -> None:
        """Remember the request, with why it was not faster, for `explain`: in the background."""
        if not known.off:
            explainer, match = self.explainer(known.shelf), known.matches.match
            self.offer(Note(explainer, prompt, filled.plan, match, reuse, first_token_seconds, known.guard))

    def explainer(self, shelf: Shelf) -> Explainer:
        """What explains requests of that shelf. Only the session's own tenant may learn that others know a prompt."""
        engine, own = self._engine, shelf.namespace.tenant == self._settings.tenant
        why = engine.capabilities.opaque
        return Explainer(self.store, engine.tokenizer, self.costs, other_tenants=own, opaque=why)

    def keep_early(self, context: Context) -> None:
        """Keep a long new prompt while its reply is being written: nobody else should have to compute it again."""
        awaited = context.flight is not None and context.flight.waiting > 0
        new = min(context.prompt_tokens, context.exact_tokens) - context.stored_tokens
        if not context.passing and new >= (1 if awaited else EARLY_TOKENS):
            self._keep(context, context.prompt_tokens)
        else:
            context.land()

    def keep(self, context: Context) -> None:
        """Keep what the context holds by now, prompt and reply, and let it wait for the next request."""
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
            for job in (*context.jobs(), WasAsked(context.shelf, context.tokens, context.asker)):
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
        if self.keeper is None or count <= context.stored_tokens:
            context.land()
            return
        job = context.keep(count)
        job.then = None if context.flight is None else context.flight.land
        if self.keeper.offer(job):
            context.flight = None  # it lands when the job is done
        else:
            context.land()

    def offer(self, job: Job) -> None:
        """Something else to do with the store when there is time."""
        if self.keeper is not None:
            self.keeper.offer(job)

    def unpark(self, tenant: str | None = None, app: str | None = None) -> None:
        """Give all contexts back that wait in the engine, or those of one app: their KV is in memory or on disk."""
        self._parked.clear(tenant, app)

    def rest(self) -> bool:
        """Keep everything and give all sequences back, so that the engine can let its model go; False if it cannot."""
        done = self.keeper is None or self.keeper.flush(REST_SECONDS)
        self.unpark()
        return done

    def purge(self, tenant: str, salt: str, runs: Sequence[Run], texts: Sequence[str]) -> None:
        """Remove every trace of some runs of tokens, and of some texts. Raises `CacheError` if it cannot be done."""
        self.rest()
        if self.store is not None:
            self.store.purge(tenant, salt, runs, texts=texts)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything offered so far is kept; False if that takes longer."""
        return self.keeper is None or self.keeper.flush(timeout_seconds)

    def close(self) -> None:
        """Keep what is waiting, within a bounded time, and remember what things cost. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._flights.land()
        remember_costs(self._engine, self.costs)
        idle = self.keeper is None or self.keeper.close(CLOSE_SECONDS)
        self._parked.clear()
        if self.store is not None and idle:
            try:
                self._patience.ask(self.store.close, CLOSE_SECONDS)
            except NoAnswer as reason:
                log.warning("The cache could not be closed: %s.", reason)
        self._patience.close()
        if self.streams is not None:
            self.streams.close()
