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

import math
import os
import platform
import threading
import time
from collections import Counter, deque
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
from rekindle.machine import home_folder, usable_cores

_MACHINES_AND_MODELS = 64  # whose costs are remembered

_MEASUREMENTS = 48  # number of the last ones of each kind
_FADE = 0.97  # each is worth this share of the next newer one
_TELLING_BYTES = 1 << 20  # the time of a smaller load does not depend on its size
_MAX_AGE_SECONDS = 30 * 24 * 3600.0  # older ones are not remembered
_HOPE = 0.7  # after each refusal, the next time is expected to take this share of the estimate
_MAX_PATIENCE = 64  # refusals that count as one
_CHANGED = 2.0  # times slower or faster than the others say: the machine has changed
_NO_DOUBT, _DOUBT = 0.999, 0.5  # how much less error another answer must have
_SIZES_APART = 4.0  # the largest measurement must be this many times the smallest to tell a fixed cost from the rest

# The prior: computing as on a fast machine (two cores reach 2.1e11 FLOP/s with float32, an H200 5.8e14 with bfloat16),
# loads as on a slow one (46 MB take two cores 6 ms from memory and 24 ms from disk; 1 GB takes an H200 25 and 70 ms,
# and 450 ms coded).
_CORE_FLOP, _ACCELERATOR_FLOP = 1e11, {4: 5e13, 2: 5e14, 1: 5e14}  # a second; of an accelerator by bytes of a number
_CPU_WEIGHT_BYTES, _ACCELERATOR_WEIGHT_BYTES = 2e10, 3e12  # a second
_LOADS: dict[Tier, tuple[float, float]] = {
    "memory": (2e-3, 4e9), "disk": (5e-3, 1e9), "coded": (1e-2, 3e8), "redis": (5e-3, 1e8), "s3": (1e-1, 5e7),
}  # fmt: skip
_DEVICE_LOADS: dict[Tier, tuple[float, float]] = {
    "memory": (5e-3, 2e10), "disk": (2e-2, 5e9), "coded": (6e-2, 1.5e9), "redis": (2e-2, 1e9), "s3": (1e-1, 5e8),
}  # fmt: skip
_CHUNKS, _ACCELERATOR_CHUNKS = (5e-3, 1.5), (2.5e-2, 1.5)
_FEW_TOKENS = 32.0  # a prefill of these shows what a single token costs
_STEP_TIMES = 4.0  # longer a token than in a prefill: products of a few rows are slow
_WIDTHS: dict[str, int] = {"compute": 3, **dict.fromkeys(_LOADS, 2), "chunks": 2, "step": 3}  # features of each kind


@dataclass(frozen=True)
class Rates:
    """The coefficients at one moment."""

    compute: tuple[float, ...]  # fixed, per token, per pair
    load: Mapping[Tier, tuple[float, ...]]  # fixed, per byte
    chunks: tuple[float, ...] = (0.0, 1.0)  # fixed, times the seconds of loads and passes
    step: tuple[float, ...] = (1.0, 0.0, 0.0)  # fixed, per token, per pair: when a reply is decoded

    def compute_seconds(self, span: Span) -> float:
        """The time to compute a span whose predecessors are present."""
        return _sum(self.compute, _work(span))

    def work_seconds(self, tokens: int, pairs: float) -> float:
        """The time to compute `tokens` tokens anywhere that attend to `pairs` others in all."""
        return _sum(self.compute, (1.0, float(tokens), pairs))

    def load_seconds(self, tier: Tier, size_bytes: int) -> float:
        """The time to load `size_bytes`. What is in the engine already costs nothing."""
        return 0.0 if tier == "engine" else _sum(self.load[tier], (1.0, float(size_bytes)))

    def loads_seconds(self, loads: Iterable[tuple[Tier, int]]) -> float:
        """The time of several loads, each a tier and a number of bytes. What comes from one tier is one load, as it was
        when it was measured: a further piece costs its bytes."""
        sizes: Counter[Tier] = Counter()
        for tier, size_bytes in loads:
            sizes[tier] += size_bytes
        return sum(self.load_seconds(*load) for load in sizes.items())

    def step_seconds(self, span: Span) -> float:
        """The time of a step that decodes one token of a reply, or verifies a draft."""
        return _sum(self.step, _work(span))

    def chunk_seconds(self, parts_seconds: float) -> float:
        """The time of a prompt that reuses chunks, by that of its loads and passes."""
        return _sum(self.chunks, (1.0, parts_seconds))


