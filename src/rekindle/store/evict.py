"""What goes first when room is needed. A policy is data; ranking is a pure function of rows.

Tails go before heads: only a block that nothing hangs on can go, and an extent's last ones before its first.
"""

from __future__ import annotations

import heapq
import math
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rekindle.store import catalog
from rekindle.store.catalog import Tail
from rekindle.store.database import Database

_RANKED = 256  # tails looked at in one go
_LOG_BYTES_A_BLOCK = 24 << 10  # what freeing a block writes to the log, at worst


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


def blocks_a_transaction(database: Database) -> int:
    """How many blocks one transaction may free: each is written to the log several times."""
    return max(8, database.log_limit_bytes // 2 // _LOG_BYTES_A_BLOCK)


class Eviction:
    """Frees the rows of what is worth least. Files are the business of `store/room`."""

    def __init__(self, database: Database, policy: Policy, clock: Callable[[], float]) -> None:
        self._database = database
        self._policy = policy
        self._clock = clock

    def free(self, short: int, holder: tuple[int, int] | None, whole: bool) -> int:
        """Free rows worth at least `short` bytes, as far as one transaction should; about how many bytes went."""
        with self._database.scanning() as connection:  # ranking may take long, and others may write meanwhile
            policy, most_hits = self._policy, catalog.most_hits(connection)
            ranked = rank(catalog.tails(connection), policy, self._clock(), most_hits, _RANKED)
        # First what gives bytes back; only if there is nothing, what merely brings an extent closer to that.
        for largest_rest in (0.0, 1.0) if whole else (0.5, 1.0):
            todo, freed = deque(ranked), 0
            while todo and freed < short:
                freed += self._cut_tails(todo, short - freed, holder, largest_rest)
            if freed:
                return freed
        return 0

    def _cut_tails(
        self, todo: deque[catalog.Tail], short: int, holder: tuple[int, int] | None, largest_rest: float
    ) -> int:
        """Free tails, those at the front first, as many as one transaction should; about how many bytes that is."""
        blocks, freed = blocks_a_transaction(self._database), 0
        with self._database.writing() as connection:
            while todo and blocks > 0 and freed < short:
                tail = catalog.tail(connection, todo[0].extent)  # as it is by now
                cut = self._cut_tail(connection, tail, holder, largest_rest, blocks) if tail else 0
                if tail and cut:
                    freed += max(1, tail.size_bytes * cut // tail.blocks)
                if cut < blocks:  # otherwise there may be more of it
                    todo.popleft()
                blocks -= cut
        return freed

    def _cut_tail(
        self,
        connection: sqlite3.Connection,
        tail: catalog.Tail,
        holder: tuple[int, int] | None,
        largest_rest: float,
        most_blocks: int,
    ) -> int:
        """Free a tail, or its last blocks, unless a larger share of its extent would be left; how many blocks."""
        start = catalog.tail_start(connection, tail, by_worth=largest_rest > 0)
        if holder is not None and holder[0] == tail.extent:
            start = max(start, holder[1] + 1)
        if start and start >= largest_rest * tail.blocks and largest_rest < 1:
            return 0
        start = max(start, tail.live - most_blocks)
        if start >= tail.live:
            return 0
        catalog.cut(connection, tail.extent, start)
        return tail.live - start
