"""Freeing rows when room is needed: what is worth least, by the policy, and what killed apps alone have used.

Tails go before heads: only a block that nothing hangs on can go, and an extent's last ones before its first.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Container

from rekindle.store.catalog import app_rows, catalog
from rekindle.store.catalog.database import Database
from rekindle.store.clock import is_believed
from rekindle.store.evict.policy import Policy, Scene, rank

_RANKED = 256  # tails looked at in one go
_LOG_BYTES_A_BLOCK = 24 << 10  # what freeing a block writes to the log, at worst


def blocks_a_transaction(database: Database) -> int:
    """How many blocks one transaction may free: each is written to the log several times."""
    return max(8, database.log_limit_bytes // 2 // _LOG_BYTES_A_BLOCK)


class Eviction:
    """Frees the rows of what is worth least. Files are the business of `store/disk_space`."""

    def __init__(self, database: Database, policy: Policy, clock: Callable[[], float]) -> None:
        self._database = database
        self._policy = policy
        self._clock = clock

    def free(
        self,
        short: int,
        holder: tuple[int, int] | None,
        whole: bool,
        apart: Container[int] = (),
    ) -> int:
        """Free rows worth at least `short` bytes, as far as one transaction should; about how many bytes went.

        Extents in `apart` stay.
        """
        with self._database.scanning() as connection:  # ranking may take long, and others may write meanwhile
            scene = self._scene(connection, whole)
            tails_now = (tail for tail in catalog.tails(connection) if tail.extent not in apart)
            ranked = rank(tails_now, self._policy, scene, _RANKED)
        # First whatever killed apps alone have used; then what gives bytes back; only if there is nothing, what merely
        # brings an extent closer to that.
        dead = [tail for tail in ranked if scene.crowd(tail).dead]
        for tails, largest_rest in (dead, 1.0), (ranked, 0.0 if whole else 0.5), (ranked, 1.0):
            todo, freed = deque(tails), 0
            while todo and freed < short:
                freed += self._cut_tails(todo, short - freed, holder, largest_rest)
            if freed:
                return freed
        return 0

    def free_killed(self, killed_before: float) -> int:
        """Free all that is of apps alone that were killed before then; about how many bytes went.

        What others use stays, and what something hangs on that stays. Raises as the catalog does; each transaction
        leaves the catalog as it should be.
        """
        with self._database.scanning() as connection:
            todo = deque(
                app_rows.private(connection, killed_before)
            )  # the deepest first: nothing hangs on what is next
        freed = 0
        if todo and not is_believed(self._database, self._clock()):
            return 0
        while todo:
            blocks = blocks_a_transaction(self._database)
            with self._database.writing() as connection:
                while todo and blocks > 0:
                    # As it is now: the app may have come back.
                    for private in app_rows.private(connection, killed_before, todo[0].extent):
                        cut = self._cut_private(connection, private, blocks)
                        freed, blocks = freed + cut * private.block_bytes, blocks - cut
                    if blocks > 0:  # otherwise there may be more of it
                        todo.popleft()
        return freed

    def _cut_private(self, connection: sqlite3.Connection, private: app_rows.PrivateBlocks, max_blocks: int) -> int:
        """Free the last blocks of an extent, as many as may be; how many."""
        row = catalog.extent(connection, private.extent)
        if row is None:
            return 0
        start = max(private.start, app_rows.first_free_block(connection, row.id), row.live - max_blocks)
        if start >= row.live:
            return 0
        catalog.cut(connection, row.id, start)
        return row.live - start

    def _scene(self, connection: sqlite3.Connection, whole: bool) -> Scene:
        now, most_hits = self._clock(), catalog.most_hits(connection)
        if not self._policy.by_app or not app_rows.any_known(connection):
            return Scene(now, most_hits)
        crowds = app_rows.crowds(connection, whole=whole)
        return Scene(now, most_hits, True, crowds, _saved_ms_a_token(connection))

    def _cut_tails(
        self, todo: deque[catalog.Tail], short: int, holder: tuple[int, int] | None, largest_rest: float
    ) -> int:
        """Free tails, those at the front first, as many as one transaction should; about how many bytes that is."""
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
        """Free a tail, or its last blocks, unless a larger share of its extent would be left; how many blocks."""
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
    """What a token of each KV space saved a use, as measured for its model; the mean of all where nothing was."""
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
