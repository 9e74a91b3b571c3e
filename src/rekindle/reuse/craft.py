"""How well a stored variant of a chunk fits a new prompt: the scores that Cache-Craft published, and its baselines.

variant   [head][a][b][chunk]       it was computed after these
prompt    [head][b][c][a][chunk]    it would stand after these now: `before`

A low overhead does not make KV exact: a variant scores 0 wherever all that it looked at stands before it in the same
order, whatever else does. Only the keys of nodes decide what is exact.

`before` always begins with the head, which counts as a chunk: one that every prompt repeats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

from rekindle.core.chunk import ChunkDigest, ChunkScores, Variant

_BELOW_ONE = math.nextafter(1.0, 0.0)
_NOISE = 1e-9  # of floating point, before rounding up


def context_impact(scores: ChunkScores, tokens: int) -> float:
    """CCI: how much a chunk of so many tokens took from what stood before it, in [0.5, 1).

    `sigmoid(a / b)`, where `a` is the mass per pair of tokens that it paid to each earlier chunk, summed over them, and
    `b` the mass per pair that it paid to itself. It is 0.5 if it paid none to others; as good as 1 if it paid none to
    itself.
    """
    # a / b, with one of the two |i| cancelled.
    others = math.fsum(_mass(chunk.mass) / chunk.tokens for chunk in scores.earlier if chunk.tokens > 0) * tokens
    own = _mass(scores.intra)
    if others == 0.0:
        return 0.5
    ratio = others / own if own > 0.0 else math.inf
    return min(1.0 / (1.0 + math.exp(-ratio)), _BELOW_ONE)


def overlap(variant: Variant, before: Sequence[ChunkDigest]) -> float:
    """beta: the share of the attention the variant paid to earlier chunks that went to chunks in `before`, in [0, 1].

    1 if there were none, or it paid none to them: nothing that it looked at is missing.
    """
    present = set(before)
    earlier = variant.scores.earlier
    total = math.fsum(_mass(chunk.mass) for chunk in earlier)
    shared = math.fsum(_mass(chunk.mass) for chunk in earlier if chunk.digest in present)
    return shared / total if total > 0.0 else 1.0


def disorder(variant: Variant, before: Sequence[ChunkDigest]) -> float:
    """gamma: the share of the pairs of shared chunks that stand the other way round now, in [0, 1].

    A chunk that stands twice counts once, where it stands first. Fewer than two shared chunks: 0.
    """
    places = _first_places(before)
    now = [places[digest] for digest in _first_places(variant.before) if digest in places]
    pairs = list(combinations(now, 2))
    return sum(first > second for first, second in pairs) / len(pairs) if pairs else 0.0


def fix_overhead(variant: Variant, before: Sequence[ChunkDigest], alpha: float = 1.0) -> float:
    """CFO: the share of the variant's tokens to compute anew if it stands after `before`; 1 or more means all.

    `alpha` scales it: more tokens, better answers.
    """
    kept = overlap(variant, before) * (1.0 - disorder(variant, before))
    return alpha * context_impact(variant.scores, len(variant.span)) * (1.0 - kept)


def preference(variant: Variant, before: Sequence[ChunkDigest]) -> tuple[float, float]:
    """Of several variants the one with the least of this is taken: overhead after `before`, then drift."""
    return fix_overhead(variant, before), variant.drift


def set_cache(
    prompt: Sequence[ChunkDigest], variants: Mapping[ChunkDigest, Sequence[Variant]]
) -> dict[ChunkDigest, Variant]:
    """The SET-CACHE baseline: the variants of the longest stored beginning of which the prompt has every chunk.

    `prompt` is all its chunks, the head first; they may stand in another order than the stored ones, but the head must
    be the same. A stored beginning is a chain: the variant of each chunk was computed after the head and the chunks of
    the chain before it, and nothing else. Of two chains of as many chunks the one with more tokens is taken, then the
    first found; of two variants at one place that with the least drift.
    """
    if not prompt:
        return {}
    links: dict[tuple[ChunkDigest, ...], Variant] = {}  # by the chain that ends with it
    for digest in dict.fromkeys(prompt[1:]):
        for variant in variants.get(digest, ()):
            if digest in variant.before:  # a chunk that stood twice has two KVs, and one place to put them
                continue
            chain = (*variant.before, digest)
            if chain not in links or variant.drift < links[chain].drift:
                links[chain] = variant
    tokens: dict[tuple[ChunkDigest, ...], int] = {(prompt[0],): 0}  # of the chains that begin with this head
    for chain in sorted(links, key=len):
        if chain[:-1] in tokens:
            tokens[chain] = tokens[chain[:-1]] + len(links[chain].span)
    longest = max(tokens, key=lambda chain: (len(chain), tokens[chain]))
    return {longest[stop - 1]: links[longest[:stop]] for stop in range(2, len(longest) + 1)}


def preload_layers(layers: int, prefill_seconds: float, load_seconds: float) -> int:
    """Lp: how many layers to load before computing begins so that no layer waits for its KV, in [1, layers].

    The rest then loads while all layers but one are computed. The seconds are those of all layers.
    """
    if load_seconds <= prefill_seconds:
        return 1
    ahead = (layers - 1) * (1.0 - prefill_seconds / load_seconds) + 1.0
    return min(max(1, math.ceil(ahead - _NOISE)), layers)


def _first_places(chunks: Sequence[ChunkDigest]) -> dict[ChunkDigest, int]:
    """Where each chunk stands first, in that order."""
    places: dict[ChunkDigest, int] = {}
    for place, digest in enumerate(chunks):
        places.setdefault(digest, place)
    return places


def _mass(value: float) -> float:
    """An attention mass; what cannot be one counts as none."""
    return value if math.isfinite(value) and value > 0.0 else 0.0
