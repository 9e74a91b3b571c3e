"""What things cost on this machine with this model: measured while working, remembered between runs.

Computing `n` tokens after `c` others takes `fixed + per_token * n + per_pair * n * (c + n / 2)` seconds: weights are
read once, each token is projected, each pair of tokens attends. Bringing KV takes `fixed + per_byte * bytes`, by tier;
what is coded is counted as large as it is when it is decoded.
The coefficients are fitted to the last measurements, never negative, small errors on short steps counting as much as
large ones on long steps.
"""

from __future__ import annotations

import os
import platform
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from rekindle.core.identity import digest_of_fields
from rekindle.core.kv import Span
from rekindle.core.plan import Tier
from rekindle.engine.base import Engine
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder

_MACHINES_AND_MODELS = 64  # whose costs are remembered

_MEASUREMENTS = 48  # number of the last ones of each kind
_FADE = 0.97  # each is worth this share of the next newer one
_TELLING_BYTES = 1 << 20  # the time of a smaller load does not depend on its size
_HOPE = 0.7  # after each refused load, the next is expected to take this share of the estimate
_CHANGED = 2.0  # a load this many times faster than expected shows that the measurements are outdated
_NO_DOUBT, _DOUBT = 0.999, 0.5  # how much less error another answer must have


@dataclass(frozen=True)
class Rates:
    """The coefficients at one moment; empty where nothing was measured yet."""

    compute: tuple[float, ...] = ()  # fixed, per token, per pair
    load: Mapping[Tier, tuple[float, ...]] = field(default_factory=dict)  # fixed, per byte

    def compute_seconds(self, span: Span) -> float | None:
        """The time to compute a span whose predecessors are present; None while unknown."""
        return None if not self.compute else _sum(self.compute, _work(span))

    def work_seconds(self, tokens: int, pairs: float) -> float | None:
        """The time to compute `tokens` tokens anywhere that attend to `pairs` others in all."""
        return None if not self.compute else _sum(self.compute, (1.0, float(tokens), pairs))

    def load_seconds(self, tier: Tier, size_bytes: int) -> float | None:
        """The time to load `size_bytes`; None while unknown. What is in the engine already costs nothing."""
        if tier == "engine":
            return 0.0
        known = self.load.get(tier)
        return None if known is None else _sum(known, (1.0, float(size_bytes)))


class Costs:
    """Takes measurements, gives rates. Used from several threads."""

    def __init__(self, remembered: Any = None) -> None:
        """`remembered` is what `as_json` gave in an earlier run; anything else is ignored."""
        self._lock = threading.Lock()
        self._kinds: dict[str, deque[tuple[float, ...]]] = {}
        self._rates: Rates | None = None
        self._refusals: dict[str, int] = {}  # of loads by tier, since the last one
        for name, width in (("compute", 4), ("memory", 3), ("disk", 3), ("coded", 3)):
            known = remembered.get(name) if isinstance(remembered, dict) else None
            self._kinds[name] = deque(_sound(known, width), maxlen=_MEASUREMENTS)

    def computed(self, span: Span, seconds: float) -> None:
        """Record the time that a span took to compute."""
        self._add("compute", (*_work(span), seconds))

    def loaded(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """Record the time that a load took."""
        with self._lock:
            known = fit_load(self._kinds[tier]) if self._refusals.get(tier) else ()
            if known and _sum(known, (1.0, float(size_bytes))) > _CHANGED * seconds:
                self._kinds[tier].clear()  # a machine that was busy then is not now
            self._refusals[tier] = 0
        self._add(tier, (1.0, float(size_bytes), seconds))

    def refused(self, tiers: Iterable[Tier]) -> None:
        """Record that stored KV was not loaded, because computing seemed faster.

        What is never tried is never measured again: with every refusal the next try becomes likelier.
        """
        with self._lock:
            for tier in tiers:
                self._refusals[tier] = self._refusals.get(tier, 0) + 1
                self._rates = None

    @property
    def rates(self) -> Rates:
        """The coefficients fitted to the measurements so far."""
        with self._lock:
            if self._rates is None:
                tiers: tuple[Tier, ...] = ("memory", "disk", "coded")
                fitted = {tier: fit_load(self._kinds[tier]) for tier in tiers}
                load = {
                    tier: tuple(rate * _HOPE ** self._refusals.get(tier, 0) for rate in rates)
                    for tier, rates in fitted.items()
                    if rates
                }
                self._rates = Rates(fit(self._kinds["compute"]), load)
            return self._rates

    def as_json(self) -> dict[str, list[tuple[float, ...]]]:
        """Everything measured, for `Costs(...)` of a later run."""
        with self._lock:
            return {name: list(rows) for name, rows in self._kinds.items()}

    def _add(self, kind: str, measurement: tuple[float, ...]) -> None:
        if _is_sound(measurement):
            with self._lock:
                self._kinds[kind].append(measurement)
                self._rates = None


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


def fit_load(measurements: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The same for loads. While all were tiny, the cost of a byte is unknown: larger ones are worth a try."""
    if measurements and all(row[1] < _TELLING_BYTES for row in measurements):
        return (fit([(1.0, row[-1]) for row in measurements])[0], 0.0)
    return fit(measurements)


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
    return 1e-9 < seconds < 1e5 and all(0 <= feature < 1e15 for feature in features)


def recall_costs(engine: Engine) -> Costs:
    """The costs measured in earlier runs."""
    return Costs(_remembered().recall(machine_and_model(engine)))


def remember_costs(engine: Engine, costs: Costs) -> None:
    """Keep the measurements for later runs."""
    _remembered().keep(machine_and_model(engine), costs.as_json())


def _remembered() -> JsonMemo:
    return JsonMemo(home_folder() / "costs.json", _MACHINES_AND_MODELS)


def machine_and_model(engine: Engine) -> str:
    """The key under which measurements are remembered."""
    identity = engine.identity(engine.regime(1)).digest
    return digest_of_fields(platform.node(), platform.machine(), str(os.cpu_count()), engine.device, identity)
