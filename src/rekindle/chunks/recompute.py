"""Selective recompute: KV of chunks comes from other prompts, and the tokens that matter are recomputed.

scattered    KV is loaded and its keys rotated; a pass of the question through the first layers shows what it attends
             to; then chosen tokens and the question are computed
leading      chunk by chunk: its first tokens are computed, the KV of the others is appended
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rekindle.cache.context import Context
from rekindle.cache.deadline import Deadline, DeadlineCaller
from rekindle.cache.lookup import CacheLookup
from rekindle.cache.prefill import Prefill, PrefillResult
from rekindle.chunks.match import QUESTION_TOKENS
from rekindle.chunks.select import RecomputePolicy, StaleTokens
from rekindle.core.chunk import MIN_CHUNK_TOKENS, ChunkMatch, PromptLayout
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.core.plan import Plan
from rekindle.engine.base import KvFeed, Logits, MovedFeed, Row, StayingFeed, Wanted
from rekindle.engine.hooks import AttentionMap, KvDrift, Positions, look_layers
from rekindle.errors import KvLost
from rekindle.store.feed import StoredFeed
from rekindle.store.tiered import TieredStore
from rekindle.store.variants import StoredVariant

_LONG_HEAD_TOKENS = 128  # a shorter one is cheap to compute twice


@dataclass(frozen=True)
class ChunkFeeds:
    """Feeds of KV that is not computed: the stored prefix, if any, and the chunks."""

    prefix: tuple[StoredFeed, ...]
    variants: tuple[StoredFeed, ...]

    @classmethod
    def open(
        cls,
        store: TieredStore,
        lookup: CacheLookup,
        plan: Plan,
        chunks: Sequence[ChunkMatch],
        timeout_seconds: float,
    ) -> ChunkFeeds:
        """Open the feeds of a plan. Raises `KvLost` if something is gone."""
        opened: list[StoredFeed] = []
        deadline = Deadline(timeout_seconds)
        try:
            match = lookup.matches.match
            if match is not None and plan.loads and not plan.in_engine:
                opened.append(store.load(lookup.source, match.until(plan.reused), timeout_seconds))
            for chunk in chunks:
                assert isinstance(chunk.known, StoredVariant)
                opened.append(store.variants.load(lookup.kv_space, chunk.known, timeout_seconds))
                if deadline.passed:  # too late
                    raise KvLost("KV from the cache was opened too late; it is computed instead.")
        except BaseException:
            for feed in opened:
                feed.close()
            raise
        count = len(opened) - len(chunks)
        return cls(tuple(opened[:count]), tuple(opened[count:]))

    @property
    def all(self) -> tuple[StoredFeed, ...]:
        return (*self.prefix, *self.variants)

    def close(self) -> None:
        """Close them, each after its current fill."""
        for feed in self.all:
            feed.close()


@dataclass(frozen=True)
class Recomputed:
    """A computed prompt: the recomputed tokens of chunks, and the number of recomputed cells."""

    logits: Logits
    recomputed_positions: Positions
    cells: int


@dataclass(frozen=True)
class SelectiveRecompute:
    """One prompt with reused chunks. `chunks`: those reused, in order, each with its variant."""

    work: Prefill
    prompt_layout: PromptLayout
    chunks: tuple[ChunkMatch, ...]
    recompute_policy: RecomputePolicy
    deadlines: DeadlineCaller

    def run(self, context: Context, plan: Plan, feeds: ChunkFeeds) -> PrefillResult:
        """Run the plan; what it loads comes from the feeds, or is in the context already.

        Raises `KvLost` or `NoAnswer` if a feed fails or is late, and `Cancelled`. The context then still has what it
        held before, and maybe more behind it.
        """
        leads = self.work.engine.capabilities.recompute == "leading"
        done = self._lead(context, plan, feeds) if leads else self._scatter(context, plan, feeds)
        context.tokens = tuple(self.work.tokens)
        seconds = sum(feed.busy_seconds for feed in feeds.all)
        return PrefillResult(
            context,
            done.logits,
            plan,
            seconds,
            recomputed_positions=tuple(done.recomputed_positions.tolist()),
            cells=done.cells,
        )

    # -- any tokens --------------------------------------------------------------------------------------------------

    def _scatter(self, context: Context, plan: Plan, feeds: ChunkFeeds) -> Recomputed:
        gaps = [step.span for step in plan.computes]
        fresh = np.concatenate([np.arange(gap.start, gap.stop) for gap in gaps])
        stale, moved = self._stale(), self._moved(feeds)
        if has_new_text(gaps, self.prompt_layout):  # it is computed once, before anything is reused
            again = fresh[(fresh >= self.prompt_layout.question) | self._between(fresh)]
            row = replace(self._row(context, fresh, moved, "none"), probe=self.work.probe)
            return self._compute(context, again, self._look(row, stale, feeds.all))
        if self.recompute_policy.looks and self.recompute_policy.expected_recomputed(self.chunks):
            row = replace(self._row(context, fresh, moved, "none"), until=self._look_layers.stop)
            stale = self._look(row, stale, feeds.all)
            moved = tuple(StayingFeed(feed.span, feed.layers) for feed in moved)
        return self._compute(context, fresh, stale, moved, feeds.all)

    def _look(self, row: Row, stale: StaleTokens, feeds: tuple[StoredFeed, ...]) -> StaleTokens:
        """Compute the new tokens over the stale KV, and collect what the question attends to."""
        seen: list[np.ndarray] = []
        last = len(self.work.tokens)
        asking = Span(max(self.prompt_layout.question, last - QUESTION_TOKENS), last)
        gaze = AttentionMap(asking, seen.append, self._look_layers)
        self.work.step(replace(row, gaze=gaze), feeds)
        # A model with a single layer computes only keys and values in it: no attention is seen.
        return replace(stale, seen=seen[0][stale.positions] if seen else np.ones(len(stale), dtype=np.float32))

    @property
    def _look_layers(self) -> range:
        return look_layers(len(self.work.engine.layout.layers))

    def _compute(
        self,
        context: Context,
        others: Positions,
        stale: StaleTokens,
        feeds: tuple[KvFeed, ...] = (),
        timed: tuple[StoredFeed, ...] = (),
    ) -> Recomputed:
        """Compute `others` and the chosen stale tokens."""
        recomputed = self.recompute_policy.choose(stale, self.chunks)
        spread = (
            KvDrift(tuple(chunk.span for chunk in self.chunks), self.recompute_policy.spread)
            if self.recompute_policy.spread
            else None
        )
        row = replace(self._row(context, np.union1d(others, recomputed), feeds), spread=spread)
        return Recomputed(self.work.step(row, timed), recomputed, len(recomputed) * len(self.work.engine.layout.layers))

    def _stale(self) -> StaleTokens:
        spans = [chunk.span for chunk in self.chunks]
        scores = [chunk.known.variant.scores for chunk in self.chunks if chunk.known is not None]
        drifts = [chunk.change * some.outside for chunk, some in zip(self.chunks, scores, strict=True)]
        return StaleTokens(
            positions=np.concatenate([np.arange(span.start, span.stop) for span in spans]),
            chunk=np.concatenate([np.full(len(span), number) for number, span in enumerate(spans)]),
            place=np.concatenate([np.arange(len(span)) for span in spans]),
            outside=np.concatenate(drifts).astype(np.float32),
            received=np.concatenate([some.received for some in scores]).astype(np.float32),
        )

    def _between(self, positions: Positions) -> np.ndarray:
        """Mask of positions between chunks: the numbers of passages, which are cheap to compute twice."""
        inside = np.zeros(len(positions), dtype=bool)
        for span in (Span(0, self.prompt_layout.head), *self.prompt_layout.chunks):
            inside |= (positions >= span.start) & (positions < span.stop)
        return ~inside & (positions < self.prompt_layout.question)

    def _moved(self, feeds: ChunkFeeds) -> tuple[KvFeed, ...]:
        """The feeds, those of chunks moved to their positions in this prompt."""
        shifted = [
            MovedFeed(feed, chunk.span.start, chunk.span.start - _variant_start(chunk))
            for feed, chunk in zip(feeds.variants, self.chunks, strict=True)
        ]
        return (*feeds.prefix, *shifted)

    def _row(self, context: Context, positions: Positions, feeds: tuple[KvFeed, ...], wanted: Wanted = "last") -> Row:
        tokens = [self.work.tokens[position] for position in positions.tolist()]
        return Row(context.sequence, tokens, positions, wanted, feeds)

    # -- leading tokens ----------------------------------------------------------------------------------------------

    def _lead(self, context: Context, plan: Plan, feeds: ChunkFeeds) -> Recomputed:
        stale = self._stale()
        recomputed = self.recompute_policy.choose(stale, self.chunks)
        work, place = self.work, plan.reused
        prefix = feeds.prefix
        for number, (feed, chunk) in enumerate(zip(feeds.variants, self.chunks, strict=True)):
            led = chunk.span.start + int(((stale.chunk == number) & np.isin(stale.positions, recomputed)).sum())
            if led == place and prefix:  # no leading token to compute: append the prefix as it is
                context.sequence.append(self._taken(prefix[0], 0, place, 0))
                prefix = ()
            elif led > place:
                work.step(Row(context.sequence, work.tokens[place:led], range(place, led), "none", prefix), prefix)
                prefix = ()
            if led < chunk.span.stop:
                start, skip = _variant_start(chunk), led - chunk.span.start
                context.sequence.append(self._taken(feed, start, len(chunk.span), skip))
            place = chunk.span.stop
        row = Row(context.sequence, work.tokens[place:], range(place, len(work.tokens)), "last", prefix)
        return Recomputed(work.step(row, prefix), recomputed, len(recomputed) * len(work.engine.layout.layers))

    def _taken(self, feed: StoredFeed, start: int, count: int, skip: int) -> Kv:
        """The KV of a feed that begins at `start`, without its first `skip` tokens."""
        layout = self.work.engine.layout
        layers = [
            LayerKv(
                np.empty((shape.kv_heads, count, shape.key_dim), dtype=layout.numpy_dtype),
                np.empty((shape.kv_heads, count, shape.value_dim), dtype=layout.numpy_dtype),
            )
            for shape in layout.layers
        ]

        def bring() -> None:
            for layer, out in enumerate(layers):
                feed.fill(layer, out)

        self.deadlines.ask(bring, feed.timeout_seconds, self.work.cancelled)
        behind = (LayerKv(layer.keys[:, skip:], layer.values[:, skip:]) for layer in layers)
        return Kv(Span(start + skip, start + count), layout, tuple(behind))


def has_new_text(gaps: Sequence[Span], prompt_layout: PromptLayout) -> bool:
    """Whether a passage or a long head is computed, not only the question and what lies between passages."""
    texts = [(Span(0, prompt_layout.head), _LONG_HEAD_TOKENS), *((c, MIN_CHUNK_TOKENS) for c in prompt_layout.chunks)]
    return any(min(gap.stop, text.stop) - max(gap.start, text.start) >= most for text, most in texts for gap in gaps)


def _variant_start(chunk: ChunkMatch) -> int:
    assert chunk.known is not None
    return chunk.known.variant.span.start
