"""Chunks of a prompt that are known from other prompts: which variant of each to take, and how to mend them.

A `Mender` is how. Ours asks the question: one pass of it over the stale KV tells where it looks, and the tokens that
count are those it looks at whose KV took much from chunks that are not there now, the first ones of each chunk above
all. The others are what was published, to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from rekindle.core.chunk import LEAST_CHUNK_TOKENS, ChunkDigest, Outline, Variant
from rekindle.core.kv import Span
from rekindle.core.plan import Compute, Load, Mend, Plan, Step, Tier
from rekindle.errors import InvalidSetting
from rekindle.reuse import craft, select
from rekindle.reuse.cost import Rates

SAFE_BUDGET = 0.4  # of a model that was not calibrated
OURS = "rekindle"
# Where the question's look counts, and how far it goes ahead. Measured on 15 prompts with SmolLM2, the layers from a
# sixth to two thirds of the way choose as well as all of them (mean KL 0.0096 and 0.0093, median 0.0052 and 0.0082);
# the first half alone leaves 0.0114.
LOOK_LAYERS = 1 / 6, 2 / 3
# Measured on 50 prompts at a budget of 0.3: ROUGE-L 0.90 and a median KL of 0.006, where 0 gives 0.81 and 0.012. Chosen
# tokens change more than others, so 0.7 and 1 overshoot.
SPREAD = 0.5

Choice = Literal["product", "leading", "random", "heavy", "published", "nothing"]
_SIGNALS = ("outside", "seen", "lead")


@dataclass(frozen=True)
class Mender:
    """How chunks are mended.

    choice     how tokens are chosen: by a product of `signals`, or as a rival does
    focus      computing ends early in chunks that the question does not look at (Cache-Craft)
    whole_set  only the longest known beginning whose chunks are all there is reused (SET-CACHE)
    spread     tokens that are not computed follow by so much what those of their chunk changed by, on average
    """

    name: str
    budget: float
    choice: Choice = "product"
    signals: tuple[str, ...] = ()
    focus: bool = False
    whole_set: bool = False
    spread: float = 0.0
    calibrated: bool = False

    @property
    def wants(self) -> frozenset[str]:
        """What it has to know of this prompt before it chooses: seen, deviation."""
        return select.needs(self.signals) if self.signals and self.budget > 0 else frozenset()


_MENDERS: Mapping[str, Mender] = {
    mender.name: mender
    for mender in (
        Mender(OURS, SAFE_BUDGET, signals=_SIGNALS, spread=SPREAD),
        Mender("leading", SAFE_BUDGET, "leading"),
        Mender("random", SAFE_BUDGET, "random"),
        Mender("h2o", SAFE_BUDGET, "heavy"),
        Mender("cache-craft", 1.0, "published", focus=True),
        Mender("full-cache", 0.0, "nothing"),
        Mender("set-cache", 0.0, "nothing", whole_set=True),
    )
}
MENDERS = tuple(_MENDERS)


def mender_of(name: str, budget: float | None = None, calibrated: float | None = None) -> Mender:
    """A mender by its name, or by signals joined by `*`; with a budget of one's own, or one that was calibrated.

    Raises `InvalidSetting`.
    """
    known = _MENDERS.get(name)
    if known is None:
        signals = tuple(part.strip() for part in name.split("*"))
        if not set(signals) <= set(select.SIGNALS):
            raise InvalidSetting(
                f"mender={name!r} is unknown. Use {', '.join(MENDERS)}, or signals joined by *: "
                f"{', '.join(select.SIGNALS)}."
            )
        known = Mender(name, SAFE_BUDGET, signals=signals)
    most = math.inf if known.choice == "published" else 1.0
    if budget is not None and not 0.0 <= budget <= most:
        raise InvalidSetting(f"mend_budget={budget} is out of range: use a share of the tokens, from 0 to 1.")
    if known.choice == "nothing":
        return known
    if budget is not None:
        return replace(known, budget=budget)
    return known if calibrated is None else replace(known, budget=calibrated, calibrated=True)


class Known(Protocol):
    """A variant that can be loaded."""

    @property
    def id(self) -> int:
        """Its number."""

    @property
    def variant(self) -> Variant:
        """What it is."""

    @property
    def tier(self) -> Tier:
        """Where its KV is."""

    @property
    def size_bytes(self) -> int:
        """How much that is."""


@dataclass(frozen=True, eq=False)
class Picked:
    """A chunk of a prompt, the variant that would be reused for it, and the scores that decided."""

    span: Span
    digest: ChunkDigest
    known: Known | None = None
    impact: float | None = None  # CCI
    overlap: float | None = None  # beta
    disorder: float | None = None  # gamma
    overhead: float | None = None  # CFO with alpha 1


def pick(
    outline: Outline, digests: Sequence[ChunkDigest], found: Mapping[ChunkDigest, Sequence[Known]], mender: Mender
) -> tuple[Picked, ...]:
    """The chunks of a prompt in order, each with the variant that fits best; `digests` has the head's first."""
    if mender.whole_set:
        chosen = craft.set_cache(digests, {key: [known.variant for known in some] for key, some in found.items()})
        found = {key: [k for k in found[key] if k.variant is variant] for key, variant in chosen.items()}
    picked = []
    for number, span in enumerate(outline.chunks, start=1):
        digest, before = digests[number], digests[:number]
        known = min(found.get(digest, ()), key=lambda one: craft.preference(one.variant, before), default=None)
        if known is None:
            picked.append(Picked(span, digest))
            continue
        variant = known.variant
        scores = (
            craft.context_impact(variant.scores, len(span)),
            craft.overlap(variant, before),
            craft.disorder(variant, before),
            craft.fix_overhead(variant, before),
        )
        picked.append(Picked(span, digest, known, *scores))
    return tuple(picked)


