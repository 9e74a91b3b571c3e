"""Numbers to small integers and back, and how many bits each layer gets.

Keys have channels that are large in every token, values have tokens that are large in every channel. So keys have a
step per channel and values a step per token, which keeps errors in proportion. A step is a fixed part of the mean
deviation, not of the range: an outlier then costs the bits of one large code instead of making its neighbours coarse.
Steps are powers of the square root of two, so each is a small integer itself. The common part of a channel, its centre,
is coded once; a token of the values with a smaller deviation without it (often the first token of a prompt) omits it.

A bit buys very different amounts of quality in different layers. `allocate` spends bits where they help most, from
measured effects of coding one part alone.

Brain floats have no numpy type and are carried raw, as `uint16`; `widen` and `narrow` convert.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.kv import KvLayout, KvType
from rekindle.safe_read import parse_untrusted_json

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
    `centre * centre_step + code * step`. Several groups at once have one more axis, the first."""

    codes: NDArray[Any]  # [heads, tokens, dim]: int16, or restored as float32
    exponents: NDArray[np.int16]  # keys [heads, dim]; values [heads, tokens], doubled, odd where there is no centre
    centres: NDArray[np.int16]  # [heads, dim]
    centre_exponent: int | NDArray[np.int16] = 0  # of values; keys use the step of their channel


def quantize_keys(numbers: NDArray[np.float32], bits: float) -> QuantizedTensor:
    """Keys [heads, tokens, dim] as integers with a step per channel. Raises `ValueError` unless all are finite."""
    _check(numbers)
    centre = numbers.mean(1, keepdims=True)  # [heads, 1, dim]
    spread = np.abs(numbers - centre).mean(1, keepdims=True)
    exponents = _exponents(spread, np.abs(numbers).max(1, keepdims=True), bits)
    step = steps_of(exponents)
    centres = np.rint(centre / step)  # [heads, 1, dim]
    codes = _round(numbers / step - centres, bits)
    return QuantizedTensor(codes, exponents[:, 0], centres[:, 0].astype(np.int16))


def dequantize_keys(tensor: QuantizedTensor) -> NDArray[np.float32]:
    """The keys [heads, tokens, dim] of quantized ones. Codes that are floats are overwritten."""
    numbers = tensor.codes.astype(np.float32, copy=False)
    numbers += tensor.centres.astype(np.float32)[..., None, :]
    numbers *= steps_of(tensor.exponents)[..., None, :]
    return numbers


def quantize_values(numbers: NDArray[np.float32], bits: float) -> QuantizedTensor:
    """Values [heads, tokens, dim] as integers with a step per token. Raises `ValueError` unless all are finite."""
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


def dequantize_values(tensor: QuantizedTensor) -> NDArray[np.float32]:
    """The values [heads, tokens, dim] of quantized ones. Codes that are floats are overwritten."""
    numbers = tensor.codes.astype(np.float32, copy=False)
    numbers *= steps_of(tensor.exponents >> 1)[..., None]
    centre = tensor.centres * steps_of(np.asarray(tensor.centre_exponent, np.int16))  # [heads, dim]
    bare = tensor.exponents & 1
    if bare.any():  # few: set aside, which is cheaper than adding a centre of zero
        places = np.nonzero(bare)
        kept = numbers[places]
        numbers += centre[..., None, :]
        numbers[places] = kept
    else:
        numbers += centre[..., None, :]
    return numbers


def zeros(shape: tuple[int, int, int], token_steps: bool) -> QuantizedTensor:
    """Zeros, with a step per token or per channel."""
    heads, tokens, dim = shape
    exponents = np.zeros((heads, tokens if token_steps else dim), np.int16)
    return QuantizedTensor(np.zeros(shape, np.int16), exponents, np.zeros((heads, dim), np.int16))


def steps_of(exponents: NDArray[np.int16]) -> NDArray[np.float32]:
    """The square root of two to these powers, the same on every machine; powers that no step has are bounded."""
    steps: NDArray[np.float32] = _STEPS.take(exponents.astype(np.intp) - _SMALLEST_EXPONENT, mode="clip")
    return steps


def _all_steps() -> NDArray[np.float32]:
    powers = np.arange(_SMALLEST_EXPONENT, _LARGEST_EXPONENT + 1, dtype=np.int32)
    steps: NDArray[np.float32] = np.ldexp(np.where(powers & 1, np.float32(2**0.5), np.float32(1)), powers >> 1)
    return steps


_STEPS = _all_steps()


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


FLOAT_TYPES: tuple[KvType, ...] = ("float32", "float16", "bfloat16")

_LARGEST = {"float32": float(np.finfo(np.float32).max), "float16": 65504.0, "bfloat16": 2.0**128 - 2.0**120}


def carrier(dtype: KvType) -> np.dtype[Any]:
    """The numpy type that carries these numbers."""
    return KvLayout(dtype, ()).numpy_dtype


def widen(array: NDArray[Any], dtype: KvType) -> NDArray[np.float32]:
    """The same numbers as float32, exactly. Raises `ValueError` if the array does not carry floats of that type."""
    if dtype not in FLOAT_TYPES:
        raise ValueError(f"{dtype} KV is quantized by its engine already: keep it raw, or as a lossless difference")
    if array.dtype != carrier(dtype):
        raise ValueError(f"{dtype} KV is carried as {carrier(dtype)}, this array holds {array.dtype}")
    if dtype == "bfloat16":
        wide: NDArray[np.float32] = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return array.astype(np.float32, copy=False)


