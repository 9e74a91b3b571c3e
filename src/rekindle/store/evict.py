"""Eviction: which KV goes when space is needed, by the policy, and what only killed apps used.

Tails go before heads: only a block without successors can go, and an extent's last blocks go before its first.

Nothing is deleted by age while the clock is in doubt. Machines start at 1970, or leap by years, until their clock is
set. The catalog records the latest time it saw. A clock ten minutes behind that, or thirty days ahead, is odd: it is
believed only after it has run for a day from where it was first seen. A clock before 2025 is never believed.
"""

from __future__ import annotations

import heapq
import math
import sqlite3
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rekindle.store.catalog import app_rows, catalog
from rekindle.store.catalog.app_rows import AppUsers
from rekindle.store.catalog.catalog import Tail
from rekindle.store.catalog.database import Database

_EARLIEST = 1_735_689_600.0  # 2025-01-01
BEHIND_SECONDS, _AHEAD_SECONDS = 600.0, 30 * 86400.0
_SETTLING_SECONDS = 86400.0
_NOTE_SECONDS = 60.0  # the recorded time is updated this often


@dataclass(frozen=True)
class ClockMemory:
    """The latest time that was believed, and since when the clock has been odd."""

    latest: float
    odd_since: float | None = None

    def next(self, now: float) -> ClockMemory:
        """The record after reading the clock; the clock is believed if `odd_since` is None then."""
        if self.latest - BEHIND_SECONDS <= now <= self.latest + _AHEAD_SECONDS:
            return ClockMemory(max(self.latest, now))
        since = self.odd_since
        if since is None or not since <= now <= since + _AHEAD_SECONDS:
            return ClockMemory(self.latest, now)
        return ClockMemory(now) if now - since >= _SETTLING_SECONDS else self


def is_believed(database: Database, now: float) -> bool:
    """Whether things may be deleted by this time. Records it. Raises as the catalog does."""
    if not now >= _EARLIEST:
        return False
    with database.scanning() as connection:
        before = _recall(connection)
    after = (before or ClockMemory(now)).next(now)
    if before is None or after.odd_since != before.odd_since or abs(after.latest - before.latest) > _NOTE_SECONDS:
        with database.writing() as connection:
            connection.execute("INSERT OR REPLACE INTO clock VALUES (1, ?, ?)", (after.latest, after.odd_since))
    return after.odd_since is None


def _recall(connection: sqlite3.Connection) -> ClockMemory | None:
    row = connection.execute("SELECT latest, odd_since FROM clock").fetchone()
    if row is not None:
        return ClockMemory(float(row[0]), None if row[1] is None else float(row[1]))
    newest = "SELECT max(max(CAST(kept AS REAL)), max(CAST(used AS REAL))) FROM extents WHERE state='live'"
    (latest,) = connection.execute(newest).fetchone()
    return None if latest is None else ClockMemory(float(latest))


HALFLIFE_SECONDS = 6 * 3600.0
NOBODY = AppUsers(background=1)  # KV used without an app name counts as one app in the background


@dataclass(frozen=True)
class EvictionState:
    """What the worth of a tail depends on beside the tail itself, at one moment.

    max_hits          the largest hit count of any extent
    apps              whether any app is registered
    users_by_extent   apps that use the tails; extents without any are left out
    saved_ms_a_token  what a use saves, by KV space
    """

    now: float
    max_hits: int = 0
    apps: bool = False
    users_by_extent: Mapping[int, AppUsers] = field(default_factory=dict)
    saved_ms_a_token: Mapping[int, float] = field(default_factory=dict)

    def age_seconds(self, tail: Tail) -> float:
        """Seconds since the last use, at least 0: the clock may have gone back."""
        return max(0.0, self.now - tail.used)

    def users(self, tail: Tail) -> AppUsers:
        return self.users_by_extent.get(tail.extent, NOBODY)


@dataclass(frozen=True, slots=True, order=True)
class Worth:
    """How much something is worth keeping: first whether anybody alive may want it, then how much."""

    wanted: bool
    value: float


class Policy(Protocol):
    """Rates tails. The lowest worth goes first; among equals, the least recently used.

    `by_app`: whether the worth depends on the apps that used the KV.
    """

    @property
    def name(self) -> str: ...

    @property
    def by_app(self) -> bool: ...

    def worth(self, tail: Tail, users: AppUsers, state: EvictionState) -> Worth:
        """The worth of a tail with these users."""


