"""What KV is worth keeping: policies as data, worth as a pure function of rows.

weighted-lru, lru, lfu   hits and recency; who asked does not matter
utility                  chance of reuse x what that would save a byte; who asked does. Without apps: weighted-lru
mobilora                 state, recency and length, added up; what is new may be worth least, and is not kept then

Of KV that killed apps alone have used, the last two let all go before anything else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rekindle.store.app_rows import Crowd
from rekindle.store.catalog import Tail

HALFLIFE_SECONDS = 6 * 3600.0
NOBODY = Crowd(background=1)  # what nobody who gave a name has used, might be asked for again


@dataclass(frozen=True)
class Scene:
    """What worth depends on beside the tail, as of one moment.

    now               the time
    most_hits         of any extent
    apps              whether any app is known
    crowds            who uses the tails, by extent; those of nobody are left out
    saved_ms_a_token  what a use saves, by shelf
    """

    now: float
    most_hits: int = 0
    apps: bool = False
    crowds: Mapping[int, Crowd] = field(default_factory=dict)
    saved_ms_a_token: Mapping[int, float] = field(default_factory=dict)

    def age_seconds(self, tail: Tail) -> float:
        """How long ago it was used. A clock that went back makes nothing older than new."""
        return max(0.0, self.now - tail.used)

    def crowd(self, tail: Tail) -> Crowd:
        """Who uses it."""
        return self.crowds.get(tail.extent, NOBODY)


@dataclass(frozen=True, slots=True, order=True)
class Worth:
    """How much something is worth keeping: first whether anybody alive may want it, then how much."""

    wanted: bool
    value: float


class Policy(Protocol):
    """How worth is told. The least worth goes first; where it is equal, what was not used for longest.

    by_app     whether it matters who used something
    refuses    whether what is new is refused where all that could go for it is worth more
    """

    @property
    def name(self) -> str: ...

    @property
    def by_app(self) -> bool: ...

    @property
    def refuses(self) -> bool: ...

    def worth(self, tail: Tail, crowd: Crowd, scene: Scene) -> Worth:
        """What a tail is worth that these apps use."""


def recency(age_seconds: float, halflife_seconds: float = HALFLIFE_SECONDS) -> float:
    """From 1, halved with every halflife."""
    return math.exp(-math.log(2) * max(0.0, age_seconds) / halflife_seconds)


@dataclass(frozen=True, slots=True)
class Weighted:
    """`hits_weight * hits + recency_weight * recency`.

    Recency is scaled to the largest count of hits, so that neither term drowns the other.
    """

    name: str
    hits_weight: float
    recency_weight: float
    by_app: bool = False
    refuses: bool = False

    def score(self, hits: int, age_seconds: float, most_hits: int) -> float:
        """The sum."""
        return self.hits_weight * hits + self.recency_weight * recency(age_seconds) * (1 + most_hits)

    def worth(self, tail: Tail, crowd: Crowd, scene: Scene) -> Worth:  # noqa: ARG002
        """The same for everybody."""
        return Worth(True, self.score(tail.hits, scene.age_seconds(tail), scene.most_hits))


WEIGHTED_LRU = Weighted("weighted-lru", hits_weight=0.6, recency_weight=0.4)


@dataclass(frozen=True, slots=True)
class Utility:
    """Chance of reuse x milliseconds that a use saves for each byte.

    The chance is the score of weighted-lru, times `log2(1 + scores of the apps)`: an app in the foreground counts
    `foreground`, one in the background `background`, a killed one nothing; so one more live app always adds, and each
    adds less than the one before.
    """

    name: str = "utility"
    foreground: float = 3.0
    background: float = 1.0
    by_app: bool = True
    refuses: bool = False

    def worth(self, tail: Tail, crowd: Crowd, scene: Scene) -> Worth:
        """That of weighted-lru, as long as no app is known."""
        base = WEIGHTED_LRU.worth(tail, crowd, scene)
        if not scene.apps:
            return base
        state = math.log2(1 + self.foreground * crowd.foreground + self.background * crowd.background)
        live_bytes = max(1.0, tail.size_bytes * tail.live / max(1, tail.blocks))
        saved = scene.saved_ms_a_token.get(tail.shelf, 1.0) * tail.tokens / live_bytes
        return Worth(not crowd.dead, base.value * state * saved)


@dataclass(frozen=True, slots=True)
class MobiLora:
    """`U = state_weight * phi(scores of the apps) + recency_weight * recency + length_weight * phi(length)`.

    `phi` is `x / (1 + x)`, for lengths in units of `unit_tokens`. The source gives form and order, no numbers: these
    make the state of one live app outweigh everything else, so that killed apps' KV goes first as it says.
    """

    name: str = "mobilora"
    state_weight: float = 0.7
    recency_weight: float = 0.2
    length_weight: float = 0.1
    foreground: float = 2.0
    background: float = 1.0
    unit_tokens: float = 512.0
    by_app: bool = True
    refuses: bool = True

    def worth(self, tail: Tail, crowd: Crowd, scene: Scene) -> Worth:
        """The sum."""
        states = self.foreground * crowd.foreground + self.background * crowd.background
        value = self.state_weight * _phi(states)
        value += self.recency_weight * recency(scene.age_seconds(tail))
        value += self.length_weight * _phi(tail.tokens / self.unit_tokens)
        return Worth(not crowd.dead, value)


def _phi(x: float) -> float:
    return x / (1 + x)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Utility(),
        WEIGHTED_LRU,
        Weighted("lru", hits_weight=0.0, recency_weight=0.0),
        Weighted("lfu", hits_weight=1.0, recency_weight=0.0),
        MobiLora(),
    )
}


def rank(tails: Iterable[Tail], policy: Policy, scene: Scene, count: int) -> list[Tail]:
    """The `count` tails that go first, in order; needs memory for so many only."""
    return heapq.nsmallest(
        count, tails, key=lambda tail: (policy.worth(tail, scene.crowd(tail), scene), tail.used, tail.extent)
    )
