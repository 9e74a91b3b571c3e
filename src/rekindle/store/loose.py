"""Loose KV: of a chunk, computed behind KV that was mended, so not what a full prefill would give.

No exact lookup may find it: it stands on a shelf of its own. There every chunk is a chain of its own, one extent, whole
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
from rekindle.core.keys import TOKEN_BYTES, Shelf
from rekindle.core.kv import Kv, LayerKv, Span

NAME_TOKENS = 16 // TOKEN_BYTES
SUFFIX = "/loose"  # of a codec's name


def loose(shelf: Shelf) -> Shelf:
    """The shelf beside `shelf` for its loose KV: same model, tenant, salt and adapter."""
    return replace(shelf, codec=shelf.codec + SUFFIX)


def is_loose(codec: str) -> bool:
    """Whether a shelf of that codec holds loose KV."""
    return codec.endswith(SUFFIX)


def named(digest: ChunkDigest, tokens: bytes) -> bytes:
    """The tokens of a chunk's loose chain."""
    return digest + tokens


def named_kv(kv: Kv) -> Kv:
    """The KV of a chunk's loose chain: a copy, with nothing at all for the name."""
    layers = tuple(LayerKv(_behind_name(layer.keys), _behind_name(layer.values)) for layer in kv.layers)
    return Kv(Span(0, NAME_TOKENS + len(kv.span)), kv.layout, layers)


def _behind_name(array: NDArray[Any]) -> NDArray[Any]:
    heads, _, dim = array.shape
    return np.concatenate([np.zeros((heads, NAME_TOKENS, dim), array.dtype), array], axis=1)
