"""Running a plan: KV is loaded layer by layer while the layers before are computed; the rest is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rekindle.cache.context import Context
from rekindle.cache.cost import Costs
from rekindle.core.cells import RemoteReport
from rekindle.core.kv import Span
from rekindle.core.plan import Compute, Plan
from rekindle.engine.base import Engine, Logits, Row, Wanted
from rekindle.engine.hooks import Probe
from rekindle.errors import Cancelled, KvLost
from rekindle.store.feed import StoredFeed

IsCancelled = Callable[[], bool]


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

    def run(self, context: Context, plan: Plan, feed: StoredFeed | None = None) -> PrefillResult:
        """Run a plan whose loads come from `feed`, or are in the context already.

        Raises `KvLost` if the feed fails or is late, and `Cancelled`; the context then holds what it held before.
        """
        seconds, feeds = 0.0, () if feed is None else (feed,)
        for step in plan.computes:
            if self.reached is not None and step is not plan.computes[0]:
                self.reached(step.span.start)
            started = time.perf_counter()
            logits = self._compute(context, step, feeds if step is plan.computes[0] else ())
            seconds += time.perf_counter() - started
        if feed is None:  # all steps together: on a GPU only the last one waits for what it computes
            self.costs.computed(Span(plan.computes[0].span.start, plan.tokens), seconds)
        return PrefillResult(context, logits, plan, 0.0 if feed is None else feed.busy_seconds)

    def _compute(self, context: Context, step: Compute, feeds: tuple[StoredFeed, ...] = ()) -> Logits:
        span = step.span
        wanted: Wanted = "last" if span.stop == len(self.tokens) else "none"
        tokens = self.tokens[span.start : span.stop]
        row = Row(context.sequence, tokens, range(span.start, span.stop), wanted, feeds, probe=self.probe)
        logits = self.step(row, feeds)
        context.tokens = tuple(self.tokens[: span.stop])
        return logits

    def step(self, row: Row, feeds: tuple[StoredFeed, ...] = ()) -> Logits:
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
