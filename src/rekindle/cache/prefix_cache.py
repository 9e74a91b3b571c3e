"""The prefix cache of a session: one handle for the prefill of a prompt, from lookup to commit.

    with cache.prepare(request, tokens, cancelled) as prefill:     looked up and planned
        logits = prefill.run(capacity, cancelled)                  loaded, computed
        ...                                                        decode into prefill.context
                                                                   leaving commits: written in the background, parked

Nothing in here fails or delays a request for longer than computing would take.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import psutil

from rekindle.cache.coders import bits_calibrated
from rekindle.cache.context import Context, ParkedContexts
from rekindle.cache.cost import Costs, remember_costs
from rekindle.cache.deadline import NoAnswer
from rekindle.cache.explain import Explainer, Explanation, Prompt
from rekindle.cache.inflight import InflightPrefills, MemoryGate
from rekindle.cache.lookup import CacheLookup, report_reuse, source_spans, stored_pieces
from rekindle.cache.matches import Matches
from rekindle.cache.prefill import IsCancelled, Prefill, PrefillResult
from rekindle.cache.stored_kv import StoredKv
from rekindle.cache.writer import BackgroundJob, BackgroundWriter, Note, StoreNote, WriteGuard
from rekindle.codec.coder import QUANTIZED, is_quantized
from rekindle.core.chunk import ChunkMatches, PromptLayout
from rekindle.core.identity import digest_of_fields
from rekindle.core.keys import KvSpace, Namespace
from rekindle.core.kv import Span
from rekindle.core.plan import Plan
from rekindle.core.reply import ChunkReuse, OriginFinding, PromptProgress, Reuse
from rekindle.core.request import Request
from rekindle.core.scope import Scope, scope_of
from rekindle.core.size import parse_limit
from rekindle.engine.base import Engine, Logits
from rekindle.engine.lora_manager import LoraManager
from rekindle.errors import Closed, InvalidSetting, KvLost, OutOfMemory
from rekindle.settings import Settings
from rekindle.store.catalog.app_rows import key_of
from rekindle.store.purge import TokenRun
from rekindle.store.tiered import TieredStore

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_SPACES = 256  # remembered
_EXACT = "raw"


class KvSpaces:
    """The KV spaces of a session: by the regime of a prompt's length, the tenant, the salt, the adapter and the level.

    Quantized KV has its own: exact KV never meets it.
    """

    def __init__(self, engine: Engine, settings: Settings, adapters: LoraManager, piece_tokens: int | None) -> None:
        """`piece_tokens`: the piece length of deterministic prefills."""
        self._engine = engine
        self._adapters = adapters
        self._settings = settings
        self._piece_tokens = piece_tokens
        self._known: dict[tuple[str, Scope, str | None, bool], KvSpace] = {}
        if settings.deterministic and settings.reuse == "quantized":
            raise InvalidSetting("reuse='quantized' and deterministic exclude each other: leave one of them out.")

    def of(self, request: Request, tokens: int) -> KvSpace:
        """The KV space of a prompt with `tokens` tokens. Raises `AdapterNotFound` and what loading one raises."""
        scope = scope_of(self._settings, request.tenant, request.cache_salt)
        regime = self._engine.regime(tokens)
        adapter = self._adapters.digest(request.adapter)
        quantized = self._is_quantized(request)
        known = self._known.get((regime, scope, adapter, quantized))
        if known is None:
            namespace = Namespace(self._engine.identity(regime).digest, scope.tenant, scope.salt)
            # Pieces are part of what the bits depend on: KV computed in others is in another KV space.
            bits = digest_of_fields(str(self._piece_tokens), self._engine.arithmetic)
            codec = QUANTIZED if quantized else f"{_EXACT}/{bits}" if self._piece_tokens else _EXACT
            known = KvSpace(namespace, self._engine.layout, adapter, codec, self._engine.name)
            if len(self._known) >= _MAX_SPACES:
                self._known.clear()
            self._known[regime, scope, adapter, quantized] = known
        return known

    def exact(self, kv_space: KvSpace) -> KvSpace | None:
        """The exact counterpart of a quantized KV space; None for any other."""
        return replace(kv_space, codec=_EXACT) if is_quantized(kv_space.codec) else None

    def _is_quantized(self, request: Request) -> bool:
        """Whether a request may use quantized KV, and its own may be quantized.

        With chunk reuse only if a codec was chosen: one source of error is enough, unless the user wants both.
        """
        settings = self._settings
        level = settings.reuse if request.reuse is None else request.reuse
        chosen = settings.codec not in ("auto", "raw")
        return not settings.deterministic and (level == "quantized" or (level == "approximate" and chosen))


log = logging.getLogger("rekindle.cache")

CLOSE_SECONDS, REST_SECONDS = 10.0, 60.0


class ChunkStrategy(Protocol):
    """Reuse of passages anywhere in a prompt (`chunks/`): may find more, plan better, and then runs the plan."""

    def allowed(self, request: Request) -> bool:
        """Whether a request may reuse passages of other prompts."""

    def search(
        self, kv_space: KvSpace, tokens: Sequence[int], passages: ChunkMatches | None, start: int
    ) -> ChunkMatches | None:
        """Look the passages up, and other text behind the first `start` tokens. Raises `NoAnswer`."""

    def plan(self, lookup: CacheLookup, exact: Plan) -> Plan:
        """A plan that reuses passages, if that is expected to be faster than the exact one."""

    def run(self, work: Prefill, context: Context, lookup: CacheLookup, plan: Plan) -> PrefillResult:
        """Run a plan of a prompt with passages."""


class Prefetch(Protocol):
    """KV of a prompt that waits for its turn, on its way or here."""

    def close(self) -> None:
        """The prompt was started or dropped. Idempotent."""


class RemoteStrategy(Protocol):
    """KV from an origin (`remote/`), fetched while the rest is computed."""

    def prefetch(self, lookup: CacheLookup, plan: Plan) -> Prefetch | None:
        """Start to fetch a prompt that waits for its turn; None if it is not worth it."""

    def look(self, lookup: CacheLookup, plan: Plan) -> OriginFinding | None:
        """What the origin has of a prompt, or why nothing would come; None if it would not be asked."""

    def run(self, work: Prefill, context: Context, lookup: CacheLookup, plan: Plan) -> PrefillResult | None:
        """Run a plan, and fetch what it would compute; None if the origin is not asked."""

    @property
    def bytes_per_second(self) -> float | None:
        """Speed of the link to the origin; None if it was never measured."""

    def close(self) -> None:
        """Close the connections. Idempotent."""


class PrefixCache:
    """One for each session. With `cache="off"` it finds and keeps nothing."""

    def __init__(
        self,
        kv: StoredKv,
        settings: Settings,
        adapters: LoraManager,
        chunks: ChunkStrategy,
        remote: RemoteStrategy | None = None,
    ) -> None:
        """Raises `InvalidSetting`."""
        self.kv, self.chunks, self.remote = kv, chunks, remote
        self._settings = settings
        self.kv_spaces = KvSpaces(kv.engine, settings, adapters, kv.steps.piece_tokens)
        memory = parse_limit(settings.memory_limit, "memory_limit").resolve(psutil.virtual_memory().total)
        crowded = kv.engine.capabilities.crowded  # then parked contexts take no memory that is not taken anyway
        # A parked context has no age: with a time to live, there are none.
        parks = kv.store is not None and settings.ttl is None and memory > 0
        self._parked = ParkedContexts((sys.maxsize if crowded else memory // 2) if parks else 0)
        if kv.writer is not None:
            kv.writer.free_killed = self.free_killed
        self._memory_gate, self._inflight = MemoryGate(self.unpark), InflightPrefills()
        self._calibrated = {deltas: bits_calibrated(kv.engine, settings, deltas=deltas) for deltas in (False, True)}
        self._warned = False  # that the store does not answer: once, until it does again
        self.owner_asks = True  # False in a server: its clients may not own the folder
        self._closed = False

    @property
    def store(self) -> TieredStore | None:
        return self.kv.store

    @property
    def writer(self) -> BackgroundWriter | None:
        return self.kv.writer

    @property
    def costs(self) -> Costs:
        return self.kv.costs

    def bits_calibrated(self, kv_space: KvSpace) -> bool:
        """Whether the bits of quantized KV in this space were calibrated before the session was opened."""
        return self._calibrated[kv_space.adapter is not None]

    # -- a request ---------------------------------------------------------------------------------------------------

    def prepare(
        self,
        request: Request,
        tokens: Sequence[int],
        cancelled: IsCancelled,
        guard: WriteGuard | None = None,
        prompt_layout: PromptLayout | None = None,
    ) -> PromptPrefill:
        """Look a prompt up and plan its prefill; waits while another request computes the same prefix, and then for the
        disk, no longer than computing it here would take.

        prompt_layout   where its passages stand
        guard           whether what is computed may be written, asked then

        Raises `Cancelled`.
        """
        waits = True
        while True:
            lookup = self._look(request, tokens, guard, prompt_layout)
            if lookup.off or not waits or not self.kv.engine.capabilities.spans:
                return PromptPrefill(self, lookup)
            inflight, own = self._inflight.join(lookup.kv_space, tokens, lookup.matches.length)
            if own:
                return PromptPrefill(self, replace(lookup, inflight=inflight))
            self.park(lookup.parked)
            waits = inflight.wait(cancelled, self.costs.rates.compute_seconds(Span(lookup.matches.length, len(tokens))))

    def peek(self, request: Request, tokens: Sequence[int], prompt_layout: PromptLayout | None = None) -> PromptPrefill:
        """The same without waiting, for a prompt that is not run: see its `lookup`, `plan` and `reuse`."""
        return PromptPrefill(self, self._look(request, tokens, None, prompt_layout))

    def prefetch(
        self,
        request: Request,
        tokens: Sequence[int],
        cancelled: IsCancelled,
        guard: WriteGuard | None = None,
        prompt_layout: PromptLayout | None = None,
    ) -> Prefetch:
        """For a prompt that waits for its turn: start to fetch what an origin has of it, and bring what is on this
        machine's disk to memory. Returns when that is there, does not fit, or the prompt waits no longer (`cancelled`).
        """
        lookup = self._look(request, tokens, guard, prompt_layout, takes_parked=False)
        plan, opened = self.plan(lookup), ExitStack()
        fetch = None if self.remote is None else self.remote.prefetch(lookup, plan)
        if fetch is not None:
            opened.callback(fetch.close)
        if self.store is not None and (pieces := stored_pieces(lookup, plan)):
            opened.callback(self.store.preload(pieces, cancelled))
        return opened

    def _look(
        self,
        request: Request,
        tokens: Sequence[int],
        guard: WriteGuard | None,
        prompt_layout: PromptLayout | None,
        *,
        takes_parked: bool = True,
    ) -> CacheLookup:
        """What is stored of a prompt. `park` its parked context afterwards, or go on from it; with
        `takes_parked=False` it is only looked at."""
        kv_space = self.kv_spaces.of(request, len(tokens))
        app_ref = request.app_ref(kv_space.namespace.scope)
        if self.store is None or request.reuse == "off":
            return CacheLookup(kv_space, tokens, Matches(len(tokens)), off=True, guard=guard, app_ref=app_ref)
        exact = not self.chunks.allowed(request)
        passages = None if exact or prompt_layout is None else ChunkMatches.of(prompt_layout, tokens)
        parked = self.kv.take_parked(self._parked, kv_space, tokens, exact=exact)
        in_engine = 0 if parked is None else parked.common(tokens, exact=exact)
        goes_on = parked is not None and len(parked.tokens) > in_engine
        if not takes_parked:  # at once: the request that it belongs to may come
            self.park(parked)
            parked = None
        own = Matches(len(tokens), in_engine)
        nothing = CacheLookup(
            kv_space, tokens, own, parked, guard=guard, passages=passages, app_ref=app_ref, parked_goes_on=goes_on
        )
        if in_engine >= len(tokens) - 1:
            return nothing
        try:
            preferred = self.kv_spaces.exact(kv_space)
            found = self.kv.find(kv_space, tokens, in_engine, preferred, request.drafted_tokens)
            if not exact and request.max_tokens:
                passages = self.chunks.search(kv_space, tokens, passages, found.length)
        except NoAnswer as late:
            log.log(logging.DEBUG if self._warned else logging.WARNING, "The cache does not answer: %s.", late)
            self._warned = True
            return replace(nothing, trouble=f"the cache does not answer: {late}")
        self._warned = False
        return replace(nothing, matches=found, passages=passages)

    def plan(self, lookup: CacheLookup) -> Plan:
        """What to load and what to compute."""
        exact = self.kv.plan(lookup)
        return exact if lookup.passages is None else self.chunks.plan(lookup, exact)

    def run(
        self,
        lookup: CacheLookup,
        plan: Plan,
        capacity: int,
        cancelled: IsCancelled,
        opened: Callable[[Context], None] = lambda _: None,
    ) -> PrefillResult:
        """Run a plan into a context with room for `capacity` tokens: a parked one or a new one.

        `opened` is called with the context, before anything is computed.
        """
        self._memory_gate.enter()
        context = None
        try:
            context = self._continue_parked(lookup, plan, capacity)
            if self.kv.engine.capabilities.crowded:
                self.unpark()
            if context is None:
                if plan.in_engine:  # there is no room to go on from it
                    plan = self.kv.plan_computing(lookup, plan)
                regime = self.kv.engine.regime(len(lookup.tokens))
                open_sequence = partial(self.kv.engine.open, capacity, regime, lookup.kv_space.adapter)
                context = Context(lookup.kv_space, self._memory_gate.take(open_sequence, cancelled))
            _begin(context, lookup)
            opened(context)
            work = self.kv.work(context, lookup, cancelled, self._memory_gate.is_alone)
            fetched = None if self.remote is None else self.remote.run(work, context, lookup, plan)
            return fetched or (self.kv if lookup.passages is None else self.chunks).run(work, context, lookup, plan)
        except BaseException:
            if lookup.inflight is not None:
                lookup.inflight.land()
            if context is not None:
                context.close()
            self._memory_gate.leave()
            raise

    def _continue_parked(self, lookup: CacheLookup, plan: Plan, capacity: int) -> Context | None:
        """The context that the plan continues, cut to what it shares and with room for more; None for a new one."""
        context = lookup.parked
        if context is None or not plan.in_engine:
            self.park(context)
            return None
        try:
            context.truncate(plan.reused)
            context.reserve(capacity)
        except (OutOfMemory, KvLost) as reason:
            log.info("computing instead: %s", reason)
            context.close()
            return None
        kv_space, tokens = lookup.kv_space, lookup.tokens[: plan.reused]
        saved_ms = 1e3 * self.costs.rates.compute_seconds(Span(0, len(tokens)))
        self.kv.offer(StoreNote(lambda store: store.record_stay(kv_space, tokens, saved_ms)))
        return context

    def park(self, context: Context | None) -> None:
        """Let a context wait in the engine for its next request."""
        if context is not None:
            self._parked.park(context)

    def commit(self, context: Context) -> None:
        """Write what a context holds, prompt and reply, in the background, and park it."""
        asked = None if context.passing else self.kv.use_note(context)
        try:
            if context.passing or self._closed:
                context.close()
                return
            if self.kv.steps.piece_tokens:
                self.kv.cut_to_pieces(context)
            if context.tokens:
                context.ended = True
                self.kv.write(context, len(context.tokens))
                for job in context.jobs():
                    self.kv.offer(job)
                self._parked.park(context)
            else:
                context.close()
            if asked is not None:
                self.kv.offer(asked)  # behind the write jobs: then all of it is found
        finally:
            context.land()
            self._memory_gate.leave()

    def explainer(self, kv_space: KvSpace) -> Explainer:
        """What explains requests of a KV space. Only the owner of the folder may learn what others' prompts share."""
        engine, own = self.kv.engine, Scope(self._settings.tenant, self._settings.cache_salt)
        everyone, why = self.owner_asks and kv_space.namespace.scope == own, engine.capabilities.opaque
        return Explainer(self.store, engine.tokenizer, self.costs, everyone=everyone, opaque=why)

    def offer(self, job: BackgroundJob) -> None:
        """Queue another job for the store."""
        self.kv.offer(job)

    # -- the whole cache ---------------------------------------------------------------------------------------------

    def unpark(self, scope: Scope | None = None) -> None:
        """Close all parked contexts, or those of one scope. Their KV is in memory or on disk."""
        self._parked.clear(lambda context: scope in (None, context.kv_space.namespace.scope))

    def free_killed(self) -> None:
        """Free the memory of killed apps: their parked contexts, and what is held for them alone. Disk is not freed."""
        if self.store is not None and not self._closed:
            killed = {(row.tenant, row.salt_digest, row.name) for row in self.store.free_killed()}
            self._parked.clear(lambda context: context.app_ref is not None and key_of(context.app_ref) in killed)

    def rest(self) -> bool:
        """Write everything and close all contexts, so that the engine can free its model; False if it cannot."""
        done = self.flush(REST_SECONDS)
        self.unpark()
        return done

    def purge(
        self, tenant: str, salt: str, runs: Sequence[TokenRun], texts: Sequence[str], *, everything: bool = False
    ) -> None:
        """Remove every trace of some runs of tokens, and of some texts; all KV of the tenant and salt if `everything`.

        Raises `CacheError` if it cannot be done.
        """
        self.flush(REST_SECONDS)
        self.unpark(Scope(tenant, salt))
        if self.store is not None:
            if everything:
                self.store.remove_all(tenant, salt)
            self.store.purge(tenant, salt, runs, texts=texts)

    def clear(self) -> int:
        """Remove everything of all tenants; returns the number of files removed. Raises `CacheError`."""
        self.rest()
        return 0 if self.store is None else self.store.clear()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything offered so far is written; False if that takes longer."""
        return self.kv.flush(timeout_seconds)

    def close(self) -> None:
        """Write what is queued, within a bounded time, and remember the costs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._inflight.land()
        remember_costs(self.kv.engine, self.costs)
        self.kv.close(CLOSE_SECONDS)
        self._parked.clear()
        if self.remote is not None:
            self.remote.close()


