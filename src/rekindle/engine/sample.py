"""Drawing the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rekindle.core.request import Sampling


class Sampler:
    """Draws the tokens of one reply. Same sampling, seed and logits: same tokens."""

    def __init__(self, sampling: Sampling, context: Sequence[int]) -> None:
        """`context` is the prompt: a repetition penalty counts it too."""
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)
        self._seen: set[int] = set(context) if sampling.repetition_penalty != 1.0 else set()

    def draw(self, logits: NDArray[np.float32]) -> int:
        """The next token, from logits `[vocabulary]`."""
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0:
            logits = self._penalized(logits)
        token = int(logits.argmax()) if sampling.greedy else self._drawn(logits)
        if sampling.repetition_penalty != 1.0:
            self._seen.add(token)
        return token

    def _penalized(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        seen = np.fromiter(self._seen, dtype=np.int64)
        penalty = np.float32(self._sampling.repetition_penalty)
        changed: NDArray[np.float32] = logits.copy()
        own = changed[seen]
        changed[seen] = np.where(own > 0, own / penalty, own * penalty)
        return changed

    def _drawn(self, logits: NDArray[np.float32]) -> int:
        sampling = self._sampling
        with np.errstate(over="ignore"):  # a tiny temperature makes all but the likeliest infinitely unlikely
            scaled = (logits - logits.max()).astype(np.float64) / sampling.temperature
        candidates = np.arange(len(scaled))
        if sampling.top_k is not None and sampling.top_k < len(scaled):
            candidates = np.argpartition(scaled, -sampling.top_k)[-sampling.top_k :]
        # Likeliest first; equal ones by token id, so that the order never depends on how they were found.
        candidates = candidates[np.lexsort((candidates, -scaled[candidates]))]
        chances = np.exp(scaled[candidates])
        chances /= chances.sum()
        if sampling.top_p < 1.0:
            kept = int(np.searchsorted(np.cumsum(chances), sampling.top_p)) + 1
            candidates, chances = candidates[:kept], chances[:kept]
        if sampling.min_p > 0.0:
            likely = chances >= sampling.min_p * chances[0]
            candidates, chances = candidates[likely], chances[likely]
        edges = np.cumsum(chances)
        point = self._random.random() * edges[-1]
        return int(candidates[min(int(np.searchsorted(edges, point, side="right")), len(edges) - 1)])
