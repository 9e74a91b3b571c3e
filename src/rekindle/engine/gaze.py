"""What some tokens look at, over a whole pass: on the device till the end, and without the other tokens' attention."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rekindle.engine.attention import Scores
from rekindle.engine.watch import Gaze, Positions

_WEIGHT_BYTES = 256 << 20  # the largest block of attention weights held at a time


class Gazing:
    """A gaze on its way through the layers."""

    def __init__(self, gaze: Gaze) -> None:
        self._gaze = gaze
        self._layers = 0
        self._total: Tensor | None = None  # [keys] summed over the layers

    def look(
        self, layer: int, positions: Positions, query: Tensor, keys: Tensor, values: Tensor, scores: Scores
    ) -> None:
        """Take one layer in, if it counts. query [1, heads, tokens, dim]; keys, values [1, kv_heads, capacity, dim]."""
        queries = self._gaze.queries
        first, stop = np.searchsorted(positions, [queries.start, queries.stop]).tolist()
        if first == stop or (self._gaze.layers is not None and layer not in self._gaze.layers):
            return
        end, kv_heads, heads = int(positions[-1]) + 1, keys.shape[1], query.shape[1]
        own = torch.from_numpy(positions[first:stop]).to(query.device)  # [queries]
        # The queries that share a key head are rows of one product, so that keys need not be repeated.
        asked = query[0, :, first:stop].reshape(kv_heads, -1, query.shape[3])
        places = torch.arange(end, device=query.device)
        hidden = places[None] > own[:, None]
        if scores.window is not None:
            hidden |= places[None] <= own[:, None] - scores.window
        lengths = torch.linalg.vector_norm(values[0, :, :end].float(), dim=-1)  # [kv_heads, keys]
        lengths /= lengths.mean()
        some = max(1, _WEIGHT_BYTES // (4 * (heads // kv_heads) * (stop - first) * end))  # key heads at a time
        seen = query.new_zeros(end, dtype=torch.float32)
        for low in range(0, kv_heads, some):
            high = min(low + some, kv_heads)
            products = torch.matmul(asked[low:high], keys[0, low:high, :end].transpose(1, 2)).float() * scores.scaling
            if scores.softcap is not None:
                products = torch.tanh(products / scores.softcap) * scores.softcap
            products = products.view(-1, stop - first, end).masked_fill_(hidden, float("-inf"))
            mass = torch.softmax(products, dim=-1).mean(dim=1)  # [heads, keys]
            weighed = mass.view(high - low, -1, end) * lengths[low:high, None]
            seen = torch.maximum(seen, weighed.amax(dim=(0, 1)))
        self._total = seen if self._total is None else self._total + seen
        self._layers += 1

    def report(self) -> None:
        """Tell what was seen."""
        if self._total is not None:
            self._gaze.report((self._total / self._layers).cpu().numpy())
