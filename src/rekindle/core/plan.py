"""The plan of a prefill: where the KV of every token comes from. Immutable, and checked when it is made.

tokens   0      loaded           computed   reused      computed     n
         [------ Load ------][-- Compute --][- Reuse --][-- Compute --]
         [ Load ][ Compute ][------ Stream ------][------ Compute ----]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rekindle.core.cells import CellGrid
from rekindle.core.kv import Span
from rekindle.core.size import count_of, human_seconds

RAW = "raw"  # the level of KV as it was computed
MARGIN = 1.1  # times computing: a plan that is expected to take longer is refused
SharedTierName = Literal["redis", "s3"]  # several servers use it
SHARED_TIERS: tuple[SharedTierName, ...] = get_args(SharedTierName)
Tier = Literal["engine", "memory", "disk", "coded", SharedTierName]  # nearest first; coded: decoded while loading


@dataclass(frozen=True, slots=True)
class Load:
    """Stored KV: still in the engine's buffers, or loaded from a tier."""

    span: Span
    tier: Tier


@dataclass(frozen=True, slots=True)
class Compute:
    """Tokens to prefill."""

    span: Span


@dataclass(frozen=True, slots=True)
class ReuseChunks:
    """Chunks whose KV comes from other prompts: it is moved to its new position, and some tokens are recomputed.

    spans                the positions of the chunks
    variants             the number of the variant of each
    recompute_policy     how the tokens to recompute are chosen
    budget               how many: a share of the chunks' tokens, as the recompute policy interprets it
    calibrated           whether the budget was measured for this model
    shares               the expected share of each chunk's tokens that is recomputed
    """

    spans: tuple[Span, ...]
    variants: tuple[int, ...]
    recompute_policy: str
    budget: float
    calibrated: bool = False
    shares: tuple[float, ...] = ()

    @property
    def expected_recomputed(self) -> int:
        """Number of tokens."""
        return tokens_of(self.shares, self.spans)


@dataclass(frozen=True, slots=True)
class RefusedChunks:
    """Text of earlier prompts that was found and is computed all the same, because that is expected to be faster.

    tokens              how many
    seconds             the expected time of the prompt if they were moved
    computing_seconds   its expected time without that
    """

    tokens: int
    seconds: float
    computing_seconds: float

    def __str__(self) -> str:
        tokens, moving = count_of(self.tokens, "token"), human_seconds(self.seconds)
        computing = human_seconds(self.computing_seconds)
        return f"{tokens} stand in an earlier prompt; moving them would take {moving}, computing {computing}"


def tokens_of(shares: Sequence[float], spans: Sequence[Span]) -> int:
    """Number of tokens in these shares of spans."""
    return round(round(sum(share * len(span) for share, span in zip(shares, spans, strict=True)), 6))


@dataclass(frozen=True, slots=True)
class FetchRemote:
    """Chunks of a prompt that an origin has: some cells (chunk, layer) are fetched, the others computed.

    computed   number of layers that are computed here for each chunk, from the lowest on
    levels     the qualities of the rest
    """

    span: Span
    layers: int
    computed: tuple[int, ...]
    levels: tuple[str, ...]

    @property
    def is_quantized(self) -> bool:
        """Whether something of what is fetched differs from what computing gives."""
        return any(level != RAW for level in self.levels)

    @property
    def brings(self) -> bool:
        """Whether anything is fetched."""
        return any(own < self.layers for own in self.computed)

    @property
    def tokens(self) -> int:
        """Number of tokens fetched; a token in some layers counts as its share of them."""
        chunks = CellGrid(len(self.span), self.layers).spans
        cells = sum(len(span) * (self.layers - own) for span, own in zip(chunks, self.computed, strict=True))
        return cells // self.layers


Step = Load | Compute | ReuseChunks | FetchRemote


@dataclass(frozen=True)
class Plan:
    """Steps that tile `[0, tokens)`: loads come first, and the last token is always computed.

    `predicted_seconds` is the expected time of the steps, `cold_seconds` that of computing everything; None where
    nobody planned. A plan that is expected to take more than `MARGIN` times as long as computing everything is invalid;
    `refused_seconds` is the expected time of the best one that was refused, `refused_chunks` says of which text.
    """

    tokens: int
    steps: tuple[Step, ...]
    predicted_seconds: float | None = None
    cold_seconds: float | None = None
    refused_seconds: float | None = None
    refused_chunks: RefusedChunks | None = None

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
        if sum(isinstance(step, ReuseChunks | FetchRemote) for step in self.steps) > 1:
            raise ValueError(f"a plan reuses chunks once, or streams once: {self.steps}")
        if self.predicted_seconds is not None and self.cold_seconds is not None:
            slower = self.predicted_seconds > MARGIN * self.cold_seconds
            if slower and any(not isinstance(step, Compute) for step in self.steps):
                raise ValueError("a plan is clearly slower than computing everything")

    @classmethod
    def computing(cls, spans: Sequence[Span], seconds: float | None = None, refused: float | None = None) -> Plan:
        """The plan that reuses nothing."""
        return cls(spans[-1].stop, tuple(map(Compute, spans)), seconds, seconds, refused)

    @property
    def loads(self) -> tuple[Load, ...]:
        return tuple(step for step in self.steps if isinstance(step, Load))

    @property
    def computes(self) -> tuple[Compute, ...]:
        return tuple(step for step in self.steps if isinstance(step, Compute))

    @property
    def in_engine(self) -> bool:
        """Whether what it loads is in the engine already."""
        return bool(self.loads) and self.loads[0].tier == "engine"

    def without_chunk_reuse(self, spans: Sequence[Span]) -> Plan:
        """The same loads, with everything else computed in these spans."""
        return Plan(self.tokens, (*self.loads, *map(Compute, spans)), None, self.cold_seconds)

    @property
    def reuse_chunks(self) -> ReuseChunks | None:
        return next((step for step in self.steps if isinstance(step, ReuseChunks)), None)

    @property
    def stream(self) -> FetchRemote | None:
        return next((step for step in self.steps if isinstance(step, FetchRemote)), None)

    @property
    def reused(self) -> int:
        """Number of tokens loaded, all at the start."""
        return self.loads[-1].span.stop if self.loads else 0


def _spans(step: Step) -> tuple[Span, ...]:
    return step.spans if isinstance(step, ReuseChunks) else (step.span,)
