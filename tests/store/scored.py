"""Variants for tests: scores that are a pure function of the tokens, and a load that compares every number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rekindle.core.chunk import ChunkScores, EarlierChunk, Variant, chunk_digest
from rekindle.core.keys import KvSpace, token_bytes
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.store.tiered import TieredStore
from rekindle.store.variants import StoredVariant
from tests.kvs import KV_SPACE, make_kv


def variant(prompt: Sequence[int], span: Span, drift: float = 0.0) -> Variant:
    """A chunk of a prompt, computed behind all that is before it, which is taken as one chunk."""
    tokens = prompt[span.start : span.stop]
    rng = np.random.default_rng([*prompt[: span.stop]])
    head = prompt[: span.start]
    earlier = (EarlierChunk(chunk_digest(head), len(head), float(rng.random())),) if head else ()
    outside, received = (rng.random(len(span)).astype(np.float16) for _ in range(2))
    return Variant(chunk_digest(tokens), span, ChunkScores(outside, received, float(rng.random()), earlier), drift)


def is_same(one: Variant, other: Variant) -> bool:
    """Whether two variants say the same, to the bit."""
    return (
        (one.digest, one.span, one.drift, one.scores.intra, one.scores.earlier)
        == (other.digest, other.span, other.drift, other.scores.intra, other.scores.earlier)
        and one.scores.outside.tobytes() == other.scores.outside.tobytes()
        and one.scores.received.tobytes() == other.scores.received.tobytes()
    )


def find(store: TieredStore, chunk: Sequence[int], kv_space: KvSpace = KV_SPACE) -> list[StoredVariant]:
    """The variants of one chunk."""
    digest = chunk_digest(chunk)
    return store.variants.find(kv_space, {digest: token_bytes(chunk)}).get(digest, [])


def assert_loads(store: TieredStore, known: StoredVariant, prompt: Sequence[int], kv_space: KvSpace = KV_SPACE) -> None:
    """Load a variant and compare every number with what was kept for that prompt. Raises `KvLost`."""
    assert_gives(store, known, make_kv(prompt, known.variant.span, kv_space), kv_space)


def assert_gives(store: TieredStore, known: StoredVariant, right: Kv, kv_space: KvSpace = KV_SPACE) -> None:
    """Load a variant into buffers with room around it, and compare every number. Raises `KvLost`."""
    count = len(known.variant.span)
    with store.variants.load(kv_space, known) as feed:
        assert feed.span == known.variant.span
        for layer in feed.layers:
            shape, dtype = kv_space.layout.layers[layer], kv_space.layout.numpy_dtype
            keys = np.zeros((shape.kv_heads, count + 8, shape.key_dim), dtype)
            values = np.zeros((shape.kv_heads, count + 8, shape.value_dim), dtype)
            feed.fill(layer, LayerKv(keys[:, 3 : 3 + count], values[:, 3 : 3 + count]))
            assert np.array_equal(keys[:, 3 : 3 + count], right.layers[layer].keys)
            assert np.array_equal(values[:, 3 : 3 + count], right.layers[layer].values)
            for around in (keys[:, :3], keys[:, 3 + count :], values[:, :3], values[:, 3 + count :]):
                assert not around.any()
