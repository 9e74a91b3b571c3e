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
        self._hidden: dict[int | None, tuple[Positions, Tensor]] = {}  # by window: for positions, what is not seen

    def look(
        self, layer: int, positions: Positions, query: Tensor, keys: Tensor, values: Tensor, scores: Scores
    ) -> None:
        """Take one layer in, if it counts. query [1, heads, tokens, dim]; keys, values [1, kv_heads, capacity, dim]."""
        queries = self._gaze.queries
        first, stop = np.searchsorted(positions, [queries.start, queries.stop]).tolist()
        if first == stop or (self._gaze.layers is not None and layer not in self._gaze.layers):
            return
        end, kv_heads, heads = int(positions[-1]) + 1, keys.shape[1], query.shape[1]
        # The queries that share a key head are rows of one product, so that keys need not be repeated.
        asked = query[0, :, first:stop].reshape(kv_heads, -1, query.shape[3])
        hidden = self._mask(positions[first:stop], end, scores.window, query.device)
        lengths = torch.linalg.vector_norm(values[0, :, :end].float(), dim=-1)  # [kv_heads, keys]
        lengths /= lengths.mean()
        some = max(1, _WEIGHT_BYTES // (4 * (heads // kv_heads) * (stop - first) * end))  # key heads at a time
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
        """What queries at these positions do not see, `[queries, keys]` of the last keys: each sees all before those.

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
        """Tell what was seen."""
        if self._total is not None:
            self._gaze.report((self._total / self._layers).cpu().numpy())
