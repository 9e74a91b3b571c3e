"""KV: the keys and values that a model computed for a span of tokens, layer by layer.

Shapes are `[kv_heads, tokens, head_dim]`, keys rotated at their positions. bfloat16 has no numpy type; outside
`engine/` it is carried as raw `uint16`. KV that an engine has quantized is carried as bytes, `uint8`: dimensions then
count bytes. An engine that stores the heads of a token side by side has one head as wide as all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

KvType = Literal["float32", "float16", "bfloat16", "uint8"]

_NUMPY_TYPE: dict[KvType, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "uint8": np.dtype(np.uint8),
}


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open token range `[start, stop)`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a span: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, position: int) -> bool:
        return self.start <= position < self.stop


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The KV of one token in one layer: `kv_heads` keys of `key_dim` and values of `value_dim` numbers."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The KV that a reader expects of one layer: nothing else is decoded."""

    dtype: KvType
    shape: LayerShape
    tokens: int


@dataclass(frozen=True)
class KvLayout:
    """The KV of one token in all layers, and its number type."""

    dtype: KvType
    layers: tuple[LayerShape, ...]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The numpy type of the arrays (raw bits for bfloat16)."""
        return _NUMPY_TYPE[self.dtype]

    def layer_spec(self, layer: int, tokens: int) -> LayerSpec:
        return LayerSpec(self.dtype, self.layers[layer], tokens)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        numbers = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in self.layers)
        return numbers * self.numpy_dtype.itemsize


PAGES = KvLayout("uint8", (LayerShape(1, 8 << 10, 8 << 10),))  # of a checkpoint: each is stored like a token's KV


@dataclass(frozen=True, eq=False)
class LayerKv:
    """Keys and values of some tokens in one layer."""

    keys: NDArray[Any]  # [kv_heads, tokens, key_dim]
    values: NDArray[Any]  # [kv_heads, tokens, value_dim]

    def spec(self, dtype: KvType) -> LayerSpec:
        heads, tokens, key_dim = self.keys.shape
        return LayerSpec(dtype, LayerShape(heads, key_dim, self.values.shape[2]), tokens)

    def window(self, start: int, stop: int) -> LayerKv:
        """Some of the tokens, as a view."""
        return LayerKv(self.keys[:, start:stop], self.values[:, start:stop])

    def copy(self) -> LayerKv:
        return LayerKv(self.keys.copy(), self.values.copy())


@dataclass(frozen=True, eq=False)
class Held:
    """KV in memory, in all layers; `span` are the tokens that are meant."""

    layers: Sequence[LayerKv]
    span: Span


@dataclass(frozen=True, eq=False)
class CodedPiece:
    """KV of one layer as it is stored, for an engine that decodes it.

    data   what `codec/coder` gave, a digest of it checked; or KV that is decoded already. Several follow each other in
           the prompt: all are alike, and have whole groups of tokens
    spec   the KV that each of them holds
    span   the tokens of it that are wanted
    at     the place of the first of them, counted from the start of a feed's span
    delta  whether it is a delta from what the pieces before it wrote to the same place
    owner  the extent it was read from
    """

    data: tuple[bytes, ...] | LayerKv
    spec: LayerSpec
    span: Span
    at: int
    delta: bool
    owner: str


@dataclass(frozen=True, eq=False)
class Kv:
    """Keys and values of the tokens of `span` in every layer. The arrays belong to the holder."""

    span: Span
    layout: KvLayout
    layers: tuple[LayerKv, ...]

    def part(self, span: Span) -> Kv:
        """That of some of the tokens, as a view."""
        start, stop = span.start - self.span.start, span.stop - self.span.start
        return Kv(span, self.layout, tuple(layer.window(start, stop) for layer in self.layers))
