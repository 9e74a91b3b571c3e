"""The predictor that was published, a small network, against the roofline of sessions on what neither has seen.

It was published with a third input, the share of attention that block-sparse kernels compute: here always all of it. A
whole layer and the projections of a top one are different things: one model each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rekindle.remote.latency import Floats, LayerModel, LayerTiming, Roofline

_HELD_OUT = 5  # every so manieth sample, shuffled, is held out: a fifth, as published
_WIDTHS = (48, 24)  # of the hidden layers, as published
_TRAINING, _BATCH, _RATE = 4000, 64, 5e-3  # steps, samples in each, how far the first goes


def mean_error(model: LayerModel, samples: Sequence[LayerTiming]) -> float:
    """The mean of how far it is off, as a share of what was measured."""
    if not samples:
        raise ValueError("an error needs samples")
    return float(np.mean([abs(model.predict(s.tokens, s.context) / s.seconds - 1.0) for s in samples]))


@dataclass(frozen=True, eq=False)
class Mlp:
    """Two hidden layers of 48 and 24, as published, from (tokens, context) to the logarithm of the seconds.

    weights  alternating [inputs, outputs] and [outputs]
    offset, scale  [3] of the two inputs and of the answer
    """

    weights: tuple[Floats, ...]
    offset: Floats
    scale: Floats

    @classmethod
    def fit(cls, samples: Sequence[LayerTiming], seed: int = 0) -> Mlp:
        """Trained with Adam on the squared error, the same for the same samples. Raises `ValueError` without any."""
        if not samples:
            raise ValueError("nothing to fit")
        rows = np.array([(s.tokens, s.context, math.log(s.seconds)) for s in samples], np.float64)
        offset, scale = rows.mean(axis=0), np.where(np.ptp(rows, axis=0) > 0, rows.std(axis=0), 1.0)
        rows = (rows - offset) / scale
        random = np.random.default_rng(seed)
        sizes = (rows.shape[1] - 1, *_WIDTHS, 1)
        weights: list[Floats] = []
        for inputs, outputs in pairwise(sizes):
            weights += [random.normal(0.0, math.sqrt(2.0 / inputs), (inputs, outputs)), np.zeros(outputs)]
        return cls(tuple(_trained(weights, rows, random)), offset, scale)

    def predict(self, tokens: int, context: int) -> float:
        """The seconds of one layer."""
        inputs = (np.array([[tokens, context]], np.float64) - self.offset[:2]) / self.scale[:2]
        answer = float(_forward(self.weights, inputs)[-1][0, 0])
        return math.exp(min(answer * self.scale[2] + self.offset[2], 20.0))


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

    @property
    def kind(self) -> str:
        """The name of the model in reports."""
        return "mlp" if isinstance(self.model, Mlp) else "roofline"


def best_model(samples: Sequence[LayerTiming], seed: int = 0) -> Chosen:
    """Fit both to four fifths of the samples, and keep the one that is better on the rest. Raises `ValueError` where
    that leaves none."""
    if len(samples) < _HELD_OUT:
        raise ValueError(f"{len(samples)} samples are too few to hold some out")
    mixed = [samples[number] for number in np.random.default_rng(seed).permutation(len(samples))]
    held, fitted = mixed[::_HELD_OUT], [s for n, s in enumerate(mixed) if n % _HELD_OUT]
    roofline, mlp = Roofline.fit(fitted), Mlp.fit(fitted, seed)
    errors = mean_error(roofline, held), mean_error(mlp, held)
    return Chosen(roofline if errors[0] <= errors[1] else mlp, *errors)
