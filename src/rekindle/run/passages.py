"""Prompts with passages: mended where KV of them is known from other prompts, kept for others, brought from an origin.

    compute   [head, passage 1][passage 2][chosen tokens of 3, 4, 5, and the question]
    link      [passage 5 ][passage 4 ][passage 3 ]

Passages that are not known here may come, the last one first, while the first ones are computed. When all others are
here the prompt is planned anew: what has come is mended like what was known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from rekindle.core.cells import Event
from rekindle.core.chunk import Outline
from rekindle.core.kv import Kv, Span
from rekindle.core.plan import Load, Plan
from rekindle.errors import KvLost
from rekindle.reuse.cost import Costs, Rates
from rekindle.reuse.fronts import meet_whole
from rekindle.reuse.lookup import Matches
from rekindle.reuse.mending import plan_mending
from rekindle.reuse.planner import Cut, make_plan
from rekindle.run.beginning import Beginning
from rekindle.run.chunks import Chunks, KeepLoose, Passages, Watched
from rekindle.run.context import Context
from rekindle.run.known import Known
from rekindle.run.mend import Mending
from rekindle.run.patience import NoAnswer, Patience
from rekindle.run.prefill import Filled, Prefill, TimedFeed
from rekindle.run.streaming import StreamReport
from rekindle.store.tiered import TieredStore

if TYPE_CHECKING:
    from rekindle.run.arrivals import Arrivals, WantedPassage
    from rekindle.run.streams import Sought

log = logging.getLogger("rekindle.cache")

_FAR = 0.75  # the share of the way to where both lanes are expected to meet that one step may go
_LOOK_SECONDS = 0.05  # how often a wait for what comes looks whether it is still worth it

CarryOut = Callable[[Prefill, Context, Known, Plan], Filled]  # a plan that mends nothing


@dataclass(frozen=True)
class FillTimes:
    """How long things may take: a look into the catalog, and a load that saves so many seconds."""

    look: Callable[[], float]
    load: Callable[[float], float]


@dataclass(frozen=True)
class PassageFill:
    """How a session fills such prompts. `left` is told of feeds that may still be busy."""

    store: TieredStore
    chunks: Chunks
    costs: Costs
    cut: Cut
    asking: Patience
    carry_out: CarryOut
    left: Callable[[TimedFeed], None]
    times: FillTimes

    def plan(self, known: Known) -> Plan:
        """What to do about a prompt."""
        exact = make_plan(known.matches, self.costs.rates, self.cut)
        if known.passages is None:
            return exact
        outline, picked = known.passages.outline, known.passages.picked
        return plan_mending(exact, outline, picked, self.chunks.mender, self.costs.rates, self.chunks.most_tokens)

    def fill(self, work: Prefill, context: Context, known: Known, plan: Plan, sought: Sought | None = None) -> Filled:
        """Carry a plan out; passages that come meanwhile change it. Raises `Cancelled`, and what the engine raises."""
        passages, arrivals = known.passages, None if sought is None else _arrivals(sought)
        assert passages is not None
        scoring = self.chunks.scoring(passages, len(known.tokens))
        work = replace(work, probe=None if scoring is None else scoring.probe)
        if arrivals is None:
            filled = self._fill(work, context, known, plan)
        else:
            if context.tokens or known.matches.in_engine:  # what is in the engine is what the context holds
                known = replace(known, matches=_of_engine(known.matches, len(context.tokens)))
            meeting = self._meet(work, context, known, passages.outline, arrivals)
            known = self._look_again(known, passages, meeting)
            plan = self.plan(known)
            context.truncate(min(plan.reused, meeting.at))
            filled = meeting.told_with(self._fill(work, context, known, plan), arrivals)
            passages = known.passages or passages
        reported = passages.report(filled.plan, filled.anew, context.mended)
        came = {passages.outline.chunks[number - 1].start for number in arrivals.here} if arrivals is not None else ()
        context.mended = tuple(replace(one, streamed=one.source == "mended" and one.start in came) for one in reported)
        context.watched = Watched(passages, filled.plan, scoring)
        return filled

    def keep_arrived(self, known: Known, passage: WantedPassage, kv: Kv) -> bool:
        """Put a passage that came into the chunk cache; False if it does not take it."""
        if known.guard is not None:
            known.guard.note()
        job = KeepLoose(known.shelf, passage.body, kv, passage.variant, known.guard, known.asker)
        return job.do(self.store) in ("kept", "known")

    def _fill(self, work: Prefill, context: Context, known: Known, plan: Plan) -> Filled:
        return (self.carry_out if plan.mend is None else self._mend)(work, context, known, plan)

    def _mend(self, work: Prefill, context: Context, known: Known, plan: Plan) -> Filled:
        passages = known.passages
        assert passages is not None
        saved = self.costs.rates.compute_seconds(Span(0, plan.tokens)) or 0.0
        mending = Mending(work, passages.outline, passages.mended(plan), self.chunks.mender, self.asking)
        try:
            filled = mending.load(self.store, known, context, plan, self.times.load(saved), self.left)
        except (KvLost, NoAnswer) as error:
            log.info("computing instead: %s", error)
            context.truncate(plan.reused if plan.in_engine else 0)
            instead = plan.without_mending(self.cut.spans(plan.reused, plan.tokens))
            return replace(self.carry_out(work, context, known, instead), lost=str(error))
        passages.note_use(self.store, self.costs, filled, saved, known.asker)
        if plan.loads and not plan.in_engine and known.matches.match is not None:
            context.near_tokens = known.near_tokens(plan)
            self.store.used(known.matches.match.until(plan.reused))
        return filled

    def _meet(self, work: Prefill, context: Context, known: Known, outline: Outline, arrivals: Arrivals) -> _Meeting:
        """Compute passages from the front until all others have come, or will not."""
        exact = make_plan(known.matches, self.costs.rates, self.cut)
        carry = lambda work, plan: self.carry_out(work, context, known, plan)  # noqa: E731
        meeting = _Meeting(work, context, known, exact, carry, outline, self.costs.rates)
        spared = 1.0 - min(1.0, self.chunks.mender.budget)
        while (spans := meeting.next_passages(arrivals.expected())) and arrivals.left():
            stop, patience = spans[-1].stop, spared * meeting.seconds(spans[:1])
            if _come_within(arrivals, patience, work.cancelled):
                break
            if stop == outline.question:  # nothing comes in time: the rest is computed as without an origin
                break
            arrivals.skip(stop)
            meeting.compute(stop)
        arrivals.close()
        return meeting

    def _look_again(self, known: Known, passages: Passages, meeting: _Meeting) -> Known:
        """What is known now, of a prompt whose beginning is in the engine."""
        try:
            find = partial(self.chunks.find, self.store, known.shelf, known.tokens, passages)
            passages = self.asking.ask(find, self.times.look())
        except NoAnswer as late:
            log.warning("The cache does not answer: %s.", late)
        return replace(known, matches=_of_engine(known.matches, meeting.at), passages=passages)


def _arrivals(sought: Sought) -> Arrivals:
    from rekindle.run.arrivals import Arrivals  # what checks signatures is not always installed

    assert isinstance(sought, Arrivals)
    return sought


def _of_engine(matches: Matches, tokens: int) -> Matches:
    """What is known, if so many tokens are in the engine."""
    return Matches(matches.tokens, tokens) if tokens else replace(matches, in_engine=0)


def _come_within(arrivals: Arrivals, seconds: float, cancelled: Callable[[], bool]) -> bool:
    """Wait so long for what is left, as long as it is expected to come by then; whether it did."""
    deadline = time.monotonic() + seconds
    while arrivals.left() and not cancelled():
        expected, left = arrivals.expected(), deadline - time.monotonic()
        if expected is None or sum(expected.values()) >= left:
            return False
        arrivals.wait(min(left, _LOOK_SECONDS))
    return True


class _Meeting(Beginning):
    """A prompt whose first passages are computed while the others come."""

    def __init__(
        self,
        work: Prefill,
        context: Context,
        known: Known,
        plan: Plan,
        carry: Callable[[Prefill, Plan], Filled],
        outline: Outline,
        rates: Rates,
    ) -> None:
        super().__init__(work, context, known, plan, carry)
        self._outline, self._rates = outline, rates

    def next_passages(self, expected: Mapping[int, float] | None) -> list[Span]:
        """What to compute next: most of what is computed before the others have come, if it is known how long each of
        them takes. While it is not, as many as were computed before, but no more than half of what is left."""
        left = [(number, span) for number, span in enumerate(self._outline.chunks, 1) if span.stop > self.following]
        spans = [span for _, span in left]
        if not self.work.alone():
            return spans[:1]
        if expected is None:
            return spans[: max(1, min(len(self.events), len(spans) // 2))]
        own = [self.seconds([span]) for span in spans]
        count = meet_whole(own, [expected.get(number, 0.0) for number, _ in left])
        return spans[: len(spans) if count == len(spans) else max(1, int(_FAR * count))]

    def seconds(self, spans: Sequence[Span]) -> float:
        """How long it takes to compute passages; nothing while nobody knows."""
        return sum(self._rates.compute_seconds(span) or 0.0 for span in spans)

    def compute(self, stop: int) -> None:
        """Load what is known here, and compute up to the end of a passage."""
        start = self.following
        named = [
            (number, span) for number, span in enumerate(self._outline.chunks, start=1) if start < span.stop <= stop
        ]
        self.go_on(stop, named)

    def told_with(self, filled: Filled, arrivals: Arrivals) -> Filled:
        """The same prompt, as it really became."""
        layers, ended = len(self.known.shelf.layout.layers), time.monotonic() - self.begun
        mended = max((event.stop for event in self.events), default=0.0)
        if arrivals.here:
            question = Event("compute", len(self._outline.chunks) + 1, 0, layers, mended, ended)
            events = [*self.events, question, *arrivals.events(self.begun, layers)]
            filled = replace(filled, streamed=StreamReport(events=events))
        if not self.events:
            return filled
        rest = tuple(step for step in filled.plan.steps if not isinstance(step, Load))
        told = self.told(filled.logits, (*self.computed_before(filled.plan.reused), *rest))
        load_seconds = told.load_seconds + filled.load_seconds
        return replace(filled, plan=told.plan, load_seconds=load_seconds, lost=filled.lost or told.lost)
