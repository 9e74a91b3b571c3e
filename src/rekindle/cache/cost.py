"""What things cost on this machine with this model: measured while working, remembered between runs.

Computing `n` tokens after `c` others takes `fixed + per_token * n + per_pair * n * (c + n / 2)` seconds: weights are
read once, each token is projected, each pair of tokens attends. Bringing KV takes `fixed + per_byte * bytes`, by tier;
what is coded is counted as large as it is when it is decoded. A prompt with passages of other prompts takes
`fixed + times * seconds` of its loads and passes: rotating keys, choosing tokens and reading attention take time, too.
Before anything was measured, a prior decides: guesses from the model's size and the device, at which computing is fast
and loading slow. Measurements of about one size scale the prior; with others the coefficients are fitted to the last
measurements, never negative, small errors on short steps counting as much as large ones on long steps.
"""

from __future__ import annotations

import os
import platform
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from rekindle.core.identity import digest_of_fields
from rekindle.core.kv import Span
from rekindle.core.plan import Tier
from rekindle.engine.base import Engine
from rekindle.json_file import JsonMemo
from rekindle.machine import count_cores, home_folder

_MACHINES_AND_MODELS = 64  # whose costs are remembered

_MEASUREMENTS = 48  # number of the last ones of each kind
_FADE = 0.97  # each is worth this share of the next newer one
_TELLING_BYTES = 1 << 20  # the time of a smaller load does not depend on its size
_HOPE = 0.7  # after each refused load, the next is expected to take this share of the estimate
_CHANGED = 2.0  # a load this many times faster than expected shows that the measurements are outdated
_NO_DOUBT, _DOUBT = 0.999, 0.5  # how much less error another answer must have
_SIZES_APART = 4.0  # the largest measurement must be this many times the smallest to tell a fixed cost from the rest

# The prior: computing as on a fast machine (two cores reach 2.1e11 FLOP/s with float32, an H200 5.8e14 with bfloat16),
# loads as on a slow one (46 MB take two cores 6 ms from memory and 24 ms from disk; 24 MB take an H200 23 ms).
_CORE_FLOP, _ACCELERATOR_FLOP = 1e11, {4: 5e13, 2: 5e14, 1: 5e14}  # a second; of an accelerator by bytes of a number
_CPU_WEIGHT_BYTES, _ACCELERATOR_WEIGHT_BYTES = 2e10, 3e12  # a second
_LOADS: dict[Tier, tuple[float, float]] = {"memory": (2e-3, 4e9), "disk": (5e-3, 1e9), "coded": (1e-2, 3e8)}
_ACCELERATOR_SECONDS = 2e-2  # more until a load begins
_CHUNKS = 5e-3, 1.5


@dataclass(frozen=True)
class Rates:
    """The coefficients at one moment."""

    compute: tuple[float, ...]  # fixed, per token, per pair
    load: Mapping[Tier, tuple[float, ...]]  # fixed, per byte
    chunks: tuple[float, ...] = (0.0, 1.0)  # fixed, times the seconds of loads and passes

    def compute_seconds(self, span: Span) -> float:
        """The time to compute a span whose predecessors are present."""
        return _sum(self.compute, _work(span))

    def work_seconds(self, tokens: int, pairs: float) -> float:
        """The time to compute `tokens` tokens anywhere that attend to `pairs` others in all."""
        return _sum(self.compute, (1.0, float(tokens), pairs))

    def load_seconds(self, tier: Tier, size_bytes: int) -> float:
        """The time to load `size_bytes`. What is in the engine already costs nothing."""
        return 0.0 if tier == "engine" else _sum(self.load[tier], (1.0, float(size_bytes)))

    def chunk_seconds(self, parts_seconds: float) -> float:
        """The time of a prompt that reuses chunks, by that of its loads and passes."""
        return _sum(self.chunks, (1.0, parts_seconds))


FREE = Rates((0.0, 1e-6, 0.0), dict.fromkeys(_LOADS, (0.0, 0.0)), (0.0, 0.0))


