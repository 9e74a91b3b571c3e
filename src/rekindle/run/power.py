"""What the machine tells of itself: how busy others keep it, whether it has mains, and what energy it takes.

Each is None where it cannot be known.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil

_POWERCAP = Path("/sys/class/powercap")


def plugged() -> bool | None:
    """Whether a machine with a battery has mains; None: it has no battery, or does not tell."""
    ask = getattr(psutil, "sensors_battery", None)  # some systems have none of it
    battery = None if ask is None else ask()
    return None if battery is None or battery.power_plugged is None else bool(battery.power_plugged)


class Load:
    """How busy others keep the cores: 1 is all of them. What this process does is not counted."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float] | None = None

    def others(self) -> float | None:
        """Since it was asked last; the first time, the average of the last minute. None if the system does not tell."""
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
    """What all cores worked since the machine started."""
    times = psutil.cpu_times()
    waiting = times.idle + getattr(times, "iowait", 0.0)
    twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # is part of user and nice, too
    return float(sum(times) - waiting - twice)


class Meter:
    """The energy that the processor packages took since it was made, in joules: RAPL, where it may be read."""

    def __init__(self, folder: Path = _POWERCAP) -> None:
        self._zones = [zone for zone in sorted(folder.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        self._last = self._read()
        self._microjoules = 0

    @property
    def measures(self) -> bool:
        """Whether the machine tells its energy."""
        return self._last is not None

    def joules(self) -> float | None:
        """So much by now; None where the machine does not tell."""
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
        except (OSError, ValueError):  # only the administrator may read it
            return None


def _range(zone: Path) -> int:
    """Where its counter begins anew."""
    try:
        return int((zone / "max_energy_range_uj").read_text())
    except (OSError, ValueError):
        return 0
