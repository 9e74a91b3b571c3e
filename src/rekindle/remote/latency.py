"""How fast the link is and how long a layer takes: the inputs of the schedule.

`Bandwidth` is a window over the last transfers; before the first of a run, what earlier runs measured counts.
`Roofline` predicts the seconds of a layer from three coefficients, none negative. `LayerCosts` collects timings while a
session runs, fits a roofline when it ends, and stores it for this model on this machine.
"""

from __future__ import annotations

import math
import platform
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle.cache.cost import machine_and_model, number_rows
from rekindle.core.cells import CellGrid
from rekindle.core.identity import digest_of_fields
from rekindle.engine.base import Engine
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder

MIN_BANDWIDTH = 1.0  # bytes a second: speed of a dead link, to avoid dividing by 0
_TRANSFERS = 16  # size of the window
_FADE = 0.9  # weight of a transfer relative to the next newer one
_TELLING = 4  # minimum transfers before one may count as a stall
_STALLED = 4.0  # times slower than the others: a stall, if it is the only one

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TransferSample:
    """`size_bytes` arrived in `seconds`, ending at `at` of a monotonic clock."""

    size_bytes: int
    seconds: float
    at: float


class Bandwidth:
    """A window over the last transfers. Thread-safe."""

    def __init__(self, remembered: float | None = None) -> None:
        """`remembered`: bytes a second in earlier runs, which count until something was measured."""
        self._remembered = remembered
        self._transfers: deque[TransferSample] = deque(maxlen=_TRANSFERS)
        self._lock = threading.Lock()

    def add(self, transfer: TransferSample) -> None:
        """Add a transfer that has ended, also one that failed after some bytes."""
        if transfer.seconds > 0 and transfer.size_bytes >= 0:
            with self._lock:
                self._transfers.append(transfer)

    @property
    def measured_at(self) -> float:
        """When the last transfer ended, on the monotonic clock; long ago if there was none."""
        with self._lock:
            return max((transfer.at for transfer in self._transfers), default=-math.inf)

    @property
    def measured(self) -> float | None:
        """What this run measured, to be remembered."""
        with self._lock:
            window = list(self._transfers)
        return _rate(_without_stall(window)) if window else None

    def bytes_per_second(self, underway: TransferSample | None = None) -> float | None:
        """Speed of the link while in use; None if nothing was ever measured.

        Pauses do not count, and parallel transfers count once. A single transfer far slower than the others is left out
        as a stall. `underway` is an unfinished transfer: it counts as soon as it is slower than the others, so the
        bandwidth of a dying link drops quickly.
        """
        with self._lock:
            window = list(self._transfers)
        rate = self._remembered if (measured := self.measured) is None else measured
        if underway is not None and underway.seconds > 0:
            now = max(MIN_BANDWIDTH, underway.size_bytes / underway.seconds)
            typical = np.median([transfer.seconds for transfer in window]) if window else 0.0
            if rate is None:
                return now if underway.size_bytes else None
            if underway.seconds > _STALLED * typical:
                return min(rate, max(now, rate * _STALLED * typical / underway.seconds))
        return rate


def _rate(transfers: Sequence[TransferSample]) -> float:
    """Bytes per busy second, newer transfers weighted more."""
    size = busy = 0.0
    taken: list[tuple[float, float]] = []  # disjoint busy intervals, latest last
    for transfer in sorted(transfers, key=lambda transfer: transfer.at):
        start, stop = transfer.at - transfer.seconds, transfer.at
        alone = transfer.seconds
        while taken and taken[-1][1] >= start:
            first, last = taken.pop()
            alone -= last - max(first, start)
            start = min(start, first)
        taken.append((start, stop))
        size, busy = _FADE * size + transfer.size_bytes, _FADE * busy + max(0.0, alone)
    return max(MIN_BANDWIDTH, size / max(busy, 1e-9))


def _without_stall(transfers: list[TransferSample]) -> list[TransferSample]:
    """All transfers but the slowest, if it alone is far slower than the rest."""
    if len(transfers) < _TELLING:
        return transfers
    slowest = max(transfers, key=lambda transfer: transfer.seconds / (transfer.size_bytes + 1))
    others = [transfer for transfer in transfers if transfer is not slowest]
    return others if _rate([slowest]) * _STALLED < min(_rate([other]) for other in others) else transfers


_MAX_LINKS, _MAX_RUNS = 64, 8  # remembered: links, and runs of each
_DAY_SECONDS, _MAX_AGE_DAYS = 24 * 3600.0, 30.0
_FADE_A_DAY = 0.5  # weight of a run, relative to one that is a day newer


def recall_bandwidth(origin: str) -> float | None:
    """Bytes a second from an origin in earlier runs on this machine, newer ones weighted more; None if nothing is
    known, or nothing newer than a month."""
    logs, weights = [], []
    for rate, at in _runs(_links().recall(_link(origin))):
        days = (time.time() - at) / _DAY_SECONDS
        if 0 <= days <= _MAX_AGE_DAYS:
            logs.append(math.log(rate))
            weights.append(_FADE_A_DAY**days)
    return math.exp(float(np.average(logs, weights=weights))) if logs else None


def remember_bandwidth(origin: str, bandwidth: Bandwidth) -> None:
    """Keep what this run measured, if anything."""
    if (rate := bandwidth.measured) is not None:
        runs = [*_runs(_links().recall(_link(origin))), (rate, time.time())]
        _links().keep(_link(origin), runs[-_MAX_RUNS:])


