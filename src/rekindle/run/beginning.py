"""The beginning of a prompt, filled piece by piece while an origin is asked for the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rekindle.core.cells import Event
from rekindle.core.kv import Span
from rekindle.core.plan import Compute, Load, Plan, Step
from rekindle.engine.base import Logits
from rekindle.run.context import Context
from rekindle.run.known import Known
from rekindle.run.prefill import Filled, Prefill

CarryOut = Callable[[Prefill, Plan], Filled]  # as if there were no origin


class Beginning:
    """One prompt. `plan` is what would be done without an origin, and mends nothing; `carry` carries such plans out."""

    def __init__(self, work: Prefill, context: Context, known: Known, plan: Plan, carry: CarryOut) -> None:
        self.work, self.context, self.known, self.plan = work, context, known, plan
        self._carry = carry
        self.begun = time.monotonic()
        self.events: list[Event] = []
        self._first: Filled | None = None  # the piece that brought what is known here

    @property
    def at(self) -> int:
        """So many tokens are here."""
        return len(self.context.tokens)

    @property
    def following(self) -> int:
        """Where computing goes on: behind all that is here or known here."""
        return max(self.at, self.plan.reused)

    @property
    def loads(self) -> tuple[Load, ...]:
        """What was really loaded, or stood in the engine."""
        plan = self.plan if self._first is None else self._first.plan
        return plan.loads if self._first is not None or plan.in_engine else ()

    @property
    def loaded(self) -> int:
        """So many tokens."""
        return self.loads[-1].span.stop if self.loads else 0

    def go_on(self, stop: int, parts: Sequence[tuple[int, Span]]) -> None:
        """Load what is known here, and compute up to `stop`. `parts` are what the timeline calls that."""
        at, start, begun = self.at, self.following, time.monotonic()
        loads = (Load(Span(0, at), "engine"),) if at else self.plan.loads
        plan = Plan(stop, (*loads, Compute(Span(start, stop))))
        filled = self._carry(replace(self.work, tokens=self.known.tokens[:stop]), plan)
        self._first = self._first or (filled if not self.plan.in_engine else replace(filled, plan=self.plan))
        layers, ended = len(self.known.shelf.layout.layers), time.monotonic()
        token_seconds = (ended - begun) / (stop - start)
        for name, span in parts:
            own = max(start, span.start) - start, min(stop, span.stop) - start
            first, last = (begun - self.begun + token_seconds * place for place in own)
            self.events.append(Event("compute", name, 0, layers, first, last))

    def end(self) -> Filled:
        """Compute what is left."""
        if self._first is None:
            return self._carry(self.work, self.plan)
        left = [step.span for step in self.plan.computes if step.span.stop > self.at]
        rest = tuple(Compute(Span(max(span.start, self.at), span.stop)) for span in left)
        filled = self._carry(self.work, Plan(self.plan.tokens, (Load(Span(0, self.at), "engine"), *rest)))
        return self.told(filled.logits, (*self.computed_before(rest[0].span.start), *rest))

    def computed_before(self, place: int) -> tuple[Compute, ...]:
        """What was computed here, behind what was loaded and before a place."""
        return (Compute(Span(self.loaded, place)),) if place > self.loaded else ()

    def told(self, logits: Logits, steps: tuple[Step, ...]) -> Filled:
        """The prompt is whole; so it became, behind what was loaded."""
        plan = Plan(self.plan.tokens, (*self.loads, *steps), None, self.plan.cold_seconds)
        if self._first is None:
            return Filled(self.context, logits, plan)
        return Filled(self.context, logits, plan, self._first.load_seconds, self._first.lost)
