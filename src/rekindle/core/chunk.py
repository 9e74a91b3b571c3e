"""A chunk, a passage that may stand in any prompt, and its variants: KV of it as it was computed in one prompt.

prompt    [head .......][1] [chunk a ....][2] [chunk b ......][question ......]
                 ^ system prompt and template: a chunk of its own, the first

A chunk is known by its tokens alone, a variant by what stood before it as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from rekindle.core.keys import token_bytes
from rekindle.core.kv import Span

LEAST_CHUNK_TOKENS = 16  # a shorter one is computed sooner than found

ChunkDigest = NewType("ChunkDigest", bytes)  # 16 bytes

_CHUNK = hashlib.blake2b(b"rekindle/chunk/1", digest_size=16)


def chunk_digest(tokens: Sequence[int] | bytes) -> ChunkDigest:
    """What a chunk is found by, from its tokens (or their bytes, see `token_bytes`)."""
    state = _CHUNK.copy()
    state.update(tokens if isinstance(tokens, bytes) else token_bytes(tokens))
    return ChunkDigest(state.digest())


@dataclass(frozen=True)
class Outline:
    """Where chunks stand in a prompt, behind a head of so many tokens. What follows the last is the question."""

    head: int
    chunks: tuple[Span, ...]
    numbers: tuple[int, ...] = ()  # which each has in the prompt; without them they count from 1

    @property
    def numbered(self) -> list[tuple[int, Span]]:
        """The chunks with their numbers."""
        return list(zip(self.numbers or range(1, len(self.chunks) + 1), self.chunks, strict=True))

    @property
    def question(self) -> int:
        """Where the question begins."""
        return self.chunks[-1].stop


@dataclass(frozen=True)
class Earlier:
    """A chunk that stood before another, and how much attention the other paid to it."""

    digest: ChunkDigest
    tokens: int
    mass: float  # sum over the other's tokens, mean over heads and layers


@dataclass(frozen=True, eq=False)
class ChunkScores:
    """What attention did in a chunk when its KV was computed: mean over heads and the layers that were read.

    outside    [tokens] the share of each token's attention that left the chunk
    received   [tokens] the mass that each token got from all tokens of the prompt
    intra      the mass that the tokens paid to their own chunk, summed
    earlier    the chunks before it, in order, the head first
    """

    outside: NDArray[np.float16]
    received: NDArray[np.float16]
    intra: float
    earlier: tuple[Earlier, ...]


@dataclass(frozen=True, eq=False)
class Variant:
    """KV of a chunk as it was computed once.

    `span` is where it stood. `drift` is the share of the tokens before it whose KV came from other prompts.
    """

    digest: ChunkDigest
    span: Span
    scores: ChunkScores
    drift: float = 0.0

    @property
    def before(self) -> tuple[ChunkDigest, ...]:
        """The chunks it was computed after, in order, the head first."""
        return tuple(chunk.digest for chunk in self.scores.earlier)
