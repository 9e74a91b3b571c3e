"""Chunks: passages that may occur in any prompt; and their variants: the KV of a chunk from one prompt.

prompt    [head .......][1] [chunk a ....][2] [chunk b ......][question ......]
                 ^ system prompt and template: a chunk of its own, the first

A chunk is identified by its tokens alone, a variant also by what came before it.
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

MIN_CHUNK_TOKENS = 16  # computing a shorter one is faster than looking it up

ChunkDigest = NewType("ChunkDigest", bytes)  # 16 bytes

_CHUNK = hashlib.blake2b(b"rekindle/chunk/1", digest_size=16)


def chunk_digest(tokens: Sequence[int] | bytes) -> ChunkDigest:
    """The key of a chunk, from its tokens (or their bytes, see `token_bytes`)."""
    state = _CHUNK.copy()
    state.update(tokens if isinstance(tokens, bytes) else token_bytes(tokens))
    return ChunkDigest(state.digest())


@dataclass(frozen=True)
class PromptLayout:
    """The positions of chunks in a prompt, after a head of `head` tokens. The question follows the last chunk."""

    head: int
    chunks: tuple[Span, ...]
    numbers: tuple[int, ...] = ()  # of each in the prompt; by default from 1

    @property
    def numbered(self) -> list[tuple[int, Span]]:
        return list(zip(self.numbers or range(1, len(self.chunks) + 1), self.chunks, strict=True))

    @property
    def question(self) -> int:
        """The position where the question begins."""
        return self.chunks[-1].stop


@dataclass(frozen=True)
class EarlierChunk:
    """A chunk that preceded another, and the attention the other paid to it."""

    digest: ChunkDigest
    tokens: int
    mass: float  # sum over the other's tokens, mean over heads and layers


@dataclass(frozen=True, eq=False)
class ChunkScores:
    """Attention in a chunk when its KV was computed: mean over heads and the observed layers.

    outside    [tokens] the share of each token's attention that left the chunk
    received   [tokens] the mass that each token received from all tokens of the prompt
    intra      the mass that the tokens paid to their own chunk, summed
    earlier    the chunks before it, in order, the head first
    """

    outside: NDArray[np.float16]
    received: NDArray[np.float16]
    intra: float
    earlier: tuple[EarlierChunk, ...]


@dataclass(frozen=True, eq=False)
class Variant:
    """The KV of a chunk from one prompt.

    `span` is its position there. `drift` is the share of the tokens before it whose KV came from other prompts.
    """

    digest: ChunkDigest
    span: Span
    scores: ChunkScores
    drift: float = 0.0

    @property
    def before(self) -> tuple[ChunkDigest, ...]:
        """The chunks it was computed after, in order, the head first."""
        return tuple(chunk.digest for chunk in self.scores.earlier)