FREE = Rates((0.0, 1e-6, 0.0), dict.fromkeys(_LOADS, (0.0, 0.0)), (0.0, 0.0))


def prior_rates(engine: Engine) -> Rates:
    """The expected costs before anything was measured."""
    on_cpu, number_bytes = engine.device == "cpu", engine.layout.numpy_dtype.itemsize
    flop = _CORE_FLOP * usable_cores() if on_cpu else _ACCELERATOR_FLOP[number_bytes]
    weights = engine.parameters * number_bytes / (_CPU_WEIGHT_BYTES if on_cpu else _ACCELERATOR_WEIGHT_BYTES)
    loads = _LOADS if on_cpu else _DEVICE_LOADS
    if not engine.capabilities.decodes:
        loads = {**loads, "coded": _LOADS["coded"]}
    load = {tier: (fixed, 1 / speed) for tier, (fixed, speed) in loads.items()}
    compute = (weights, 2 * engine.parameters / flop, 4 * engine.attention / flop)
    step = (weights, *(_STEP_TIMES * rate for rate in compute[1:]))
    return Rates(compute, load, _CHUNKS if on_cpu else _ACCELERATOR_CHUNKS, step)


class _Kind:
    """The last measurements of one kind, and how often it was refused since the last one."""

    def __init__(self, rows: Iterable[tuple[float, ...]]) -> None:
        self.rows = deque(rows, maxlen=_MEASUREMENTS)  # features, seconds, when
        self.refusals, self._patience = 0, 1

    @property
    def measurements(self) -> list[tuple[float, ...]]:
        return [row[:-1] for row in self.rows]

    def add(self, features: tuple[float, ...], seconds: float) -> None:
        """Add a measurement. One that is more than twice or less than half of what the others say shows that the
        machine has changed, and they are scaled: to what is possible now, or half way to what may be a busy moment."""
        self.rows.append((*features, seconds, time.time()))
        change = _change(self.measurements)
        if self.refusals:  # this was a try
            self.refusals, self._patience = 0, 1 if change < 1 / _CHANGED else min(2 * self._patience, _MAX_PATIENCE)
        if not 1 / _CHANGED <= change <= _CHANGED:
            scale, newest = min(change, math.sqrt(change)), self.rows.pop()
            scaled = [(*row[:-2], row[-2] * scale, row[-1]) for row in self.rows]
            self.rows = deque((*filter(_is_sound, scaled), newest), maxlen=_MEASUREMENTS)

    def tried(self) -> None:
        """It was tried, and there was nothing to measure."""
        if self.refusals:
            self.refusals, self._patience = 0, min(2 * self._patience, _MAX_PATIENCE)

    def hoped(self, rates: tuple[float, ...]) -> tuple[float, ...]:
        """The rates, less for every refusal: what is never tried is never measured again. Every try that changes
        nothing makes the next one half as likely."""
        return tuple(rate * _HOPE ** (self.refusals / self._patience) for rate in rates)