def _runs(remembered: object) -> list[tuple[float, float]]:
    """Rate and time of each run; what is damaged is left out."""
    rows = number_rows(remembered, 2)
    return [(float(rate), float(at)) for rate, at in rows if MIN_BANDWIDTH <= rate < 1e15 and 0 <= at < 1e15]


def _link(origin: str) -> str:
    return digest_of_fields(platform.node(), origin)


def _links() -> JsonMemo:
    return JsonMemo(home_folder() / "links.json", _MAX_LINKS)


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """Seconds that one layer took for `tokens` new tokens after `context` others."""

    tokens: int
    context: int
    seconds: float


class LayerModel(Protocol):
    """Predicts how long a layer takes."""

    def predict(self, tokens: int, context: int) -> float:
        """The seconds of one layer."""


def _pairs(tokens: float, context: float) -> float:
    return tokens * (context + tokens / 2)


@dataclass(frozen=True)
class Roofline:
    """`fixed + per_token * n + per_pair * n * (c + n / 2)`: weights are read, tokens projected, pairs attend."""

    fixed: float
    per_token: float
    per_pair: float

    @classmethod
    def fit(cls, samples: Sequence[LayerTiming]) -> Roofline:
        """The non-negative coefficients with the least relative error. Raises `ValueError` without samples."""
        if not samples:
            raise ValueError("nothing to fit")
        rows = [(1.0, s.tokens, _pairs(s.tokens, s.context), s.seconds) for s in samples]
        return cls(*fit(rows))

    def predict(self, tokens: int, context: int) -> float:
        """The seconds of one layer."""
        return self.fixed + self.per_token * tokens + self.per_pair * _pairs(tokens, context)

    @classmethod
    def recalled(cls, remembered: object) -> Roofline | None:
        """From stored coefficients; None if they are invalid."""
        try:
            fixed, per_token, per_pair = map(float, remembered)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            return None
        sound = all(0 <= c < math.inf for c in (fixed, per_token, per_pair))
        return cls(fixed, per_token, per_pair) if sound else None


def fit(measurements: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The non-negative coefficients with the least relative error; a measurement is its features and the seconds.

    With three features, trying every subset of them is the simplest way to the best answer without negative ones.
    """
    rows = np.array(measurements, dtype=np.float64)
    scaled, width = rows[:, :-1] / rows[:, -1:], rows.shape[1] - 1
    best, coefficients = math.inf, np.zeros(width)
    # As many coefficients as there are different measurements, and the plain rate (the second) before the others.
    for count in range(1, min(width, len({row[:-1] for row in measurements})) + 1):
        for chosen in sorted(combinations(range(width), count), key=lambda some: 1 not in some):
            found = np.linalg.lstsq(scaled[:, chosen], np.ones(len(rows)), rcond=None)[0]
            error = float(np.square(scaled[:, chosen] @ found - 1).sum())
            if (found >= 0).all() and error < best - 1e-12:
                best, coefficients = error, np.zeros(width)
                coefficients[list(chosen)] = found
    return tuple(coefficients.tolist())


def cell_seconds(model: LayerModel, cells: CellGrid) -> Floats:
    """[chunks, layers] seconds of each cell, all layers alike."""
    rows = [model.predict(len(span), span.start) for span in cells.spans]
    return np.repeat(np.array(rows)[:, None], cells.layers, axis=1)


_MAX_MODELS = 64  # pairs of machine and model
_MAX_SAMPLES, _MIN_SAMPLES = 400, 25
_NEWS = 0.2  # share of samples that must be new for another fit


class LayerCosts:
    """Layer timings of this model on this machine. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._name = machine_and_model(engine)
        known = _remembered().recall(self._name)
        known = known if isinstance(known, dict) else {}
        self.model = Roofline.recalled(known.get("roofline"))
        self._samples = deque(_samples(known.get("samples")), maxlen=_MAX_SAMPLES)
        self._new = 0
        self._lock = threading.Lock()

    def learn(self, samples: Iterable[LayerTiming]) -> None:
        with self._lock:
            new = [sample for sample in samples if sample.seconds > 0]
            self._samples.extend(new)
            self._new += len(new)

    def seconds(self, cells: CellGrid) -> Floats | None:
        """[chunks, layers] seconds of each cell; None while unknown."""
        return None if self.model is None else cell_seconds(self.model, cells)

    def close(self) -> None:
        """Fit and store a roofline for the next run, if there are enough new timings."""
        with self._lock:
            samples, new = list(self._samples), self._new
            self._new = 0
        if len(samples) < _MIN_SAMPLES or new < _NEWS * len(samples):
            return
        self.model = Roofline.fit(samples)
        numbers = [[sample.tokens, sample.context, sample.seconds] for sample in samples]
        _remembered().keep(self._name, {"roofline": astuple(self.model), "samples": numbers})


def _samples(remembered: object) -> list[LayerTiming]:
    rows = [row for row in number_rows(remembered, 3) if row[0] > 0 and row[1] >= 0 and row[2] > 0]
    return [LayerTiming(int(tokens), int(context), float(seconds)) for tokens, context, seconds in rows]


def _remembered() -> JsonMemo:
    return JsonMemo(home_folder() / "layers.json", _MAX_MODELS)
