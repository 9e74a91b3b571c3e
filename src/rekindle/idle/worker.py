"""Computes requests in idle time, within a budget and while CPU load and battery allow; stops within a token.

The cost of each request is measured. Measurements are None where the machine does not provide them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.engine.fairness import IDLE, taking
from rekindle.errors import Cancelled, Closed, InvalidSetting, RekindleError
from rekindle.idle.log import Action, IdleAction, flop, record_action
from rekindle.knowledge.library import Library
from rekindle.session.session import Session

_POWERCAP = Path("/sys/class/powercap")
# What psutil raises where the system has no such thing, denies it (Android) or says something unexpected.
_DENIED = (psutil.Error, OSError, AttributeError, NotImplementedError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Budget:
    """How much may be spent; None: no limit. Seconds end a running action, the others take effect after it."""

    seconds: float | None = None
    tflop: float | None = None
    joules: float | None = None


@dataclass(frozen=True)
class Spent:
    """How much was spent. `joules` is None if it cannot be measured."""

    seconds: float = 0.0
    flop: float = 0.0
    joules: float | None = None


def is_left(budget: Budget, spent: Spent) -> bool:
    """Whether no limit of the budget is reached."""
    limits = (budget.seconds, budget.tflop, budget.joules)
    done = (spent.seconds, spent.flop / 1e12, spent.joules or 0.0)
    return all(limit is None or part < limit for limit, part in zip(limits, done, strict=True))


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


class EnergyMeter:
    """The energy the processor packages used since the meter was made, from RAPL where it can be read."""

    def __init__(self, folder: Path = _POWERCAP) -> None:
        self._zones = [zone for zone in sorted(folder.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        self._last = self._read()
        self._microjoules = 0

    @property
    def measures(self) -> bool:
        return self._last is not None

    def joules(self) -> float | None:
        """Joules so far; None if they cannot be measured."""
        read = self._read()
        if read is None or self._last is None:
            return None
        for zone, now, before in zip(self._zones, read, self._last, strict=True):
            self._microjoules += now - before if now >= before else max(0, now - before + _range(zone))
        self._last = read
        return self._microjoules / 1e6

    def _read(self) -> list[int] | None:
        try:
            return [int((zone / "energy_uj").read_text()) for zone in self._zones] or None
        except (OSError, ValueError):  # often only root may read it
            return None


def _range(zone: Path) -> int:
    """Where the counter wraps around."""
    try:
        return int((zone / "max_energy_range_uj").read_text())
    except (OSError, ValueError):
        return 0


log = logging.getLogger("rekindle.idle")

_LOOK_SECONDS = 2.0  # between two looks at load and battery


@dataclass(frozen=True)
class WorkResult:
    """The reply of an idle request and what it cost; no reply if it was stopped."""

    reply: Reply | None
    seconds: float
    tokens: int = 0
    flop: float | None = None
    joules: float | None = None


class StopOrDeadline(threading.Event):
    """Set when `stop` is set, and after the deadline."""

    def __init__(self, stop: threading.Event, deadline: float) -> None:
        super().__init__()
        self._stop, self._deadline = stop, deadline

    def is_set(self) -> bool:
        return super().is_set() or self._stop.is_set() or time.perf_counter() >= self._deadline


class IdleWorker:
    """Computes requests that nobody waits for, within a budget and while load and battery allow.

    stop         setting it stops the work within a token
    spent        the total cost so far
    blocked_by   why it does not continue, if because of load or battery
    """

    def __init__(
        self,
        session: Session,
        budget: Budget,
        conditions: IdleConditions | None = None,
        report: Callable[[IdleAction], None] | None = None,
    ) -> None:
        """Raises `InvalidSetting` for a budget of joules if energy cannot be measured."""
        self.stop = threading.Event()
        self.spent = Spent()
        self.blocked_by: str | None = None
        self._session = session
        self._budget, self._conditions = budget, conditions
        self._report = report
        self._meter, self._load = EnergyMeter(), CpuLoad()
        self._looked = float("-inf")
        if budget.joules is not None and not self._meter.measures:
            raise InvalidSetting(
                "This machine does not report its energy use, so joules cannot be limited. Limit seconds or tflop."
            )

    def may_continue(self) -> bool:
        """Whether there is budget left, and neither `stop` nor load nor battery forbid it."""
        if self.stop.is_set() or not is_left(self._budget, self.spent):
            return False
        now = time.monotonic()
        if self._conditions is not None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self.blocked_by = blocked_by(self._conditions, self._load.others(), on_mains())
        return self.blocked_by is None

    def compute(self, request: Request) -> WorkResult:
        """Compute a request and measure it. A request that the session refuses is logged and skipped."""
        started, energy = time.perf_counter(), self._meter.joules()
        limit = self._budget.seconds
        deadline = float("inf") if limit is None else started + limit - self.spent.seconds
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
        seconds, after = time.perf_counter() - started, self._meter.joules()
        joules = None if energy is None or after is None else after - energy
        if reply is None:
            return WorkResult(None, seconds, joules=joules)
        decoded = max(0, len(reply.tokens) - 1)  # the last token is sampled but never computed
        tokens, context = reply.reuse.computed + decoded, reply.usage.prompt_tokens + decoded
        return WorkResult(reply, seconds, tokens, flop(self._session.engine, tokens, context), joules)

    def record(
        self, library: Library, action: Action, what: str, result: WorkResult, answer: int | None = None
    ) -> IdleAction:
        """Record an action in the log, and report it."""
        finished = result.reply is not None
        done = IdleAction(action, what, answer, result.seconds, result.tokens, result.flop, result.joules, finished)
        joules = None if result.joules is None else (self.spent.joules or 0.0) + result.joules
        self.spent = Spent(self.spent.seconds + result.seconds, self.spent.flop + (result.flop or 0.0), joules)
        record_action(library, done)
        if self._report is not None:
            self._report(done)
        return done