def prior_rates(engine: Engine) -> Rates:
    """The expected costs before anything was measured."""
    on_cpu, number_bytes = engine.device == "cpu", engine.layout.numpy_dtype.itemsize
    flop = _CORE_FLOP * count_cores() if on_cpu else _ACCELERATOR_FLOP[number_bytes]
    weights = engine.parameters * number_bytes / (_CPU_WEIGHT_BYTES if on_cpu else _ACCELERATOR_WEIGHT_BYTES)
    begin = 0.0 if on_cpu else _ACCELERATOR_SECONDS
    load = {tier: (begin + fixed, 1 / speed) for tier, (fixed, speed) in _LOADS.items()}
    chunks = (begin + _CHUNKS[0], _CHUNKS[1])
    return Rates((weights, 2 * engine.parameters / flop, 4 * engine.attention / flop), load, chunks)


class Costs:
    """Takes measurements, gives rates. Used from several threads."""

    def __init__(self, prior: Rates, remembered: Any = None) -> None:
        """`remembered` is what `as_json` gave in an earlier run; anything else is ignored."""
        self._lock = threading.Lock()
        self._prior = prior
        self._kinds: dict[str, deque[tuple[float, ...]]] = {}
        self._rates: Rates | None = None
        self._refusals: dict[str, int] = {}  # by kind, since the last time
        for name, width in (("compute", 4), ("memory", 3), ("disk", 3), ("coded", 3), ("chunks", 3)):
            known = remembered.get(name) if isinstance(remembered, dict) else None
            self._kinds[name] = deque(_sound(known, width), maxlen=_MEASUREMENTS)

    def computed(self, span: Span, seconds: float) -> None:
        """Record the time that a span took to compute."""
        self._add("compute", (*_work(span), seconds))

    def loaded(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """Record the time that a load took."""
        with self._lock:
            known = fit_load(self._prior.load[tier], self._kinds[tier])
            if self._refusals.get(tier) and _sum(known, (1.0, float(size_bytes))) > _CHANGED * seconds:
                self._kinds[tier].clear()  # a machine that was busy then is not now
            self._refusals[tier] = 0
        self._add(tier, (1.0, float(size_bytes), seconds))

    def reused_chunks(self, parts_seconds: float, seconds: float) -> None:
        """Record the time of a prompt that reused chunks, whose loads and passes were expected to take that long."""
        with self._lock:
            self._refusals["chunks"] = 0
        self._add("chunks", (1.0, parts_seconds, seconds))

    def refused(self, kinds: Iterable[str]) -> None:
        """Record that something was not done, because computing seemed faster.

        What is never tried is never measured again: with every refusal the next try becomes likelier.
        """
        with self._lock:
            for kind in kinds:
                self._refusals[kind] = self._refusals.get(kind, 0) + 1
                self._rates = None

    @property
    def rates(self) -> Rates:
        """The coefficients by the measurements so far, and by the prior where there are none."""
        with self._lock:
            if self._rates is None:
                prior, kinds = self._prior, self._kinds
                load = {tier: self._hoped(tier, fit_load(known, kinds[tier])) for tier, known in prior.load.items()}
                chunks = self._hoped("chunks", fit_or_scale(prior.chunks, kinds["chunks"]))
                self._rates = Rates(fit_or_scale(prior.compute, kinds["compute"]), load, chunks)
            return self._rates

    def as_json(self) -> dict[str, list[tuple[float, ...]]]:
        """Everything measured, for `Costs(...)` of a later run."""
        with self._lock:
            return {name: list(rows) for name, rows in self._kinds.items()}

    def _hoped(self, kind: str, rates: tuple[float, ...]) -> tuple[float, ...]:
        """The rates of a kind after what was refused."""
        return tuple(rate * _HOPE ** self._refusals.get(kind, 0) for rate in rates)

    def _add(self, kind: str, measurement: tuple[float, ...]) -> None:
        if _is_sound(measurement):
            with self._lock:
                self._kinds[kind].append(measurement)
                self._rates = None


class AlwaysReuse(Costs):
    """Everything but computing is free, so whatever is stored is reused: calibration measures what that does."""

    def __init__(self) -> None:
        super().__init__(FREE)

    def loaded(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """Ignored."""

    def reused_chunks(self, parts_seconds: float, seconds: float) -> None:
        """Ignored."""

    def refused(self, kinds: Iterable[str]) -> None:
        """Ignored."""


def fit(measurements: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The non-negative coefficients with the least relative error; none for no measurements.

    A measurement is its features and the seconds. With three features at most, trying every subset of them is the
    simplest way to the best answer without negative ones.
    """
    if not measurements:
        return ()
    rows = np.array(measurements, dtype=np.float64)
    features, seconds = rows[:, :-1], rows[:, -1]
    weights = np.sqrt(_FADE ** np.arange(len(rows))[::-1]) / seconds
    scaled, target = features * weights[:, None], seconds * weights
    width = features.shape[1]
    best: tuple[float, tuple[float, ...]] | None = None
    # As many coefficients as there are different measurements, and the plain rate (the second) before the others.
    most = min(width, len({row[:-1] for row in measurements}))
    for count in range(1, most + 1):
        for chosen in sorted(combinations(range(width), count), key=lambda c: 1 not in c):
            found = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
            error = float(np.square(scaled[:, chosen] @ found - target).sum())
            # More work takes longer: what says otherwise, on a noisy machine, must be much the better answer.
            better = _NO_DOUBT if 1 in chosen else _DOUBT
            if (found >= 0).all() and (best is None or error < best[0] * better - 1e-12):
                coefficients = np.zeros(width)
                coefficients[list(chosen)] = found
                best = error, tuple(coefficients.tolist())
    return best[1] if best is not None else ()


def fit_or_scale(prior: Sequence[float], measurements: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The same, if the measurements differ enough in size (the second feature). Else the prior, scaled to them."""
    sizes = [row[1] for row in measurements]
    if sizes and max(sizes) >= _SIZES_APART * min(sizes):
        return fit(measurements)
    (scale,) = fit([(_sum(prior, row[:-1]), row[-1]) for row in measurements]) or (1.0,)
    return tuple(scale * rate for rate in prior)


def fit_load(prior: Sequence[float], measurements: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The same for loads. While all were tiny, only the prior knows the cost of a byte."""
    if measurements and all(row[1] < _TELLING_BYTES for row in measurements):
        return (fit([(1.0, row[-1]) for row in measurements])[0], prior[1])
    return fit_or_scale(prior, measurements)


def _work(span: Span) -> tuple[float, float, float]:
    count = len(span)
    return 1.0, float(count), count * (span.start + count / 2)


def _sum(coefficients: Sequence[float], features: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(coefficients, features, strict=True))


def _sound(rows: Any, width: int) -> list[tuple[float, ...]]:
    """The remembered measurements that make sense."""
    if not isinstance(rows, list):
        return []
    kept = []
    for row in rows:
        numbers = isinstance(row, list) and all(isinstance(n, (int, float)) for n in row)
        if numbers and len(row) == width and _is_sound(row):
            kept.append(tuple(float(n) for n in row))
    return kept


def _is_sound(measurement: Sequence[float]) -> bool:
    """Whether this can be a measurement: no step takes a day, or less than a nanosecond."""
    *features, seconds = measurement
    return 1e-9 < seconds < 1e5 and all(0 < feature < 1e15 for feature in features)


def recall_costs(engine: Engine) -> Costs:
    """The costs measured in earlier runs."""
    return Costs(prior_rates(engine), _remembered().recall(machine_and_model(engine)))


def remember_costs(engine: Engine, costs: Costs) -> None:
    """Keep the measurements for later runs."""
    measured = costs.as_json()
    if any(measured.values()):
        _remembered().keep(machine_and_model(engine), measured)


def _remembered() -> JsonMemo:
    return JsonMemo(home_folder() / "costs.json", _MACHINES_AND_MODELS)


def machine_and_model(engine: Engine) -> str:
    """The key under which measurements are remembered."""
    identity = engine.identity(engine.regime(1)).digest
    return digest_of_fields(platform.node(), platform.machine(), str(os.cpu_count()), engine.device, identity)