def _begin(context: Context, lookup: CacheLookup) -> None:
    context.passing, context.inflight, context.guard = lookup.off, lookup.inflight, lookup.guard
    context.prompt_tokens, context.app_ref, context.ended = len(lookup.tokens), lookup.app_ref, False
    context.stored_tokens = max(lookup.stored_tokens, context.stored_tokens)
    context.origin_miss = None


class PromptPrefill:
    """The prefill of one prompt. Use it as a context manager: leaving commits what was run, or gives back the rest."""

    def __init__(self, cache: PrefixCache, lookup: CacheLookup) -> None:
        self._cache = cache
        self.lookup = lookup
        try:
            self.plan = cache.plan(lookup)
        except BaseException:
            self._give_back()
            raise
        self._result: PrefillResult | None = None
        self._opened: list[Context] = []  # what it runs into
        self._begun = time.perf_counter()
        self._ended = False  # committed, given back, or failed

    @property
    def result(self) -> PrefillResult:
        """What `run` did."""
        assert self._result is not None, "the prefill was not run"
        return self._result

    @property
    def context(self) -> Context:
        """The context that holds the prompt, after `run`."""
        return self.result.context

    @property
    def reuse(self) -> Reuse:
        """What is reused: as planned before `run`, as it came out after it."""
        lookup, result = self.lookup, self._result
        plan, lost = (self.plan, None) if result is None else (result.plan, result.lost)
        miss = self._cache.kv.miss(lookup, plan, lost)
        return report_reuse(lookup, plan, result, miss, self._cache.bits_calibrated)

    def source_spans(self, chunks: Sequence[ChunkReuse]) -> list[tuple[int, int, str]]:
        """The same for each run of tokens: start, stop, and a key of `SOURCES`; `chunks` are those of `reuse`."""
        return source_spans(self.lookup, self.plan if self._result is None else self._result.plan, chunks)

    @property
    def present(self) -> int:
        """Number of tokens of the prompt that are in the context so far. May be called from any thread."""
        try:
            return min(len(self.lookup.tokens), self._opened[0].sequence.length) if self._opened else 0
        except Closed:
            return 0

    def progress(self, cached: int) -> PromptProgress:
        """How far the prompt is read, `cached` of its tokens being reused. May be called from any thread.

        The expected time is the plan's until something was computed, then what the rest takes at that speed: ask right
        after more is present.
        """
        total, compute_seconds = len(self.lookup.tokens), self._cache.costs.rates.compute_seconds
        processed, seconds = max(cached, self.present), time.perf_counter() - self._begun
        expected = self.plan.predicted_seconds
        if processed > cached and self.plan.reuse_chunks is None:
            share = compute_seconds(Span(cached, processed)) / compute_seconds(Span(cached, total))
            expected = seconds / share if share > 0 else None
        return PromptProgress(total, cached, processed, seconds, expected, kept=not self.lookup.off)

    def run(self, capacity: int, cancelled: IsCancelled) -> Logits:
        """Load and compute the prompt, with room for `capacity` tokens; returns the logits after its last token.

        What cannot be loaded is computed. Raises `Cancelled`, and what the engine raises.
        """
        self._ended = True  # a run that fails gives back what it took
        self._result = self._cache.run(self.lookup, self.plan, capacity, cancelled, self._opened.append)
        self._ended = False
        return self._result.logits

    def note(self, prompt: Prompt, reuse: Reuse, first_token_seconds: float) -> None:
        """Remember the request and what was reused for `explain`, in the background."""
        if not self.lookup.off:
            explainer, match = self._cache.explainer(self.lookup.kv_space), self.lookup.matches.match
            plan, guard = self.result.plan, self.lookup.guard
            self._cache.offer(Note(explainer, prompt, plan, match, reuse, first_token_seconds, guard))

    def explain(self, prompt: Prompt) -> Explanation:
        """Where the KV of the prompt would come from, and why not more of it."""
        explainer, remote = self._cache.explainer(self.lookup.kv_space), self._cache.remote
        origin = None if remote is None else remote.look(self.lookup, self.plan)
        return explainer.explain(prompt, self.plan, self.lookup.matches.match, self.reuse, origin)

    def commit_prompt(self) -> None:
        """Write a long new prompt while its reply is being decoded."""
        self._cache.kv.write_early(self.context)

    def commit(self) -> None:
        """Write what the context holds now, prompt and reply, and park it; without `run`, give back what was taken.

        Idempotent.
        """
        if self._ended:
            return
        self._ended = True
        if self._result is not None:
            self._cache.commit(self._result.context)
        else:
            self._give_back()

    def _give_back(self) -> None:
        self._cache.park(self.lookup.parked)
        if self.lookup.inflight is not None:
            self.lookup.inflight.land()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.commit()
