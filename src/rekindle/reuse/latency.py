"""How fast the link is, and how long a layer takes: what a schedule of computing and streaming is made from.

A layer of `n` new tokens after `c` others is measured as a `Sample`. Two models learn from samples: `Roofline`, three
coefficients that are never negative, and `Mlp`, the small network of the source. `best_model` keeps whichever errs less
on samples that it has not seen. A whole layer and the projections of a top one are different things: one model each.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cells import Cells

LEAST_BANDWIDTH = 1.0  # bytes a second: what a dead link is said to bring, so that nobody divides by nothing
_TRANSFERS = 16  # the last so many count
_FADE = 0.9  # each is worth this share of the next newer one
_TELLING = 4  # transfers, before one of them may be taken for a stall
_STALLED = 4.0  # times longer than the others say: a stall, if it is alone

_HELD_OUT = 5  # every so manieth sample, shuffled, is held out: a fifth, as published
_WIDTHS = (48, 24)  # of the hidden layers, as published
_TRAINING, _BATCH, _RATE = 4000, 64, 5e-3  # steps, samples in each, how far the first goes

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Transfer:
    """So many bytes came in so many seconds, the last of them at this moment of a clock that does not jump."""

    size_bytes: int
    seconds: float
    at: float


class Bandwidth:
    """A window over the last transfers, of any thread."""

    def __init__(self) -> None:
        self._transfers: deque[Transfer] = deque(maxlen=_TRANSFERS)
        self._lock = threading.Lock()

    def add(self, transfer: Transfer) -> None:
        """A transfer has ended, well or not: what broke after some bytes says something too."""
        if transfer.seconds > 0 and transfer.size_bytes >= 0:
            with self._lock:
                self._transfers.append(transfer)

    def bytes_per_second(self, underway: Transfer | None = None) -> float | None:
        """What the link brings while it is used; None until something was measured.

        Pauses do not count, and what came side by side counts once. One transfer that took far longer than the others
        is left out: the next one tells whether it was a stall. `underway` is one that has not ended, as far as it is:
        it counts as soon as it is slower than the others say, so a link that dies has no bandwidth before long.
        """
        with self._lock:
            window = list(self._transfers)
        rate = _rate(_without_stall(window)) if window else None
        if underway is not None and underway.seconds > 0:
            now = max(LEAST_BANDWIDTH, underway.size_bytes / underway.seconds)
            typical = np.median([transfer.seconds for transfer in window]) if window else 0.0
            if rate is None:
                return now if underway.size_bytes else None
            if underway.seconds > _STALLED * typical:
                return min(rate, max(now, rate * _STALLED * typical / underway.seconds))
        return rate


def _rate(transfers: Sequence[Transfer]) -> float:
    """Bytes by busy seconds, each transfer worth less than the next newer one."""
    size = busy = 0.0
    taken: list[tuple[float, float]] = []  # when the link was busy, apart from each other, the latest last
    for transfer in sorted(transfers, key=lambda transfer: transfer.at):
        start, stop = transfer.at - transfer.seconds, transfer.at
        alone = transfer.seconds
        while taken and taken[-1][1] >= start:
            first, last = taken.pop()
            alone -= last - max(first, start)
            start = min(start, first)
        taken.append((start, stop))
        size, busy = _FADE * size + transfer.size_bytes, _FADE * busy + max(0.0, alone)
    return max(LEAST_BANDWIDTH, size / max(busy, 1e-9))


def _without_stall(transfers: list[Transfer]) -> list[Transfer]:
    """All but the slowest for its bytes, if that is far slower than the rest and alone in it."""
    if len(transfers) < _TELLING:
        return transfers
    slowest = max(transfers, key=lambda transfer: transfer.seconds / (transfer.size_bytes + 1))
    others = [transfer for transfer in transfers if transfer is not slowest]
    return others if _rate([slowest]) * _STALLED < min(_rate([other]) for other in others) else transfers


@dataclass(frozen=True, slots=True)
class Sample:
    """One layer of `tokens` new tokens after `context` others took so long.

    active  the share of the attention that was computed, less than 1 where blocks were left out
    """

    tokens: int
    context: int
    seconds: float
    active: float = 1.0


class LayerModel(Protocol):
    """Says how long a layer takes."""

    def predict(self, tokens: int, context: int, active: float = 1.0) -> float:
        """The seconds of one layer."""

    def error(self, held_out: Sequence[Sample]) -> float:
        """The mean of how far it is off, as a share of what was measured."""

    def as_json(self) -> dict[str, Any]:
        """Itself, for `model_from`."""


def _mean_error(model: LayerModel, samples: Sequence[Sample]) -> float:
    if not samples:
        raise ValueError("an error needs samples")
    off = [abs(model.predict(s.tokens, s.context, s.active) / s.seconds - 1.0) for s in samples]
    return float(np.mean(off))


def _pairs(tokens: float, context: float, active: float) -> float:
    return active * tokens * (context + tokens / 2)


@dataclass(frozen=True)
class Roofline:
    """`fixed + per_token * n + per_pair * n * (c + n / 2)`: weights are read, tokens projected, pairs attend."""

    fixed: float
    per_token: float
    per_pair: float

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> Roofline:
        """The coefficients, none negative, with the least relative error. Raises `ValueError` without samples."""
        if not samples:
            raise ValueError("nothing to fit")
        features = np.array([(1.0, s.tokens, _pairs(s.tokens, s.context, s.active)) for s in samples])
        scaled = features / np.array([s.seconds for s in samples])[:, None]
        scale = np.maximum(np.abs(scaled).max(axis=0), 1e-300)  # columns of like size, for the numbers' sake
        found = _never_negative(scaled / scale, np.ones(len(samples))) / scale
        return cls(*found.tolist())

    def predict(self, tokens: int, context: int, active: float = 1.0) -> float:
        """The seconds of one layer."""
        return self.fixed + self.per_token * tokens + self.per_pair * _pairs(tokens, context, active)

    def error(self, held_out: Sequence[Sample]) -> float:
        """The mean of how far it is off, as a share of what was measured."""
        return _mean_error(self, held_out)

    def as_json(self) -> dict[str, Any]:
        """Itself, for `model_from`."""
        return {"kind": "roofline", "coefficients": [self.fixed, self.per_token, self.per_pair]}


def _never_negative(matrix: Floats, target: Floats) -> Floats:
    """The least squares without negative coefficients: the best of all subsets, where there are few columns."""
    width = matrix.shape[1]
    best, least = np.zeros(width), float(np.square(target).sum())
    for count in range(1, width + 1):
        for chosen in combinations(range(width), count):
            found = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            error = float(np.square(matrix[:, chosen] @ found - target).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(width), error
                best[list(chosen)] = found
    return best


@dataclass(frozen=True, eq=False)
class Mlp:
    """Two hidden layers of 48 and 24, as published, from (tokens, context, active) to the logarithm of the seconds.

    weights  alternating [inputs, outputs] and [outputs]
    offset, scale  [4] of the three inputs and of the answer
    """

    weights: tuple[Floats, ...]
    offset: Floats
    scale: Floats

    @classmethod
    def fit(cls, samples: Sequence[Sample], seed: int = 0) -> Mlp:
        """Trained with Adam on the squared error, the same for the same samples. Raises `ValueError` without any."""
        if not samples:
            raise ValueError("nothing to fit")
        rows = np.array([(s.tokens, s.context, s.active, math.log(s.seconds)) for s in samples], np.float64)
        offset, scale = rows.mean(axis=0), np.where(np.ptp(rows, axis=0) > 0, rows.std(axis=0), 1.0)
        rows = (rows - offset) / scale
        random = np.random.default_rng(seed)
        sizes = (rows.shape[1] - 1, *_WIDTHS, 1)
        weights: list[Floats] = []
        for inputs, outputs in pairwise(sizes):
            weights += [random.normal(0.0, math.sqrt(2.0 / inputs), (inputs, outputs)), np.zeros(outputs)]
        return cls(tuple(_trained(weights, rows, random)), offset, scale)

    def predict(self, tokens: int, context: int, active: float = 1.0) -> float:
        """The seconds of one layer."""
        inputs = (np.array([[tokens, context, active]], np.float64) - self.offset[:3]) / self.scale[:3]
        answer = float(_forward(self.weights, inputs)[-1][0, 0])
        return math.exp(min(answer * self.scale[3] + self.offset[3], 20.0))

    def error(self, held_out: Sequence[Sample]) -> float:
        """The mean of how far it is off, as a share of what was measured."""
        return _mean_error(self, held_out)

    def as_json(self) -> dict[str, Any]:
        """Itself, for `model_from`."""
        arrays = [array.tolist() for array in (*self.weights, self.offset, self.scale)]
        return {"kind": "mlp", "arrays": arrays}


def _forward(weights: Sequence[Floats], rows: Floats) -> list[Floats]:
    """[inputs, hidden, hidden, answer] of some rows."""
    layers = [rows]
    for number in range(0, len(weights), 2):
        out = layers[-1] @ weights[number] + weights[number + 1]
        layers.append(out if number + 2 == len(weights) else np.maximum(out, 0.0))
    return layers


def _gradients(weights: Sequence[Floats], rows: Floats) -> list[Floats]:
    layers = _forward(weights, rows[:, :-1])
    back = 2.0 * (layers[-1] - rows[:, -1:]) / len(rows)
    found: list[Floats] = []
    for number in range(len(weights) - 2, -1, -2):
        below = layers[number // 2]
        found = [below.T @ back, back.sum(axis=0), *found]
        back = (back @ weights[number].T) * (below > 0)
    return found


def _trained(weights: list[Floats], rows: Floats, random: np.random.Generator) -> list[Floats]:
    """Adam, the rate falling to nothing along a half cosine."""
    means, squares = [np.zeros_like(w) for w in weights], [np.zeros_like(w) for w in weights]
    for step in range(1, _TRAINING + 1):
        some = rows[random.integers(0, len(rows), _BATCH)]
        rate = _RATE * (1 + math.cos(math.pi * step / _TRAINING)) / 2
        for n, gradient in enumerate(_gradients(weights, some)):
            means[n] = 0.9 * means[n] + 0.1 * gradient
            squares[n] = 0.999 * squares[n] + 0.001 * gradient**2
            mean, square = means[n] / (1 - 0.9**step), squares[n] / (1 - 0.999**step)
            weights[n] = weights[n] - rate * mean / (np.sqrt(square) + 1e-8)
    return weights


@dataclass(frozen=True)
class Chosen:
    """The model that errs less on what was held out, and by how much both err there."""

    model: Roofline | Mlp
    roofline_error: float
    mlp_error: float


def best_model(samples: Sequence[Sample], seed: int = 0) -> Chosen:
    """Fit both to four fifths of the samples, and keep the one that is better on the rest. Raises `ValueError` where
    that leaves none."""
    if len(samples) < _HELD_OUT:
        raise ValueError(f"{len(samples)} samples are too few to hold some out")
    mixed = [samples[number] for number in np.random.default_rng(seed).permutation(len(samples))]
    held, fitted = mixed[::_HELD_OUT], [s for n, s in enumerate(mixed) if n % _HELD_OUT]
    roofline, mlp = Roofline.fit(fitted), Mlp.fit(fitted, seed)
    errors = roofline.error(held), mlp.error(held)
    return Chosen(roofline if errors[0] <= errors[1] else mlp, *errors)


def model_from(remembered: Any) -> Roofline | Mlp | None:
    """What `as_json` gave; None for anything else."""
    try:
        if remembered["kind"] == "roofline":
            fixed, per_token, per_pair = map(float, remembered["coefficients"])
            made: Roofline | Mlp = Roofline(fixed, per_token, per_pair)
            sound = all(0 <= c < math.inf for c in (fixed, per_token, per_pair))
        else:
            *weights, offset, scale = [np.asarray(array, np.float64) for array in remembered["arrays"]]
            made = Mlp(tuple(weights), offset, scale)
            sizes = (3, *_WIDTHS, 1)
            shapes = [shape for pair in pairwise(sizes) for shape in (pair, pair[1:])]
            sound = [array.shape for array in made.weights] == shapes and offset.shape == scale.shape == (4,)
            sound = sound and all(np.isfinite(array).all() for array in (*weights, offset, scale))
    except (KeyError, TypeError, ValueError):
        return None
    return made if sound else None


def cell_seconds(model: LayerModel, cells: Cells, active: Iterable[float] | None = None) -> Floats:
    """[chunks, layers] how long each cell takes, all layers alike; `active` is the share of attention, by chunk."""
    shares = [1.0] * cells.chunks if active is None else list(active)
    rows = [model.predict(len(s), s.start, share) for s, share in zip(cells.spans, shares, strict=True)]
    return np.repeat(np.array(rows)[:, None], cells.layers, axis=1)