def recency(age_seconds: float) -> float:
    """From 1, halved with every halflife."""
    return math.exp(-math.log(2) * max(0.0, age_seconds) / HALFLIFE_SECONDS)


def chance(hits: int, age_seconds: float, max_hits: int) -> float:
    """A score for the chance of another use: `0.6 * hits + 0.4 * recency`.

    Recency is scaled to the largest count of hits, so that neither term drowns the other.
    """
    return 0.6 * hits + 0.4 * recency(age_seconds) * (1 + max_hits)


@dataclass(frozen=True, slots=True)
class Lru:
    """What only killed apps used goes first, then the least recently used."""

    name: str = "lru"
    by_app: bool = True

    def worth(self, tail: Tail, users: AppUsers, state: EvictionState) -> Worth:  # noqa: ARG002
        return Worth(not users.dead, 0.0)


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

    def worth(self, tail: Tail, users: AppUsers, state: EvictionState) -> Worth:
        """The chance of reuse alone while no app is registered."""
        likely = chance(tail.hits, state.age_seconds(tail), state.max_hits)
        if not state.apps:
            return Worth(True, likely)
        popularity = math.log2(1 + self.foreground * users.foreground + self.background * users.background)
        live_bytes = max(1.0, tail.size_bytes * tail.live / max(1, tail.blocks))
        saved = state.saved_ms_a_token.get(tail.kv_space, 1.0) * tail.tokens / live_bytes
        return Worth(not users.dead, likely * popularity * saved)


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Lru(), Utility())}


def rank(tails: Iterable[Tail], policy: Policy, state: EvictionState, count: int) -> list[Tail]:
    """The `count` tails that go first, in order. Holds only `count` in memory."""
    return heapq.nsmallest(
        count, tails, key=lambda tail: (policy.worth(tail, state.users(tail), state), tail.used, tail.extent)
    )


_RANKED = 256  # tails ranked at a time
_LOG_BYTES_A_BLOCK = 24 << 10  # what freeing a block writes to the log, at worst


