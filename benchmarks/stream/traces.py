"""Bandwidth over time: traces of real links, a few made here, and how they are scaled.

A trace file is a CSV with the columns `time_s,mbps`: megabits a second from that moment to the next. A trace
begins again when it is over. What a link is good for depends on how fast the machine beside it computes: a trace is
scaled so that streaming a context over it takes a chosen multiple of the time that computing it takes.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import InvalidSetting

BYTES_PER_MEGABIT = 125_000.0
MADE = ("constant", "step down", "step up", "noisy", "outage")
_MIN_SHARE = 0.2  # of its mean: a window in which less comes is no window to measure in
_EVEN = 1e-9  # of what a trace carries: so little is nothing
_WINDOWS = 200  # looked at, before a trace is given up

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Trace:
    """A link: `rates[i]` bytes a second for `lengths[i]` seconds, one after the other, again and again."""

    name: str
    lengths: Floats
    rates: Floats
    offset: float = 0.0  # where in it time 0 is

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.rates) or not len(self.rates):
            raise ValueError("a trace is a rate for each length")
        if (self.lengths <= 0).any() or (self.rates < 0).any() or not np.isfinite(self.rates).all():
            raise ValueError("lengths are positive, rates not negative")
        if not self.rates.any():
            raise ValueError("nothing ever comes over this link")

    @property
    def seconds(self) -> float:
        """How long it is until it begins again."""
        return float(self._times[-1])

    @property
    def mean_rate(self) -> float:
        """Bytes a second, all of it."""
        return float(self._carried[-1] / self._times[-1])

    def rate_at(self, seconds: float) -> float:
        """Bytes a second at a moment."""
        place = (self.offset + seconds) % self.seconds
        return float(self.rates[min(int(np.searchsorted(self._times, place, "right")) - 1, len(self.rates) - 1)])

    def carried(self, start: float, stop: float) -> float:
        """The bytes that it carries between two moments."""
        return self._until(self.offset + stop) - self._until(self.offset + start)

    def moment(self, start: float, size_bytes: float) -> float:
        """When a number of bytes that begin at a moment are through."""
        total = float(self._carried[-1])
        wanted = self._until(self.offset + start) + size_bytes
        # A little less, or the last byte before a silence would be taken for the first behind it.
        rounds, left = divmod(max(0.0, wanted - _EVEN * total), total)
        place = max(1, int(np.searchsorted(self._carried, left, "left")))  # the first moment at which they are
        while not self.rates[place - 1]:  # it begins in silence
            place += 1
        rest = (left - self._carried[place - 1]) / self.rates[place - 1]
        return max(start, float(rounds * self.seconds + self._times[place - 1] + rest) - self.offset)

    def scaled(self, factor: float) -> Trace:
        """The same trace, `factor` times as fast."""
        return Trace(self.name, self.lengths, self.rates * factor, self.offset)

    def at_ratio(self, size_bytes: float, local_seconds: float, ratio: float) -> Trace:
        """The same link, so fast that these bytes take `ratio` times the local time from its beginning on."""
        carried = self.carried(0.0, ratio * local_seconds)
        if carried <= 0:
            raise ValueError(f"nothing comes over {self.name} in the first {ratio * local_seconds:.1f} s")
        return self.scaled(size_bytes / carried)

    def beginning(self, window_seconds: float, seed: int) -> Trace:
        """The same from a moment drawn at random, after which the link is not as good as dead for that long."""
        random = np.random.default_rng(seed)
        for offset in random.uniform(0.0, self.seconds, _WINDOWS).tolist():
            found = Trace(self.name, self.lengths, self.rates, offset)
            if found.carried(0.0, window_seconds) >= _MIN_SHARE * self.mean_rate * window_seconds:
                return found
        return self

    def change(self, window_seconds: float) -> float:
        """How much its rate changes in a window: its fastest tenth over its slowest."""
        edges = np.linspace(0.0, window_seconds, 11)
        rates = np.diff([self.carried(0.0, float(edge)) for edge in edges])
        return float(rates.max() / max(rates.min(), _EVEN * rates.max()))

    @cached_property
    def _times(self) -> Floats:
        """[rates + 1]"""
        return np.concatenate([[0.0], np.cumsum(self.lengths)])

    @cached_property
    def _carried(self) -> Floats:
        """[rates + 1] the bytes until each time."""
        return np.concatenate([[0.0], np.cumsum(self.lengths * self.rates)])

    def _until(self, place: float) -> float:
        rounds, rest = divmod(place, self.seconds)
        return float(rounds * self._carried[-1] + np.interp(rest, self._times, self._carried))


def read_trace(path: Path) -> Trace:
    """A trace from a file. Raises `InvalidSetting`, which names the line."""
    times, rates = _read(path)
    lengths = np.diff(times)
    try:
        if not len(lengths):
            raise ValueError("it has fewer than two lines")
        return Trace(path.stem, np.append(lengths, np.median(lengths)), np.array(rates))
    except ValueError as error:
        raise InvalidSetting(f"{path} is no trace: {error}.") from None


def _read(path: Path) -> tuple[list[float], list[float]]:
    """Moments, and bytes a second."""
    times, rates = [], []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                times.append(float(row["time_s"]))
                rates.append(float(row["mbps"]) * BYTES_PER_MEGABIT)
            except (KeyError, TypeError, ValueError):
                raise InvalidSetting(f"{path}, line {number} is not `time_s,mbps`.") from None
    return times, rates


def read_traces(folder: Path, max_count: int, seed: int) -> list[Trace]:
    """Traces of a folder, or of its folders in turn, drawn at random; those over which nothing comes are passed over.

    Raises `InvalidSetting`.
    """
    if not folder.is_dir():
        raise InvalidSetting(f"--traces {folder} is not a folder. Give one with .csv files of time_s,mbps.")
    families = [sorted(place.glob("*.csv")) for place in (folder, *sorted(p for p in folder.iterdir() if p.is_dir()))]
    random = np.random.default_rng(seed)
    drawn = [[family[n] for n in random.permutation(len(family))] for family in families if family]
    turns = [
        path for turn in range(max(map(len, drawn), default=0)) for path in (f[turn] for f in drawn if turn < len(f))
    ]
    found: list[Trace] = []
    for path in turns:
        if len(found) == max_count:
            break
        if any(_read(path)[1]):
            found.append(read_trace(path))
    if not found:
        raise InvalidSetting(f"--traces {folder} has no .csv file of time_s,mbps over which anything comes.")
    return found


def made_trace(name: str, seconds: float, seed: int) -> Trace:
    """A link made by code, one of `MADE`. What changes does so within `seconds`, in which something shall come."""
    noise = np.random.default_rng(seed).lognormal(0.0, 0.8, 400)
    parts = {  # shares of that time, and how fast the link is then
        "constant": [(1.0, 1.0)],
        "step down": [(0.4, 4.0), (20.0, 1.0)],
        "step up": [(0.4, 1.0), (20.0, 4.0)],
        "noisy": [(0.05, rate) for rate in noise.tolist()],
        "outage": [(0.2, 1.0), (0.3, 0.0), (20.0, 1.0)],
    }[name]
    shares, rates = np.array(parts).T
    return Trace(name, shares * seconds, rates * 1e6)
