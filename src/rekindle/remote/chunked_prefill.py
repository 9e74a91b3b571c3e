"""Prefill in pieces while an origin is asked for the rest of the prompt.

`PrefixPrefill`    the origin may have the beginning: chunks are computed until it answers, then both go on together
`PassagePrefill`   the origin may have passages: they arrive last one first while the first ones are computed

    compute   [head, passage 1][passage 2][chosen tokens of 3, 4, 5, and the question]
    link      [passage 5 ][passage 4 ][passage 3 ]

Once every passage is here or given up, the prompt is planned again: passages that arrived are reused like those from
the local cache.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rekindle.cache.context import Context
from rekindle.cache.deadline import NoAnswer
from rekindle.cache.lookup import CacheLookup
from rekindle.cache.matches import Matches
from rekindle.cache.prefill import IsCancelled, Prefill, PrefillResult
from rekindle.cache.stored_kv import StoredKv
from rekindle.chunks.match import WriteNonprefixKv
from rekindle.chunks.prefill import ChunkPrefill
from rekindle.core.cells import CHUNK_TOKENS, RemoteReport, TimelineEvent
from rekindle.core.chunk import PromptLayout, Variant
from rekindle.core.kv import Kv, Span
from rekindle.core.plan import RAW, Compute, FetchRemote, Load, Plan, Step
from rekindle.engine.base import Logits
from rekindle.remote.fetch import RemoteChunkFetch, RemotePrefixFetch, WantedPassage
from rekindle.remote.hybrid_prefill import HybridPrefill
from rekindle.remote.schedule import count_computed
from rekindle.remote.transfer_queue import OriginSlices
from rekindle.store.tiered import TieredStore


class ChunkedPrefill:
    """One prompt. `plan` is the exact plan without an origin."""

    def __init__(self, kv: StoredKv, work: Prefill, context: Context, lookup: CacheLookup, plan: Plan) -> None:
        self._kv, self.work, self.context, self.lookup, self.plan = kv, work, context, lookup, plan
        self.begun = time.monotonic()
        self.events: list[TimelineEvent] = []
        self._first: PrefillResult | None = None  # the piece that loaded from the cache

    @property
    def at(self) -> int:
        """Number of tokens in the context."""
        return len(self.context.tokens)

    @property
    def following(self) -> int:
        """Where computing continues: behind all tokens in the context or in the local cache."""
        return max(self.at, self.plan.reused)

    @property
    def loads(self) -> tuple[Load, ...]:
        """What was actually loaded, or was in the engine."""
        plan = self.plan if self._first is None else self._first.plan
        return plan.loads if self._first is not None or plan.in_engine else ()

    @property
    def loaded(self) -> int:
        """Number of tokens loaded."""
        return self.loads[-1].span.stop if self.loads else 0

    def go_on(self, stop: int, parts: Sequence[tuple[int, Span]]) -> None:
        """Load what the cache has, and compute up to `stop`. `parts`: number and span of each timeline event."""
        at, start, begun = self.at, self.following, time.monotonic()
        loads = (Load(Span(0, at), "engine"),) if at else self.plan.loads
        plan = Plan(stop, (*loads, Compute(Span(start, stop))))
        result = self._run(replace(self.work, tokens=self.lookup.tokens[:stop]), plan)
        self._first = self._first or (result if not self.plan.in_engine else replace(result, plan=self.plan))
        layers, ended = len(self.lookup.kv_space.layout.layers), time.monotonic()
        token_seconds = (ended - begun) / (stop - start)
        for name, span in parts:
            own = max(start, span.start) - start, min(stop, span.stop) - start
            first, last = (begun - self.begun + token_seconds * place for place in own)
            self.events.append(TimelineEvent("compute", name, 0, layers, first, last))

    def end(self, work: Prefill | None = None) -> PrefillResult:
        """Compute the rest."""
        work = work or self.work
        if self._first is None:
            return self._run(work, self.plan)
        left = [step.span for step in self.plan.computes if step.span.stop > self.at]
        rest = tuple(Compute(Span(max(span.start, self.at), span.stop)) for span in left)
        result = self._run(work, Plan(self.plan.tokens, (Load(Span(0, self.at), "engine"), *rest)))
        return self.make_result(result.logits, (*self.computed_before(rest[0].span.start), *rest))

    def _run(self, work: Prefill, plan: Plan) -> PrefillResult:
        return self._kv.run(work, self.context, self.lookup, plan)

    def computed_before(self, place: int) -> tuple[Compute, ...]:
        """The step that computed the tokens between what was loaded and `place`."""
        return (Compute(Span(self.loaded, place)),) if place > self.loaded else ()

    def make_result(self, logits: Logits, steps: tuple[Step, ...]) -> PrefillResult:
        """The result of the whole prompt: what was loaded, then `steps`."""
        plan = Plan(self.plan.tokens, (*self.loads, *steps), None, self.plan.cold_seconds)
        if self._first is None:
            return PrefillResult(self.context, logits, plan)
        return PrefillResult(self.context, logits, plan, self._first.load_seconds, self._first.lost)


def stopping(work: Prefill, stops: IsCancelled) -> Prefill:
    """The same prefill, which raises `Cancelled` also once `stops` was true."""
    stopped = threading.Event()

    def cancelled() -> bool:
        if stops():
            stopped.set()
        return stopped.is_set() or work.cancelled()

    return replace(work, cancelled=cancelled)


log = logging.getLogger("rekindle.cache")

_STEP_SHARE = 0.75  # share of the way to the expected meeting point that one step may cover
_LOOK_SECONDS = 0.05  # how often a wait checks whether it still pays


class PrefixPrefill(ChunkedPrefill):
    """A prompt whose prefix may be published, computed chunk by chunk until the origin answers."""

    @property
    def is_between_chunks(self) -> bool:
        """Whether the context ends at a chunk boundary, with everything from the local cache loaded."""
        return self.at >= self.plan.reused and not self.at % CHUNK_TOKENS

    @property
    def _boundary(self) -> int:
        """Where the next piece ends. Each is as long as all before: an origin that has not answered may take as long
        again, and long steps are faster. While other requests wait, pieces are short."""
        at = self.following
        pieces = sum(event.lane == "compute" for event in self.events)
        most = min(pieces, self.work.engine.prefill_tokens // CHUNK_TOKENS) if self.work.alone() else 1
        last = (self.plan.tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        following = (at // CHUNK_TOKENS + 1) * CHUNK_TOKENS
        return max(following, min(following + (max(1, most) - 1) * CHUNK_TOKENS, last))

    def is_ready(self, fetch: RemotePrefixFetch) -> bool:
        """Whether to fetch now, or to compute the rest."""
        if self._boundary >= self.plan.tokens or (fetch.over and fetch.offer is None):
            return True
        return fetch.offer is not None and self.is_between_chunks

    def next_piece(self) -> None:
        """Load what the cache has, and compute up to the end of a chunk."""
        stop = self._boundary
        chunks = range(self.following // CHUNK_TOKENS, stop // CHUNK_TOKENS)
        self.go_on(stop, [(chunk, Span(chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS)) for chunk in chunks])

    def streamed(
        self, streaming: HybridPrefill, offer: OriginSlices, logits: Logits, stored_bits: float
    ) -> PrefillResult:
        """The result after hybrid prefill. KV of fewer bits a number than `stored_bits` is not stored."""
        cells, report, ladder = offer.cells, streaming.report, offer.ladder
        report.events[:0] = self.events
        report.slices, report.kl = ladder.slices(report.streamed_cells), ladder.kl(report.streamed_cells)
        self.context.tokens = tuple(self.lookup.tokens)
        if any(level != RAW for level in report.slices):
            self.context.quantized_tokens = cells.tokens  # upper bound
        coarse = [cell.chunk for cell in report.streamed_cells if ladder.taken[cell].bits < stored_bits]
        if coarse:
            starts = [cells.span(min(coarse)).start, self.context.coarse_from]
            self.context.coarse_from = min(start for start in starts if start is not None)
        first = -(-self.loaded // CHUNK_TOKENS)
        span = Span(first * CHUNK_TOKENS, cells.tokens)
        stream = FetchRemote(span, cells.layers, report.computed[first:], tuple(report.slices))
        last = Compute(Span(span.stop, self.plan.tokens))
        result = self.make_result(logits, (*self.computed_before(span.start), stream, last))
        return replace(result, lost=result.lost or report.failed, streamed=report)


def prefill_with_arrivals(
    chunks: ChunkPrefill, work: Prefill, context: Context, lookup: CacheLookup, arrivals: RemoteChunkFetch
) -> PrefillResult:
    """Prefill a prompt whose passages are being fetched. Raises `Cancelled`, and what the engine raises."""
    passages = lookup.passages
    assert passages is not None
    scorer = chunks.scorer(passages, len(lookup.tokens), chunks.kv.plan(lookup))
    work = replace(work, probe=None if scorer is None else scorer.probe)
    if context.tokens or lookup.matches.in_engine:  # what is in the engine is in the context
        lookup = replace(lookup, matches=_of_engine(lookup.matches, len(context.tokens)))
    prefill = PassagePrefill(chunks.kv, work, context, lookup, chunks.kv.plan(lookup), passages.prompt_layout)
    prefill.meet(arrivals, 1.0 - min(1.0, chunks.recompute_policy.budget))
    try:
        passages = chunks.find(lookup.kv_space, lookup.tokens, passages)
    except NoAnswer as late:
        log.warning("The cache does not answer: %s.", late)
    lookup = replace(lookup, matches=_of_engine(lookup.matches, prefill.at), passages=passages)
    plan = chunks.plan(lookup, chunks.kv.plan(lookup))
    context.truncate(min(plan.reused, prefill.at))
    result = prefill.result_with(chunks.run_unnoted(work, context, lookup, plan), arrivals)
    chunks.note_result(context, passages, result, scorer)
    came = {passages.prompt_layout.chunks[number - 1].start for number in arrivals.here}
    context.chunk_reuse = tuple(
        replace(chunk, streamed=chunk.source == "reused" and chunk.start in came) for chunk in context.chunk_reuse
    )
    return result


def keep_arrived(store: TieredStore, lookup: CacheLookup, passage: WantedPassage, variant: Variant, kv: Kv) -> bool:
    """Store a fetched passage in the chunk cache; False if it was not stored."""
    if lookup.guard is not None:
        lookup.guard.note()
    job = WriteNonprefixKv(lookup.kv_space, passage.tokens, kv, variant, lookup.guard, lookup.app_ref)
    return job.do(store) in ("kept", "known")


def _of_engine(matches: Matches, tokens: int) -> Matches:
    """The matches when the first `tokens` are in the engine."""
    return Matches(matches.tokens, tokens) if tokens else replace(matches, in_engine=0)


def _wait_for_arrivals(arrivals: RemoteChunkFetch, seconds: float, cancelled: Callable[[], bool]) -> bool:
    """Wait up to `seconds` for the passages left, while they are expected by then; whether all arrived."""
    deadline = time.monotonic() + seconds
    while arrivals.left() and not cancelled():
        expected, left = arrivals.expected(), deadline - time.monotonic()
        if expected is None or sum(expected.values()) >= left:
            return False
        arrivals.wait(min(left, _LOOK_SECONDS))
    return True


class PassagePrefill(ChunkedPrefill):
    """A prompt whose first passages are computed while the others arrive."""

    def __init__(
        self,
        kv: StoredKv,
        work: Prefill,
        context: Context,
        lookup: CacheLookup,
        plan: Plan,
        prompt_layout: PromptLayout,
    ) -> None:
        super().__init__(kv, work, context, lookup, plan)
        self._prompt_layout, self._rates = prompt_layout, kv.costs.rates

    def meet(self, arrivals: RemoteChunkFetch, spared: float) -> None:
        """Compute passages from the front until all others have arrived or are given up.

        `spared`: share of a passage's compute time that an arrival saves."""
        while (spans := self.next_passages(arrivals.expected())) and arrivals.left():
            stop, wait_seconds = spans[-1].stop, spared * self.seconds(spans[:1])
            if _wait_for_arrivals(arrivals, wait_seconds, self.work.cancelled):
                break
            if stop == self._prompt_layout.question:  # nothing arrives in time: the rest is computed without an origin
                break
            arrivals.skip(stop)
            self.compute(stop)
        arrivals.close()

    def next_passages(self, expected: Mapping[int, float] | None) -> list[Span]:
        """What to compute next: most of the passages before the meeting point, if transfer times are known. Else
        as many as were computed before, but at most half of what is left."""
        left = [
            (number, span) for number, span in enumerate(self._prompt_layout.chunks, 1) if span.stop > self.following
        ]
        spans = [span for _, span in left]
        if not self.work.alone():
            return spans[:1]
        if expected is None:
            return spans[: max(1, min(len(self.events), len(spans) // 2))]
        own = [self.seconds([span]) for span in spans]
        count = count_computed(own, [expected.get(number, 0.0) for number, _ in left])
        return spans[: len(spans) if count == len(spans) else max(1, int(_STEP_SHARE * count))]

    def seconds(self, spans: Sequence[Span]) -> float:
        """Seconds to compute passages."""
        return sum(map(self._rates.compute_seconds, spans))

    def compute(self, stop: int) -> None:
        """Load what the cache has, and compute up to the end of a passage."""
        start = self.following
        named = [
            (number, span)
            for number, span in enumerate(self._prompt_layout.chunks, start=1)
            if start < span.stop <= stop
        ]
        self.go_on(stop, named)

    def result_with(self, result: PrefillResult, arrivals: RemoteChunkFetch) -> PrefillResult:
        """The result with what was loaded, computed and fetched before."""
        layers, ended = len(self.lookup.kv_space.layout.layers), time.monotonic() - self.begun
        computed_until = max((event.stop for event in self.events), default=0.0)
        if arrivals.here:
            question = TimelineEvent("compute", len(self._prompt_layout.chunks) + 1, 0, layers, computed_until, ended)
            events = [*self.events, question, *arrivals.events(self.begun, layers)]
            result = replace(result, streamed=RemoteReport(events=events))
        if not self.events:
            return result
        rest = tuple(step for step in result.plan.steps if not isinstance(step, Load))
        whole = self.make_result(result.logits, (*self.computed_before(result.plan.reused), *rest))
        load_seconds = whole.load_seconds + result.load_seconds
        return replace(result, plan=whole.plan, load_seconds=load_seconds, lost=result.lost or whole.lost)
