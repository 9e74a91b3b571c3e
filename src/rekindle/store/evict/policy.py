"""What KV is worth keeping: policies as data, worth as a pure function of rows.

utility   chance of reuse x what that would save a byte; who asked matters, and what killed apps alone have used goes
          before anything else
lru       what was not used for longest goes first
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rekindle.store.catalog.app_rows import Crowd
from rekindle.store.catalog.catalog import Tail

HALFLIFE_SECONDS = 6 * 3600.0
NOBODY = Crowd(background=1)  # what nobody who gave a name has used, might be asked for again


@dataclass(frozen=True)
class Scene:
    """What worth depends on beside the tail, as of one moment.

    now               the time
    most_hits         of any extent
    apps              whether any app is known
    crowds            who uses the tails, by extent; those of nobody are left out
    saved_ms_a_token  what a use saves, by KV space
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
    """

    @property
    def name(self) -> str: ...

    @property
    def by_app(self) -> bool: ...

    def worth(self, tail: Tail, crowd: Crowd, scene: Scene) -> Worth:
        """What a tail is worth that these apps use."""


def recency(age_seconds: float, halflife_seconds: float = HALFLIFE_SECONDS) -> float:
    """From 1, halved with every halflife."""
    return math.exp(-math.log(2) * max(0.0, age_seconds) / halflife_seconds)


def chance(hits: int, age_seconds: float, most_hits: int) -> float:
    """How likely it is to be used again, by what it was used: `0.6 * hits + 0.4 * recency`.

    Recency is scaled to the largest count of hits, so that neither term drowns the other.
    """
    return 0.6 * hits + 0.4 * recency(age_seconds) * (1 + most_hits)


@dataclass(frozen=True, slots=True)
class Lru:
    """All worth the same: what was not used for longest goes first."""

    name: str = "lru"
    by_app: bool = False

    def worth(self, tail: Tail, crowd: Crowd, scene: Scene) -> Worth:  # noqa: ARG002
        """The same for everything."""
        return Worth(True, 0.0)


@dataclass(frozen=True, slots=True)
class Utility:
    """Chance of reuse x milliseconds that a use saves for each byte.

    The chance is times `log2(1 + scores of the apps)`: an app in the foreground counts
    `foreground`, one in the background `background`, a killed one nothing; so one more live app always adds, and each
    adds less than the one before.
    """

    name: str = "utility"
    foreground: float = 3.0
    background: float = 1.0
    by_app: bool = True

    def worth(self, tail: Tail, crowd: Crowd, scene: Scene) -> Worth:
        """The chance alone, as long as no app is known."""
        likely = chance(tail.hits, scene.age_seconds(tail), scene.most_hits)
        if not scene.apps:
            return Worth(True, likely)
        state = math.log2(1 + self.foreground * crowd.foreground + self.background * crowd.background)
        live_bytes = max(1.0, tail.size_bytes * tail.live / max(1, tail.blocks))
        saved = scene.saved_ms_a_token.get(tail.kv_space, 1.0) * tail.tokens / live_bytes
        return Worth(not crowd.dead, likely * state * saved)


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Utility(), Lru())}


def rank(tails: Iterable[Tail], policy: Policy, scene: Scene, count: int) -> list[Tail]:
    """The `count` tails that go first, in order; needs memory for so many only."""
    return heapq.nsmallest(
        count, tails, key=lambda tail: (policy.worth(tail, scene.crowd(tail), scene), tail.used, tail.extent)
    )
