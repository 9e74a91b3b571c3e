"""What rows may ask for beside logits (`engine/hooks`), without ever holding a whole attention matrix:

probes           attention that tokens send and receive, layer by layer
attention map    what some tokens attend to over a whole pass, kept on the device until the end
KV drift         KV that is not recomputed follows what changed beside it, see `KvDrift`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rekindle.core.kv import Span
from rekindle.engine.hf import kernels, kv_kernels
from rekindle.engine.hf.attention import ScoreParams, Tile, attention_weights, split_tile
from rekindle.engine.hooks import AttentionMap, KvDrift, Positions, Probe, Reading

_WEIGHT_BYTES = {"cpu": 2 << 20, "mps": 32 << 20, "cuda": 512 << 20}  # the largest block of weights held at a time


def read_attention(
    probe: Probe,
    layer: int,
    positions: Positions,
    query: Tensor,  # [1, heads, tokens, key_dim]
    keys: Tensor,  # [1, kv_heads, capacity, key_dim]
    tiles: tuple[Tile, ...],
    scores: ScoreParams,
    deviation: Tensor | None,  # [tokens]
) -> Callable[[], Reading]:
    """Read this layer for the probe. What is returned waits for the device and brings the reading."""
    heads, end = query.shape[1], int(positions[-1]) + 1
    asked = _asked(positions, probe.queries)
    device = query.device
    received = torch.zeros(heads, end, device=device)
    sent = torch.zeros(len(positions), len(probe.segments), device=device)
    if kernels.supports(query, keys, keys) and not scores.softcap and len(probe.segments) <= kernels.MAX_SEGMENTS:
        places, segments = (torch.from_numpy(n).to(device) for n in (positions, _segment_of_keys(probe.segments, end)))
        first, count = int(asked.argmax()), int(asked.sum())
        sent, received = kernels.attention_sent(
            query, keys, places, segments, len(probe.segments), (first, first + count), scores.scaling, scores.window
        )
    elif asked.any() or probe.segments:
        if probe.sampled:
            query = query[:, :: heads // keys.shape[1]]
            heads, received = query.shape[1], received[: query.shape[1]]
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
    found = mean.mean(dim=0), mean.amax(dim=0)  # [keys]

    def reading() -> Reading:
        return Reading(
            layer=layer,
            positions=positions,
            received=found[0].cpu().numpy() if probe.queries is not None else None,
            received_most=found[1].cpu().numpy() if probe.queries is not None else None,
            sent=sent.cpu().numpy() if probe.segments else None,
            deviation=deviation.float().cpu().numpy() if deviation is not None else None,
        )

    return reading


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


def _segment_of_keys(segments: Sequence[Span], end: int) -> NDArray[np.int32]:
    """The number of each key's segment; -1: none. Segments do not overlap."""
    found = np.full(end, -1, dtype=np.int32)
    for number, span in enumerate(segments):
        found[span.start : span.stop] = number
    return found


def _segment_mass(weights: Tensor, tile: Tile, segments: tuple[Span, ...]) -> Tensor:
    """[queries, segments] the attention mass of each query on each segment, mean over heads."""
    mean = weights.mean(dim=0)  # [queries, keys]
    masses = [
        mean[:, max(0, s.start - tile.low) : max(0, min(s.stop, tile.high) - tile.low)].sum(dim=1) for s in segments
    ]
    return torch.stack(masses, dim=1) if masses else mean.new_zeros(mean.shape[0], 0)


_MAP_WEIGHT_BYTES = 256 << 20  # the largest block of attention weights held at a time


