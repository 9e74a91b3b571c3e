"""What attention does in the chunks of a prompt while it is computed: read once, kept with their variants.

Some layers are read, not all: what leaves a chunk is much the same in all of them, and reading is not free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rekindle.core.chunk import ChunkDigest, ChunkScores, Earlier, Outline, Variant
from rekindle.core.kv import Span
from rekindle.engine.watch import Probe, Reading

_EVERY = 4  # so many layers make one that is read
_HALF = np.finfo(np.float16).max


class Scoring:
    """Collects the scores of all chunks of one prompt, however it is cut into steps."""

    def __init__(self, outline: Outline, tokens: int, layers: int) -> None:
        self._spans = (Span(0, outline.head), *outline.chunks)
        read = range(min(_EVERY // 2, layers - 1), layers, _EVERY)
        self._layers, self._first = len(read), read.start
        self._sent = np.zeros((tokens, len(self._spans)), dtype=np.float32)  # mass of each token to each chunk
        self._received = np.zeros(tokens, dtype=np.float32)  # mass of each token from all
        self._seen = np.zeros(tokens, dtype=np.int64)  # in so many layers
        self.probe = Probe(self._take, queries=Span(0, tokens), segments=self._spans, layers=read)

    def _take(self, reading: Reading) -> None:
        assert reading.sent is not None and reading.received is not None
        if reading.layer == self._first and self._seen[reading.positions].any():
            for sums in (self._sent, self._received, self._seen):  # what it was computed with was lost: once more
                sums[:] = 0
        self._sent[reading.positions] += reading.sent / self._layers
        self._received[: len(reading.received)] += reading.received * len(reading.positions) / self._layers
        self._seen[reading.positions] += 1

    def variant(self, chunk: int, digests: Sequence[ChunkDigest], drift: float = 0.0) -> Variant | None:
        """The variant of chunk number `chunk` (the head is 0); None unless most of it was computed under this probe.

        Its first tokens may have been known: another passage that stood in its place began alike.
        """
        span = self._spans[chunk]
        own = slice(span.start, span.stop)
        read = self._seen[own] >= self._layers  # [tokens]
        if 2 * int(read.sum()) < len(span):
            return None
        mass = self._sent[own][read].sum(axis=0) * (len(span) / read.sum())  # [chunks] what its tokens paid to each
        earlier = tuple(Earlier(digests[other], len(self._spans[other]), float(mass[other])) for other in range(chunk))
        left = np.where(read, 1.0 - self._sent[own, chunk], 1.0)  # the first tokens look outside, for the most part
        outside = np.clip(left, 0.0, 1.0).astype(np.float16)
        received = np.clip(self._received[own], 0.0, _HALF).astype(np.float16)
        return Variant(digests[chunk], span, ChunkScores(outside, received, float(mass[chunk]), earlier), drift)


def unscored(outline: Outline, chunk: int, digests: Sequence[ChunkDigest], drift: float) -> Variant:
    """The variant of a chunk of which nobody saw what attention did: half of it is taken to have left the chunk."""
    spans = (Span(0, outline.head), *outline.chunks)
    count, before = len(spans[chunk]), max(1, sum(map(len, spans[:chunk])))
    halves = np.full(count, 0.5, dtype=np.float16)
    earlier = tuple(
        Earlier(digests[other], len(spans[other]), 0.5 * count * len(spans[other]) / before) for other in range(chunk)
    )
    return Variant(digests[chunk], spans[chunk], ChunkScores(halves, halves, 0.5 * count, earlier), drift)
