"""The functions between an encoder's two dense layers, in numpy and in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Activation = Callable[[Floats], None]  # in place, over values that lie side by side

_PIECE_VALUES = 1 << 16  # the values are gone over many times: they stay in the processor's cache meanwhile
# numpy has no erf. x times the normal distribution F(x) is x / (1 + exp(-z(x))) with z = log(F / (1 - F)), an odd
# function that a polynomial follows closely. These are the coefficients of -z(x) / x in powers of x * x, the lowest
# first: a minimax fit, F within 4e-8. The highest has the sign that makes F end at 0 and 1 however large x is.
_NORMAL = (
    -1.595769807,
    -0.07266613614,
    6.492191617e-5,
    1.10797083e-4,
    -7.973823824e-6,
    2.687463146e-7,
    -3.646817669e-9,
)
_SLOPE = -2.0 * (2.0 / np.pi) ** 0.5
_TANH = (_SLOPE, _SLOPE * 0.044715)  # the older approximation, which some models were trained with


def relu(values: Floats) -> None:
    """The larger of x and 0."""
    np.maximum(values, 0, out=values)


def gelu(values: Floats) -> None:
    """x times the normal distribution at x, within 1e-6."""
    _weigh(values, _NORMAL)


def gelu_tanh(values: Floats) -> None:
    """The approximation of `gelu` by a hyperbolic tangent."""
    _weigh(values, _TANH)


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"gelu": gelu, "relu": relu, "gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh}
)


def _weigh(values: Floats, coefficients: tuple[float, ...]) -> None:
    """Divide by 1 + exp(x * p(x * x)), with the polynomial p."""
    flat = values.reshape(-1)
    length = min(len(flat), _PIECE_VALUES)
    squares, sums = np.empty(length, np.float32), np.empty(length, np.float32)
    *lower, lowest = (np.float32(value) for value in reversed(coefficients[:-1]))
    highest = np.float32(coefficients[-1])
    with np.errstate(over="ignore"):  # an infinite divisor is the right one
        for start in range(0, len(flat), _PIECE_VALUES):
            piece = flat[start : start + _PIECE_VALUES]
            square, total = squares[: len(piece)], sums[: len(piece)]
            np.multiply(piece, piece, out=square)
            np.multiply(square, highest, out=total)
            for value in lower:
                total += value
                total *= square
            total += lowest
            total *= piece
            np.exp(total, out=total)
            total += np.float32(1)
            piece /= total
