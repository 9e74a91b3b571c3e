"""KV without a model: a pure function of the tokens before it, so that any reader can tell right from wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rekindle.core.app import Asker
from rekindle.core.keys import Namespace, Shelf
from rekindle.core.kv import Kv, KvLayout, LayerKv, LayerShape, Span
from rekindle.store.tiered import Kept, TieredStore

# A small layout, with keys and values of different sizes.
SMALL = KvLayout("float16", (LayerShape(2, 4, 4), LayerShape(1, 8, 4)))
SHELF = Shelf(Namespace("synthetic"), SMALL, model="synthetic")


def make_kv(tokens: Sequence[int], span: Span, shelf: Shelf = SHELF) -> Kv:
    """The KV of `span`: each token's numbers depend on it, its place and all tokens before it."""
    context = np.cumsum(np.asarray(tokens, np.uint64) * np.uint64(2654435761) + np.uint64(1), dtype=np.uint64)
    seeds = context[span.start : span.stop]  # [tokens]
    layers = []
    for number, shape in enumerate(shelf.layout.layers):
        halves = []
        for half, dim in enumerate((shape.key_dim, shape.value_dim)):
            cells = np.arange(shape.kv_heads * dim, dtype=np.uint64).reshape(shape.kv_heads, 1, dim)
            mixed = seeds[None, :, None] * np.uint64(31 + number * 2 + half) + cells * np.uint64(97)
            mixed += np.uint64(shelf.namespace.root[0])  # other namespaces have other KV
            raw = (mixed ^ (mixed >> np.uint64(17))).astype(np.uint16) & np.uint16(0x3BFF)  # finite halves
            halves.append(
                raw.view(np.float16).astype(shelf.layout.numpy_dtype)
                if shelf.layout.dtype == "float32"
                else raw.view(shelf.layout.numpy_dtype)
            )
        layers.append(LayerKv(*halves))
    return Kv(span, shelf.layout, tuple(layers))


def keep(store: TieredStore, tokens: Sequence[int], shelf: Shelf = SHELF, app: Asker | None = None) -> Kept:
    """Keep what is missing of a prompt."""
    gap = store.gap(shelf, tokens)
    return Kept("known") if gap is None else store.keep(shelf, tokens, make_kv(tokens, gap, shelf), app=app)


def load(store: TieredStore, tokens: Sequence[int], shelf: Shelf = SHELF) -> int:
    """Look a prompt up, load what is found, and compare every number. Returns how many tokens were found.

    Raises `KvLost` if what was found cannot be read.
    """
    match = store.lookup(shelf, tokens)
    if match.length == 0:
        return 0
    right = make_kv(tokens, Span(0, match.length), shelf)
    with store.load(shelf, match) as feed:
        for layer in feed.layers:
            shape = shelf.layout.layers[layer]
            dtype = shelf.layout.numpy_dtype
            # Room for more tokens than are loaded, as in an engine's buffers.
            keys = np.zeros((shape.kv_heads, match.length + 7, shape.key_dim), dtype)
            values = np.zeros((shape.kv_heads, match.length + 7, shape.value_dim), dtype)
            feed.fill(layer, LayerKv(keys[:, : match.length], values[:, : match.length]))
            same = np.array_equal(keys[:, : match.length], right.layers[layer].keys)
            same &= np.array_equal(values[:, : match.length], right.layers[layer].values)
            if not same or keys[:, match.length :].any() or values[:, match.length :].any():
                raise AssertionError(f"layer {layer} of {match.length} tokens is not what was kept")
    return match.length
