"""KV without a model: a pure function of the tokens before it, so that any reader can tell right from wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rekindle.core.keys import KvSpace, Namespace
from rekindle.core.kv import Kv, KvLayout, LayerKv, LayerShape, Span
from rekindle.core.scope import AppRef
from rekindle.store.tiered import Kept, TieredStore

# A small layout, with keys and values of different sizes.
SMALL = KvLayout("float16", (LayerShape(2, 4, 4), LayerShape(1, 8, 4)))
KV_SPACE = KvSpace(Namespace("synthetic"), SMALL, model="synthetic")


def make_kv(tokens: Sequence[int], span: Span, kv_space: KvSpace = KV_SPACE) -> Kv:
    """The KV of `span`: each token's numbers depend on it, its place and all tokens before it."""
    context = np.cumsum(np.asarray(tokens, np.uint64) * np.uint64(2654435761) + np.uint64(1), dtype=np.uint64)
    seeds = context[span.start : span.stop]  # [tokens]
    layers = []
    for number, shape in enumerate(kv_space.layout.layers):
        halves = []
        for half, dim in enumerate((shape.key_dim, shape.value_dim)):
            cells = np.arange(shape.kv_heads * dim, dtype=np.uint64).reshape(shape.kv_heads, 1, dim)
            mixed = seeds[None, :, None] * np.uint64(31 + number * 2 + half) + cells * np.uint64(97)
            mixed += np.uint64(kv_space.namespace.root[0])  # other namespaces have other KV
            raw = (mixed ^ (mixed >> np.uint64(17))).astype(np.uint16) & np.uint16(0x3BFF)  # finite halves
            halves.append(
                raw.view(np.float16).astype(kv_space.layout.numpy_dtype)
                if kv_space.layout.dtype == "float32"
                else raw.view(kv_space.layout.numpy_dtype)
            )
        layers.append(LayerKv(*halves))
    return Kv(span, kv_space.layout, tuple(layers))


def keep(store: TieredStore, tokens: Sequence[int], kv_space: KvSpace = KV_SPACE, app: AppRef | None = None) -> Kept:
    """Keep what is missing of a prompt."""
    gap = store.admit(kv_space, tokens)
    return gap if isinstance(gap, Kept) else store.keep(kv_space, tokens, make_kv(tokens, gap, kv_space), app=app)


def load(store: TieredStore, tokens: Sequence[int], kv_space: KvSpace = KV_SPACE) -> int:
    """Look a prompt up, load what is found, and compare every number. Returns how many tokens were found.

    Raises `KvLost` if what was found cannot be read.
    """
    match = store.lookup(kv_space, tokens)
    if match.length == 0:
        return 0
    right = make_kv(tokens, Span(0, match.length), kv_space)
    with store.load(kv_space, match) as feed:
        for layer in feed.layers:
            shape = kv_space.layout.layers[layer]
            dtype = kv_space.layout.numpy_dtype
            # Room for more tokens than are loaded, as in an engine's buffers.
            keys = np.zeros((shape.kv_heads, match.length + 7, shape.key_dim), dtype)
            values = np.zeros((shape.kv_heads, match.length + 7, shape.value_dim), dtype)
            feed.fill(layer, LayerKv(keys[:, : match.length], values[:, : match.length]))
            same = np.array_equal(keys[:, : match.length], right.layers[layer].keys)
            same &= np.array_equal(values[:, : match.length], right.layers[layer].values)
            if not same or keys[:, match.length :].any() or values[:, match.length :].any():
                raise AssertionError(f"layer {layer} of {match.length} tokens is not what was kept")
    return match.length
