"""What attention did in a chunk, as bytes: half floats for tokens, a fixed record for each chunk before it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from rekindle.core.chunk import ChunkDigest, ChunkScores, Earlier

_EARLIER = struct.Struct("<16sId")
_HALF = np.dtype("<f2")


@dataclass(frozen=True, slots=True)
class PackedScores:
    """Scores as they are kept."""

    outside: bytes
    received: bytes
    intra: float
    earlier: bytes


def pack(scores: ChunkScores) -> PackedScores:
    """Scores as bytes. Raises `ValueError` for those of no chunk."""
    outside, received = (np.asarray(of_tokens, _HALF) for of_tokens in (scores.outside, scores.received))
    try:
        earlier = [_EARLIER.pack(chunk.digest, chunk.tokens, chunk.mass) for chunk in scores.earlier]
    except struct.error as error:
        raise ValueError(f"not a chunk: {error}") from error
    return PackedScores(outside.tobytes(), received.tobytes(), float(scores.intra), b"".join(earlier))


def unpack(packed: PackedScores, tokens: int) -> ChunkScores:
    """The scores of a chunk of so many tokens. Raises `ValueError` if they are not that."""
    if not len(packed.outside) == len(packed.received) == tokens * _HALF.itemsize:
        raise ValueError("there is not one score a token")
    if len(packed.earlier) % _EARLIER.size:
        raise ValueError("a chunk before it is cut off")
    earlier = [Earlier(ChunkDigest(digest), *rest) for digest, *rest in _EARLIER.iter_unpack(packed.earlier)]
    outside, received = np.frombuffer(packed.outside, _HALF), np.frombuffer(packed.received, _HALF)
    return ChunkScores(outside, received, packed.intra, tuple(earlier))
