"""The two places where failures end: what cannot be read is a miss, what cannot be written is not kept.

Both are counted and logged once. Everything in the store that a request waits for goes through one of them.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from rekindle.errors import CacheUnusable, Closed
from rekindle.store.limits import LimitTooSmall, Refused

log = logging.getLogger("rekindle.store")

# The last four: damaged rows of the catalog.
FAILURES = (OSError, sqlite3.Error, CacheUnusable, TypeError, ValueError, LookupError, ArithmeticError)
_MAX_REASONS = 1000
T = TypeVar("T")


@dataclass(frozen=True)
class Kept:
    """The outcome of a keep: kept, known already, or refused and why; early: refused, but tried again later.

    `whole`: not only the first blocks, for which there was room."""

    outcome: Literal["kept", "known", "early", "refused", "failed"]
    reason: str = ""
    size_bytes: int = 0
    whole: bool = True


@dataclass
class Counts:
    """What happened since the store was opened."""

    kept: int = 0
    refused: int = 0
    read_failures: int = 0
    write_failures: int = 0
    quarantined: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class Failures:
    """Where failures end, for one open store. After it is closed (`closed`), reading is refused."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.closed = False
        self._limit_said = False

    def check_open(self) -> None:
        """Raises `Closed` if the store was closed."""
        if self.closed:
            raise Closed("The store was closed.")

    def reading(self, work: Callable[[], T], miss: T) -> T:
        """The result of `work`, or `miss` if it fails. Raises `Closed`."""
        self.check_open()
        try:
            return work()
        except FAILURES as error:
            self.counts.read_failures += 1
            self.log_once("The cache cannot be read, so everything is computed", error)
            return miss

    def writing(self, work: Callable[[], T], failed: Callable[[str], T]) -> T:
        """The result of `work`, or of `failed` with the reason if it fails."""
        try:
            return work()
        except FAILURES as error:
            self.counts.write_failures += 1
            self.log_once("The cache cannot be written, so nothing new is kept", error)
            return failed(str(error))

    def refused(self, refusal: Refused) -> Kept:
        """Count a refusal: something is not kept, but nothing failed. That the limit is too small is logged once."""
        reason = str(refusal)
        if isinstance(refusal, LimitTooSmall) and not self._limit_said:
            self._limit_said = True
            log.warning("KV is not kept on disk: %s.", reason)
        self.counts.refused += 1
        self._count(reason)
        return Kept("refused", reason)

    def cut(self, tokens: int, of: int) -> None:
        """Note that only the first tokens of a prompt were kept. Logged once."""
        if not self._limit_said:
            self._limit_said = True
            log.warning(
                "Of a prompt only the first %s of %s tokens are kept on disk: the disk limit has no room for more. Set "
                "a larger disk_limit (--disk-limit 2GB).", f"{tokens:,}", f"{of:,}",
            )  # fmt: skip

    def log_once(self, what: str, error: Exception, level: int = logging.WARNING) -> None:
        """Log a warning the first time, and at debug level after that."""
        log.log(level if self._count(str(error)) == 1 else logging.DEBUG, "%s: %s", what, error)

    def _count(self, reason: str) -> int:
        """Count a reason and return its count. Reasons may contain names, so their number is bounded."""
        reasons = self.counts.reasons
        if len(reasons) >= _MAX_REASONS and reason not in reasons:
            reasons.clear()
        reasons[reason] += 1
        return reasons[reason]
