"""Recompute policies that ours is compared with. A session takes one with `use`.

leading      the first tokens of each chunk
random, h2o  drawn, or those that got the most attention; the same share of each chunk
cache-craft  as published: of each chunk as many as its overhead says, those that looked outside most; computing ends
             early in chunks that the question does not look at. `-gap`: its cut read at the gap, not one chunk before;
             `-all`: computing never ends early
cacheblend   all tokens in the first layers, then those whose KV deviates most there
full-cache   nothing is recomputed
set-cache    the same, for the longest known beginning whose chunks are all there
a*b          a product of signals: see `selectors`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.baselines import selectors
from benchmarks.baselines.cache_craft import set_cache
from benchmarks.baselines.choose_in_layers import ChooseByDeviation, ChooseByFocus
from rekindle.cache.stored_kv import StoredKv
from rekindle.chunks import prefill
from rekindle.chunks.match import calibration_of, match_chunks
from rekindle.chunks.prefill import ChunkPrefill
from rekindle.chunks.recompute import Recomputed, SelectiveRecompute
from rekindle.chunks.scores import preference
from rekindle.chunks.select import OURS, LeadingPolicy, Positions, RecomputePolicy, StaleTokens, recompute_policy_for
from rekindle.core.chunk import ChunkDigest, ChunkMatch, ChunkMatches, LoadableVariant
from rekindle.core.keys import KvSpace
from rekindle.core.kv import Span
from rekindle.errors import InvalidSetting
from rekindle.session.session import Session
from rekindle.settings import Settings

CRAFTS = ("cache-craft", "cache-craft-gap", "cache-craft-all")
RECOMPUTE_POLICIES = (OURS, "leading", "random", "h2o", *CRAFTS, "cacheblend", "full-cache", "set-cache")


@dataclass(frozen=True)
class SignalPolicy(RecomputePolicy):
    """By a product of signals."""

    spread: float = 0.0
    signals: tuple[str, ...] = ()

    @property
    def looks(self) -> bool:
        """Whether one of them is where the question looks."""
        return self.budget > 0 and "seen" in selectors.needs(self.signals)

    @property
    def deviates(self) -> bool:
        """Whether one of them is known only after some layers."""
        return self.budget > 0 and "deviation" in selectors.needs(self.signals)

    def choose(self, stale: StaleTokens, chunks: Sequence[ChunkMatch]) -> Positions:  # noqa: ARG002
        """The largest products."""
        return selectors.choose_by(stale, self.signals, self.budget) if self.budget > 0 else stale.positions[:0]


@dataclass(frozen=True)
class RandomPolicy(LeadingPolicy):
    """Drawn within each chunk."""

    name: str = "random"

    def choose(self, stale: StaleTokens, chunks: Sequence[ChunkMatch]) -> Positions:  # noqa: ARG002
        """The same for the same prompt."""
        return selectors.choose_random(stale, self.budget, seed=len(stale))


@dataclass(frozen=True)
class HeavyHitterPolicy(LeadingPolicy):
    """Those that got the most attention in their chunk (H2O)."""

    name: str = "h2o"

    def choose(self, stale: StaleTokens, chunks: Sequence[ChunkMatch]) -> Positions:  # noqa: ARG002
        """The heaviest."""
        return selectors.choose_heavy(stale, self.budget)


@dataclass(frozen=True)
class CraftPolicy(LeadingPolicy):
    """Cache-Craft; its budget is alpha."""

    name: str = "cache-craft"

    @property
    def focuses(self) -> bool:
        """Whether computing ends early in chunks that the question does not look at."""
        return self.name != "cache-craft-all"

    def shares(self, chunks: Sequence[ChunkMatch]) -> list[float]:
        """Their overheads, if the question turns out to look at all chunks."""
        return [min(1.0, self.budget * (chunk.overhead or 0.0)) for chunk in chunks]

    def choose(self, stale: StaleTokens, chunks: Sequence[ChunkMatch]) -> Positions:
        """Of each chunk as many as its overhead says."""
        overheads = {number: self.budget * (chunk.overhead or 0.0) for number, chunk in enumerate(chunks)}
        return selectors.choose_published(stale, overheads)


def policy_of(name: str, budget: float | None = None, calibrated: float | None = None) -> RecomputePolicy:
    """A recompute policy by its name, or by signals joined by `*`. Raises `InvalidSetting`."""
    if name == OURS:
        return recompute_policy_for("scattered", budget, calibrated)
    if name in ("full-cache", "set-cache"):
        return RecomputePolicy(0.0, name=name, spread=0.0)
    if name in CRAFTS:
        if budget is not None and not budget >= 0.0:
            raise InvalidSetting(f"recompute_budget={budget} is out of range: use an alpha of 0 or more.")
        return CraftPolicy(next((one for one in (budget, calibrated) if one is not None), 1.0), name=name)
    share = recompute_policy_for("scattered", budget, calibrated).budget
    plain = {"leading": LeadingPolicy, "random": RandomPolicy, "h2o": HeavyHitterPolicy}
    if name in plain:
        return plain[name](share)
    if name == "cacheblend":
        return SignalPolicy(share, name=name, signals=("deviation",))
    signals = tuple(part.strip() for part in name.split("*"))
    if not set(signals) <= set(selectors.SIGNALS):
        raise InvalidSetting(
            f"recompute_policy={name!r} is unknown. Use {', '.join(RECOMPUTE_POLICIES)}, or signals joined by *: "
            f"{', '.join(selectors.SIGNALS)}."
        )
    return SignalPolicy(share, name=name, signals=signals)


class ScoredChunks(ChunkPrefill):
    """A session's chunks, scored on every device: what is published chooses by these scores."""

    scores_on_accelerator = True


