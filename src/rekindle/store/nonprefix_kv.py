"""Non-prefix KV: of a chunk, computed behind KV that was reused, so not what a full prefill would give.

No exact lookup may find it: it has a KV space of its own. There every chunk is a chain of its own, one extent, whole
or of no use. Its first tokens are no tokens but the chunk's digest, so that two chunks that begin alike share no block:

    chain   [digest, as 4 tokens][the chunk's tokens ...........]
    KV      [zeros .............][as it was computed at its span ]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.chunk import ChunkDigest
from rekindle.core.keys import TOKEN_BYTES, KvSpace
from rekindle.core.kv import Kv, LayerKv, Span

DIGEST_TOKENS = 16 // TOKEN_BYTES
SUFFIX = "/nonprefix"  # of a codec's name


def nonprefix(kv_space: KvSpace) -> KvSpace:
    """The KV space beside `kv_space` for its non-prefix KV: same model, tenant, salt and adapter."""
    return replace(kv_space, codec=kv_space.codec + SUFFIX)


def is_nonprefix(codec: str) -> bool:
    """Whether a KV space of that codec holds non-prefix KV."""
    return codec.endswith(SUFFIX)


def chain_tokens(digest: ChunkDigest, tokens: bytes) -> bytes:
    """The tokens of a chunk's own chain."""
    return digest + tokens


def chain_kv(kv: Kv) -> Kv:
    """The KV of a chunk's own chain: a copy, with nothing at all for the name."""
    layers = tuple(LayerKv(_behind_name(layer.keys), _behind_name(layer.values)) for layer in kv.layers)
    return Kv(Span(0, DIGEST_TOKENS + len(kv.span)), kv.layout, layers)


def _behind_name(array: NDArray[Any]) -> NDArray[Any]:
    heads, _, dim = array.shape
    return np.concatenate([np.zeros((heads, DIGEST_TOKENS, dim), array.dtype), array], axis=1)
