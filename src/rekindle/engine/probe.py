"""Reading what attention does inside a row, without ever holding a whole attention matrix."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rekindle.core.kv import Span
from rekindle.engine.attention import Scores, Tile, attention_weights, split_tile
from rekindle.engine.watch import Positions, Probe, Reading

_WEIGHT_BYTES = {"cpu": 8 << 20, "mps": 32 << 20, "cuda": 512 << 20}  # the largest block of weights held at a time


def read(
    probe: Probe,
    layer: int,
    positions: Positions,
    query: Tensor,  # [1, heads, tokens, key_dim]
    keys: Tensor,  # [1, kv_heads, capacity, key_dim]
    tiles: tuple[Tile, ...],
    scores: Scores,
    deviation: Tensor | None,  # [tokens]
) -> None:
    """Report a `Reading` of this layer to the probe."""
    heads, end = query.shape[1], int(positions[-1]) + 1
    asked = _asked(positions, probe.queries)
    device = query.device
    received = torch.zeros(heads, end, device=device)
    sent = torch.zeros(len(positions), len(probe.segments), device=device)
    if asked.any() or probe.segments:
        rows = max(1, _WEIGHT_BYTES[device.type] // (4 * heads * end))
        for tile in (piece for whole in tiles for piece in split_tile(whole, rows, device)):
            if not probe.segments and not asked[tile.start : tile.stop].any():
                continue
            weights = attention_weights(
                query[:, :, tile.start : tile.stop], keys[:, :, tile.low : tile.high], tile, scores
            )[0]  # [heads, queries, keys]
            chosen = asked[tile.start : tile.stop]
            of_asked = weights if chosen.all() else weights[:, torch.from_numpy(chosen).to(device)]
            received[:, tile.low : tile.high] += of_asked.sum(dim=1)
            sent[tile.start : tile.stop] = _segment_mass(weights, tile, probe.segments)
    mean = received / max(1, int(asked.sum()))
    probe.report(
        Reading(
            layer=layer,
            positions=positions,
            received=mean.mean(dim=0).cpu().numpy() if probe.queries is not None else None,
            received_most=mean.amax(dim=0).cpu().numpy() if probe.queries is not None else None,
            sent=sent.cpu().numpy() if probe.segments else None,
            deviation=deviation.float().cpu().numpy() if deviation is not None else None,
        )
    )


def deviation_of(new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]) -> Tensor:
    """How far new KV `[1, kv_heads, tokens, dim]` is from old, relative to the old, token by token."""
    shares = [
        (fresh - stale).float().square().sum(dim=(0, 1, 3)) / stale.float().square().sum(dim=(0, 1, 3)).clamp_min(1e-12)
        for fresh, stale in zip(new, old, strict=True)
    ]
    return torch.stack(shares).mean(dim=0).sqrt()


def _asked(positions: Positions, queries: Span | None) -> NDArray[np.bool_]:
    if queries is None:
        return np.zeros(len(positions), dtype=bool)
    return (positions >= queries.start) & (positions < queries.stop)


def _segment_mass(weights: Tensor, tile: Tile, segments: tuple[Span, ...]) -> Tensor:
    """[queries, segments] the mass each query gives to each segment, mean over heads."""
    mean = weights.mean(dim=0)  # [queries, keys]
    masses = [
        mean[:, max(0, s.start - tile.low) : max(0, min(s.stop, tile.high) - tile.low)].sum(dim=1) for s in segments
    ]
    return torch.stack(masses, dim=1) if masses else mean.new_zeros(mean.shape[0], 0)
