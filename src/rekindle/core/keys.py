"""Keys of KV blocks: a hash of everything up to the block.

    root(namespace) --tokens 0..31--> node --tokens 32..63--> node --...--> node of the last, maybe partial, block

A node's key covers its namespace and all tokens up to it, so equal keys mean equal context. Every hit is also checked
against the stored tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NewType, get_args

import numpy as np

from rekindle.core.identity import digest_of_fields
from rekindle.core.kv import KvLayout, KvType, LayerShape
from rekindle.core.scope import Scope
from rekindle.errors import InvalidPrompt
from rekindle.safe_read import parse_untrusted_json

BLOCK_TOKENS = 32
TOKEN_BYTES = 4
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES  # of token ids, not of KV

NodeKey = NewType("NodeKey", bytes)
NODE_KEY_BYTES = 16

_LARGEST_DIM = 1 << 31
_NATIVE = sys.byteorder == "little" and array("I").itemsize == 4  # whether this machine's numbers are those of keys
_NODE = hashlib.blake2b(b"rekindle/node/1", digest_size=NODE_KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Namespace:
    """One model identity, tenant and salt. Namespaces never see each other's KV."""

    identity: str
    tenant: str = "local"
    salt: str = ""

    @property
    def scope(self) -> Scope:
        return Scope(self.tenant, self.salt)

    @property
    def root(self) -> NodeKey:
        """The parent key of every first block."""
        return NodeKey(bytes.fromhex(digest_of_fields("rekindle/root/1", self.identity, self.tenant, self.salt)))


@dataclass(frozen=True)
class KvSpace:
    """What must be equal for KV at the same node to be interchangeable.

    `adapter` is the digest of a LoRA's weights and scale, None for the base model; `model` is a display name and does
    not count.
    """

    namespace: Namespace
    layout: KvLayout
    adapter: str | None = None
    codec: str = "raw"
    model: str = ""

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        adapter = "base" if self.adapter is None else f"adapter:{self.adapter}"
        root = self.namespace.root
        return digest_of_fields("rekindle/kv-space/1", root, adapter, self.codec, layout_text(self.layout))


def layout_text(layout: KvLayout) -> str:
    """A layout as canonical JSON."""
    layers = [[shape.kv_heads, shape.key_dim, shape.value_dim] for shape in layout.layers]
    return json.dumps({"dtype": layout.dtype, "layers": layers}, separators=(",", ":"))


def parse_layout(text: str) -> KvLayout:
    """The layout of such JSON. Raises `ValueError` for anything else."""
    fields = parse_untrusted_json(text)
    if not isinstance(fields, dict) or fields.get("dtype") not in get_args(KvType):
        raise ValueError("not a layout of KV: its numbers are of no known type")
    layers = fields.get("layers")
    if not isinstance(layers, list) or not all(_is_shape(shape) for shape in layers):
        raise ValueError("not a layout of KV: a layer is [kv_heads, key_dim, value_dim]")
    return KvLayout(fields["dtype"], tuple(LayerShape(*shape) for shape in layers))


def _is_shape(shape: object) -> bool:
    if not isinstance(shape, list) or len(shape) != 3:
        return False
    return all(type(number) is int and 0 <= number < _LARGEST_DIM for number in shape)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, four each. Raises `InvalidPrompt` for an invalid id."""
    if isinstance(tokens, (tuple, list)) and _NATIVE:
        with contextlib.suppress(OverflowError, TypeError):  # others are explained below
            return array("I", tokens).tobytes()
    try:
        given = np.asarray(tokens)
        narrow = given.astype("<u4")
        exact = given.dtype.kind in "ui" and given.ndim == 1 and bool((narrow == given).all())
    except (OverflowError, ValueError, TypeError):
        exact = False
    if not exact and len(tokens):
        raise InvalidPrompt("Token ids are whole numbers from 0 to 2^32 - 1, one after the other.")
    return narrow.tobytes()


def token_ids(data: bytes) -> tuple[int, ...]:
    """The inverse of `token_bytes`."""
    return tuple(np.frombuffer(data, "<u4").tolist())


def common_tokens(a: bytes, b: bytes) -> int:
    """Length of the common prefix of two prompts, in tokens."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter // TOKEN_BYTES
    low, high = 0, shorter  # bisection: comparing slices is faster than comparing bytes one by one
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low // TOKEN_BYTES


def child_key(parent: NodeKey, tokens: bytes) -> NodeKey:
    """The key of the block of `tokens` that follows `parent`."""
    return chain(parent, tokens)[0]


def chain(root: NodeKey, tokens: bytes) -> list[NodeKey]:
    """The keys of the blocks of a prompt, in order; the last block may be partial."""
    keys: list[NodeKey] = []
    parent, full = root, BLOCK_BYTES.to_bytes(8, "little")
    for start in range(0, len(tokens), BLOCK_BYTES):
        part = tokens[start : start + BLOCK_BYTES]
        length = full if len(part) == BLOCK_BYTES else len(part).to_bytes(8, "little")
        state = _NODE.copy()
        # The parent has a fixed length, so one length field suffices.
        state.update(parent + length + part)
        parent = NodeKey(state.digest())
        keys.append(parent)
    return keys