def blocks_a_transaction(database: Database) -> int:
    """How many blocks one transaction may free: each is written to the log several times."""
    return max(8, database.log_limit_bytes // 2 // _LOG_BYTES_A_BLOCK)


@dataclass(frozen=True)
class HeldRank:
    """Names of extents in memory, the first to leave first; `dead` are those that only killed apps used."""

    order: list[str]
    dead: list[str]


class Eviction:
    """Frees the rows of the lowest worth. `store/disk_space` removes the files."""

    def __init__(self, database: Database, policy: Policy, clock: Callable[[], float]) -> None:
        self._database = database
        self._policy = policy
        self._clock = clock

    def free(self, short: int, holder: tuple[int, int] | None, whole: bool, apart: Container[int] = ()) -> int:
        """Free rows of about `short` bytes, in one pass; returns about how many bytes were freed.

        Extents in `apart` stay.
        """
        with self._database.scanning() as connection:  # ranking may take long, and others may write meanwhile
            state = self._state(connection, whole)
            tails_now = (tail for tail in catalog.tails(connection) if tail.extent not in apart)
            ranked = rank(tails_now, self._policy, state, _RANKED)
        # First whatever killed apps alone have used; then what gives bytes back; only if there is nothing, what merely
        # brings an extent closer to that.
        dead = [tail for tail in ranked if state.users(tail).dead]
        for tails, largest_rest in (dead, 1.0), (ranked, 0.0 if whole else 0.5), (ranked, 1.0):
            todo, freed = deque(tails), 0
            while todo and freed < short:
                freed += self._cut_tails(todo, short - freed, holder, largest_rest)
            if freed:
                return freed
        return 0

    def free_killed(self, killed_before: float, short: int) -> int:
        """Free about `short` bytes of what only apps killed before that time used; returns about how many were freed.

        KV that others use, or that other KV continues, stays. Raises as the catalog does; every transaction leaves the
        catalog consistent.
        """
        with self._database.scanning() as connection:
            todo = deque(app_rows.private(connection, killed_before))  # the deepest first
        freed = 0
        if todo and not is_believed(self._database, self._clock()):
            return 0
        while todo and freed < short:
            blocks = blocks_a_transaction(self._database)
            with self._database.writing() as connection:
                while todo and blocks > 0 and freed < short:
                    # As it is now: the app may have come back.
                    for private in app_rows.private(connection, killed_before, todo[0].extent):
                        cut = self._cut_private(connection, private, blocks)
                        freed, blocks = freed + cut * private.block_bytes, blocks - cut
                    if blocks > 0:  # otherwise there may be more of it
                        todo.popleft()
        return freed

    def _cut_private(self, connection: sqlite3.Connection, private: app_rows.PrivateBlocks, max_blocks: int) -> int:
        """Free the last blocks of an extent, as many as allowed; returns their number."""
        row = catalog.extent(connection, private.extent)
        if row is None:
            return 0
        start = max(private.start, app_rows.first_free_block(connection, row.id), row.live - max_blocks)
        if start >= row.live:
            return 0
        catalog.cut(connection, row.id, start)
        return row.live - start

    def rank_held(self, names: Iterable[str]) -> HeldRank:
        """The order in which extents should leave memory, and which of them only killed apps used."""
        with self._database.scanning() as connection:
            state = self._state(connection, whole=True)
            found = {name: catalog.extents(connection, "name=? AND state='live'", (name,)) for name in names}
        rows = {name: rows[0] for name, rows in found.items() if rows}
        tails = {
            name: Tail(row.id, row.live, row.blocks, row.size_bytes, row.hits, row.used, row.tokens, row.kv_space)
            for name, row in rows.items()
        }
        # Of those that were last used together, the deepest go first, as on disk.
        listed = sorted(
            tails,
            key=lambda name: (
                self._policy.worth(tails[name], state.users(tails[name]), state),
                tails[name].used,
                -rows[name].depth,
            ),
        )
        unlisted = [name for name in found if name not in rows]
        return HeldRank([*unlisted, *listed], [name for name in listed if state.users(tails[name]).dead])

    def _state(self, connection: sqlite3.Connection, whole: bool) -> EvictionState:
        now, max_hits = self._clock(), catalog.max_hits(connection)
        if not self._policy.by_app or not app_rows.any_known(connection):
            return EvictionState(now, max_hits)
        users_by_extent = app_rows.users_by_extent(connection, whole=whole)
        return EvictionState(now, max_hits, True, users_by_extent, _saved_ms_a_token(connection))

    def _cut_tails(
        self, todo: deque[catalog.Tail], short: int, holder: tuple[int, int] | None, largest_rest: float
    ) -> int:
        """Free tails from the front in one transaction; returns about how many bytes were freed."""
        blocks, freed = blocks_a_transaction(self._database), 0
        with self._database.writing() as connection:
            while todo and blocks > 0 and freed < short:
                tail = catalog.tail(connection, todo[0].extent)  # as it is now
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
        max_blocks: int,
    ) -> int:
        """Free a tail, or its last blocks, unless more than `largest_rest` of its extent would be left.

        Returns the number of blocks freed.
        """
        start = catalog.tail_start(connection, tail, by_worth=largest_rest > 0)
        if holder is not None and holder[0] == tail.extent:
            start = max(start, holder[1] + 1)
        if start and start >= largest_rest * tail.blocks and largest_rest < 1:
            return 0
        start = max(start, tail.live - max_blocks)
        if start >= tail.live:
            return 0
        catalog.cut(connection, tail.extent, start)
        return tail.live - start


def _saved_ms_a_token(connection: sqlite3.Connection) -> dict[int, float]:
    """Milliseconds that a use saves per token, by KV space: measured per model, the mean where nothing was measured."""
    measured = {
        identity: saved / tokens
        for identity, saved, tokens in connection.execute(
            "SELECT s.identity, total(e.saved_ms), total(e.hits * e.tokens) FROM extents e "
            "JOIN kv_spaces s ON s.id=e.kv_space WHERE e.state='live' GROUP BY s.identity"
        )
        if saved > 0 and tokens > 0
    }
    mean = sum(measured.values()) / len(measured) if measured else 1.0
    return {
        id: measured.get(identity, mean) for id, identity in connection.execute("SELECT id, identity FROM kv_spaces")
    }
