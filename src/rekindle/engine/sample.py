"""Sampling the next token from logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from rekindle.core.request import Sampling

_FEW = 1024


class Sampler:
    """Samples the tokens of one reply. Same sampling, seed and logits: same tokens."""

    def __init__(self, sampling: Sampling, context: Sequence[int]) -> None:
        """`context` is the prompt: a repetition penalty counts it too."""
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)
        self._seen: set[int] = set(context) if sampling.repetition_penalty != 1.0 else set()

    def draw(self, logits: NDArray[np.float32]) -> int:
        """The next token, from logits `[vocabulary]`."""
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0:
            logits = penalized(logits, self._seen, sampling.repetition_penalty)
        token = int(logits.argmax()) if sampling.greedy else self._drawn(logits)
        if sampling.repetition_penalty != 1.0:
            self._seen.add(token)
        return token

    def _drawn(self, logits: NDArray[np.float32]) -> int:
        sampling = self._sampling
        with np.errstate(over="ignore"):  # with a tiny temperature
            scaled = (logits - logits.max()).astype(np.float64) / sampling.temperature
        chances = np.exp(scaled)
        candidates = self._candidates(scaled, chances)
        edges = np.cumsum(chances[candidates])
        point = self._random.random() * edges[-1]
        return int(candidates[min(int(np.searchsorted(edges, point, side="right")), len(edges) - 1)])

    def _candidates(self, scaled: NDArray[np.float64], chances: NDArray[np.float64]) -> NDArray[np.int64]:
        """The tokens that may be drawn: all in order, or the most likely first."""
        sampling = self._sampling
        top_k = sampling.top_k if sampling.top_k is not None and sampling.top_k < len(scaled) else None
        if top_k is None and sampling.top_p == 1.0 and sampling.min_p == 0.0:
            return np.arange(len(scaled))
        # Few tokens hold nearly all the probability: sorting all of them would take longer than the rest.
        if top_k is not None:
            candidates = _likeliest(scaled, top_k)
        elif sampling.min_p > 0.0:
            candidates = _ordered(scaled, np.flatnonzero(chances >= sampling.min_p * chances.max()))
        else:
            candidates = _likeliest(scaled, min(_FEW, len(scaled)))
            if chances[candidates].sum() < sampling.top_p * chances.sum():
                candidates = _likeliest(scaled, len(scaled))
        total = chances[candidates].sum() if top_k is not None else chances.sum()
        if sampling.top_p < 1.0:
            held = np.cumsum(chances[candidates]) / total
            candidates = candidates[: int(np.searchsorted(held, sampling.top_p)) + 1]
        if sampling.min_p > 0.0:
            candidates = candidates[chances[candidates] >= sampling.min_p * chances[candidates[0]]]
        return candidates


def penalized(logits: NDArray[np.float32], seen: Collection[int], penalty: float) -> NDArray[np.float32]:
    """The logits, with seen tokens made less likely."""
    places = np.fromiter(seen, dtype=np.int64)
    changed: NDArray[np.float32] = logits.copy()
    own = changed[places]
    changed[places] = np.where(own > 0, own / np.float32(penalty), own * np.float32(penalty))
    return changed


def _likeliest(scaled: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    found = np.argpartition(scaled, -count)[-count:] if count < len(scaled) else np.arange(len(scaled))
    return _ordered(scaled, found)


def _ordered(scaled: NDArray[np.float64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The most likely first, ties by token id: the order does not depend on how they were found."""
    return tokens[np.lexsort((tokens, -scaled[tokens]))]
