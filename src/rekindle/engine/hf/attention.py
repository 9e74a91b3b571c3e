"""Attention of the rows of one sequence over its buffers: dense, exact, for any sorted set of positions.

A row's queries are cut into *tiles*. A tile reads only the keys it can need, so a scattered recompute does not pay
for keys after its queries, and a sliding window does not pay for keys outside it:

    keys ->   0 . . . . . . . . . . . . n
    tile 0    #########.\\\\\\              # seen by all its queries   \\ masked, query by query
    tile 1    ################\\\\\\\\        nothing is computed to the right of a tile's last position

On a CUDA device a kernel takes all scattered queries of a row at once (`kernels.py`), as one tile with positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from rekindle.engine.hf.kernels import attend_scattered
from rekindle.engine.hooks import Positions

# Small tiles waste less on masked keys; a GPU wants fewer, larger calls. Measured for 2,521 scattered queries over
# 8,256 keys in a 32/8-head shape on an H200: 1.67 ms in tiles of 256, 0.93 ms of 512, 1.18 ms in one.
_TILE_QUERIES = {"cpu": 256, "mps": 256, "cuda": 512}


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `[start, stop)` of a row against keys `[low, high)` of its sequence.

    Either nothing is masked, or `mask` is added to the scores, or the tile is `causal` (its queries are at the last
    positions of its keys), or `positions` gives the position of each query.
    """

    start: int
    stop: int
    low: int
    high: int
    mask: Tensor | None = None  # [stop - start, high - low]
    causal: bool = False
    positions: Tensor | None = None  # [stop - start]
    window: int | None = None  # how far back each of those attends


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """How a layer turns query-key products into attention, and how far back it looks."""

    scaling: float
    softcap: float | None
    window: int | None  # positions, its own included; None: all


def cut_tiles(
    positions: Positions, window: int | None, dtype: torch.dtype, device: torch.device, *, by_position: bool = False
) -> tuple[Tile, ...]:
    """The tiles of a row with these positions, in a layer that attends to `window` positions back (None: all).

    `by_position`: scattered queries may come as one tile (see `kernels.supports`).
    """
    count, first, last = len(positions), int(positions[0]), int(positions[-1])
    if count == 1:
        return (Tile(0, 1, _lowest(first, window), last + 1),)
    in_one_run = last - first + 1 == count
    sees_all = window is None or last < window
    if in_one_run and sees_all and (first == 0 or device.type == "cuda"):
        return (Tile(0, count, 0, last + 1, causal=True),)
    if by_position:
        return (Tile(0, count, 0, last + 1, positions=torch.from_numpy(positions).to(device), window=window),)
    size = _TILE_QUERIES[device.type]
    return tuple(
        _cut_tile(positions, start, min(start + size, count), window, dtype, device) for start in range(0, count, size)
    )


def attend(query: Tensor, keys: Tensor, values: Tensor, tiles: tuple[Tile, ...], scores: ScoreParams) -> Tensor:
    """Attention output `[1, heads, tokens, value_dim]`.

    query [1, heads, tokens, key_dim]; keys, values [1, kv_heads, capacity, dim].
    """
    if scores.softcap is not None:
        size = _TILE_QUERIES[query.device.type]
        pieces = (piece for tile in tiles for piece in split_tile(tile, size, query.device))
        outputs = [_capped(*_cut(query, keys, values, piece), piece, scores) for piece in pieces]
    elif len(tiles) == 1:
        return _dense(*_cut(query, keys, values, tiles[0]), tiles[0], scores.scaling)
    else:
        outputs = [_dense(*_cut(query, keys, values, tile), tile, scores.scaling) for tile in tiles]
    return torch.cat(outputs, dim=2)


def attention_weights(query: Tensor, keys: Tensor, tile: Tile, scores: ScoreParams) -> Tensor:
    """The weights themselves, `[1, heads, queries, keys]` in float32: for soft-capped layers and for probes.

    The tile must come from `split_tile`, which makes its mask explicit.
    """
    products = torch.matmul(query, _repeat(keys, query.shape[1]).transpose(2, 3)).mul_(scores.scaling)
    if scores.softcap is not None:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    if tile.mask is not None:
        products = products.add_(tile.mask)
    return torch.softmax(products, dim=-1, dtype=torch.float32)


def split_tile(tile: Tile, queries: int, device: torch.device) -> Iterator[Tile]:
    """The tile in pieces of at most `queries` queries, each with an explicit mask: bounds the memory of weights."""
    for start in range(tile.start, tile.stop, queries):
        stop = min(start + queries, tile.stop)
        mask, high = tile.mask, tile.high
        if tile.causal:
            high -= tile.stop - stop  # keys after the last of these queries are hidden from all of them
            own = torch.arange(start, stop, device=device) + (tile.high - tile.stop)  # positions of the queries
            future = torch.arange(tile.low, high, device=device)[None] > own[:, None]
            mask = torch.zeros(future.shape, device=device).masked_fill_(future, float("-inf"))
        elif mask is not None:
            mask = mask[start - tile.start : stop - tile.start]
        yield Tile(start, stop, tile.low, high, mask)


def _cut(query: Tensor, keys: Tensor, values: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values of a tile, each `[1, heads, count, dim]`."""
    if tile.stop - tile.start != query.shape[2]:
        query = query[:, :, tile.start : tile.stop]
    return query, keys[:, :, tile.low : tile.high], values[:, :, tile.low : tile.high]


def _capped(query: Tensor, keys: Tensor, values: Tensor, tile: Tile, scores: ScoreParams) -> Tensor:
    weights = attention_weights(query, keys, tile, scores).to(values.dtype)
    return torch.matmul(weights, _repeat(values, query.shape[1]))


def _dense(query: Tensor, keys: Tensor, values: Tensor, tile: Tile, scaling: float) -> Tensor:
    heads, kv_heads, tokens = query.shape[1], keys.shape[1], query.shape[2]
    if tile.positions is not None:
        return attend_scattered(query, keys, values, tile.positions, scaling, tile.window)
    if tokens == 1 and heads != kv_heads and query.device.type == "cpu":
        # Decoding: the queries that share a key head become rows of one product, so keys are read once, not
        # once a head. Measured for a 32/8-head shape and 4,096 keys: 3.1 ms against 7.8 ms. (CUDA's own is faster.)
        grouped = query.reshape(1, kv_heads, heads // kv_heads, -1)
        mixed = functional.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
        return mixed.reshape(1, heads, 1, -1)
    if query.device.type == "mps" and heads != kv_heads:
        keys, values = _repeat(keys, heads), _repeat(values, heads)  # grouped heads are not sure to work there
    whole = tile.causal and tokens == keys.shape[2]
    mask = causal_lower_right(tokens, keys.shape[2]) if tile.causal and not whole else tile.mask
    return functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=whole, scale=scaling, enable_gqa=keys.shape[1] != heads
    )


def _repeat(heads: Tensor, count: int) -> Tensor:
    """Key or value heads repeated to `count` query heads."""
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
        return Tile(start, stop, low, high)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    mask.masked_fill_(torch.from_numpy(hidden).to(device), float("-inf"))
    return Tile(start, stop, low, high, mask)


def _lowest(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)
