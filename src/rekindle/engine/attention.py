"""Attention of the rows of one sequence over its buffers: dense, exact, for any sorted set of positions.

A row's queries are cut into *tiles*. A tile sees only the keys it can need, so a scattered recompute does not pay
for keys that lie after its queries, and a sliding window does not pay for keys that have left it:

    keys ->   0 . . . . . . . . . . . . n
    tile 0    #########.\\\\\\              # seen by all its queries   \\ masked, query by query
    tile 1    ################\\\\\\\\        nothing is computed to the right of a tile's last position
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rekindle.engine.base import Positions

_TILE_QUERIES = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `[start, stop)` of a row against keys `[low, high)` of its sequence."""

    start: int
    stop: int
    low: int
    high: int
    mask: Tensor | None  # [stop - start, high - low], added to the scores; None: nothing is masked
    causal: bool  # query i sees keys up to i: the plain prefill of a whole prompt


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns query-key products into attention, and how far back it looks."""

    scaling: float
    softcap: float | None
    window: int | None  # positions, its own included; None: all


def cut_tiles(positions: Positions, window: int | None, dtype: torch.dtype, device: torch.device) -> tuple[Tile, ...]:
    """The tiles of a row with these positions, in a layer that sees `window` positions back (None: all)."""
    count, first, last = len(positions), int(positions[0]), int(positions[-1])
    if count == 1:
        return (Tile(0, 1, _lowest(first, window), last + 1, None, False),)
    if first == 0 and last + 1 == count and (window is None or count <= window):
        return (Tile(0, count, 0, count, None, True),)
    return tuple(
        _cut_tile(positions, start, min(start + _TILE_QUERIES, count), window, dtype, device)
        for start in range(0, count, _TILE_QUERIES)
    )


def attend(query: Tensor, keys: Tensor, values: Tensor, tiles: tuple[Tile, ...], scores: Scores) -> Tensor:
    """Attention output `[1, heads, tokens, value_dim]`.

    query [1, heads, tokens, key_dim]; keys, values [1, kv_heads, capacity, dim].
    """
    if scores.softcap is not None:
        pieces = (piece for tile in tiles for piece in split_tile(tile, _TILE_QUERIES, query.device))
        outputs = [_capped(*_cut(query, keys, values, piece), piece, scores) for piece in pieces]
    elif len(tiles) == 1:
        return _dense(*_cut(query, keys, values, tiles[0]), tiles[0], scores.scaling)
    else:
        outputs = [_dense(*_cut(query, keys, values, tile), tile, scores.scaling) for tile in tiles]
    return torch.cat(outputs, dim=2)


def attention_weights(query: Tensor, keys: Tensor, tile: Tile, scores: Scores) -> Tensor:
    """The weights themselves, `[1, heads, queries, keys]` in float32: for soft-capped layers and for probes.

    The tile must come from `split_tile`, which makes its mask explicit.
    """
    products = torch.matmul(query, _repeat(keys, query.shape[1]).transpose(2, 3)) * scores.scaling
    if scores.softcap is not None:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    if tile.mask is not None:
        products = products + tile.mask
    return torch.softmax(products, dim=-1, dtype=torch.float32)


def split_tile(tile: Tile, queries: int, device: torch.device) -> Iterator[Tile]:
    """The tile in pieces of at most so many queries, each with an explicit mask: bounds what weights need."""
    for start in range(tile.start, tile.stop, queries):
        stop = min(start + queries, tile.stop)
        mask = tile.mask
        if tile.causal:
            future = torch.arange(tile.high, device=device)[None] > torch.arange(start, stop, device=device)[:, None]
            mask = torch.zeros(future.shape, device=device).masked_fill_(future, float("-inf"))
        elif mask is not None:
            mask = mask[start - tile.start : stop - tile.start]
        yield Tile(start, stop, tile.low, tile.high, mask, False)


def _cut(query: Tensor, keys: Tensor, values: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """What a tile looks at: queries, keys and values, each `[1, heads, count, dim]`."""
    if tile.stop - tile.start != query.shape[2]:
        query = query[:, :, tile.start : tile.stop]
    return query, keys[:, :, tile.low : tile.high], values[:, :, tile.low : tile.high]


def _capped(query: Tensor, keys: Tensor, values: Tensor, tile: Tile, scores: Scores) -> Tensor:
    weights = attention_weights(query, keys, tile, scores).to(values.dtype)
    return torch.matmul(weights, _repeat(values, query.shape[1]))


def _dense(query: Tensor, keys: Tensor, values: Tensor, tile: Tile, scaling: float) -> Tensor:
    heads, kv_heads = query.shape[1], keys.shape[1]
    tokens = query.shape[2]
    if tokens == 1 and heads != kv_heads:
        # Decoding: the queries that share a key head become rows of one product, so keys are read once, not
        # once a head (measured on a 32/8-head shape, 4,096 keys, CPU: 2.5x).
        grouped = query.reshape(1, kv_heads, heads // kv_heads, -1)
        mixed = functional.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
        return mixed.reshape(1, heads, 1, -1)
    if tile.mask is not None and query.device.type == "cuda":
        # With a mask and grouped heads CUDA has only its slowest kernel.
        keys, values = _repeat(keys, heads), _repeat(values, heads)
    return functional.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=tile.mask,
        is_causal=tile.causal,
        scale=scaling,
        enable_gqa=keys.shape[1] != heads,
    )


def _repeat(heads: Tensor, count: int) -> Tensor:
    """Key or value heads repeated to as many as there are query heads."""
    times = count // heads.shape[1]
    return heads if times == 1 else heads.repeat_interleave(times, dim=1)


def _cut_tile(
    positions: Positions, start: int, stop: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tile:
    own = positions[start:stop]
    low, high = _lowest(int(own[0]), window), int(own[-1]) + 1
    keys = np.arange(low, high)
    hidden = keys[None, :] > own[:, None]
    if window is not None:
        hidden |= keys[None, :] <= own[:, None] - window
    if not hidden.any():
        return Tile(start, stop, low, high, None, False)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    mask.masked_fill_(torch.from_numpy(hidden).to(device), float("-inf"))
    return Tile(start, stop, low, high, mask, False)


def _lowest(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)
