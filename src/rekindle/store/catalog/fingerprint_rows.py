"""The rows of fingerprints in the catalog: where in a chain the text is that has them.

A row is sealed like a variant's. Functions take the transaction they belong to.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.codec.digest import Digester
from rekindle.core.keys import NodeKey
from rekindle.store.catalog.variant_rows import LOST, SpaceRow

_KEYS_A_QUERY = 500
_SEAL_BYTES = 8
# In a damaged catalog a column may have another type: a cast makes it readable at least.
_COLUMNS = (
    "key, CAST(parent AS BLOB), CAST(stop AS INTEGER), CAST(moved AS INTEGER), CAST(drift AS REAL), CAST(seal AS BLOB)"
)


@dataclass(frozen=True, slots=True)
class TextPlace:
    """Where a gram is stored.

    parent   the node above the block that has its last token
    stop     the position behind it in its chain
    moved    where it was computed, less where it is in its chain
    drift    share of what came before it that was not exact when it was computed
    """

    key: int
    parent: NodeKey
    stop: int
    moved: int = 0
    drift: float = 0.0

    def seal(self, digester: Digester, kv_space_digest: str) -> bytes:
        """The digest of a row, keyed if the store has a key. Raises `struct.error` for invalid numbers."""
        numbers = struct.pack("<qqqd", self.key, self.stop, self.moved, self.drift)
        return digester.header(b"rekindle/fingerprint/1" + numbers + self.parent + kv_space_digest.encode())[
            :_SEAL_BYTES
        ]


def find(
    connection: sqlite3.Connection, digester: Digester, space: SpaceRow, keys: Sequence[int]
) -> dict[int, TextPlace]:
    """The places of those keys that are listed; damaged rows are left out."""
    found = {}
    for values in _select(connection, _COLUMNS, space.number, keys):
        try:
            place = TextPlace(*values[:5])
            if values[5] == place.seal(digester, space.digest):
                found[place.key] = place
        except (struct.error, TypeError, ValueError):
            continue
    return found


def listed(connection: sqlite3.Connection, kv_space: int, keys: Sequence[int]) -> set[int]:
    """Those of the keys whose rows lead to text that is still stored."""
    return {key for (key,) in _select(connection, "key", kv_space, keys, f"AND NOT {LOST['fingerprints']}")}


def add(
    connection: sqlite3.Connection, digester: Digester, space: SpaceRow, places: Sequence[TextPlace], max_count: int
) -> None:
    """List places, each in place of an earlier one with its key; the oldest rows beyond `max_count` go."""
    connection.executemany(
        "INSERT OR REPLACE INTO fingerprints (kv_space, key, parent, stop, moved, drift, seal) VALUES (?,?,?,?,?,?,?)",
        [
            (space.number, one.key, one.parent, one.stop, one.moved, one.drift, one.seal(digester, space.digest))
            for one in places
        ],
    )
    connection.execute("DELETE FROM fingerprints WHERE id <= (SELECT max(id) FROM fingerprints) - ?", (max_count,))


def _select(
    connection: sqlite3.Connection, columns: str, kv_space: int, keys: Sequence[int], where: str = ""
) -> Iterator[tuple[Any, ...]]:
    for first in range(0, len(keys), _KEYS_A_QUERY):
        some = keys[first : first + _KEYS_A_QUERY]
        marks = ",".join("?" * len(some))
        yield from connection.execute(
            f"SELECT {columns} FROM fingerprints v WHERE key IN ({marks}) AND kv_space=? {where}", (*some, kv_space)
        ).fetchall()