class Costs:
    """Takes measurements, gives rates. Used from several threads."""

    def __init__(self, prior: Rates, remembered: Any = None) -> None:
        """`remembered` is what `as_json` gave in an earlier run; anything else is ignored, and what is too old."""
        self._lock = threading.Lock()
        self._prior = prior
        self._rates: Rates | None = None
        known = remembered if isinstance(remembered, dict) else {}
        self._kinds = {name: _Kind(_sound(known.get(name), width)) for name, width in _WIDTHS.items()}

    def computed(self, span: Span, seconds: float) -> None:
        """Record the time that a span of a prompt took to compute."""
        self._add("compute", _work(span), seconds)

    def stepped(self, span: Span, seconds: float) -> None:
        """Record the time of a step of a reply: one token, or a draft that was verified."""
        self._add("step", _work(span), seconds)

    def loaded(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """Record the time that a load took."""
        self._add(tier, (1.0, float(size_bytes)), seconds)

    def reused_chunks(self, parts_seconds: float, seconds: float) -> None:
        """Record the time of a prompt that reused chunks, whose loads and passes were expected to take that long."""
        self._add("chunks", (1.0, parts_seconds), seconds)

    def refused(self, kinds: Iterable[str]) -> None:
        """Record that something was not done, because computing seemed faster."""
        with self._lock:
            for kind in kinds:
                self._kinds[kind].refusals += 1
                self._rates = None

    def tried(self, kinds: Iterable[str]) -> None:
        """Record that something was tried and brought nothing."""
        with self._lock:
            for kind in kinds:
                self._kinds[kind].tried()
                self._rates = None

    @property
    def rates(self) -> Rates:
        """The coefficients by the measurements so far, and by the prior where there are none."""
        with self._lock:
            if self._rates is None:
                prior, kinds = self._prior, self._kinds
                self._rates = Rates(
                    fit_or_scale(prior.compute, [*kinds["compute"].measurements, *self._single_tokens()]),
                    {
                        tier: kinds[tier].hoped(fit_load(known, kinds[tier].measurements))
                        for tier, known in prior.load.items()
                    },
                    kinds["chunks"].hoped(fit_or_scale(prior.chunks, kinds["chunks"].measurements)),
                    fit_or_scale(prior.step, kinds["step"].measurements),
                )
            return self._rates

    def _single_tokens(self) -> list[tuple[float, ...]]:
        """A decoded token, where no prefill was as short: what one token costs to compute after a load.

        Of long prefills alone, measured while a machine became busy, the shorter may have taken longer: then all of it
        seemed to be a fixed cost, which no load could save.
        """
        shortest = min((row[1] for row in self._kinds["compute"].measurements), default=0.0)
        tokens = [row for row in self._kinds["step"].measurements if row[1] == 1.0]
        return [sorted(tokens, key=lambda row: row[-1])[len(tokens) // 2]] if tokens and shortest > _FEW_TOKENS else []

    def as_json(self) -> dict[str, list[tuple[float, ...]]]:
        """Everything measured, for `Costs(...)` of a later run."""
        with self._lock:
            return {name: list(kind.rows) for name, kind in self._kinds.items()}

    def _add(self, kind: str, features: tuple[float, ...], seconds: float) -> None:
        if _is_sound((*features, seconds, 0.0)):
            with self._lock:
                self._kinds[kind].add(features, seconds)
                self._rates = None


class AlwaysReuse(Costs):
    """Everything but computing is free, so whatever is stored is reused: calibration measures what that does."""

    def __init__(self) -> None:
        super().__init__(FREE)

    def loaded(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """Ignored."""

    def reused_chunks(self, parts_seconds: float, seconds: float) -> None:
        """Ignored."""

    def stepped(self, span: Span, seconds: float) -> None:
        """Ignored."""

    def refused(self, kinds: Iterable[str]) -> None:
        """Ignored."""


def fit(measurements: Sequence[tuple[float, ...]], fade: float = _FADE, doubt: float = _DOUBT) -> tuple[float, ...]:
    """The non-negative coefficients with the least relative error; none for no measurements.

    A measurement is its features and the seconds; each is worth `fade` of the next newer one. An answer without the
    second feature must have `doubt` of the error of the others. With three features at most, trying every subset of
    them is the simplest way to the best answer without negative ones.
    """
    if not measurements:
        return ()
    rows = np.array(measurements, dtype=np.float64)
    features, seconds = rows[:, :-1], rows[:, -1]
    weights = np.sqrt(fade ** np.arange(len(rows))[::-1]) / seconds
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
            better = _NO_DOUBT if 1 in chosen else doubt
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


def _change(measurements: Sequence[tuple[float, ...]]) -> float:
    """How many times longer the last one took than the others did, for its size."""
    if len(measurements) < 2:
        return 1.0
    rows = np.array(measurements, dtype=np.float64)
    times = rows[:, -1] / (rows[:, :-1] @ np.array(fit(measurements)))
    return float(times[-1] / np.median(times[:-1]))


def _work(span: Span) -> tuple[float, float, float]:
    count = len(span)
    return 1.0, float(count), count * (span.start + count / 2)


def _sum(coefficients: Sequence[float], features: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(coefficients, features, strict=True))


def _sound(rows: object, width: int) -> list[tuple[float, ...]]:
    """The remembered measurements that make sense and are not too old."""
    sound, now = filter(_is_sound, number_rows(rows, width + 2)), time.time()
    return [tuple(map(float, row)) for row in sound if 0 <= now - row[-1] <= _MAX_AGE_SECONDS]


def number_rows(remembered: object, width: int) -> list[tuple[float, ...]]:
    """The rows of `width` numbers in something that was remembered; whatever else is in it is left out."""
    rows = [tuple(row) for row in remembered if isinstance(row, list)] if isinstance(remembered, list) else []
    return [row for row in rows if len(row) == width and all(isinstance(number, int | float) for number in row)]


def _is_sound(row: Sequence[float]) -> bool:
    """Whether this can be a measurement: no step takes a day, or less than a nanosecond."""
    *features, seconds, when = row
    return 1e-9 < seconds < 1e5 and all(0 < feature < 1e15 for feature in features) and 0 <= when < 1e15


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
