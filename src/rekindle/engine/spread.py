"""KV that is not computed anew, moved along with that beside it which is: see `Spread`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rekindle.engine.sequence import Slots
from rekindle.engine.watch import Positions, Spread


class Spreading:
    """A spread over the tokens that a row has now: for all spans at once, because a GPU wants few launches."""

    def __init__(self, spread: Spread, positions: Positions, device: torch.device) -> None:
        """`positions` are those that are computed."""
        spans = [span for span in spread.spans if _inside(span.start, span.stop, positions)]
        places = [np.searchsorted(positions, [span.start, span.stop]) for span in spans]
        rests = [np.setdiff1d(np.arange(s.start, s.stop), positions, assume_unique=True) for s in spans]
        own = np.concatenate([np.arange(*place) for place in places]) if spans else np.empty(0, dtype=np.int64)
        rest = np.concatenate(rests) if spans else np.empty(0, dtype=np.int64)
        self.idle = not len(own) or not len(rest)
        if self.idle:
            return
        counts = np.array([stop - start for start, stop in places])
        self._spans = len(spans)
        self._own = torch.from_numpy(own).to(device)  # [n] places in the row
        self._rest = torch.from_numpy(rest).to(device)  # [m] positions
        self._span_of_own = torch.from_numpy(np.repeat(np.arange(len(spans)), counts)).to(device)
        self._span_of_rest = torch.from_numpy(np.repeat(np.arange(len(spans)), [len(r) for r in rests])).to(device)
        self._shares = torch.from_numpy((spread.gain / counts).astype(np.float32)).to(device)[:, None]  # [spans, 1]

    def move(self, buffer: Tensor, slots: Slots, rows: Tensor) -> None:
        """Before rows `[1, kv_heads, tokens, dim]` go to `slots` of a buffer `[1, kv_heads, capacity, dim]`."""
        change = (rows[0] - buffer[0, :, slots]).index_select(1, self._own)  # [kv_heads, n, dim]
        sums = change.new_zeros(change.shape[0], self._spans, change.shape[2], dtype=torch.float32)
        sums.index_add_(1, self._span_of_own, change.float())
        mean = (sums * self._shares).to(buffer.dtype)
        buffer[0].index_add_(1, self._rest, mean.index_select(1, self._span_of_rest))


def _inside(start: int, stop: int, positions: Positions) -> bool:
    first, last = np.searchsorted(positions, [start, stop])
    return bool(0 < last - first < stop - start)
