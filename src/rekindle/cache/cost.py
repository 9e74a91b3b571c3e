"""What things cost on this machine with this model: measured while working, remembered between runs.

Every cost is a formula times a measured number. The formula says how it grows: computing `n` tokens after `c` others is
`fixed + per_token * n + per_pair * n * (c + n / 2)`, a load is `fixed + per_byte * bytes`. The number is the median of
how many times longer than that the last twelve of about the same size took. Each is timed where it happens, by a clock
of its own, and no single stall counts, wherever it happens.

What was measured may refuse a load only while it is young: three of about its size, one of them in the last ten
minutes. Otherwise the formula counts, with the speed at which a probe read (`store/probe`), and loads from memory and
disk are tried. None of them is ever expected to take more than ten times what the probe took.
"""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from rekindle.core.identity import digest_of_fields
from rekindle.core.kv import Span
from rekindle.core.plan import Tier
from rekindle.engine.base import Engine
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder, usable_cores
from rekindle.store.probe import ReadSpeeds

_REMEMBERED = 64  # machines and models
_LAST, _FEWEST = 12, 3  # measurements of one kind and size: the most that are kept, and how many may refuse
_YOUNG_SECONDS = 600.0  # older ones refuse nothing either
_CURRENT_SECONDS = 1.0  # how long rates are, unless something is measured
_MAX_AGE_SECONDS = 30 * 24 * 3600.0  # older ones are not remembered
_SLOWEST = 10.0  # times what a probe takes
_LEAST_BYTES = 4 << 20  # the time of a smaller load is mostly that of what happens around it

# Computing as on a fast machine (two cores reach 2.1e11 FLOP/s with float32, an H200 5.8e14 with bfloat16).
_CORE_FLOP, _ACCELERATOR_FLOP = 1e11, {4: 5e13, 2: 5e14, 1: 5e14}  # a second; of an accelerator by bytes of a number
_CPU_WEIGHT_BYTES, _ACCELERATOR_WEIGHT_BYTES = 2e10, 3e12  # a second
# Seconds of a load, and bytes a second: of memory and disk until a probe has read them, of the others until measured.
_LOADS: dict[Tier, tuple[float, float]] = {
    "memory": (2e-3, 8e9), "disk": (5e-3, 4e9), "coded": (1e-2, 3e8), "redis": (5e-3, 1e8), "s3": (1e-1, 5e7),
}  # fmt: skip
_DECODED_ON_DEVICE = (6e-2, 1.5e9)
_PROBED: tuple[Tier, ...] = ("memory", "disk")
# Rotating keys, choosing tokens and reading attention: with SmolLM2 on a CPU prompts take 0.86 and 0.91 of the time of
# computing where loads and passes alone are 0.72 and 0.76 of it.
_CHUNKS, _ACCELERATOR_CHUNKS = (5e-3, 1.2), (2.5e-2, 1.5)
_STEP_TIMES = 4.0  # longer a token than in a prefill: products of a few rows are slow

Coefficients = tuple[float, ...]


