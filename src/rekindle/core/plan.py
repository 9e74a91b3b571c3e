"""The plan of a prefill: where the KV of every token comes from. Frozen, and checked when it is made.

tokens   0      loaded           computed   mended      computed     n
         [------ Load ------][-- Compute --][-- Mend --][-- Compute --]
         [ Load ][ Compute ][------ Stream ------][------ Compute ----]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rekindle.core.cells import Cells
from rekindle.core.kv import Span

Tier = Literal["engine", "memory", "disk", "coded"]  # from the nearest to the farthest; coded: decoded on the way


@dataclass(frozen=True, slots=True)
class Load:
    """KV that is known already: still in the engine's own buffers, or brought from memory or disk, maybe decoded."""

    span: Span
    tier: Tier


@dataclass(frozen=True, slots=True)
class Compute:
    """Tokens to prefill, in one step of the engine or as many as it needs."""

    span: Span


@dataclass(frozen=True, slots=True)
class Mend:
    """Chunks whose KV was computed in other prompts: it is moved to where they stand, and some tokens computed anew.

    spans      where the chunks stand
    variants   the number of the variant that each comes from
    mender     how the tokens to compute anew are chosen
    budget     how many of them: a share of the chunks' tokens, or what the mender makes of it
    """

    spans: tuple[Span, ...]
    variants: tuple[int, ...]
    mender: str
    budget: float


@dataclass(frozen=True, slots=True)
class Stream:
    """Chunks of a prompt that an origin has: some cells (chunk, layer) come from there, the others are computed.

    computed   how many of the model's layers are computed here, from the lowest on, for each chunk
    level      the quality of the rest
    """

    span: Span
    layers: int
    computed: tuple[int, ...]
    level: str

    @property
    def brings(self) -> bool:
        """Whether anything comes."""
        return any(own < self.layers for own in self.computed)

    @property
    def tokens(self) -> int:
        """How many tokens' worth of KV comes from the origin: of a token in some layers, its share of them."""
        chunks = Cells(len(self.span), self.layers).spans
        cells = sum(len(span) * (self.layers - own) for span, own in zip(chunks, self.computed, strict=True))
        return cells // self.layers


Step = Load | Compute | Mend | Stream


@dataclass(frozen=True)
class Plan:
    """Steps that tile `[0, tokens)`; what is loaded stands first, and the last token is always computed.

    `predicted_seconds` is what the steps are expected to take, `cold_seconds` what computing everything would: None
    while nothing was measured. A plan that is expected to be slower than computing everything cannot be made.
    """

    tokens: int
    steps: tuple[Step, ...]
    predicted_seconds: float | None = None
    cold_seconds: float | None = None

    def __post_init__(self) -> None:
        stop = 0
        for span in sorted((span for step in self.steps for span in _spans(step)), key=lambda span: span.start):
            if span.start != stop or not len(span):
                raise ValueError(f"a plan has a gap, an overlap or an empty step at {stop}: {self.steps}")
            stop = span.stop
        if stop != self.tokens or not isinstance(self.steps[-1], Compute) or self.steps[-1].span.stop != stop:
            raise ValueError(f"a plan must end by computing token {self.tokens - 1}: {self.steps}")
        if self.loads != self.steps[: len(self.loads)]:
            raise ValueError(f"a plan loads first: {self.steps}")
        if sum(isinstance(step, Mend | Stream) for step in self.steps) > 1:
            raise ValueError(f"a plan mends once, or streams once: {self.steps}")
        if self.predicted_seconds is not None and self.cold_seconds is not None:
            worse = self.predicted_seconds > self.cold_seconds
            if worse and any(not isinstance(step, Compute) for step in self.steps):
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
    def in_engine(self) -> bool:
        """Whether what it reuses as it is stands in the engine already."""
        return bool(self.loads) and self.loads[0].tier == "engine"

    def without_mending(self, spans: Sequence[Span]) -> Plan:
        """The same loads, and everything else computed, in these spans."""
        return Plan(self.tokens, (*self.loads, *map(Compute, spans)), None, self.cold_seconds)

    @property
    def mend(self) -> Mend | None:
        """The step that mends, if there is one."""
        return next((step for step in self.steps if isinstance(step, Mend)), None)

    @property
    def stream(self) -> Stream | None:
        """The step that streams, if there is one."""
        return next((step for step in self.steps if isinstance(step, Stream)), None)

    @property
    def reused(self) -> int:
        """How many tokens are reused as they are, all at the start."""
        return self.loads[-1].span.stop if self.loads else 0


def _spans(step: Step) -> tuple[Span, ...]:
    return step.spans if isinstance(step, Mend) else (step.span,)
