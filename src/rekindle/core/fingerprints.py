"""Fingerprints of a text's tokens: the same text has the same ones at any offset of any prompt.

    tokens    t t t t t t t t t t t t t t t t t t t t t t t
    grams     [every 32 tokens in a row have a hash .......]
    kept      of every 64 grams in a row the one with the smallest hash (winnowing)

Two prompts that share at least `SHARED_TOKENS` tokens in a row have a fingerprint in common, wherever they share them;
about one token of 32 ends one. A gram is as long as a block: the tokens of the block where it ends, up to its end, are
tokens of the gram.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.core.keys import BLOCK_TOKENS

GRAM_TOKENS = BLOCK_TOKENS
WINDOW_GRAMS = 64
SHARED_TOKENS = WINDOW_GRAMS + GRAM_TOKENS - 1

_POSITION = np.uint64((1 << 24) - 1)  # the low bits that make every hash of a prompt different
_BASE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class Fingerprints:
    """The fingerprints of a prompt.

    ends   [n] the position behind each gram, growing
    keys   [n] its hash
    """

    ends: NDArray[np.int64]
    keys: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: bytes) -> Fingerprints:
        """Those of some tokens (see `token_bytes`), in time linear in their number."""
        hashes = _gram_hashes(tokens)  # [grams]
        if len(hashes) < WINDOW_GRAMS:
            return cls(np.empty(0, np.int64), np.empty(0, np.int64))
        least = (hashes & ~_POSITION) | np.arange(len(hashes), dtype=np.uint64)
        width = 1
        while width < WINDOW_GRAMS:  # the minimum of `width` grams from each on
            least = np.minimum(least[:-width], least[width:])
            width *= 2
        kept = np.unique(least & _POSITION).astype(np.int64)
        return cls(kept + GRAM_TOKENS, hashes[kept].view(np.int64))


def _gram_hashes(tokens: bytes) -> NDArray[np.uint64]:
    """The hash of every `GRAM_TOKENS` tokens in a row, `[tokens - GRAM_TOKENS + 1]`."""
    hashes = _mixed(np.frombuffer(tokens, "<u4").astype(np.uint64) + np.uint64(1))
    base, width = _BASE, 1
    while width < GRAM_TOKENS:  # a polynomial in `base`, modulo 2^64: twice as many tokens in every round
        hashes = hashes[:-width] * np.uint64(base) + hashes[width:]
        base, width = base * base % (1 << 64), 2 * width
    return _mixed(hashes)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection that spreads every bit over all others (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