class PublishedChunks(ChunkPrefill):
    """A session's chunks, with another recompute policy."""

    def __init__(self, kv: StoredKv, settings: Settings, name: str, budget: float | None) -> None:
        """Raises `InvalidSetting`."""
        super().__init__(kv, settings)
        engine = kv.engine
        if engine.capabilities.recompute == "leading" and name != "full-cache":
            name = "leading"
        self.recompute_policy = policy_of(name, budget, calibration_of(engine, name))

    def search(
        self, kv_space: KvSpace, tokens: Sequence[int], passages: ChunkMatches | None, start: int
    ) -> ChunkMatches | None:
        """Documents only: what is published finds no other text."""
        wanted = passages is not None and start < passages.prompt_layout.question
        return self.find(kv_space, tokens, passages) if wanted and passages is not None else passages

    def match(
        self, passages: ChunkMatches, found: Mapping[ChunkDigest, Sequence[LoadableVariant]]
    ) -> tuple[ChunkMatch, ...]:
        """The chunks of a prompt, each with the variant to reuse."""
        if self.recompute_policy.name == "set-cache":
            found = only_the_set(passages.digests, found)
        rank = preference if self.recompute_policy.name in (OURS, "leading") else lowest_overhead
        return match_chunks(passages.prompt_layout, passages.digests, found, rank)


def lowest_overhead(match: ChunkMatch) -> tuple[float, float]:
    """Sort key of a chunk's variants as published: CFO, then drift."""
    assert match.known is not None and match.overhead is not None
    return match.overhead, match.known.variant.drift


def only_the_set(
    digests: Sequence[ChunkDigest], found: Mapping[ChunkDigest, Sequence[LoadableVariant]]
) -> dict[ChunkDigest, list[LoadableVariant]]:
    """What was found of the longest known beginning whose chunks are all there."""
    chosen = set_cache(digests, {key: [known.variant for known in some] for key, some in found.items()})
    return {key: [known for known in found[key] if known.variant is variant] for key, variant in chosen.items()}


class PublishedRecompute(SelectiveRecompute):
    """Chooses inside the layer loop, in place of a recompute policy."""

    def _compute(
        self, context: Any, others: Positions, stale: StaleTokens, feeds: Any = (), timed: Any = ()
    ) -> Recomputed:
        recompute_policy, layers = self.recompute_policy, len(self.work.engine.layout.layers)
        if isinstance(recompute_policy, SignalPolicy) and recompute_policy.deviates:
            deviating = ChooseByDeviation(stale, recompute_policy.signals, recompute_policy.budget, layers)
            row = self._row(context, np.union1d(others, stale.positions), feeds)
            logits = self.work.step(replace(row, selector=deviating, probe=deviating.probe), timed)
            return Recomputed(logits, deviating.chosen, deviating.cells)
        if isinstance(recompute_policy, CraftPolicy) and recompute_policy.focuses and len(self.chunks) > 2:
            recomputed = recompute_policy.choose(stale, self.chunks)
            question = Span(self.prompt_layout.question, len(self.work.tokens))
            spans, at_gap = [chunk.span for chunk in self.chunks], recompute_policy.name == "cache-craft-gap"
            focusing = ChooseByFocus(recomputed, spans, question, at_gap=at_gap)
            row = self._row(context, np.union1d(others, recomputed), feeds)
            if len(recomputed):
                logits = self.work.step(replace(row, selector=focusing, probe=focusing.probe), timed)
                return Recomputed(logits, recomputed, focusing.cells)
        return super()._compute(context, others, stale, feeds, timed)


def use(session: Session, name: str, budget: float | None = None) -> None:
    """Make the session use this recompute policy. Raises `InvalidSetting`."""
    prefill.SelectiveRecompute = PublishedRecompute  # type: ignore[attr-defined]
    session.cache.chunks = PublishedChunks(session.cache.kv, session.settings, name, budget)
