"""What is known of one prompt while it is answered, and what it was spared in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.core.keys import Shelf
from rekindle.core.plan import Plan
from rekindle.core.reply import Reuse
from rekindle.reuse.lookup import Matches
from rekindle.run.context import Context
from rekindle.run.flight import Flight
from rekindle.run.keep import Guard
from rekindle.run.prefill import Filled


@dataclass(frozen=True)
class Known:
    """What is known of a prompt, and the context it can go on from, which is its own until it is given back."""

    shelf: Shelf
    tokens: Sequence[int]
    matches: Matches
    parked: Context | None = None
    trouble: str | None = None
    off: bool = False  # nothing was looked for, and nothing shall be kept
    guard: Guard | None = None  # which decides whether it may be kept
    flight: Flight | None = None  # by which others know that it is being computed

    @property
    def stored_tokens(self) -> int:
        """How many tokens the store knows."""
        return self.matches.stored[-1].span.stop if self.matches.stored else 0


def spared(known: Known, plan: Plan, filled: Filled | None, miss: str | None) -> Reuse:
    """What a prompt is spared by a plan; once it is filled, what it was really spared."""
    tiers = Counter({load.tier: 0 for load in plan.loads})
    for load in plan.loads:
        tiers[load.tier] += len(load.span)
    return Reuse(
        level="off" if known.off else "exact",
        computed=len(known.tokens) - plan.reused,
        engine=tiers["engine"],
        memory=tiers["memory"],
        disk=tiers["disk"],
        load_seconds=0.0 if filled is None else filled.load_seconds,
        predicted_seconds=plan.predicted_seconds,
        cold_seconds=plan.cold_seconds,
        miss=miss,
    )
