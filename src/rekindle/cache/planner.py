"""The plan of a prompt, from what is stored and what things cost. Pure: same arguments, same plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from rekindle.cache.cost import Rates
from rekindle.cache.matches import Matches
from rekindle.core.kv import Span
from rekindle.core.plan import MARGIN, Compute, Load, Plan, Tier


@dataclass(frozen=True, slots=True)
class PrefillSteps:
    """How a prefill is cut into steps of the engine: at most `token_limit` each.

    With `piece_tokens` every prefill, cold or warm, is cut at the same places and only whole pieces are reused: each
    token is then computed with the same neighbours, so that its KV and logits are the same to the last bit.
    At each of the `edges` a step ends: there a checkpoint is written.
    """

    token_limit: int
    piece_tokens: int | None = None
    edges: tuple[int, ...] = ()

    def reusable(self, tokens: int) -> int:
        """How many of `tokens` stored ones may be reused."""
        return tokens - tokens % self.piece_tokens if self.piece_tokens else tokens

    def spans(self, start: int, stop: int) -> list[Span]:
        """The steps that compute `[start, stop)`."""
        size = self.piece_tokens or self.token_limit
        fixed = [start, *(edge for edge in self.edges if start < edge < stop), stop]
        edges = [place for a, b in pairwise(fixed) for place in range(a, b, size)]
        return [Span(a, b) for a, b in pairwise([*edges, stop])]


def make_plan(matches: Matches, rates: Rates, cut: PrefillSteps) -> Plan:
    """The plan that reuses KV in the shortest expected time; of equals the one that reuses most, from the engine if it
    can. All is computed only where every such plan is clearly slower, or gains nothing. What nothing was measured of is
    tried: it is expected to take no longer than computing.
    """
    spans = cut.spans(0, matches.tokens)
    cold = sum(map(rates.compute_seconds, spans))
    plans: list[tuple[float, Plan]] = []
    refused: list[float] = []
    for loads in _choices(matches, cut):
        sizes, rest = _sizes(loads, matches), cut.spans(loads[-1].span.stop, matches.tokens)
        computing = sum(map(rates.compute_seconds, rest))
        loading = rates.loads_seconds(sizes)
        seconds = max(rates.certain_seconds(sizes) + computing, min(loading + computing, cold))
        if seconds <= MARGIN * cold and not _gains_nothing(loading, computing, cold, rates):
            plans.append((seconds, Plan(matches.tokens, (*loads, *map(Compute, rest)), seconds, cold)))
        else:
            refused.append(seconds)
    if not plans:
        return Plan.computing(spans, cold, min(refused, default=None))
    return min(plans, key=lambda one: (one[0], -one[1].reused, not one[1].in_engine))[1]


def _gains_nothing(loading: float, computing: float, cold: float, rates: Rates) -> bool:
    """Whether a load spares less than the margin of computing, and takes longer than what it spares: ten tokens of a
    prompt on a GPU, where any load takes longer than they do. Nothing could be shown by trying it."""
    spared = max(0.0, cold - computing)
    return "compute" in rates.measured and spared < (MARGIN - 1) * cold and loading > spared


def _choices(matches: Matches, cut: PrefillSteps) -> Iterator[tuple[Load, ...]]:
    """The loads to choose from: ever longer stored prefixes, or what is in the engine."""
    last = matches.tokens - 1
    loads: list[Load] = []
    for found in matches.stored:
        whole = Span(found.span.start, max(found.span.start, min(found.span.stop, last)))
        usable = cut.reusable(whole.stop)
        if usable > whole.start:
            yield (*loads, Load(Span(whole.start, usable), found.tier))
        loads.append(Load(whole, found.tier))
    if stays := cut.reusable(min(matches.in_engine, last)):
        yield (Load(Span(0, stays), "engine"),)


def _sizes(loads: tuple[Load, ...], matches: Matches) -> list[tuple[Tier, int]]:
    """Where the bytes of loads come from, with those that are decoded beside them."""
    token_bytes = matches.stored[0].size_bytes // len(matches.stored[0].span) if matches.stored else 0
    beside = {found.span.start: found.beside_bytes for found in matches.stored}
    return [(load.tier, len(load.span) * token_bytes + beside.get(load.span.start, 0)) for load in loads]
