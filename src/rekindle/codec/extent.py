"""The extent: one file a keep. Consecutive blocks of one chain, layer after layer.

    8 bytes | header, JSON          | layer 0                            | layer 1 | ...
    length  | what it holds,        | keys              | values         |
            | a digest per cell     | [kv_heads, tokens, dim] each       |

Within a layer, KV has the engine's layout, so reading a run of tokens is one read per head, straight into the engine's
buffers, and writing needs no copy. A cell is one block in one layer; each has a digest, and so have the keys and the
values of a whole layer, because the common read, all of it, is checked faster at once.

The header is safetensors', so other tools can open the file: tensors `layer.N.keys` and `layer.N.values`.

Coded KV (`codec/coder`) is one run of bytes per layer, `layer.N.coded`, each with a digest; of lossless codes, the
decoded keys and values have digests too, so that a wrong base is detected.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rekindle.codec.coder import Coder
from rekindle.codec.digest import Digester
from rekindle.codec.quantizer import BitPlan
from rekindle.core.keys import BLOCK_TOKENS, NODE_KEY_BYTES, TOKEN_BYTES, NodeKey, layout_text, parse_layout
from rekindle.core.kv import KvLayout, LayerKv, Span
from rekindle.safe_read import parse_untrusted_json

FORMAT = "rekindle-extent/3"
_ALIGN_BYTES = 64
_SAFETENSORS_TYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}
# A header takes some ten times its bytes while it is read: together less than the file and 64 MB. Half a million tokens
# fit into the first number; beyond that, KV is a hundred times as long as what a header says of it.
_LARGEST_HEADER_BYTES = 4 << 20
_HEADER_SHARE = 16
_LARGEST_LAYER_BYTES = 1 << 40

Half = Literal["keys", "values"]
HALVES: tuple[Half, Half] = ("keys", "values")


@dataclass(frozen=True)
class Coding:
    """How an extent is coded, the KV space of its delta base, if it is a delta, and the bytes of each layer."""

    coder: Coder
    base_kv_space: str | None
    sizes: tuple[int, ...]

    @cached_property
    def exact(self) -> bool:
        """Whether the KV comes back bit by bit."""
        return self.coder.delta == "exact" if self.base_kv_space is not None else self.coder.whole is None

    def as_json(self) -> dict[str, Any]:
        """As it is written in a header."""
        return {"coder": self.coder.to_json(), "base": self.base_kv_space, "sizes": list(self.sizes)}

    @classmethod
    def from_json(cls, fields: Any, layers: int) -> Coding:
        """Parse the field of a header. Raises `ValueError`, `KeyError` or `TypeError`."""
        sizes, base_kv_space = tuple(fields["sizes"]), fields["base"]
        if len(sizes) != layers or not all(type(size) is int and 0 <= size < _LARGEST_LAYER_BYTES for size in sizes):
            raise ValueError("the sizes of coded layers are invalid")
        if base_kv_space is not None and not isinstance(base_kv_space, str):
            raise ValueError("the base of coded layers is invalid")
        coder = Coder.from_json(fields["coder"])
        used = coder.whole if base_kv_space is None else coder.delta
        if used is None or (isinstance(used, BitPlan) and len(used.layers) < layers):
            raise ValueError("no coder codes like that")
        return cls(coder, base_kv_space, sizes)


@dataclass(frozen=True)
class ExtentPlan:
    """What an extent holds and where in the file it stands. Pure arithmetic over layout, tokens and coded sizes."""

    name: str
    kv_space: str
    parent: NodeKey
    layout: KvLayout
    tokens: bytes
    digest_name: str
    digest_width: int
    coding: Coding | None = None

    @property
    def coded_as(self) -> str:
        """How it is coded: raw, exact (coded without loss) or quantized."""
        return "raw" if self.coding is None else "exact" if self.coding.exact else "quantized"

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
        return len(self.header(bytes(self.digest_width * self.layer_digests * len(self.layout.layers))))

    @property
    def layer_digests(self) -> int:
        """How many digests a layer has."""
        return digests_a_layer(self.blocks, self.coding)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Where keys and values of each layer, or its coded bytes, begin in the file, and where the last end."""
        starts = [self.header_bytes]
        if self.coding is not None:
            return tuple(accumulate(self.coding.sizes, initial=self.header_bytes))
        for layer, shape in enumerate(self.layout.layers):
            for half in HALVES:
                starts.append(starts[-1] + shape.kv_heads * self.row_bytes(layer, half, self.token_count))
        return tuple(starts)

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return self._starts[-1]

    def start(self, layer: int, half: Half) -> int:
        """Where the keys, or the values, of a layer begin in a file that is not coded."""
        return self._starts[2 * layer + HALVES.index(half)]

    def coded_at(self, layer: int) -> Span:
        """The range of a coded layer in the file."""
        return Span(self._starts[layer], self._starts[layer + 1])

    def row_bytes(self, layer: int, half: Half, tokens: int) -> int:
        """Bytes of `tokens` tokens of one head."""
        shape = self.layout.layers[layer]
        return tokens * (shape.key_dim if half == "keys" else shape.value_dim) * self.layout.numpy_dtype.itemsize

    def layer_bytes(self, layer: int) -> int:
        """Bytes of the keys and values of a layer that is not coded."""
        return self.layout.layers[layer].kv_heads * sum(
            self.row_bytes(layer, half, self.token_count) for half in HALVES
        )

    def empty(self, layer: int, tokens: int) -> LayerKv:
        """Uninitialised arrays for `tokens` tokens of a layer."""
        keys, values = self.layer_shapes(layer, tokens)
        return LayerKv(np.empty(keys, self.layout.numpy_dtype), np.empty(values, self.layout.numpy_dtype))

    def layer_shapes(self, layer: int, tokens: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The shapes of keys and values of `tokens` tokens of a layer."""
        shape = self.layout.layers[layer]
        return (shape.kv_heads, tokens, shape.key_dim), (shape.kv_heads, tokens, shape.value_dim)

    def header(self, digests: bytes) -> bytes:
        """The header in the file; its length does not depend on the digests."""
        about: dict[str, Any] = {
            "format": FORMAT,
            "extent": self.name,
            "kv_space": self.kv_space,
            "parent": self.parent.hex(),
            "layout": layout_text(self.layout),
            "tokens": self.tokens.hex(),
            "digest": self.digest_name,
            "digests": digests.hex(),
        }
        if self.coding is not None:  # safetensors has texts only here
            about["coding"] = json.dumps(self.coding.as_json(), separators=(",", ":"))
        text = json.dumps({"__metadata__": about, **self._tensors()}, separators=(",", ":")).encode()
        padded = text + b" " * (-(len(text) + 8) % _ALIGN_BYTES)
        return len(padded).to_bytes(8, "little") + padded

    def _tensors(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        offset = 0
        if self.coding is not None:
            for layer, (start, stop) in enumerate(pairwise(accumulate(self.coding.sizes, initial=0))):
                tensors[f"layer.{layer}.coded"] = {
                    "dtype": "U8",
                    "shape": [stop - start],
                    "data_offsets": [start, stop],
                }
            return tensors
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
    """A header that was read: the plan, and the digests of each layer: keys, values, then every cell.

    Of a coded layer: keys and values if the code is lossless, then the bytes in the file.
    """

    plan: ExtentPlan
    digests: bytes  # [layers, layer_digests, digest_width]

    def half_digest(self, layer: int, half: Half) -> bytes:
        """The digest of all keys, or all values, of a layer."""
        return self._at(layer, HALVES.index(half), 1)

    def half_digests(self, layer: int) -> bytes:
        """The digests of all keys and of all values of a layer."""
        return self._at(layer, 0, 2)

    def cell_digests(self, layer: int, first: int, stop: int) -> bytes:
        """The digests of blocks `first..stop` of a layer, one after the other."""
        return self._at(layer, 2 + first, stop - first)

    def coded_digest(self, layer: int) -> bytes:
        """The digest of a coded layer's bytes."""
        return self._at(layer, self.plan.layer_digests - 1, 1)

    def _at(self, layer: int, place: int, count: int) -> bytes:
        width = self.plan.digest_width
        row = layer * self.plan.layer_digests
        return self.digests[(row + place) * width : (row + place + count) * width]


def parse_header(data: bytes) -> ExtentHeader:
    """Read a header, length field included. Raises `ValueError` if it is not one of ours, whole and consistent."""
    try:
        about = parse_untrusted_json(data[8:])["__metadata__"]
        if about["format"] != FORMAT:
            raise ValueError("unknown format")
        if not all(isinstance(about[name], str) for name in ("extent", "kv_space", "digest")):
            raise ValueError("a name that is no text")
        layout = parse_layout(about["layout"])
        coded = about.get("coding")
        coding = None if coded is None else Coding.from_json(parse_untrusted_json(coded), len(layout.layers))
        tokens, digests = bytes.fromhex(about["tokens"]), bytes.fromhex(about["digests"])
        parent = NodeKey(bytes.fromhex(about["parent"]))
        if len(parent) != NODE_KEY_BYTES or not tokens or len(tokens) % TOKEN_BYTES:
            raise ValueError("no tokens, or no key above them")
        blocks = -(-len(tokens) // (TOKEN_BYTES * BLOCK_TOKENS))
        width, rest = divmod(len(digests), digests_a_layer(blocks, coding) * len(layout.layers))
        plan = ExtentPlan(about["extent"], about["kv_space"], parent, layout, tokens, about["digest"], width, coding)
        exact = not rest and plan.header(digests) == data
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"not an extent header: {error}") from error
    if not exact:
        raise ValueError("not an extent header: its fields contradict each other")
    vars(plan)["header_bytes"] = len(data)  # what the cached property would write the whole header again for
    return ExtentHeader(plan, digests)


def digests_a_layer(blocks: int, coding: Coding | None) -> int:
    """How many digests a layer of `blocks` blocks has."""
    return 2 + blocks if coding is None else 3 if coding.exact else 1


def header_length(first_bytes: bytes, file_bytes: int) -> int:
    """Bytes of the header with its length field, from the first eight bytes of a file. Raises
    `ValueError`."""
    length = int.from_bytes(first_bytes[:8], "little") + 8
    max_bytes = min(file_bytes, _LARGEST_HEADER_BYTES + file_bytes // _HEADER_SHARE)
    if len(first_bytes) < 8 or not 10 <= length <= max_bytes:
        raise ValueError("not an extent: its first bytes are no header length")
    return length


def rows_of(array: NDArray[Any]) -> list[memoryview]:
    """The bytes of each head, `[tokens, dim]`, without a copy. Raises `TypeError` if a head is not contiguous."""
    return [head.data.cast("B") for head in array]


def is_row_contiguous(kv: LayerKv) -> bool:
    """Whether the tokens of each head stand side by side, as in every engine's buffers."""
    return all(head.flags.c_contiguous for array in (kv.keys, kv.values) for head in array[:1])


def digest_layer(digester: Digester, kv: LayerKv) -> bytes:
    """The digests of a whole layer: keys, values, then every cell."""
    return digest_halves(digester, kv) + digest_cells(digester, kv)


def digest_halves(digester: Digester, kv: LayerKv) -> bytes:
    """The digests of all keys and of all values of a layer."""
    halves = []
    for array in (kv.keys, kv.values):
        state = digester.data()
        for row in rows_of(array):
            state.update(row)
        halves.append(state.digest())
    return b"".join(halves)


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
