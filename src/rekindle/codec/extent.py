"""The extent: one file a keep. Consecutive blocks of one chain, layer after layer.

    8 bytes | header, JSON          | layer 0                            | layer 1 | ...
    length  | what it holds,        | keys              | values         |
            | a digest per cell     | [kv_heads, tokens, dim] each       |

Within a layer, KV stands as the engine has it, so reading a run of tokens is one read a head, straight into the
engine's buffers, and writing needs no copy. A cell is one block in one layer; each has a digest, and so have the keys
and the values of a layer as a whole, because the common read, all of it, is checked faster at once.

The header is safetensors', so other tools can open the file: tensors `layer.N.keys` and `layer.N.values`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rekindle.codec.digest import Digester
from rekindle.core.keys import BLOCK_TOKENS, TOKEN_BYTES, NodeKey, layout_text, parse_layout
from rekindle.core.kv import KvLayout, LayerKv

FORMAT = "rekindle-extent/1"
_ALIGN_BYTES = 64
_SAFETENSORS_TYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}
_LARGEST_HEADER_BYTES = 256 << 20

Half = Literal["keys", "values"]
HALVES: tuple[Half, Half] = ("keys", "values")


@dataclass(frozen=True)
class ExtentPlan:
    """What an extent holds and where in the file it stands. Pure arithmetic over layout and tokens."""

    name: str
    shelf: str
    parent: NodeKey
    layout: KvLayout
    tokens: bytes
    digest_name: str
    digest_width: int

    @property
    def token_count(self) -> int:
        """Tokens of all blocks together."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def blocks(self) -> int:
        """Blocks of 32 tokens, the last maybe partial."""
        return -(-self.token_count // BLOCK_TOKENS)

    @cached_property
    def header_bytes(self) -> int:
        """Length of the header with its length field: data begins here."""
        return len(self.header(bytes(self.digest_width * (2 + self.blocks) * len(self.layout.layers))))

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Where keys and values of each layer begin in the file, and where the last end."""
        starts = [self.header_bytes]
        for layer, shape in enumerate(self.layout.layers):
            for half in HALVES:
                starts.append(starts[-1] + shape.kv_heads * self.row_bytes(layer, half, self.token_count))
        return tuple(starts)

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return self._starts[-1]

    def start(self, layer: int, half: Half) -> int:
        """Where the keys, or the values, of a layer begin in the file."""
        return self._starts[2 * layer + HALVES.index(half)]

    def row_bytes(self, layer: int, half: Half, tokens: int) -> int:
        """Bytes of so many tokens of one head."""
        shape = self.layout.layers[layer]
        return tokens * (shape.key_dim if half == "keys" else shape.value_dim) * self.layout.numpy_dtype.itemsize

    def empty(self, layer: int, tokens: int) -> LayerKv:
        """Arrays for so many tokens of a layer."""
        shape, dtype = self.layout.layers[layer], self.layout.numpy_dtype
        return LayerKv(
            np.empty((shape.kv_heads, tokens, shape.key_dim), dtype),
            np.empty((shape.kv_heads, tokens, shape.value_dim), dtype),
        )

    def header(self, digests: bytes) -> bytes:
        """The header as it stands in the file; its length does not depend on the digests."""
        about = {
            "format": FORMAT,
            "extent": self.name,
            "shelf": self.shelf,
            "parent": self.parent.hex(),
            "layout": layout_text(self.layout),
            "tokens": self.tokens.hex(),
            "digest": self.digest_name,
            "digests": digests.hex(),
        }
        text = json.dumps({"__metadata__": about, **self._tensors()}, separators=(",", ":")).encode()
        padded = text + b" " * (-(len(text) + 8) % _ALIGN_BYTES)
        return len(padded).to_bytes(8, "little") + padded

    def _tensors(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        offset = 0
        for layer, shape in enumerate(self.layout.layers):
            for half in HALVES:
                dim = shape.key_dim if half == "keys" else shape.value_dim
                stop = offset + shape.kv_heads * self.row_bytes(layer, half, self.token_count)
                tensors[f"layer.{layer}.{half}"] = {
                    "dtype": _SAFETENSORS_TYPE[self.layout.dtype],
                    "shape": [shape.kv_heads, self.token_count, dim],
                    "data_offsets": [offset, stop],
                }
                offset = stop
        return tensors


@dataclass(frozen=True)
class ExtentHeader:
    """A header that was read: the plan, and the digests of each layer: keys, values, then every cell."""

    plan: ExtentPlan
    digests: bytes  # [layers, 2 + blocks, digest_width]

    def half_digest(self, layer: int, half: Half) -> bytes:
        """The digest of all keys, or all values, of a layer."""
        return self._at(layer, HALVES.index(half), 1)

    def cell_digests(self, layer: int, first: int, stop: int) -> bytes:
        """The digests of blocks `first..stop` of a layer, one after the other."""
        return self._at(layer, 2 + first, stop - first)

    def _at(self, layer: int, place: int, count: int) -> bytes:
        width = self.plan.digest_width
        row = layer * (2 + self.plan.blocks)
        return self.digests[(row + place) * width : (row + place + count) * width]


def parse_header(data: bytes) -> ExtentHeader:
    """Read a header, length field included. Raises `ValueError` if it is not one of ours, whole and consistent."""
    try:
        about = json.loads(data[8:])["__metadata__"]
        if about["format"] != FORMAT:
            raise ValueError(f"unknown format {about['format']!r}")
        layout = parse_layout(about["layout"])
        tokens, digests = bytes.fromhex(about["tokens"]), bytes.fromhex(about["digests"])
        parent = NodeKey(bytes.fromhex(about["parent"]))
        blocks = -(-len(tokens) // (TOKEN_BYTES * BLOCK_TOKENS))
        width, rest = divmod(len(digests), (2 + blocks) * len(layout.layers))
        plan = ExtentPlan(about["extent"], about["shelf"], parent, layout, tokens, about["digest"], width)
        exact = not rest and plan.header(digests) == data
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"not an extent header: {error}") from error
    if not exact:
        raise ValueError("not an extent header: its fields contradict each other")
    return ExtentHeader(plan, digests)


def header_length(first_bytes: bytes) -> int:
    """Bytes of the header with its length field, from the first eight bytes of a file. Raises `ValueError`."""
    length = int.from_bytes(first_bytes[:8], "little")
    if len(first_bytes) < 8 or not 2 <= length <= _LARGEST_HEADER_BYTES:
        raise ValueError("not an extent: its first bytes are no header length")
    return length + 8


def rows_of(array: NDArray[Any]) -> list[memoryview]:
    """The bytes of each head, `[tokens, dim]`, without a copy. Raises `TypeError` if a head is not contiguous."""
    return [head.data.cast("B") for head in array]


def is_row_contiguous(kv: LayerKv) -> bool:
    """Whether the tokens of each head stand side by side, as in every engine's buffers."""
    return all(head.flags.c_contiguous for array in (kv.keys, kv.values) for head in array[:1])


def digest_layer(digester: Digester, kv: LayerKv) -> bytes:
    """The digests of a whole layer: keys, values, then every cell."""
    halves = []
    for array in (kv.keys, kv.values):
        state = digester.data()
        for row in rows_of(array):
            state.update(row)
        halves.append(state.digest())
    return b"".join([*halves, digest_cells(digester, kv)])


def digest_cells(digester: Digester, kv: LayerKv) -> bytes:
    """The digests of consecutive cells, one after the other; a cell is its tokens' keys, head by head, then values."""
    rows = [(row, len(row) // kv.keys.shape[1]) for array in (kv.keys, kv.values) for row in rows_of(array)]
    digests = []
    for start in range(0, kv.keys.shape[1], BLOCK_TOKENS):
        state = digester.data()
        for row, size in rows:
            state.update(row[start * size : (start + BLOCK_TOKENS) * size])
        digests.append(state.digest())
    return b"".join(digests)
