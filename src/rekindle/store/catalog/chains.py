"""The chains of a catalog, extent by extent, each with the end of what it hangs on. Reads rows, never files."""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from rekindle.core.keys import BLOCK_BYTES, TOKEN_BYTES, NodeKey
from rekindle.store.prefix_index import BlockRef

_HELD_BYTES = 32 << 20  # of tokens, to be asked for again by what hangs on them


@dataclass(frozen=True, slots=True)
class ExtentTokens:
    """The live tokens of an extent, and the node they hang on."""

    extent: int
    kv_space: int
    parent: NodeKey
    tokens: bytes


class Chains:
    """The chains of some KV spaces. Extents come in the order of their numbers, so what comes or moves, comes later."""

    def __init__(self, kv_spaces: Sequence[int]) -> None:
        self._kv_spaces = tuple(kv_spaces)
        self._marks = ",".join("?" * len(self._kv_spaces))
        self._held: OrderedDict[int, ExtentTokens] = OrderedDict()
        self._held_bytes = 0

    def count(self, connection: sqlite3.Connection) -> int:
        select = f"SELECT coalesce(sum(live), 0) FROM extents WHERE state='live' AND kv_space IN ({self._marks})"
        return int(connection.execute(select, self._kv_spaces).fetchone()[0])

    def after(self, connection: sqlite3.Connection, last: int, max_blocks: int) -> list[ExtentTokens]:
        """The next extents after number `last`, of about `max_blocks` blocks; none at the end."""
        stop, blocks = last, 0
        extents = connection.execute(
            f"SELECT id, live FROM extents WHERE id>? AND state='live' AND kv_space IN ({self._marks}) ORDER BY id",
            (last, *self._kv_spaces),
        )
        for stop, live in extents:  # noqa: B007  (the last one is what is asked for)
            blocks += live
            if blocks >= max_blocks:
                break
        extents.close()
        rows = connection.execute(
            "SELECT extent, kv_space, parent, tokens FROM blocks "
            f"WHERE extent>? AND extent<=? AND kv_space IN ({self._marks}) ORDER BY extent, place",
            (last, stop, *self._kv_spaces),
        )
        return [self._hold(list(group)) for _, group in groupby(rows, itemgetter(0))]

    def before(self, connection: sqlite3.Connection, stretch: ExtentTokens, tokens: int) -> bytes:
        """The last tokens before an extent, at most `tokens`."""
        parts: list[bytes] = []
        missing = tokens * TOKEN_BYTES
        above: ExtentTokens | None = stretch
        while missing > 0 and above is not None:
            spot = _find(connection, above)
            above = None if spot is None else self.read(connection, spot.extent)
            if spot is None or above is None:
                break
            stop = (spot.place + 1) * BLOCK_BYTES
            parts.append(above.tokens[max(0, stop - missing) : stop])
            missing -= stop
        return b"".join(reversed(parts))

    def above(self, connection: sqlite3.Connection, stretch: ExtentTokens, blocks: int) -> BlockRef | None:
        """The block that is `blocks` above an extent's first; None if it is gone."""
        above: ExtentTokens | None = stretch
        while above is not None:
            spot = _find(connection, above)
            if spot is None:
                return None
            if blocks <= spot.place + 1:
                return BlockRef(spot.extent, spot.place + 1 - blocks)
            blocks -= spot.place + 1
            above = self.read(connection, spot.extent)
        return None

    def read(self, connection: sqlite3.Connection, extent: int, *, fresh: bool = False) -> ExtentTokens | None:
        """An extent, as it was when it came, or, `fresh`, as it is; None if it has no blocks."""
        held = self._held.get(extent)
        if held is not None and not fresh:
            self._held.move_to_end(extent)
            return held
        select = "SELECT extent, kv_space, parent, tokens FROM blocks WHERE extent=? ORDER BY place"
        rows = connection.execute(select, (extent,)).fetchall()
        return self._hold(rows) if rows else None

    def _hold(self, rows: Sequence[tuple[int, int, NodeKey, bytes]]) -> ExtentTokens:
        """An extent of these rows. Its tokens never change, but for the last that may go."""
        extent, kv_space, parent, _ = rows[0]
        stretch = ExtentTokens(extent, kv_space, parent, b"".join([row[3] for row in rows]))
        if (older := self._held.pop(extent, None)) is not None:
            self._held_bytes -= len(older.tokens)
        self._held[extent] = stretch
        self._held_bytes += len(stretch.tokens)
        while self._held_bytes > _HELD_BYTES and len(self._held) > 1:
            self._held_bytes -= len(self._held.popitem(last=False)[1].tokens)
        return stretch


def _find(connection: sqlite3.Connection, below: ExtentTokens) -> BlockRef | None:
    """The block that an extent hangs on; None at the root."""
    row = connection.execute(
        "SELECT extent, place FROM blocks WHERE key=? AND kv_space=?", (below.parent, below.kv_space)
    ).fetchone()
    return None if row is None else BlockRef(*row)