class AttentionMapRecorder:
    """Collects a gaze over the layers of a pass."""

    def __init__(self, gaze: AttentionMap) -> None:
        self._gaze = gaze
        self._layers = 0
        self._total: Tensor | None = None  # [keys] summed over the layers
        self._hidden: dict[int | None, tuple[Positions, Tensor]] = {}  # by window: positions and their mask

    def look(
        self, layer: int, positions: Positions, query: Tensor, keys: Tensor, values: Tensor, scores: ScoreParams
    ) -> None:
        """Add one layer, if wanted. query [1, heads, tokens, dim]; keys, values [1, kv_heads, capacity, dim]."""
        queries = self._gaze.queries
        first, stop = np.searchsorted(positions, [queries.start, queries.stop]).tolist()
        if first == stop or (self._gaze.layers is not None and layer not in self._gaze.layers):
            return
        end, kv_heads, heads = int(positions[-1]) + 1, keys.shape[1], query.shape[1]
        # Queries that share a key head are rows of one product, so keys need not be repeated.
        asked = query[0, :, first:stop].reshape(kv_heads, -1, query.shape[3])
        hidden = self._mask(positions[first:stop], end, scores.window, query.device)
        lengths = torch.linalg.vector_norm(values[0, :, :end].float(), dim=-1)  # [kv_heads, keys]
        lengths /= lengths.mean()
        some = max(1, _MAP_WEIGHT_BYTES // (4 * (heads // kv_heads) * (stop - first) * end))  # key heads at a time
        seen = query.new_zeros(end, dtype=torch.float32)
        for low in range(0, kv_heads, some):
            high = min(low + some, kv_heads)
            some_keys = keys[0, low:high, :end].transpose(1, 2)
            products = torch.baddbmm(keys.new_empty(1), asked[low:high], some_keys, beta=0, alpha=scores.scaling)
            if scores.softcap is not None:
                products = torch.tanh(products / scores.softcap) * scores.softcap
            products = products.view(-1, stop - first, end)
            products[..., end - hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
            mass = torch.softmax(products, dim=-1, dtype=torch.float32).mean(dim=1)  # [heads, keys]
            weighed = mass.view(high - low, -1, end) * lengths[low:high, None]
            seen = torch.maximum(seen, weighed.amax(dim=(0, 1)))
        self._total = seen if self._total is None else self._total + seen
        self._layers += 1

    def _mask(self, own: Positions, end: int, window: int | None, device: torch.device) -> Tensor:
        """Mask of queries at these positions, `[queries, keys]`, of the last keys; earlier ones are visible to all.

        The same in all layers but for the window.
        """
        known = self._hidden.get(window)
        if known is None or not np.array_equal(known[0], own):
            asking = torch.from_numpy(own).to(device)[:, None]
            places = torch.arange(int(own[0]) + 1 if window is None else 0, end, device=device)[None]
            hidden = places > asking
            if window is not None:
                hidden |= places <= asking - window
            known = self._hidden[window] = (own, hidden)
        return known[1]

    def report(self) -> None:
        """Report the mean over the layers."""
        if self._total is not None:
            self._gaze.report((self._total / self._layers).cpu().numpy())


class KvDriftCorrection:
    """A spread over a row's current tokens: all spans at once, because a GPU wants few launches."""

    def __init__(self, spread: KvDrift, positions: Positions, device: torch.device) -> None:
        """`positions`: those that are computed."""
        spans = [span for span in spread.spans if _inside(span.start, span.stop, positions)]
        owns = [np.arange(*np.searchsorted(positions, [span.start, span.stop])) for span in spans]
        self.idle = not spans
        if self.idle:
            return
        others = np.ones(max(span.stop for span in spans), dtype=bool)
        others[positions[positions < len(others)]] = False
        rests = [span.start + np.flatnonzero(others[span.start : span.stop]) for span in spans]
        parts = [positions, *(part for some in (owns, rests) for part in (np.concatenate(some), _starts(some)))]
        numbers = torch.from_numpy(np.concatenate(parts)).to(device)
        self._spans = kv_kernels.MovingSpans(*torch.split(numbers, [len(part) for part in parts]))
        self._gain = spread.gain

    def move(self, buffer: Tensor, rows: Tensor) -> None:
        """Call before rows `[1, kv_heads, tokens, dim]` go to a buffer `[1, kv_heads, capacity, dim]`."""
        spans = self._spans
        if kernels.fits_split(rows.shape[3], rows.dtype, rows.device):
            kv_kernels.move_rest(buffer[0], rows[0], spans, self._gain)
            return
        change = rows[0, :, spans.own] - buffer[0, :, spans.slots[spans.own]]  # [kv_heads, n, dim]
        counts, rest_counts = spans.own_starts.diff(), spans.rest_starts.diff()
        numbers = torch.arange(len(counts), device=rows.device)
        sums = change.new_zeros(change.shape[0], len(counts), change.shape[2], dtype=torch.float32)
        sums.index_add_(1, numbers.repeat_interleave(counts), change.float())
        mean = (sums * (self._gain / counts)[:, None]).to(buffer.dtype)
        buffer[0].index_add_(1, spans.rest, mean.repeat_interleave(rest_counts, dim=1))


def _starts(parts: Sequence[Positions]) -> Positions:
    """Where each part begins once they are joined, and the end."""
    return np.cumsum([0, *map(len, parts)])


def _inside(start: int, stop: int, positions: Positions) -> bool:
    first, last = np.searchsorted(positions, [start, stop])
    return bool(0 < last - first < stop - start)
