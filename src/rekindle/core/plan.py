"""The plan of a prefill: where the KV of every token comes from. Frozen, and checked when it is made.

tokens   0                    loaded                 computed   n
         [-------- Load --------][-------- Compute ----------]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rekindle.core.kv import Span

Tier = Literal["engine", "memory", "disk"]  # from the nearest to the farthest


@dataclass(frozen=True, slots=True)
class Load:
    """KV that is known already: still in the engine's own buffers, or brought from memory or disk."""

    span: Span
    tier: Tier


@dataclass(frozen=True, slots=True)
class Compute:
    """Tokens to prefill, in one step of the engine or as many as it needs."""

    span: Span


Step = Load | Compute


@dataclass(frozen=True)
class Plan:
    """Steps that tile `[0, tokens)` in order; the last token is always computed.

    `predicted_seconds` is what the steps are expected to take, `cold_seconds` what computing everything would: None
    while nothing was measured. A plan that is expected to be slower than computing everything cannot be made.
    """

    tokens: int
    steps: tuple[Step, ...]
    predicted_seconds: float | None = None
    cold_seconds: float | None = None

    def __post_init__(self) -> None:
        stop = 0
        for step in self.steps:
            if step.span.start != stop or not len(step.span):
                raise ValueError(f"a plan has a gap, an overlap or an empty step at {stop}: {self.steps}")
            stop = step.span.stop
        if stop != self.tokens or not isinstance(self.steps[-1], Compute):
            raise ValueError(f"a plan must end by computing token {self.tokens - 1}: {self.steps}")
        if self.predicted_seconds is not None and self.cold_seconds is not None:
            worse = self.predicted_seconds > self.cold_seconds
            if worse and any(isinstance(step, Load) for step in self.steps):
                raise ValueError("a plan is slower than computing everything")

    @classmethod
    def computing(cls, spans: Sequence[Span], seconds: float | None = None) -> Plan:
        """The plan that reuses nothing."""
        return cls(spans[-1].stop, tuple(map(Compute, spans)), seconds, seconds)

    @property
    def loads(self) -> tuple[Load, ...]:
        """The steps that reuse KV."""
        return tuple(step for step in self.steps if isinstance(step, Load))

    @property
    def computes(self) -> tuple[Compute, ...]:
        """The steps that compute."""
        return tuple(step for step in self.steps if isinstance(step, Compute))

    @property
    def reused(self) -> int:
        """How many tokens are reused, all at the start."""
        return self.computes[0].span.start
