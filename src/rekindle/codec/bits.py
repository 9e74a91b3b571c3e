"""How many bits the keys and values of each layer get.

A bit buys very different amounts of quality: where a layer matters little, or its numbers are easy to code, it is
better spent elsewhere. The effect of coding one part alone is measured by whoever runs the model; the choice is pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.safe_read import parse_untrusted_json

FEWEST_BITS, MAX_BITS = 1.0, 8.0
_UNITS = 8  # a bit


@dataclass(frozen=True, slots=True)
class LayerBits:
    """Bits a number, before entropy coding saves some: 0 for nothing at all, else from 1 to 8, fractions too."""

    keys: float
    values: float

    def __post_init__(self) -> None:
        for bits in (self.keys, self.values):
            if bits != 0 and not FEWEST_BITS <= bits <= MAX_BITS:
                raise ValueError(f"a number gets 0 bits or {FEWEST_BITS:g} to {MAX_BITS:g}, not {bits}")


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
    least = np.zeros(units + 1)  # of the parts so far, for each budget
    choices = []
    for harms in parts:
        options = np.full((len(costs), units + 1), np.inf)
        for level, cost in enumerate(costs[costs <= units]):
            options[level, cost:] = least[: units + 1 - cost] + harms[level]
        choices.append(options.argmin(0))  # the fewest bits among equals
        least = options.min(0)
    chosen = []
    for choice in reversed(choices):
        chosen.append(int(choice[units]))
        units -= int(costs[chosen[-1]])
    return np.array(chosen[::-1], int)


def _is_pair(row: object) -> bool:
    return isinstance(row, list) and len(row) == 2 and all(type(bits) in (int, float) for bits in row)
