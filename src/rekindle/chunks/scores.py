"""Attention scores of chunks: collected while they are computed, and how well a stored variant fits a new prompt.

Only some layers are read: the attention that leaves a chunk is much the same in all of them, and reading costs time.

The fit (context impact, overlap, disorder, overhead) is as Cache-Craft published it:

variant   [head][a][b][chunk]       computed after these chunks
prompt    [head][b][c][a][chunk]    would stand after these now: `before`

A low overhead does not make KV exact: a variant scores 0 wherever everything it attended to stands before it in the
same order, whatever else does. Only the keys of nodes decide what is exact.

`before` always begins with the head, which counts as a chunk that every prompt repeats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from rekindle.core.chunk import ChunkDigest, ChunkMatch, ChunkScores, EarlierChunk, PromptLayout, Variant
from rekindle.core.kv import Span
from rekindle.engine.hooks import Probe, Reading

_EVERY = 8  # one of this many layers is read
_HALF = np.finfo(np.float16).max


class ChunkScorer:
    """Collects the scores of all chunks of one prompt over its steps."""

    def __init__(self, prompt_layout: PromptLayout, tokens: int, layers: int) -> None:
        self._spans = (Span(0, prompt_layout.head), *prompt_layout.chunks)
        read = range(min(_EVERY // 2, layers - 1), layers, _EVERY)
        self._layers, self._first = len(read), read.start
        self._sent = np.zeros(
            (tokens, len(self._spans)), dtype=np.float32
        )  # attention mass of each token on each chunk
        self._received = np.zeros(tokens, dtype=np.float32)  # attention mass that each token receives
        self._seen = np.zeros(tokens, dtype=np.int64)  # number of layers read
        self.probe = Probe(self._take, queries=Span(0, tokens), segments=self._spans, layers=read, sampled=True)

    def _take(self, reading: Reading) -> None:
        assert reading.sent is not None and reading.received is not None
        if reading.layer == self._first and self._seen[reading.positions].any():
            for sums in (self._sent, self._received, self._seen):  # the step is repeated after lost KV: start again
                sums[:] = 0
        self._sent[reading.positions] += reading.sent / self._layers
        self._received[: len(reading.received)] += reading.received * len(reading.positions) / self._layers
        self._seen[reading.positions] += 1

    def variant(self, chunk: int, digests: Sequence[ChunkDigest], drift: float = 0.0) -> Variant | None:
        """The variant of chunk number `chunk` (the head is 0); None unless most of it was computed under this probe.

        Its first tokens may be from the cache, after another passage that began alike.
        """
        span = self._spans[chunk]
        own = slice(span.start, span.stop)
        read = self._seen[own] >= self._layers  # [tokens]
        if 2 * int(read.sum()) < len(span):
            return None
        mass = self._sent[own][read].sum(axis=0) * (len(span) / read.sum())  # [chunks] attention of its tokens to each
        earlier = tuple(
            EarlierChunk(digests[other], len(self._spans[other]), float(mass[other])) for other in range(chunk)
        )
        left = np.where(read, 1.0 - self._sent[own, chunk], 1.0)  # first tokens mostly attend outside
        outside = np.clip(left, 0.0, 1.0).astype(np.float16)
        received = np.clip(self._received[own], 0.0, _HALF).astype(np.float16)
        return Variant(digests[chunk], span, ChunkScores(outside, received, float(mass[chunk]), earlier), drift)


def unscored(prompt_layout: PromptLayout, chunk: int, digests: Sequence[ChunkDigest], drift: float) -> Variant:
    """A variant without measured attention: assumes that half of it left the chunk."""
    spans = (Span(0, prompt_layout.head), *prompt_layout.chunks)
    count, before = len(spans[chunk]), max(1, sum(map(len, spans[:chunk])))
    halves = np.full(count, 0.5, dtype=np.float16)
    earlier = tuple(
        EarlierChunk(digests[other], len(spans[other]), 0.5 * count * len(spans[other]) / before)
        for other in range(chunk)
    )
    return Variant(digests[chunk], spans[chunk], ChunkScores(halves, halves, 0.5 * count, earlier), drift)


_BELOW_ONE = math.nextafter(1.0, 0.0)


def context_impact(scores: ChunkScores, tokens: int) -> float:
    """CCI: how much a chunk of `tokens` tokens depends on what was before it, in [0.5, 1).

    `sigmoid(a / b)`: `a` is its attention per pair of tokens to each earlier chunk, summed, and `b` that to itself.
    0.5 without attention to others; almost 1 without attention to itself.
    """
    # a / b, with one of the two |i| cancelled.
    others = math.fsum(_mass(chunk.mass) / chunk.tokens for chunk in scores.earlier if chunk.tokens > 0) * tokens
    own = _mass(scores.intra)
    if others == 0.0:
        return 0.5
    ratio = others / own if own > 0.0 else math.inf
    return min(1.0 / (1.0 + math.exp(-ratio)), _BELOW_ONE)


def overlap(variant: Variant, before: Sequence[ChunkDigest]) -> float:
    """beta: the share of the variant's attention to earlier chunks that went to chunks in `before`, in [0, 1].

    1 without attention to earlier chunks: nothing is missing.
    """
    present = set(before)
    earlier = variant.scores.earlier
    total = math.fsum(_mass(chunk.mass) for chunk in earlier)
    shared = math.fsum(_mass(chunk.mass) for chunk in earlier if chunk.digest in present)
    return shared / total if total > 0.0 else 1.0


def disorder(variant: Variant, before: Sequence[ChunkDigest]) -> float:
    """gamma: the share of pairs of shared chunks whose order is reversed now, in [0, 1].

    A repeated chunk counts once, at its first place. Fewer than two shared chunks: 0.
    """
    places = _first_places(before)
    now = [places[digest] for digest in _first_places(variant.before) if digest in places]
    pairs = list(combinations(now, 2))
    return sum(first > second for first, second in pairs) / len(pairs) if pairs else 0.0


def fix_overhead(variant: Variant, before: Sequence[ChunkDigest], alpha: float = 1.0) -> float:
    """CFO: the share of the variant's tokens to recompute after `before`, scaled by `alpha`; 1 or more means all."""
    kept = overlap(variant, before) * (1.0 - disorder(variant, before))
    return alpha * context_impact(variant.scores, len(variant.span)) * (1.0 - kept)


