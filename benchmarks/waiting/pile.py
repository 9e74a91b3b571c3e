"""Coded layers, decompressed into one run of bytes: what stands where in it, worked out for all frames at once.

    tables | symbols, frames that are alike beside each other | side numbers of each layer: low bytes, high bytes

There are hundreds of frames, so nothing is done for each of them by itself. The tables go with the bytes: they say to a
device what it needs to know of single frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rekindle.codec.quantized import Coded, CodedLayout
from rekindle.core.kv import Span


class Tables:
    """Small arrays that travel together."""

    def __init__(self, arrays: Mapping[str, NDArray[np.int64]]) -> None:
        self._shapes = {name: array.shape for name, array in arrays.items()}
        self.joined = np.concatenate([array.reshape(-1) for array in arrays.values()]).astype(np.int64)

    def on_device(self, raw: Tensor) -> dict[str, Tensor]:
        """The arrays, from the bytes that begin with them."""
        numbers = raw[: self.joined.nbytes].view(torch.int64)
        found, start = {}, 0
        for name, shape in self._shapes.items():
            stop = start + math.prod(shape)
            found[name], start = numbers[start:stop].view(shape), stop
        return found


@dataclass(frozen=True)
class FrameRun:
    """Frames beside each other that are unpacked alike."""

    per_byte: int
    half: int
    tokens: int
    frames: slice
    symbols: slice
    codes: slice


@dataclass(frozen=True, eq=False)
class Pile:
    """What a batch is, decompressed: `tables | symbols, frames that are alike together | side numbers, layer by layer`.

    Side numbers are low bytes, then high bytes, of each layer. Places are counted from where the symbols start.
    """

    coded: Coded
    counts: tuple[int, int]  # layers, groups
    kept: slice  # of the tokens of all groups
    frames: NDArray[np.int64]  # see `expand_into`
    runs: tuple[FrameRun, ...]
    tables: Tables
    size_bytes: int
    codes: int
    strays: int
    side_numbers: int


def pile_of(places: CodedLayout, span: Span | None) -> Pile:
    """The pile of the groups that hold tokens of `span`, all by default."""
    coded, shape = places.coded, places.coded.shape
    groups = coded.groups_of(span)
    own = slice(groups.start, groups.stop)
    tokens = np.array([len(coded.group(number)) for number in groups])
    first = 0 if span is None else span.start - groups.start * coded.group_tokens
    kept = slice(first, first + (coded.tokens if span is None else len(span)))

    layers, strays = len(places.sides), places.strays[:, own]
    totals = places.side_starts[:, -1]
    before = np.cumsum(totals) - totals  # side numbers of the layers before
    keys_at = places.side_starts[:, :-1][:, own] + before[:, None]  # [layers, groups]
    values_at = keys_at + 2 * shape.kv_heads * shape.key_dim
    centres_at = values_at + shape.kv_heads * tokens
    strays_at = centres_at + shape.kv_heads * shape.value_dim + 1

    layer, group, half = (axis.reshape(-1) for axis in np.indices(strays.shape))
    dense = places.per_byte[:, own].reshape(-1)
    order = np.lexsort((layer, half, tokens[group], dense))
    layer, group, half, dense = layer[order], group[order], half[order], dense[order]
    sizes = -(-shape.kv_heads * tokens[group] * np.array([shape.key_dim, shape.value_dim])[half] // dense)
    symbol_stops, code_stops = np.cumsum(sizes), np.cumsum(sizes * dense)
    stray_counts = strays.reshape(-1)[order]
    stray_starts = np.stack([strays_at, strays_at + strays[..., 0]], axis=-1).reshape(-1)[order]
    stray_starts -= np.cumsum(stray_counts) - stray_counts
    planes = int(symbol_stops[-1]) + 2 * before
    tables = Tables(
        {
            "layer": layer,
            "group": group,
            "tokens": tokens,
            "keys_at": keys_at,
            "values_at": values_at,
            "centres_at": centres_at,
            "side_counts": totals,
            "planes": np.stack([planes - before, planes - before + totals], axis=1),
            "stray_counts": stray_counts,
            "strays": np.stack([stray_starts, code_stops - sizes * dense, code_stops], axis=1),
        }
    )
    head = tables.joined.nbytes
    symbols = np.column_stack([layer, places.frames[:, own].reshape(-1, 2)[order], head + symbol_stops - sizes, sizes])
    aside = np.column_stack([np.arange(layers), places.sides, head + planes, 2 * totals])
    return Pile(
        coded=coded,
        counts=(layers, len(groups)),
        kept=kept,
        frames=np.concatenate([symbols, aside]),
        runs=_runs(np.column_stack([dense, half, tokens[group]]), symbol_stops, code_stops),
        tables=tables,
        size_bytes=head + int(symbol_stops[-1]) + 2 * int(totals.sum()),
        codes=int(code_stops[-1]),
        strays=int(stray_counts.sum()),
        side_numbers=int(totals.sum()),
    )


def _runs(kinds: NDArray[Any], symbol_stops: NDArray[Any], code_stops: NDArray[Any]) -> tuple[FrameRun, ...]:
    """The runs of frames of equal kinds: density, half, tokens."""
    changes = np.flatnonzero((kinds[1:] != kinds[:-1]).any(1)) + 1
    edges = [0, *changes.tolist(), len(kinds)]
    symbols, codes = np.concatenate([[0], symbol_stops]).tolist(), np.concatenate([[0], code_stops]).tolist()
    found = []
    for a, b in pairwise(edges):
        per_byte, half, tokens = kinds[a].tolist()
        found.append(
            FrameRun(per_byte, half, tokens, slice(a, b), slice(symbols[a], symbols[b]), slice(codes[a], codes[b]))
        )
    return tuple(found)
