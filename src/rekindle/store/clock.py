"""Whether the clock is believed when something is to be deleted because of its age.

Machines start at 1970, or leap by years, until their clock is put right. The catalog remembers the latest time at which
it was looked after. A clock that is ten minutes behind that, or thirty days ahead, is odd: by an odd clock nothing is
deleted until it has run on for a day from where it was first met. A clock from before this program was written is never
believed.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from rekindle.store.catalog.database import Database

_EARLIEST = 1_735_689_600.0  # 2025-01-01
BEHIND_SECONDS, _AHEAD_SECONDS = 600.0, 30 * 86400.0
_SETTLING_SECONDS = 86400.0
_NOTE_SECONDS = 60.0  # how old the remembered time may become: it is not written for every look


@dataclass(frozen=True)
class ClockMemory:
    """The latest time that was believed, and since when the clock has been odd."""

    latest: float
    odd_since: float | None = None

    def next(self, now: float) -> ClockMemory:
        """What is remembered after a look at the clock. It is believed if it is not odd then."""
        if self.latest - BEHIND_SECONDS <= now <= self.latest + _AHEAD_SECONDS:
            return ClockMemory(max(self.latest, now))
        since = self.odd_since
        if since is None or not since <= now <= since + _AHEAD_SECONDS:
            return ClockMemory(self.latest, now)
        return ClockMemory(now) if now - since >= _SETTLING_SECONDS else self


def is_believed(database: Database, now: float) -> bool:
    """Look at the clock: whether things may be deleted by what it says. Raises as the catalog does."""
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
