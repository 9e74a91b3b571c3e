"""What Cache-Craft compares itself with, and how deep it loads ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rekindle.core.chunk import ChunkDigest, Variant

_NOISE = 1e-9  # of floating point, before rounding up


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
