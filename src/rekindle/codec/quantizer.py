"""Numbers to small integers and back: a step for each channel of the keys and for each token of the values.

Keys have channels that are large in every token, values have tokens that are large in every channel; a step that
follows them keeps errors in proportion. A step is a fixed part of the mean deviation, not of the range: one outlier
then costs the bits of one large code instead of making all its neighbours coarse. Steps are powers of the square root
of two, so that one is a small integer itself. What all tokens of a channel have in common, its centre, is coded once;
a token of the values that is better off without it (the first token of a prompt often is) does without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_NUMBER = 2.0**100  # beyond it, differences could overflow
_SMALLEST_EXPONENT = -252  # of the square root of two: the smallest normal float32
_LARGEST_EXPONENT = 220
_NOMINAL_BITS = 2.2  # a normal variable in steps of its deviation: 2.05 bits, and what steps and centres cost
_DEVIATION = 1.2533  # standard over mean absolute deviation of a normal variable
_COARSE_BITS = 2.5  # below, rounding a little towards zero saves more bits than it adds error
_LARGEST_CODE = 16000  # so that differences of codes stay in int16


@dataclass(frozen=True)
class QuantizedTensor:
    """Some tokens of keys or values as integers: `number = (centre + code) * step`, or for values
    `centre * centre_step + code * step`."""

    codes: NDArray[np.int16]  # [heads, tokens, dim]
    exponents: NDArray[np.int16]  # keys [heads, dim]; values [heads, tokens], doubled, odd where there is no centre
    centres: NDArray[np.int16]  # [heads, dim]
    centre_exponent: int = 0  # of values; keys use the step of their channel


def quantize_keys(numbers: NDArray[np.float32], bits: float) -> QuantizedTensor:
    """Keys [heads, tokens, dim] on a lattice with a step a channel. Raises `ValueError` unless all are finite."""
    _check(numbers)
    centre = numbers.mean(1, keepdims=True)  # [heads, 1, dim]
    spread = np.abs(numbers - centre).mean(1, keepdims=True)
    exponents = _exponents(spread, np.abs(numbers).max(1, keepdims=True), bits)
    step = steps_of(exponents)
    centres = np.rint(centre / step)  # [heads, 1, dim]
    codes = _round(numbers / step - centres, bits)
    return QuantizedTensor(codes, exponents[:, 0], centres[:, 0].astype(np.int16))


def dequantize_keys(lattice: QuantizedTensor) -> NDArray[np.float32]:
    """The keys [heads, tokens, dim] of a lattice."""
    numbers = lattice.codes.astype(np.float32)
    numbers += lattice.centres[:, None]
    numbers *= steps_of(lattice.exponents)[:, None]
    return numbers


def quantize_values(numbers: NDArray[np.float32], bits: float) -> QuantizedTensor:
    """Values [heads, tokens, dim] on a lattice with a step a token. Raises `ValueError` unless all are finite."""
    _check(numbers)
    centre = numbers.mean(1, keepdims=True)  # [heads, 1, dim]
    centre_exponent = _exponents(np.abs(numbers - centre).mean(), np.abs(centre).max(), bits)
    centre_step = steps_of(centre_exponent)
    centres = np.rint(centre / centre_step)
    rest = numbers - centres * centre_step
    spread, without = np.abs(rest).mean(2, keepdims=True), np.abs(numbers).mean(2, keepdims=True)  # [heads, tokens, 1]
    bare = without <= spread
    chosen = np.where(bare, numbers, rest)
    exponents = _exponents(np.minimum(spread, without), np.abs(chosen).max(2, keepdims=True), bits)
    codes = _round(chosen / steps_of(exponents), bits)
    marked = (2 * exponents + bare)[:, :, 0].astype(np.int16)
    return QuantizedTensor(codes, marked, centres[:, 0].astype(np.int16), int(centre_exponent))


def dequantize_values(lattice: QuantizedTensor) -> NDArray[np.float32]:
    """The values [heads, tokens, dim] of a lattice."""
    numbers = lattice.codes.astype(np.float32)
    numbers *= steps_of(lattice.exponents >> 1)[:, :, None]
    centre = lattice.centres * steps_of(np.asarray(lattice.centre_exponent, np.int16))  # [heads, dim]
    bare = (lattice.exponents & 1).astype(bool)
    kept = numbers[bare]  # few: set aside, which is cheaper than adding a centre of zero
    numbers += centre[:, None]
    numbers[bare] = kept
    return numbers


def zeros(shape: tuple[int, int, int], token_steps: bool) -> QuantizedTensor:
    """The lattice of zeros, with a step a token or a step a channel."""
    heads, tokens, dim = shape
    exponents = np.zeros((heads, tokens if token_steps else dim), np.int16)
    return QuantizedTensor(np.zeros(shape, np.int16), exponents, np.zeros((heads, dim), np.int16))


def steps_of(exponents: NDArray[np.int16]) -> NDArray[np.float32]:
    """The square root of two to these powers, the same on every machine; powers that no step has are bounded."""
    bounded = np.clip(exponents, _SMALLEST_EXPONENT, _LARGEST_EXPONENT).astype(np.int32)
    steps: NDArray[np.float32] = np.ldexp(np.where(bounded & 1, np.float32(2**0.5), np.float32(1)), bounded >> 1)
    return steps


def _check(numbers: NDArray[np.float32]) -> None:
    if not (np.abs(numbers) < LARGEST_NUMBER).all():  # false for NaN as well
        raise ValueError("KV with NaN, infinity or numbers beyond 2**100 cannot be quantized: keep it raw")


def _exponents(spread: Any, peak: Any, bits: float) -> NDArray[np.int16]:
    """The nearest step to what that spread and those bits ask for, but none that makes codes too large."""
    wanted = np.asarray(spread, np.float64) * (_DEVIATION * 2.0 ** (_NOMINAL_BITS - bits))
    needed = np.asarray(peak, np.float64) / _LARGEST_CODE
    tiny = np.finfo(np.float64).tiny
    exponents = np.maximum(np.rint(2 * np.log2(wanted + tiny)), np.ceil(2 * np.log2(needed + tiny)))
    bounded: NDArray[np.int16] = np.clip(exponents, _SMALLEST_EXPONENT, _LARGEST_EXPONENT).astype(np.int16)
    return bounded


def _round(scaled: NDArray[Any], bits: float) -> NDArray[np.int16]:
    if bits < _COARSE_BITS:
        scaled = np.copysign(np.floor(np.abs(scaled) + np.float32(0.4)), scaled)
    codes: NDArray[np.int16] = np.rint(scaled).astype(np.int16)
    return codes
