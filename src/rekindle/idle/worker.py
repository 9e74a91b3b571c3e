"""Computes requests in idle time, within a budget and while CPU load and battery allow; stops within a token."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.engine.fairness import IDLE, taking
from rekindle.errors import Cancelled, Closed, RekindleError
from rekindle.idle.log import Action, IdleAction, record_action
from rekindle.knowledge.library import Library
from rekindle.session.session import Session

# What psutil raises where the system has no such thing, denies it (Android) or says something unexpected.
_DENIED = (psutil.Error, OSError, AttributeError, NotImplementedError, RuntimeError, ValueError)


@dataclass(frozen=True)
class IdleConditions:
    """When idle work may run.

    max_load     only while other processes keep less than this share of the cores busy
    on_battery   also without mains power
    """

    max_load: float = 0.5
    on_battery: bool = False


def blocked_by(conditions: IdleConditions, load: float | None, on_mains: bool | None) -> str | None:
    """Why idle work may not run now; None if it may.

    load       load of other processes per core, 0 to 1 and more; None: unknown
    on_mains   whether a machine with a battery has mains power; None: it has no battery
    """
    if on_mains is False and not conditions.on_battery:
        return "the machine runs on its battery"
    if load is not None and load >= conditions.max_load:
        return f"others keep {load:.0%} of the cores busy"
    return None


def on_mains() -> bool | None:
    """Whether a machine with a battery has mains power; None: no battery, or unknown."""
    try:
        battery = psutil.sensors_battery()
    except _DENIED:
        return None
    return None if battery is None or battery.power_plugged is None else bool(battery.power_plugged)


class CpuLoad:
    """The CPU load of other processes: 1 means all cores are busy. This process does not count."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float] | None = None

    def others(self) -> float | None:
        """The load since the last call; the first time, the average of the last minute. None if unknown."""
        cores = psutil.cpu_count() or 1
        try:
            busy, own, now = _busy_seconds(), time.process_time(), time.monotonic()
            before, self._before = self._before, (busy, own, now)
            if before is None:
                return _average() / cores
        except _DENIED:
            return None
        passed = now - before[2]
        return None if passed <= 0 else max(0.0, busy - before[0] - (own - before[1])) / (passed * cores)


def _average() -> float:
    return float(psutil.getloadavg()[0])


def _busy_seconds() -> float:
    """CPU time of all cores since boot."""
    times = psutil.cpu_times()
    waiting = times.idle + getattr(times, "iowait", 0.0)
    twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # also counted in user and nice
    return float(sum(times) - waiting - twice)


log = logging.getLogger("rekindle.idle")

_LOOK_SECONDS = 2.0  # between two looks at load and battery


@dataclass(frozen=True)
class WorkResult:
    """The reply of an idle request and its cost; no reply if it was stopped."""

    reply: Reply | None
    seconds: float
    tokens: int = 0


class StopOrDeadline(threading.Event):
    """Set when `stop` is set, and after the deadline."""

    def __init__(self, stop: threading.Event, deadline: float) -> None:
        super().__init__()
        self._stop, self._deadline = stop, deadline

    def is_set(self) -> bool:
        return super().is_set() or self._stop.is_set() or time.perf_counter() >= self._deadline


class IdleWorker:
    """Computes requests that nobody waits for, within a budget and while load and battery allow.

    stop            setting it stops the work within a token
    spent_seconds   the total cost so far
    blocked_by      why it does not continue, if because of load or battery
    """

    def __init__(
        self,
        session: Session,
        budget_seconds: float | None,
        conditions: IdleConditions | None = None,
        report: Callable[[IdleAction], None] | None = None,
    ) -> None:
        self.stop = threading.Event()
        self.spent_seconds = 0.0
        self.blocked_by: str | None = None
        self._session = session
        self._budget_seconds, self._conditions = budget_seconds, conditions
        self._report = report
        self._load = CpuLoad()
        self._looked = float("-inf")

    @property
    def is_spent(self) -> bool:
        """Whether nothing of the budget is left."""
        return self._budget_seconds is not None and self.spent_seconds >= self._budget_seconds

    def may_continue(self) -> bool:
        """Whether there is budget left, and neither `stop` nor load nor battery forbid it."""
        if self.stop.is_set() or self.is_spent:
            return False
        now = time.monotonic()
        if self._conditions is not None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self.blocked_by = blocked_by(self._conditions, self._load.others(), on_mains())
        return self.blocked_by is None

    def compute(self, request: Request) -> WorkResult:
        """Compute a request and measure it. A request that the session refuses is logged and skipped."""
        started, limit = time.perf_counter(), self._budget_seconds
        deadline = float("inf") if limit is None else started + limit - self.spent_seconds
        reply = None
        try:
            with taking(IDLE):
                reply = self._session.answer(request, StopOrDeadline(self.stop, deadline)).reply
        except Cancelled:
            pass
        except Closed:
            raise
        except RekindleError as error:
            log.warning("Idle work skipped something: %s", error)
        seconds = time.perf_counter() - started
        if reply is None:
            return WorkResult(None, seconds)
        decoded = max(0, len(reply.tokens) - 1)  # the last token is sampled but never computed
        return WorkResult(reply, seconds, reply.reuse.computed + decoded)

    def record(
        self, library: Library, action: Action, what: str, result: WorkResult, answer: int | None = None
    ) -> IdleAction:
        """Record an action in the log, and report it."""
        finished = result.reply is not None
        done = IdleAction(action, what, answer, result.seconds, result.tokens, finished)
        self.spent_seconds += result.seconds
        record_action(library, done)
        if self._report is not None:
            self._report(done)
        return done
