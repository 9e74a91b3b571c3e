"""Running a plan: KV is loaded layer by layer while the layers before are computed; the rest is computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

from rekindle.cache.context import Context
from rekindle.cache.cost import Costs
from rekindle.cache.deadline import Deadline
from rekindle.core.cells import RemoteReport
from rekindle.core.keys import KvSpace
from rekindle.core.kv import CodedPiece, Held, LayerKv, Span
from rekindle.core.plan import Compute, Plan
from rekindle.engine.base import Engine, Logits, Row, Wanted
from rekindle.engine.hooks import Probe
from rekindle.errors import Cancelled, KvLost
from rekindle.store.feed import StoredFeed
from rekindle.store.prefix_index import Match
from rekindle.store.tiered import TieredStore

IsCancelled = Callable[[], bool]


class TimedFeed:
    """A feed with a deadline, which knows how long it took."""

    def __init__(self, feed: StoredFeed, timeout_seconds: float) -> None:
        """The clock starts with the first fill: waiting for the engine does not count."""
        self._feed = feed
        self.span, self.layers = feed.span, feed.layers
        self.timeout_seconds = timeout_seconds
        self._deadline: Deadline | None = None
        self._lock = threading.Lock()
        self._since = 0.0  # when the first of the threads that fill now began
        self._threads = 0
        self._left = len(feed.layers)
        self.busy_seconds = 0.0  # while at least one thread was filling

    @classmethod
    def open(cls, store: TieredStore, kv_space: KvSpace, match: Match, timeout_seconds: float) -> TimedFeed:
        """A feed of what the store found. Raises `KvLost` if it is gone."""
        deadline = Deadline(timeout_seconds)
        feed = cls(store.load(kv_space, match), timeout_seconds)
        if deadline.passed:  # the caller has given up
            feed.close()
        return feed

    @property
    def late(self) -> bool:
        """Whether its deadline passed before it had loaded everything."""
        return self._left > 0 and self._deadline is not None and self._deadline.passed

    @property
    def filling(self) -> bool:
        """Whether a thread fills a layer now."""
        return self._threads > 0

    def fill(self, layer: int, out: LayerKv) -> None:
        """See `KvFeed`. Raises `KvLost`, whatever went wrong."""
        with self._timed():
            self._feed.fill(layer, out)

    @property
    def coded(self) -> bool:
        """See `CodedFeed`."""
        return self._feed.coded

    def fill_coded(self, layer: int, take: Callable[[CodedPiece], None]) -> None:
        """See `CodedFeed`. Raises `KvLost`, whatever went wrong."""
        with self._timed():
            self._feed.fill_coded(layer, take)

    def damaged(self, piece: CodedPiece, reason: str) -> KvLost:
        """See `CodedFeed`."""
        return self._feed.damaged(piece, reason)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count a layer, and the time it takes."""
        with self._lock:
            self._deadline = self._deadline or Deadline(self.timeout_seconds)
            self._since = self._since if self._threads else time.perf_counter()
            self._threads += 1
        try:
            yield
        except KvLost:
            raise
        except Exception as error:  # any failure: it is computed
            raise KvLost(f"KV from the cache could not be read ({error}); it is computed instead.") from error
        else:
            with self._lock:
                self._left -= 1
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self.busy_seconds += time.perf_counter() - self._since

    def held(self) -> Sequence[Held] | None:
        """See `HeldFeed`: what is in memory is never late."""
        return self._feed.held()

    def close(self) -> None:
        """Close its files; those that are being read, afterwards."""
        self._feed.close()


@dataclass(frozen=True)
class PrefillResult:
    """A context that holds a whole prompt, and the logits `[1, vocabulary]` after its last token.

    `plan` is what was really done; `lost` says why less was reused than planned; `recomputed_positions` are
    those tokens of reused passages that were recomputed.
    """

    context: Context
    logits: Logits
    plan: Plan
    load_seconds: float = 0.0
    lost: str | None = None
    recomputed_positions: tuple[int, ...] = ()
    cells: int = 0  # number of token-layers of reused passages that were computed
    streamed: RemoteReport | None = None  # what was fetched from an origin, if anything


@dataclass(frozen=True)
class Prefill:
    """Computes the tokens of a prompt into a context."""

    engine: Engine
    costs: Costs
    tokens: Sequence[int]
    cancelled: IsCancelled
    replay: bool = True  # see `Row`
    probe: Probe | None = None  # watches what is computed
    reached: Callable[[int], None] | None = None  # called with the tokens present, after each step but the last
    alone: IsCancelled = lambda: True  # whether no other request waits for its steps to end

    def run(self, context: Context, plan: Plan, feed: TimedFeed | None = None) -> PrefillResult:
        """Run a plan whose loads come from `feed`, or are in the context already.

        Raises `KvLost` if the feed fails or is late, and `Cancelled`; the context then holds what it held before.
        """
        started = time.perf_counter()
        first = plan.computes[0]
        logits = self._compute(context, first, () if feed is None else (feed,))
        for before, step in pairwise(plan.computes):
            if self.reached is not None:
                self.reached(before.span.stop)
            logits = self._compute(context, step)
        if feed is None:  # all steps together: on a GPU only the last one waits for what it computes
            span = Span(first.span.start, plan.tokens)
            self.costs.computed(span, time.perf_counter() - started)
        return PrefillResult(context, logits, plan, 0.0 if feed is None else feed.busy_seconds)

    def _compute(self, context: Context, step: Compute, feeds: tuple[TimedFeed, ...] = ()) -> Logits:
        span = step.span
        wanted: Wanted = "last" if span.stop == len(self.tokens) else "none"
        tokens = self.tokens[span.start : span.stop]
        row = Row(context.sequence, tokens, range(span.start, span.stop), wanted, feeds, probe=self.probe)
        logits = self.step(row, feeds)
        context.tokens = tuple(self.tokens[: span.stop])
        return logits

    def step(self, row: Row, feeds: tuple[TimedFeed, ...] = ()) -> Logits:
        """One step of the engine, as part of a prompt. Raises `KvLost` if a feed fails or is late, and `Cancelled`."""
        row = replace(row, replay=self.replay, prefill=True)
        try:
            (logits,) = self.engine.step([row], lambda: self.cancelled() or any(feed.late for feed in feeds))
        except Cancelled:
            if self.cancelled():
                raise
            limit = max(feed.timeout_seconds for feed in feeds)
            raise KvLost(f"Loading KV from the cache took longer than {limit:.2f} s; it is computed instead.") from None
        return logits