def context_change(variant: Variant, before: Sequence[ChunkDigest], tokens: Sequence[int]) -> float:
    """How much of what a variant was computed after is not before it now, or other than it was, in [0, 1].

    `tokens` has the length of each chunk in `before`. 0: its KV is what a full prefill gives, but for what stands
    between passages. Otherwise 1 less the product of what is kept: the share of its attention to earlier passages that
    went to passages in `before`, the share of pairs in the same order, the share of passages before it now that it was
    computed after, and the share of exact KV before it.
    """
    if tuple(before) == variant.before:
        return variant.drift
    if tuple(before[:1]) != variant.before[:1]:  # another head
        return 1.0
    earlier, known = variant.scores.earlier[1:], set(variant.before[1:])
    attended = math.fsum(_mass(chunk.mass) for chunk in earlier)
    present = math.fsum(_mass(chunk.mass) for chunk in earlier if chunk.digest in before)
    sizes = dict(zip(before[1:], tokens[1:], strict=True))  # one that is repeated counts once
    familiar = sum(count for digest, count in sizes.items() if digest in known)
    kept = present / attended if attended > 0.0 else 1.0
    kept *= (1.0 - disorder(variant, before)) * familiar / max(1, sum(tokens[1:]))
    return 1.0 - kept * (1.0 - variant.drift)


def preference(match: ChunkMatch) -> tuple[float, float, float]:
    """Sort key of a chunk's variants, the best is smallest: how much it depends on what has changed, then overhead and
    drift."""
    assert match.known is not None and match.overhead is not None
    return match.dependence, match.overhead, match.known.variant.drift


def _first_places(chunks: Sequence[ChunkDigest]) -> dict[ChunkDigest, int]:
    """The first place of each chunk, in that order."""
    places: dict[ChunkDigest, int] = {}
    for place, digest in enumerate(chunks):
        places.setdefault(digest, place)
    return places


def _mass(value: float) -> float:
    """An attention mass; 0 for invalid values."""
    return value if math.isfinite(value) and value > 0.0 else 0.0