def plan_mending(
    exact: Plan, outline: Outline, chunks: Sequence[Picked], mender: Mender, rates: Rates, most_tokens: int
) -> Plan:
    """The plan that mends what it can, if that is expected to be sooner than the exact one; else the exact one.

    A chunk of which only the beginning is known exactly is mended as a whole. No pass may have more than `most_tokens`.
    """
    start = exact.reused
    usable = [chunk for chunk in chunks if chunk.known is not None and chunk.span.stop > start and _pays(chunk, mender)]
    if not usable:
        return exact
    start = min(start, usable[0].span.start)
    loads = tuple(
        replace(load, span=Span(load.span.start, min(load.span.stop, start)))
        for load in exact.loads
        if load.span.start < start
    )
    spans = tuple(chunk.span for chunk in usable)
    numbers = tuple(chunk.known.id for chunk in usable if chunk.known is not None)
    gaps = _gaps(start, spans, exact.tokens)
    seconds = _seconds(loads, usable, gaps, outline, mender, rates, exact.tokens)
    stale = sum(map(len, spans)) if "deviation" in mender.wants else expected_anew(usable, mender)
    anew = sum(map(len, gaps)) + stale
    limits = [limit for limit in (exact.predicted_seconds, exact.cold_seconds) if limit is not None]
    if anew > most_tokens or (seconds is not None and seconds >= min(limits, default=math.inf)):
        return exact
    steps: tuple[Step, ...] = (*loads, Mend(spans, numbers, mender.name, mender.budget), *map(Compute, gaps))
    return Plan(exact.tokens, steps, seconds, exact.cold_seconds)


def _pays(chunk: Picked, mender: Mender) -> bool:
    """Whether some of the chunk would not be computed."""
    if mender.choice == "published":
        return mender.budget * (chunk.overhead or 0.0) < 1.0
    return mender.budget < 1.0


def expected_anew(chunks: Sequence[Picked], mender: Mender) -> int:
    """How many tokens would be computed anew, if the question turns out to look at all chunks."""
    if mender.choice == "published":
        shares = [min(1.0, mender.budget * (chunk.overhead or 0.0)) for chunk in chunks]
        return sum(math.ceil(share * len(chunk.span)) for share, chunk in zip(shares, chunks, strict=True))
    return math.ceil(mender.budget * sum(len(chunk.span) for chunk in chunks))


def _gaps(start: int, spans: Sequence[Span], stop: int) -> list[Span]:
    """What lies between the spans, from `start` to `stop`."""
    gaps, place = [], start
    for span in (*spans, Span(stop, stop)):
        if span.start > place:
            gaps.append(Span(place, span.start))
        place = span.stop
    return gaps


@dataclass(frozen=True)
class _Work:
    """What one pass computes: so many tokens, which meet so many others."""

    tokens: int
    pairs: float

    @classmethod
    def of(cls, spans: Sequence[Span]) -> _Work:
        return cls(sum(map(len, spans)), sum(len(span) * (span.start + len(span) / 2) for span in spans))

    @classmethod
    def scattered(cls, count: int, among: int) -> _Work:
        """Tokens that stand anywhere: on the average in the middle."""
        return cls(count, count * among / 2)

    def times(self, share: float) -> _Work:
        return _Work(round(self.tokens * share), self.pairs * share)

    def __add__(self, other: _Work) -> _Work:
        return _Work(self.tokens + other.tokens, self.pairs + other.pairs)


def _seconds(
    loads: Sequence[Load],
    chunks: Sequence[Picked],
    gaps: Sequence[Span],
    outline: Outline,
    mender: Mender,
    rates: Rates,
    tokens: int,
) -> float | None:
    """What it would take; None where a cost is unknown."""
    anew = _Work.scattered(expected_anew(chunks, mender), tokens)
    fresh = _Work.of(gaps)
    again = _Work.of([Span(outline.question, tokens)])
    passes = [fresh + anew]
    if any(len(gap) >= LEAST_CHUNK_TOKENS for gap in gaps[:-1]):  # what is new is computed first
        passes = [fresh, anew + again]
    elif "seen" in mender.wants:  # the question goes ahead, through some of the layers
        passes = [fresh.times(LOOK_LAYERS[1]), fresh + anew]
    costs = [rates.work_seconds(work.tokens, work.pairs) for work in passes]
    picked = [chunk.known for chunk in chunks if chunk.known is not None]
    token_bytes = picked[0].size_bytes // max(1, len(chunks[0].span))
    costs += [rates.load_seconds(load.tier, len(load.span) * token_bytes) for load in loads]
    for tier in {known.tier for known in picked}:
        costs.append(rates.load_seconds(tier, sum(known.size_bytes for known in picked if known.tier == tier)))
    measured = [cost for cost in costs if cost is not None]
    return sum(measured) if len(measured) == len(costs) else None
