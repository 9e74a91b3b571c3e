"""What a server computed and spared, by minute for two hours and by hour for a month: numbers in a small file, no text.

Its size is bounded: the names of the numbers are, and old rows go. Losing it costs nothing but the plots.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from rekindle.core.reply import Reply
from rekindle.machine import make_private_folder, narrow, open_private

MINUTE, HOUR = 60, 3600
_KEPT = {MINUTE: 2 * HOUR, HOUR: 31 * 24 * HOUR}  # seconds, by the length of a row
_FLUSH_SECONDS = 10.0
_LEVELS = "bytes."  # numbers that begin so are levels: the highest of a row counts, not the sum
_TABLE = "CREATE TABLE IF NOT EXISTS usage (length INT, at INT, name TEXT, value REAL, PRIMARY KEY (length, at, name))"
_ADD = (
    "INSERT INTO usage VALUES (?,?,?,?) ON CONFLICT DO UPDATE SET value="
    f"CASE WHEN name GLOB '{_LEVELS}*' THEN max(value, excluded.value) ELSE value + excluded.value END"
)


class UsageLog:
    """Thread-safe. What cannot be written is dropped."""

    def __init__(
        self,
        path: Path | None,
        measure: Callable[[], Mapping[str, float]] = dict,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`path` None: in memory only. `measure` gives levels and totals of the whole server, read at every flush."""
        self._path, self._measure, self._clock = path, measure, clock
        self._memory = sqlite3.connect(":memory:", check_same_thread=False) if path is None else None
        self._lock = threading.Lock()
        self._new: dict[tuple[int, str], float] = defaultdict(float)  # by minute and name
        self._totals: Mapping[str, float] = {}
        self._flushed = clock()

    def count(self, reply: Reply) -> bool:
        """Count a reply; whether it is time to flush, in some thread."""
        reuse = reply.reuse
        counts: dict[str, float] = {"requests": 1, "written": reply.usage.completion_tokens}
        counts |= {f"tokens.{source}": count for source, count in reuse.by_source.items()}
        if reuse.miss is not None:
            counts[f"miss.{reuse.miss}"] = 1
        if reuse.cold_seconds is not None:
            counts |= {"first": reply.timings.first_token_seconds, "cold": reuse.cold_seconds, "timed": 1}
        now = self._clock()
        with self._lock:
            for name, value in counts.items():
                self._new[int(now // MINUTE * MINUTE), name] += value
            return now - self._flushed > _FLUSH_SECONDS

    def flush(self) -> None:
        """Write what was counted."""
        measured, now = self._measure(), self._clock()
        with self._lock:
            new, self._new, self._flushed = self._new, defaultdict(float), now
            for name, value in measured.items():
                grown = value if name.startswith(_LEVELS) else value - self._totals.get(name, 0)
                if grown:
                    new[int(now // MINUTE * MINUTE), name] = grown
            self._totals = measured
        with suppress(OSError, sqlite3.Error), self._writing() as connection:
            connection.execute(_TABLE)
            for length, kept in _KEPT.items():
                rows = [(length, at // length * length, name, value) for (at, name), value in new.items()]
                connection.executemany(_ADD, rows)
                connection.execute("DELETE FROM usage WHERE length=? AND at<?", (length, now - kept))

    def rows(self, length: int, seconds: float) -> list[dict[str, float]]:
        """The rows of a length that are not older than `seconds`, the oldest first: `at`, and what was counted."""
        self.flush()
        found: dict[int, dict[str, float]] = {}
        select = "SELECT at, name, value FROM usage WHERE length=? AND at>? ORDER BY at"
        with suppress(OSError, sqlite3.Error), self._writing() as connection:
            for at, name, value in connection.execute(select, (length, self._clock() - seconds)):
                found.setdefault(at, {"at": at})[name] = value
        return list(found.values())

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        if self._memory is not None:
            with self._lock, self._memory:
                yield self._memory
            return
        assert self._path is not None
        make_private_folder(self._path.parent)
        with open_private(self._path, "ab"):  # else SQLite makes a file that others can read
            narrow(self._path)
        with closing(sqlite3.connect(self._path, timeout=1.0)) as connection, connection:
            yield connection