@dataclass(frozen=True)
class Rates:
    """What things are expected to take at one moment."""

    compute: Coefficients  # fixed, per token, per pair
    load: Mapping[Tier, Coefficients]  # fixed, per byte
    chunks: Coefficients = (0.0, 1.0)  # fixed, times the seconds of loads and passes
    step: Coefficients = (1.0, 0.0, 0.0)  # fixed, per token, per pair: when a reply is decoded
    slowest: Mapping[Tier, float] = field(default_factory=dict)  # the most seconds a byte
    measured: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # times that, by kind and size

    def compute_seconds(self, span: Span) -> float:
        """The time to compute a span whose predecessors are present."""
        return self.work_seconds(*_work(span))

    def work_seconds(self, tokens: int, pairs: float) -> float:
        """The time to compute `tokens` tokens anywhere that attend to `pairs` others in all."""
        return self._nearest("compute", tokens) * _sum(self.compute, (tokens, pairs))

    def step_seconds(self, span: Span) -> float:
        """The time of a step that decodes one token of a reply, or verifies a draft."""
        return self._nearest("step", len(span)) * _sum(self.step, _work(span))

    def load_seconds(self, tier: Tier, size_bytes: int) -> float:
        """The time to load `size_bytes`. What is in the engine already costs nothing."""
        if tier == "engine":
            return 0.0
        expected = self._times(tier, size_bytes) * _sum(self.load[tier], (size_bytes,))
        return min(expected, self.slowest[tier] * max(size_bytes, _LEAST_BYTES)) if tier in self.slowest else expected

    def loads_seconds(self, loads: Iterable[tuple[Tier, int]]) -> float:
        """The time of several loads, each a tier and a number of bytes."""
        return sum(self.load_seconds(*load) for load in by_tier(loads).items())

    def chunk_seconds(self, parts_seconds: float) -> float:
        """The time of a prompt that reuses chunks, by that of its loads and passes."""
        return self._times("chunks", parts_seconds) * _sum(self.chunks, (parts_seconds,))

    def certain_seconds(self, loads: Iterable[tuple[Tier, int]]) -> float:
        """The same of the loads that may be refused for it: none before computing was measured, and only loads of a
        measured size from memory or disk."""
        if "compute" not in self.measured:
            return 0.0
        sizes = by_tier(loads).items()
        known = (one for one in sizes if one[0] not in _PROBED or _size(one[1]) in self.measured.get(one[0], ()))
        return sum(self.load_seconds(*load) for load in known)

    def _times(self, kind: str, amount: float) -> float:
        return self.measured.get(kind, {}).get(_size(amount), 1.0)

    def _nearest(self, kind: str, amount: float) -> float:
        known, size = self.measured.get(kind), _size(amount)
        return known[min(known, key=lambda one: (abs(one - size), -one))] if known else 1.0


FREE = Rates((0.0, 1e-6, 0.0), dict.fromkeys(_LOADS, (0.0, 0.0)), (0.0, 0.0))


def prior_rates(engine: Engine) -> Rates:
    """The expected costs before anything was measured."""
    on_cpu, number_bytes = engine.device == "cpu", engine.layout.numpy_dtype.itemsize
    flop = _CORE_FLOP * usable_cores() if on_cpu else _ACCELERATOR_FLOP[number_bytes]
    weights = engine.parameters * number_bytes / (_CPU_WEIGHT_BYTES if on_cpu else _ACCELERATOR_WEIGHT_BYTES)
    loads = {**_LOADS, "coded": _DECODED_ON_DEVICE} if engine.capabilities.decodes and not on_cpu else _LOADS
    compute = (weights, 2 * engine.parameters / flop, 4 * engine.attention / flop)
    step = (weights, *(_STEP_TIMES * rate for rate in compute[1:]))
    load: dict[Tier, Coefficients] = {tier: (fixed, 1 / speed) for tier, (fixed, speed) in loads.items()}
    return Rates(compute, load, _CHUNKS if on_cpu else _ACCELERATOR_CHUNKS, step)


