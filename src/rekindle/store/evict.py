"""What goes first when room is needed. A policy is data; ranking is a pure function of rows."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.store.catalog import Tail


@dataclass(frozen=True, slots=True)
class Policy:
    """The worth of a tail: `hits_weight * hits + recency_weight * recency`; the least worth goes first.

    Recency falls with age, from 1 to a half in `halflife_seconds`, and is scaled to the largest count of hits, so
    that neither term drowns the other. Where the worth is equal, the one not used for longest goes first.
    """

    name: str
    hits_weight: float
    recency_weight: float
    halflife_seconds: float = 6 * 3600.0

    def worth(self, hits: int, age_seconds: float, most_hits: int) -> float:
        """How much a tail is worth keeping. A clock that went back makes nothing older than new."""
        recency = math.exp(-math.log(2) * max(0.0, age_seconds) / self.halflife_seconds)
        return self.hits_weight * hits + self.recency_weight * recency * (1 + most_hits)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("weighted-lru", hits_weight=0.6, recency_weight=0.4),
        Policy("lru", hits_weight=0.0, recency_weight=0.0),
        Policy("lfu", hits_weight=1.0, recency_weight=0.0),
    )
}


def rank(tails: Iterable[Tail], policy: Policy, now: float, most_hits: int, count: int) -> list[Tail]:
    """The `count` tails that go first, in order; needs memory for so many only."""
    return heapq.nsmallest(
        count, tails, key=lambda tail: (policy.worth(tail.hits, now - tail.used, most_hits), tail.used, tail.extent)
    )
