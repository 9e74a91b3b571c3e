"""The budget of idle work, and the conditions of the machine that allow it: CPU load, mains power, energy.

Measurements are None where the machine does not provide them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_POWERCAP = Path("/sys/class/powercap")


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
    ask = getattr(psutil, "sensors_battery", None)  # missing on some systems
    battery = None if ask is None else ask()
    return None if battery is None or battery.power_plugged is None else bool(battery.power_plugged)


class CpuLoad:
    """The CPU load of other processes: 1 means all cores are busy. This process does not count."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float] | None = None

    def others(self) -> float | None:
        """The load since the last call; the first time, the average of the last minute. None if unknown."""
        cores = psutil.cpu_count() or 1
        busy, own, now = _busy_seconds(), time.process_time(), time.monotonic()
        before, self._before = self._before, (busy, own, now)
        if before is None:
            return _average() / cores
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
