"""How near answers from approximate KV are to those of the full computation: by distribution, and by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.engine.base import Logits

LogProbabilities = NDArray[np.float64]  # [positions, vocabulary]


@dataclass(frozen=True)
class Nearness:
    """Distributions of next tokens against the right ones."""

    mean_kl: float  # nats
    median_kl: float
    top1: float  # share of positions with the same most likely token
    positions: int


def nearness(exact: Logits, other: Logits) -> Nearness:
    """Compare logits `[positions, vocabulary]` position by position."""
    right, found = log_softmax(exact), log_softmax(other)
    kl = np.maximum((np.exp(right) * (right - found)).sum(axis=-1), 0.0)  # rounding alone makes it negative
    same = exact.argmax(axis=-1) == other.argmax(axis=-1)
    return Nearness(float(kl.mean()), float(np.median(kl)), float(same.mean()), len(kl))


def log_softmax(logits: NDArray[np.floating]) -> LogProbabilities:
    """Logits `[positions, vocabulary]` as log-probabilities."""
    moved = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(moved - np.log(np.exp(moved).sum(axis=-1, keepdims=True)))


def rouge_l(right: Sequence[int], found: Sequence[int]) -> float:
    """ROUGE-L of two token sequences: F-measure of their longest common subsequence.

    By token rather than by word, so that it means the same in every language; 1 for two empty ones.
    """
    if list(right) == list(found):
        return 1.0
    lengths = [0] * (len(found) + 1)  # of the longest common subsequence with each beginning of `found`
    for token in right:
        diagonal = 0
        for place, other in enumerate(found, start=1):
            diagonal, lengths[place] = (
                lengths[place],
                diagonal + 1 if token == other else max(lengths[place], lengths[place - 1]),
            )
    return 2 * lengths[-1] / (len(right) + len(found))