def narrow(array: NDArray[np.float32], dtype: KvType) -> NDArray[Any]:
    """Finite float32 numbers as the nearest of that type, ties to even; beyond its largest they become the largest."""
    if dtype == "float32":
        return array
    out = np.empty(array.shape, carrier(dtype))
    narrow_into(array.copy(), dtype, out)
    return out


def narrow_into(array: NDArray[np.float32], dtype: KvType, out: NDArray[Any]) -> None:
    """The same, written to `out`. The array is overwritten."""
    if dtype == "float32":
        out[...] = array
        return
    np.clip(array, -_LARGEST[dtype], _LARGEST[dtype], out=array)
    if dtype == "float16":
        np.copyto(out, array, casting="same_kind")
        return
    bits = array.view(np.uint32)
    half = bits >> np.uint32(16)
    half &= np.uint32(1)
    half += np.uint32(0x7FFF)
    bits += half
    out[...] = bits >> np.uint32(16)


MIN_BITS, MAX_BITS = 1.0, 8.0
_UNITS = 8  # a bit


@dataclass(frozen=True, slots=True)
class LayerBits:
    """Bits a number, before entropy coding saves some: 0 for nothing at all, else from 1 to 8, fractions too."""

    keys: float
    values: float

    def __post_init__(self) -> None:
        for bits in (self.keys, self.values):
            if bits != 0 and not MIN_BITS <= bits <= MAX_BITS:
                raise ValueError(f"a number gets 0 bits or {MIN_BITS:g} to {MAX_BITS:g}, not {bits}")


@dataclass(frozen=True)
class BitPlan:
    """The bits of every layer."""

    layers: tuple[LayerBits, ...]

    @classmethod
    def uniform(cls, layers: int, bits: float) -> BitPlan:
        """The same bits everywhere. Raises `ValueError` for a number of bits that no codec has."""
        return cls((LayerBits(bits, bits),) * layers)

    @property
    def mean_bits(self) -> float:
        """Bits a number over all layers, where all halves are equally large."""
        return math.fsum(layer.keys + layer.values for layer in self.layers) / max(1, 2 * len(self.layers))

    def to_json(self) -> str:
        """The plan as text; the same plan always as the same text."""
        return json.dumps([[float(layer.keys), float(layer.values)] for layer in self.layers], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BitPlan:
        """The plan of such a text. Raises `ValueError` for any other text."""
        rows = parse_untrusted_json(text)
        if not isinstance(rows, list) or not all(_is_pair(row) for row in rows):
            raise ValueError("not a bit plan: it is a list of [keys, values] a layer")
        try:
            return cls(tuple(LayerBits(float(keys), float(values)) for keys, values in rows))
        except OverflowError as error:
            raise ValueError("not a bit plan: a number is out of range") from error


def allocate(effect: NDArray[Any], levels: Sequence[float], mean_bits: float) -> BitPlan:
    """The plan with the least summed effect whose mean is at most `mean_bits`.

    `effect[layer, half, level]` is the harm (a KL, say) of coding only the keys (0) or values (1) of that layer with
    `levels[level]` bits, everything else exact; harms of different parts add up, nearly. Levels are whole eighths of a
    bit. Raises `ValueError` if the table does not fit the levels, holds anything that is not finite, or if even the
    lowest level everywhere is above `mean_bits`.
    """
    harms = np.asarray(effect, np.float64)
    costs = np.asarray(levels, np.float64) * _UNITS
    if harms.ndim != 3 or harms.shape[1:] != (2, len(costs)) or not np.isfinite(harms).all():
        raise ValueError("effects must be finite and of shape [layers, 2, levels]")
    if len(costs) == 0 or (costs % 1).any() or (np.diff(costs) <= 0).any() or costs[0] < 0:
        raise ValueError("levels must rise, in whole eighths of a bit")
    parts = harms.reshape(-1, len(costs))  # [parts, levels]
    units = math.floor(min(mean_bits * _UNITS, costs[-1]) * len(parts) + 1e-9)
    if units < costs[0] * len(parts):
        raise ValueError(f"{mean_bits:g} bits a number are fewer than the lowest level, {levels[0]:g}")
    bits = np.asarray(levels, np.float64)[_cheapest(parts, costs.astype(int), units)].reshape(-1, 2)
    return BitPlan(tuple(LayerBits(float(keys), float(values)) for keys, values in bits))


def _cheapest(parts: NDArray[np.float64], costs: NDArray[np.int_], units: int) -> NDArray[np.int_]:
    """The level of each part with the least summed harm for at most `units` units.

    Every budget is solved for the first part alone, then with the second, and so on: exact, and a matter of
    milliseconds for a few hundred parts.
    """
    lowest = np.zeros(units + 1)  # of the parts so far, for each budget
    choices = []
    for harms in parts:
        options = np.full((len(costs), units + 1), np.inf)
        for level, cost in enumerate(costs[costs <= units]):
            options[level, cost:] = lowest[: units + 1 - cost] + harms[level]
        choices.append(options.argmin(0))  # the fewest bits among equals
        lowest = options.min(0)
    chosen = []
    for choice in reversed(choices):
        chosen.append(int(choice[units]))
        units -= int(costs[chosen[-1]])
    return np.array(chosen[::-1], int)


def _is_pair(row: object) -> bool:
    return isinstance(row, list) and len(row) == 2 and all(type(bits) in (int, float) for bits in row)
