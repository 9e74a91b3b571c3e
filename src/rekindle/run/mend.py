"""Mending: KV of chunks comes from other prompts, and the tokens that matter are computed anew.

scattered    KV streams in and is turned; a pass of the question through the first layers shows where it looks; then
             chosen tokens and the question are computed
leading      chunk by chunk: its first tokens are computed, the KV of the others is put behind them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rekindle.core.chunk import Outline
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.core.plan import Plan
from rekindle.engine.base import KvFeed, Logits, MovedFeed, Row, StayingFeed, Wanted
from rekindle.engine.watch import Gaze, Positions, Spread
from rekindle.errors import KvLost
from rekindle.reuse import select
from rekindle.reuse.mending import LOOK_LAYERS, Mender, Picked
from rekindle.reuse.select import Stale
from rekindle.run.choosing import ChooseByDeviation, ChooseByFocus
from rekindle.run.context import Context
from rekindle.run.known import Known
from rekindle.run.patience import Deadline, Patience
from rekindle.run.prefill import Filled, Prefill, TimedFeed
from rekindle.store.tiered import TieredStore
from rekindle.store.variants import KnownVariant

_GAZING_TOKENS = 128  # the last ones of a question tell where it looks


@dataclass(frozen=True)
class MendFeeds:
    """Brings what a mended prompt does not compute: what it begins with, if that is stored, and its chunks."""

    prefix: tuple[TimedFeed, ...]
    variants: tuple[TimedFeed, ...]

    @classmethod
    def open(
        cls,
        store: TieredStore,
        known: Known,
        plan: Plan,
        chunks: Sequence[Picked],
        patience_seconds: float,
    ) -> MendFeeds:
        """Feeds of what the plan loads, if that is stored, and of the chunks. Raises `KvLost` if something is gone."""
        opened: list[TimedFeed] = []
        deadline = Deadline(patience_seconds)
        try:
            match = known.matches.match
            if match is not None and plan.loads and not plan.in_engine:
                opened.append(TimedFeed.open(store, known.source, match.until(plan.reused), patience_seconds))
            for chunk in chunks:
                assert isinstance(chunk.known, KnownVariant)
                opened.append(TimedFeed(store.variants.load(known.shelf, chunk.known), patience_seconds))
                if deadline.passed:  # nobody waits for them any more
                    raise KvLost("KV from the cache was opened too late; it is computed instead.")
        except BaseException:
            for feed in opened:
                feed.close()
            raise
        count = len(opened) - len(chunks)
        return cls(tuple(opened[:count]), tuple(opened[count:]))

    @property
    def all(self) -> tuple[TimedFeed, ...]:
        """Every feed."""
        return (*self.prefix, *self.variants)

    def close(self) -> None:
        """Close them, each after the fill it is in the middle of."""
        for feed in self.all:
            feed.close()


@dataclass(frozen=True)
class _Done:
    logits: Logits
    anew: Positions
    cells: int


@dataclass(frozen=True)
class Mending:
    """One prompt whose plan mends. `chunks` are those that are mended, in order, each with its variant."""

    work: Prefill
    outline: Outline
    chunks: tuple[Picked, ...]
    mender: Mender
    patience: Patience

    def load(
        self,
        store: TieredStore,
        known: Known,
        context: Context,
        plan: Plan,
        patience_seconds: float,
        left: Callable[[TimedFeed], None],
    ) -> Filled:
        """The same with feeds of what is stored; those that may still be busy afterwards are told to `left`."""
        ask = partial(MendFeeds.open, store, known, plan, self.chunks, patience_seconds)
        feeds = self.patience.ask(ask, patience_seconds)
        try:
            return self.run(context, plan, feeds)
        finally:
            feeds.close()
            for feed in feeds.all:
                left(feed)

    def run(self, context: Context, plan: Plan, feeds: MendFeeds) -> Filled:
        """Carry out the plan; what it loads comes by the feeds, or is in the context already.

        Raises `KvLost` or `NoAnswer` if a feed fails or is late, and `Cancelled`. What the context held before is
        still there then, and may be followed by more.
        """
        leads = self.work.engine.capabilities.mends == "leading"
        done = self._lead(context, plan, feeds) if leads else self._scatter(context, plan, feeds)
        context.tokens = tuple(self.work.tokens)
        seconds = sum(feed.busy_seconds for feed in feeds.all)
        return Filled(context, done.logits, plan, seconds, anew=tuple(done.anew.tolist()), cells=done.cells)

    # -- any tokens --------------------------------------------------------------------------------------------------

    def _scatter(self, context: Context, plan: Plan, feeds: MendFeeds) -> _Done:
        fresh = np.concatenate([np.arange(step.span.start, step.span.stop) for step in plan.computes])
        stale, moved = self._stale(), self._moved(feeds)
        again = fresh[(fresh >= self.outline.question) | self._between(fresh)]
        if len(again) < len(fresh):  # there is more to compute than the question: once, before anything is mended
            row = replace(self._row(context, fresh, moved, "none"), probe=self.work.probe)
            return self._compute(context, again, self._look(row, stale, feeds.all))
        if "seen" in self.mender.wants:
            row = replace(self._row(context, fresh, moved, "none"), until=self._gazing_layers.stop)
            stale = self._look(row, stale, feeds.all)
            moved = tuple(StayingFeed(feed.span, feed.layers) for feed in moved)
        return self._compute(context, fresh, stale, moved, feeds.all)

    def _look(self, row: Row, stale: Stale, feeds: tuple[TimedFeed, ...]) -> Stale:
        """Compute what is new over the stale KV, and see where the question looks."""
        seen: list[np.ndarray] = []
        last = len(self.work.tokens)
        asking = Span(max(self.outline.question, last - _GAZING_TOKENS), last)
        gaze = Gaze(asking, seen.append, self._gazing_layers)
        self.work.step(replace(row, gaze=gaze), feeds)
        # The only layer of a model that has one owes nothing but keys and values: it tells nothing.
        return replace(stale, seen=seen[0][stale.positions] if seen else np.ones(len(stale), dtype=np.float32))

    @property
    def _gazing_layers(self) -> range:
        layers = len(self.work.engine.layout.layers)
        return range(math.floor(LOOK_LAYERS[0] * layers), math.ceil(LOOK_LAYERS[1] * layers))

    def _compute(
        self,
        context: Context,
        others: Positions,
        stale: Stale,
        feeds: tuple[KvFeed, ...] = (),
        timed: tuple[TimedFeed, ...] = (),
    ) -> _Done:
        """Compute `others` and the chosen stale tokens."""
        layers = len(self.work.engine.layout.layers)
        spread = Spread(tuple(chunk.span for chunk in self.chunks), self.mender.spread) if self.mender.spread else None
        if "deviation" in self.mender.wants:
            choosing = ChooseByDeviation(stale, self.mender, layers)
            row = replace(self._row(context, np.union1d(others, stale.positions), feeds), spread=spread)
            logits = self.work.step(replace(row, selector=choosing, probe=choosing.probe), timed)
            return _Done(logits, choosing.chosen, choosing.cells)
        anew = self._choose(stale)
        row = replace(self._row(context, np.union1d(others, anew), feeds), spread=spread)
        if self.mender.focus and len(self.chunks) > 2 and len(anew):
            question = Span(self.outline.question, len(self.work.tokens))
            focusing = ChooseByFocus(anew, [chunk.span for chunk in self.chunks], question)
            logits = self.work.step(replace(row, selector=focusing, probe=focusing.probe), timed)
            return _Done(logits, anew, focusing.cells)
        return _Done(self.work.step(row, timed), anew, len(anew) * layers)

    def _choose(self, stale: Stale) -> Positions:
        mender = self.mender
        if mender.choice == "nothing" or mender.budget == 0:  # then nobody asked for what the signals need
            return np.empty(0, dtype=np.int64)
        if mender.choice == "leading":
            return select.choose_leading(stale, mender.budget)
        if mender.choice == "random":
            return select.choose_random(stale, mender.budget, seed=len(self.work.tokens))
        if mender.choice == "heavy":
            return select.choose_heavy(stale, mender.budget)
        if mender.choice == "published":
            overheads = {number: mender.budget * (chunk.overhead or 0.0) for number, chunk in enumerate(self.chunks)}
            return select.choose_published(stale, overheads)
        return select.choose_top(stale, mender.signals, mender.budget)

    def _stale(self) -> Stale:
        spans = [chunk.span for chunk in self.chunks]
        scores = [chunk.known.variant.scores for chunk in self.chunks if chunk.known is not None]
        return Stale(
            positions=np.concatenate([np.arange(span.start, span.stop) for span in spans]),
            chunk=np.concatenate([np.full(len(span), number) for number, span in enumerate(spans)]),
            place=np.concatenate([np.arange(len(span)) for span in spans]),
            outside=np.concatenate([some.outside for some in scores]).astype(np.float32),
            received=np.concatenate([some.received for some in scores]).astype(np.float32),
        )

    def _between(self, positions: Positions) -> np.ndarray:
        """Which positions stand between chunks: their numbers, which are cheap to compute twice."""
        inside = np.zeros(len(positions), dtype=bool)
        for span in (Span(0, self.outline.head), *self.outline.chunks):
            inside |= (positions >= span.start) & (positions < span.stop)
        return ~inside & (positions < self.outline.question)

    def _moved(self, feeds: MendFeeds) -> tuple[KvFeed, ...]:
        """The feeds, those of chunks moved to where they stand now."""
        shifted = [
            MovedFeed(feed, chunk.span.start, chunk.span.start - _variant_start(chunk))
            for feed, chunk in zip(feeds.variants, self.chunks, strict=True)
        ]
        return (*feeds.prefix, *shifted)

    def _row(self, context: Context, positions: Positions, feeds: tuple[KvFeed, ...], wanted: Wanted = "last") -> Row:
        tokens = [self.work.tokens[position] for position in positions.tolist()]
        return Row(context.sequence, tokens, positions, wanted, feeds)

    # -- leading tokens ----------------------------------------------------------------------------------------------

    def _lead(self, context: Context, plan: Plan, feeds: MendFeeds) -> _Done:
        stale = self._stale()
        anew = select.choose_leading(stale, self.mender.budget)
        work, place = self.work, plan.reused
        prefix = feeds.prefix
        for number, (feed, chunk) in enumerate(zip(feeds.variants, self.chunks, strict=True)):
            led = chunk.span.start + int(((stale.chunk == number) & np.isin(stale.positions, anew)).sum())
            if led == place and prefix:  # no token leads to it: what comes first is put there as it is
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
        return _Done(work.step(row, prefix), anew, len(anew) * len(work.engine.layout.layers))

    def _taken(self, feed: TimedFeed, start: int, count: int, skip: int) -> Kv:
        """The KV that a feed brings, computed from `start` on, behind its first `skip` tokens."""
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

        self.patience.ask(bring, feed.patience_seconds, self.work.cancelled)
        behind = (LayerKv(layer.keys[:, skip:], layer.values[:, skip:]) for layer in layers)
        return Kv(Span(start + skip, start + count), layout, tuple(behind))


def _variant_start(chunk: Picked) -> int:
    assert chunk.known is not None
    return chunk.known.variant.span.start
