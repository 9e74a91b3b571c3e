"""How the KV of one engine is found in the store, loaded into a context while the rest is computed, and written back.

Nothing in here fails or delays a request for longer than computing would take: a store that cannot be read or does not
answer knows nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import TypeVar, get_args

from rekindle.cache.context import Context, ParkedContexts
from rekindle.cache.cost import AlwaysReuse, by_tier, recall_costs
from rekindle.cache.deadline import DeadlineCaller, Late, NoAnswer
from rekindle.cache.lookup import CacheLookup, why_missed
from rekindle.cache.matches import Matches, find_matches
from rekindle.cache.planner import PrefillSteps, make_plan
from rekindle.cache.prefill import IsCancelled, Prefill, PrefillResult
from rekindle.cache.writer import BackgroundJob, BackgroundWriter, StoreNote
from rekindle.codec.coder import is_quantized
from rekindle.core.keys import KvSpace
from rekindle.core.kv import Span
from rekindle.core.plan import SHARED_TIERS, Plan, SharedTierName, Tier
from rekindle.engine.base import Engine
from rekindle.errors import KvLost
from rekindle.settings import Settings
from rekindle.store.feed import StoredFeed, TierLoad
from rekindle.store.prefix_index import Match
from rekindle.store.probe import read_speeds
from rekindle.store.tiered import TieredStore

log = logging.getLogger("rekindle.cache")

PIECE_TOKENS = 256  # of a deterministic prefill
EARLY_TOKENS = 256  # a prompt with this many new tokens is written while its reply is being decoded
LOOKUP_SECONDS = 0.25  # timeout of a question to the catalog
SHARED_LOOKUP_SECONDS = 0.5  # the same of shared tiers
_MIN_SHARED_TOKENS = 256  # fewer are not worth a question
# The shortest timeout of a load; then what computing takes; the longest.
LOAD_SECONDS, MAX_LOAD_SECONDS = 1.0, 60.0
PROBE_SECONDS = 600.0  # between two probes of a folder, at least
T = TypeVar("T")


class StoredKv:
    """KV by spans of tokens. `CheckpointKv` is for models whose state cannot be cut. Thread-safe."""

    def __init__(self, engine: Engine, settings: Settings, store: TieredStore | None) -> None:
        """Without a store nothing is found or written."""
        self.engine, self.store = engine, store
        self.writer = None if store is None else BackgroundWriter(store)
        self.costs = recall_costs(engine)
        self._probed_at = -math.inf  # of a monotonic clock
        self.steps = PrefillSteps(engine.prefill_tokens, PIECE_TOKENS if settings.deterministic else None)
        self.deadlines, self._shared_deadlines = DeadlineCaller(), DeadlineCaller()
        if store is not None:
            store.shared.worth = self._worth_writing
            self._probe(store)
        self._slow: StoredFeed | None = None  # a read that did not end in time

    def _probe(self, store: TieredStore) -> None:
        """Learn in the background how fast the folder is read; again after a late load, at most once in a while."""
        again = self._probed_at > -math.inf
        if time.monotonic() - self._probed_at < PROBE_SECONDS or isinstance(self.costs, AlwaysReuse):
            return
        self._probed_at = time.monotonic()

        def probe() -> None:
            if (speeds := read_speeds(store.disk, again=again)) is not None:
                self.costs.probed(speeds)

        with suppress(RuntimeError):  # no thread left
            Thread(target=probe, name="rekindle-probe", daemon=True).start()

    # -- reading -----------------------------------------------------------------------------------------------------

    def take_parked(
        self, parked: ParkedContexts, kv_space: KvSpace, tokens: Sequence[int], *, exact: bool
    ) -> Context | None:
        """Take the parked context that is of most use for a prompt; None if none is."""
        return parked.take(kv_space, tokens, exact=exact)

    def ask_store(self, question: Callable[[], T]) -> T:
        """The answer of the catalog. Raises `NoAnswer` if it fails or takes too long."""
        if self._slow is not None and self._slow.filling:
            raise Late("it is still busy with an earlier load")
        return self.deadlines.ask(question, LOOKUP_SECONDS)

    def find(
        self, kv_space: KvSpace, tokens: Sequence[int], in_engine: int, preferred: KvSpace | None, follow: int
    ) -> Matches:
        """The longest stored prefix of a prompt. Raises `NoAnswer`."""
        store = self.store
        assert store is not None
        look = partial(find_matches, store, kv_space, tokens, in_engine, preferred, follow)
        found = self.ask_store(look)
        missing = Span(found.length, len(tokens))
        tiers = self.tiers_to_ask(kv_space, missing) if store.shared.tiers else []
        if not tiers:
            return found
        started = time.perf_counter()
        found = self.ask_shared(lambda: look(tiers=tiers), missing, found)
        return replace(found, asked_seconds=time.perf_counter() - started)

    def tiers_to_ask(self, kv_space: KvSpace, missing: Span) -> list[SharedTierName]:
        """The shared tiers from which these tokens are expected sooner than they are computed."""
        if self.store is None or len(missing) < _MIN_SHARED_TOKENS:
            return []
        return self._sooner((tier.name for tier in self.store.shared.tiers if tier.answers), kv_space, missing)

    def ask_shared(self, look: Callable[[], T], missing: Span, otherwise: T) -> T:
        """The answer of shared tiers; `otherwise` if there is none, or it takes too long."""
        seconds = min(SHARED_LOOKUP_SECONDS, max(LOOKUP_SECONDS, self.costs.rates.compute_seconds(missing)))
        try:
            return self._shared_deadlines.ask(look, seconds)
        except NoAnswer as reason:
            log.info("without the shared tiers: %s", reason)
            return otherwise

    def _sooner(self, names: Iterable[SharedTierName], kv_space: KvSpace, span: Span) -> list[SharedTierName]:
        rates, size_bytes = self.costs.rates, len(span) * kv_space.layout.token_bytes
        limit = rates.compute_seconds(span)
        return [name for name in names if rates.load_seconds(name, size_bytes) < limit]

    def _worth_writing(self, kv_space: KvSpace, tokens: int) -> Sequence[SharedTierName]:
        return self._sooner(SHARED_TIERS, kv_space, Span(0, tokens))

    def plan(self, lookup: CacheLookup) -> Plan:
        """The plan with the shortest expected time."""
        return make_plan(lookup.matches, self.costs.rates, self.steps)

    def miss(self, lookup: CacheLookup, plan: Plan, lost: str | None = None) -> str | None:
        """Why not everything but the last token is reused, in a word; None if it is. See `Reuse`."""
        missed = why_missed(lookup, plan, self.steps, lost)
        ends = missed is None or missed == "unknown"
        return "limit" if ends and plan.reused < plan.tokens - 1 and self._exceeds_limit(lookup) else missed

    def _exceeds_limit(self, lookup: CacheLookup) -> bool:
        """Whether the KV of a prompt is larger than the disk limit. How small codecs make it is not known."""
        kv_space, store = lookup.kv_space, self.store
        size_bytes = len(lookup.tokens) * kv_space.layout.token_bytes
        raw = kv_space.adapter is None and not is_quantized(kv_space.codec)
        return store is not None and raw and store.disk.room.is_over(size_bytes)

    def work(self, context: Context, lookup: CacheLookup, cancelled: IsCancelled, alone: IsCancelled) -> Prefill:  # noqa: ARG002  (for subclasses)
        """The prefill of a prompt into a context; `alone`: whether no other request waits."""
        replay = self.steps.piece_tokens is None
        return Prefill(self.engine, self.costs, lookup.tokens, cancelled, replay, alone=alone)

    def run(self, work: Prefill, context: Context, lookup: CacheLookup, plan: Plan) -> PrefillResult:
        """Run a plan that loads a prefix and computes the rest. What cannot be loaded is computed.

        Raises `Cancelled`, and what the engine raises.
        """
        if not plan.loads or plan.in_engine:
            return work.run(context, plan)
        store, match = self.store, lookup.matches.match
        assert store is not None and match is not None
        saved = self.costs.rates.compute_seconds(Span(0, plan.reused))
        timeout = self.load_timeout(saved)
        used = self._used(match, plan.reused)
        begun = time.perf_counter()
        try:
            feed = self.deadlines.ask(lambda: store.load(lookup.source, used, timeout), timeout)
            feed.brought(time.perf_counter() - begun)  # to open it
            try:
                result = self._run(work, context, lookup, plan, feed)
            finally:
                feed.close()
                self.note_busy(feed)
        except (KvLost, NoAnswer) as error:
            log.info("computing instead: %s", error)
            if time.perf_counter() - begun >= timeout:  # else it would be tried again every time
                self.note_late(plan, lookup.matches, timeout)
            context.stored_tokens = 0
            return replace(work.run(context, self.plan_computing(lookup, plan)), lost=str(error))
        context.quantized_tokens = lookup.quantized_tokens(plan)
        self.learn_loads(self._loads(feed, lookup, result), lookup.matches.asked_seconds)
        if any(load.tier in SHARED_TIERS for load in plan.loads):
            context.shared_tokens = plan.reused
        store.record_use(used, max(0.0, saved - result.load_seconds) * 1e3, lookup.app_ref)
        return result

    def _loads(self, feed: StoredFeed, lookup: CacheLookup, result: PrefillResult) -> list[TierLoad]:  # noqa: ARG002  (for subclasses)
        return feed.loads()

    def learn_loads(self, loads: Iterable[TierLoad], asked_seconds: float = 0.0) -> None:
        """Record what loads took by their own clocks, what comes from one tier as one load; a shared tier was asked
        before."""
        loads = list(loads)
        for tier, size_bytes in by_tier((tier, size_bytes) for tier, size_bytes, _ in loads).items():
            seconds = sum(seconds for other, _, seconds in loads if other == tier)
            self.costs.loaded(tier, size_bytes, seconds + (asked_seconds if tier in SHARED_TIERS else 0.0))

    def note_late(self, plan: Plan, matches: Matches, seconds: float) -> None:
        """Record that a load from the slowest tier took longer than `seconds`. The disk may be slower than it was."""
        tier = max((load.tier for load in plan.loads), key=get_args(Tier).index)
        self.costs.loaded(tier, matches.load_bytes(plan.reused, tier), seconds)
        if self.store is not None:
            self._probe(self.store)

    def plan_computing(self, lookup: CacheLookup, plan: Plan) -> Plan:
        """The plan that computes everything instead."""
        return Plan.computing(self._steps_of(lookup).spans(0, plan.tokens), plan.cold_seconds)

    def load_timeout(self, saved_seconds: float) -> float:
        """Timeout of a load, by the seconds it saves."""
        return min(max(LOAD_SECONDS, saved_seconds), MAX_LOAD_SECONDS)

    def note_busy(self, feed: StoredFeed) -> None:
        """After a load: while its feed hangs in a read, the store is not asked."""
        if feed.filling:
            self._slow = feed

    def _steps_of(self, lookup: CacheLookup) -> PrefillSteps:  # noqa: ARG002  (for subclasses)
        return self.steps

    def _used(self, match: Match, tokens: int) -> Match:
        """The part of a match that the first `tokens` tokens need."""
        return match.until(tokens)

    def _run(
        self,
        work: Prefill,
        context: Context,
        lookup: CacheLookup,  # noqa: ARG002  (for subclasses)
        plan: Plan,
        feed: StoredFeed,
    ) -> PrefillResult:
        return work.run(context, plan, feed)

    # -- writing -----------------------------------------------------------------------------------------------------

    def write_early(self, context: Context) -> None:
        """Write a long new prompt while its reply is being decoded: nobody else should have to compute it again."""
        awaited = context.inflight is not None and context.inflight.waiting > 0
        new = min(context.prompt_tokens, context.storable_tokens) - context.stored_tokens
        if not context.passing and new >= (1 if awaited else EARLY_TOKENS):
            self.write(context, context.prompt_tokens)
        else:
            context.land()

    def write(self, context: Context, count: int) -> None:
        """Write the first `count` tokens of a context in the background."""
        count = self.steps.reusable(min(count, context.storable_tokens))
        if self.writer is None or count <= context.stored_tokens:
            context.land()
            return
        job = context.keep(count)
        job.then = None if context.inflight is None else context.inflight.land
        job.shares = True
        if context.inflight is not None:
            context.inflight.being_written()
        if self.writer.offer(job):
            context.inflight = None  # it lands when the job is done
        else:
            context.land()

    def use_note(self, context: Context) -> BackgroundJob:
        """The job that notes which app used what is stored of a context."""
        kv_space, tokens, app_ref = context.kv_space, context.tokens, context.app_ref
        return StoreNote(lambda store: store.record_request(kv_space, tokens, app_ref))

    def cut_to_pieces(self, context: Context) -> None:
        """Deterministic: drop what was not prefilled in whole pieces, which is never reused."""
        context.truncate(min(len(context.tokens), self.steps.reusable(context.prompt_tokens)))

    def offer(self, job: BackgroundJob) -> None:
        """Queue another job for the store."""
        if self.writer is not None:
            self.writer.offer(job)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything offered so far is written, to shared tiers too; False if that takes longer."""
        deadline = time.monotonic() + timeout_seconds
        written = self.writer is None or self.writer.flush(timeout_seconds)
        left = max(0.0, deadline - time.monotonic())
        return written and (self.store is None or self.store.shared.flush(left))

    def close(self, timeout_seconds: float) -> None:
        """Write what is queued, within the timeout, and close the store. Idempotent."""
        idle = self.writer is None or self.writer.close(timeout_seconds)
        if self.store is not None and not self.store.shared.flush(timeout_seconds):
            log.warning("Some KV was not written to the shared tiers within %.0f s.", timeout_seconds)
        if self.store is not None and idle:
            try:
                self.deadlines.ask(self.store.close, timeout_seconds)
            except NoAnswer as reason:
                log.warning("The cache could not be closed: %s.", reason)
        self.deadlines.close()
        self._shared_deadlines.close()