class Costs:
    """Takes measurements, gives rates. Used from several threads."""

    def __init__(self, prior: Rates, remembered: Any = None, *, compiles: bool = False) -> None:
        """`remembered` is what `as_json` gave in an earlier run; anything else is ignored, and what is too old.

        `compiles`: the first of each kind and size in a process is not measured, because a device gets ready then.
        """
        self._lock = threading.Lock()
        self._prior = prior
        self._rates: tuple[float, Rates] | None = None  # and when they were current
        self._rows = {kind: _BySize(formula) for kind, formula in _formulas(prior).items()}
        self._ready: set[tuple[str, int]] | None = set() if compiles else None  # met before, in this process
        known, now = remembered if isinstance(remembered, dict) else {}, time.time()
        for kind, rows in self._rows.items():
            for row in number_rows(known.get(kind), len(rows.formula) + 1):
                if _is_sound(row) and 0 <= now - row[-1] <= _MAX_AGE_SECONDS:
                    rows.add(tuple(map(float, row)))

    def computed(self, span: Span, seconds: float) -> None:
        """Record the time that a span of a prompt took to compute."""
        self._add("compute", _work(span), seconds)

    def stepped(self, span: Span, seconds: float) -> None:
        """Record the time of a step of a reply: one token, or a draft that was verified."""
        self._add("step", _work(span), seconds)

    def loaded(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """Record the time that a load took."""
        self._add(tier, (size_bytes,), seconds)

    def reused_chunks(self, parts_seconds: float, seconds: float) -> None:
        """Record the time of a prompt that reused chunks, whose loads and passes were expected to take that long."""
        self._add("chunks", (parts_seconds,), seconds)

    def probed(self, speeds: ReadSpeeds) -> None:
        """Take over how fast memory and the cache folder were read."""
        load = dict(self._prior.load)
        for tier, speed in zip(_PROBED, (speeds.memory, speeds.cached), strict=True):
            load[tier] = (load[tier][0], 1 / speed)
        slowest: dict[Tier, float] = {"memory": _SLOWEST / speeds.memory}
        if speeds.disk is not None:
            slowest["disk"] = _SLOWEST / speeds.disk
        with self._lock:
            self._prior, self._rates = replace(self._prior, load=load, slowest=slowest), None
            for kind, formula in _formulas(self._prior).items():
                self._rows[kind].apply(formula)

    @property
    def rates(self) -> Rates:
        """What is expected by the measurements so far, and by the formulas alone where there are none."""
        now = time.time()
        with self._lock:
            if self._rates is None or not 0 <= now - self._rates[0] < _CURRENT_SECONDS:
                measured = {
                    kind: rows.pooled() if kind in ("compute", "step") else rows.young(now)
                    for kind, rows in self._rows.items()
                }
                known = {kind: times for kind, times in measured.items() if times}
                self._rates = now, replace(self._prior, measured=known)
            return self._rates[1]

    def as_json(self) -> dict[str, list[tuple[float, ...]]]:
        """Everything measured, for `Costs(...)` of a later run."""
        with self._lock:
            return {kind: rows.rows for kind, rows in self._rows.items()}

    def _add(self, kind: str, amounts: tuple[float, ...], seconds: float) -> None:
        row = (*map(float, amounts), seconds, time.time())
        if kind not in self._rows or not _is_sound(row):
            return
        with self._lock:
            key = kind, _size(row[0])
            if self._ready is not None and key not in self._ready:
                self._ready.add(key)
            else:
                self._rows[kind].add(row)
                self._rates = None


class _BySize:
    """The last measurements of one kind: the amounts, the seconds, and when. Sizes up to twice as large are one."""

    def __init__(self, formula: Coefficients) -> None:
        self.formula = formula
        self._rows: defaultdict[int, deque[tuple[float, ...]]] = defaultdict(lambda: deque(maxlen=_LAST))
        self._times: dict[int, list[float]] = {}  # how many times longer than the formula says

    def add(self, row: tuple[float, ...]) -> None:
        size = _size(row[0])
        self._rows[size].append(row)
        self._times[size] = [*self._times.get(size, ())[-_LAST + 1 :], self._times_of(row)]

    def apply(self, formula: Coefficients) -> None:
        """Count with another formula."""
        if formula != self.formula:
            self.formula = formula
            self._times = {size: list(map(self._times_of, rows)) for size, rows in self._rows.items()}

    @property
    def rows(self) -> list[tuple[float, ...]]:
        return [row for rows in self._rows.values() for row in rows]

    def pooled(self) -> dict[int, float]:
        """The median of each size; of few measurements with those of the next sizes."""
        found = {}
        for size in self._times:
            pool: list[float] = []
            for other in sorted(self._times, key=lambda one: abs(one - size)):
                if len(pool) < _FEWEST:
                    pool += self._times[other]
            found[size] = median(pool)
        return found

    def young(self, now: float) -> dict[int, float]:
        """The median of each size that was measured often enough and lately."""
        found = {}
        for size, rows in self._rows.items():
            if len(rows) >= _FEWEST and _is_young(rows[-1], now):
                young = sum(_is_young(row, now) for row in rows)
                found[size] = median(self._times[size][-max(young, _FEWEST) :])
        return found

    def _times_of(self, row: tuple[float, ...]) -> float:
        return row[-2] / max(_sum(self.formula, row[:-2]), 1e-12)


class AlwaysReuse(Costs):
    """Everything but computing is free, so whatever is stored is reused: calibration measures what that does."""

    def __init__(self) -> None:
        super().__init__(FREE)

    def _add(self, kind: str, amounts: tuple[float, ...], seconds: float) -> None:
        if kind == "compute":
            super()._add(kind, amounts, seconds)

    def probed(self, speeds: ReadSpeeds) -> None:
        """Ignored."""


def by_tier(loads: Iterable[tuple[Tier, int]]) -> Mapping[Tier, int]:
    """Bytes of each tier: what comes from one tier is one load, as it was when it was measured."""
    sizes: Counter[Tier] = Counter()
    for tier, size_bytes in loads:
        sizes[tier] += size_bytes
    return {tier: size_bytes for tier, size_bytes in sizes.items() if tier != "engine" and size_bytes}


def _formulas(rates: Rates) -> dict[str, Coefficients]:
    loads = {str(tier): formula for tier, formula in rates.load.items()}
    return {"compute": rates.compute, "step": rates.step, "chunks": rates.chunks, **loads}


def _is_young(row: Sequence[float], now: float) -> bool:
    """Whether it was measured lately. A clock that was set back makes none young."""
    return 0 <= now - row[-1] <= _YOUNG_SECONDS


def _size(amount: float) -> int:
    """The number of binary digits: sizes of one number are up to twice as large as each other."""
    return math.frexp(amount)[1]


def _work(span: Span) -> tuple[int, float]:
    """Tokens, and pairs of tokens that attend to each other."""
    return len(span), len(span) * (span.start + len(span) / 2)


def _sum(coefficients: Coefficients, amounts: Sequence[float]) -> float:
    return coefficients[0] + sum(a * b for a, b in zip(coefficients[1:], amounts, strict=True))


def number_rows(remembered: object, width: int) -> list[tuple[float, ...]]:
    """The rows of `width` numbers in something that was remembered; whatever else is in it is left out."""
    rows = [tuple(row) for row in remembered if isinstance(row, list | tuple)] if isinstance(remembered, list) else []
    return [row for row in rows if len(row) == width and all(isinstance(number, int | float) for number in row)]


def _is_sound(row: Sequence[float]) -> bool:
    """Whether this can be a measurement: no step takes a day, or less than a nanosecond."""
    *amounts, seconds, when = row
    return 1e-9 < seconds < 1e5 and all(0 < amount < 1e15 for amount in amounts) and 0 <= when < 1e15


def recall_costs(engine: Engine) -> Costs:
    """The costs measured in earlier runs."""
    return Costs(prior_rates(engine), _remembered().recall(_name(engine)), compiles=engine.device != "cpu")


def remember_costs(engine: Engine, costs: Costs) -> None:
    """Keep the measurements for later runs."""
    measured = costs.as_json()
    if any(measured.values()):
        _remembered().keep(_name(engine), measured)


def _remembered() -> JsonMemo:
    return JsonMemo(home_folder() / "costs.json", _REMEMBERED)


def _name(engine: Engine) -> str:
    return digest_of_fields("rekindle/costs/2", machine_and_model(engine))


def machine_and_model(engine: Engine) -> str:
    """The key under which measurements are remembered."""
    identity = engine.identity(engine.regime(1)).digest
    return digest_of_fields(platform.node(), platform.machine(), str(os.cpu_count()), engine.device, identity)
