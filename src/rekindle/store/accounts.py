"""Accounts of a folder: keys that were met before, for admission on second use, and bytes written, for the budget."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from rekindle.core.keys import NodeKey


def seen_before(connection: sqlite3.Connection, shelf: int, keys: Sequence[NodeKey], now: float, most_rows: int) -> int:
    """How many of the chained keys were met before; all are remembered now, the oldest others forgotten."""
    select = "SELECT 1 FROM seen WHERE key=? AND shelf=?"
    known = [connection.execute(select, (key, shelf)).fetchone() is not None for key in keys]
    connection.executemany("INSERT OR REPLACE INTO seen VALUES (?,?,?)", [(key, shelf, now) for key in keys])
    excess = int(connection.execute("SELECT count(*) FROM seen").fetchone()[0]) - most_rows
    if excess > 0:
        oldest = "SELECT key, shelf FROM seen ORDER BY at LIMIT ?"
        connection.execute(f"DELETE FROM seen WHERE (key, shelf) IN ({oldest})", (excess,))
    return known.index(False) if False in known else len(known)


def written_between(connection: sqlite3.Connection, minute: int, last: int) -> int:
    """Bytes written from that minute to the other. What a clock that was ahead wrote later does not count."""
    select = "SELECT coalesce(sum(bytes), 0) FROM written WHERE minute BETWEEN ? AND ?"
    return int(connection.execute(select, (minute, last)).fetchone()[0])


def add_written(connection: sqlite3.Connection, minute: int, size_bytes: int) -> None:
    """Count bytes written now; what is older than two hours is forgotten."""
    connection.execute(
        "INSERT INTO written VALUES (?,?) ON CONFLICT (minute) DO UPDATE SET bytes=bytes+excluded.bytes",
        (minute, size_bytes),
    )
    connection.execute("DELETE FROM written WHERE minute<?", (minute - 120,))
