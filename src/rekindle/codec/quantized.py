"""KV of one layer as small integers, entropy-coded.

    header | sizes of each group | side: steps, centres, strays | keys, values of group 0 | of group 1 | ...

A group is 128 tokens, four blocks, the last maybe fewer: enough to compress almost as well as all together, few enough
to decode for one block. Everything small comes first, together, because it would be twice as long if compressed group
by group. Keys have a step a channel of a group, values a step a token.

Each layer is coded on its own, so that loading can go layer by layer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rekindle.codec.packing import DENSEST, Packed, expand, pack, squeeze, unpack
from rekindle.codec.quantizer import (
    FLOAT_TYPES,
    LayerBits,
    QuantizedTensor,
    carrier,
    dequantize_keys,
    dequantize_values,
    narrow,
    quantize_keys,
    quantize_values,
    widen,
    zeros,
)
from rekindle.core.keys import BLOCK_TOKENS
from rekindle.core.kv import KvType, LayerKv, LayerShape, LayerSpec, Span

GROUP_TOKENS = 4 * BLOCK_TOKENS
PRESETS = {"q8": 8.0, "q5": 5.0, "q4": 4.0, "q3": 3.0, "q2": 2.0}

Kind = Literal["whole", "difference"]
_KINDS: tuple[Kind, Kind] = ("whole", "difference")
MAGIC = b"RKq1"
_HEADER = struct.Struct("<4sBBHIIIII")
_SIZES = np.dtype([("bytes", "<u4", 2), ("strays", "<u4", 2), ("per_byte", "u1", 2)])  # of keys and values
_SIDE_TYPE = np.dtype("<i2")


@dataclass(frozen=True, slots=True)
class Coded:
    """The header of coded bytes."""

    kind: Kind
    dtype: KvType
    shape: LayerShape
    tokens: int
    group_tokens: int

    def group(self, number: int) -> Span:
        start = number * self.group_tokens
        return Span(start, min(start + self.group_tokens, self.tokens))

    @property
    def groups(self) -> int:
        return -(-self.tokens // self.group_tokens)

    def groups_of(self, span: Span | None) -> range:
        """The groups that hold a token of `span`, all by default."""
        if span is None:
            return range(self.groups)
        return range(span.start // self.group_tokens, -(-span.stop // self.group_tokens)) if len(span) else range(0)

    def side_numbers(self, number: int) -> int:
        """How many numbers beside the codes a group has, its strays not counted."""
        shape = self.shape
        return shape.kv_heads * (2 * shape.key_dim + shape.value_dim + len(self.group(number))) + 1


@dataclass(frozen=True, eq=False)
class CodedLayout:
    """The places of the parts of layers that are coded alike; nothing is decompressed.

    The side is one frame a layer: low bytes of all its numbers, then high bytes. Of a group they are: exponents and
    centres of the keys, exponents and centres of the values, the exponent of these centres, strays of both halves.
    """

    coded: Coded
    frames: NDArray[np.int64]  # [layers, groups, 2, 2]: of keys and values, where the frame starts and its bytes
    per_byte: NDArray[np.int64]  # [layers, groups, 2]
    strays: NDArray[np.int64]  # [layers, groups, 2]
    sides: NDArray[np.int64]  # [layers, 2]: where the frame starts and its bytes
    side_starts: NDArray[np.int64]  # [layers, groups + 1]: the first number of each group, and how many there are


@dataclass(frozen=True, eq=False)
class FloatKv:
    """Keys and values of some tokens as float32."""

    keys: NDArray[np.float32]  # [kv_heads, tokens, key_dim]
    values: NDArray[np.float32]  # [kv_heads, tokens, value_dim]


@dataclass(frozen=True, eq=False)
class OpenGroup:
    """The integers of a group, and which of its tokens are wanted."""

    tokens: Span
    wanted: Span
    keys: QuantizedTensor
    values: QuantizedTensor


def encode(kv: LayerKv, dtype: KvType, bits: LayerBits) -> bytes:
    """The KV of one layer with about `bits` bits a number.

    Raises `ValueError` for numbers that are not finite, for KV that is no float, and for a layer without numbers.
    """
    return encode_floats(FloatKv(widen(kv.keys, dtype), widen(kv.values, dtype)), dtype, "whole", bits)


def decode(data: bytes, spec: LayerSpec, span: Span | None = None, into: KvType | None = None) -> LayerKv:
    """The KV of the tokens `span`, all by default, in the type `into`, by default the one it had.

    Raises `ValueError` for bytes that are damaged or hold anything but what `spec` says.
    """
    made = spec if into is None else replace(spec, dtype=into)
    return assemble(made, spec.tokens if span is None else len(span), decode_floats(data, "whole", spec, span))


def describe(data: bytes) -> Coded:
    """The header of the bytes; takes no memory for the content.

    Raises `ValueError` for other bytes.
    """
    if len(data) < _HEADER.size:
        raise ValueError("not quantized KV: too short")
    magic, kind, dtype, heads, tokens, key_dim, value_dim, group_tokens, _ = _HEADER.unpack_from(data)
    if magic != MAGIC or kind >= len(_KINDS) or dtype >= len(FLOAT_TYPES) or group_tokens != GROUP_TOKENS:
        raise ValueError("not quantized KV: its header is unknown")
    if 0 in (heads, key_dim, value_dim):
        raise ValueError("not quantized KV: it has no numbers")
    return Coded(_KINDS[kind], FLOAT_TYPES[dtype], LayerShape(heads, key_dim, value_dim), tokens, group_tokens)


def encode_floats(numbers: FloatKv, dtype: KvType, kind: Kind, bits: LayerBits) -> bytes:
    """`encode` for numbers that are float32 already; `dtype` is the type they had."""
    shape = _shape_of(numbers)
    coded = Coded(kind, dtype, shape, numbers.keys.shape[1], GROUP_TOKENS)
    sizes = np.zeros(coded.groups, _SIZES)
    side: list[NDArray[np.int16]] = []
    frames: list[bytes] = []
    for number in range(coded.groups):
        at = slice(coded.group(number).start, coded.group(number).stop)
        keys, values = numbers.keys[:, at], numbers.values[:, at]
        snapped = (
            quantize_keys(keys, bits.keys) if bits.keys else zeros(keys.shape, token_steps=False),
            quantize_values(values, bits.values) if bits.values else zeros(values.shape, token_steps=True),
        )
        packed = [pack(tensor.codes) for tensor in snapped]
        sizes[number] = (
            [len(half.symbols) for half in packed],
            [len(half.strays) for half in packed],
            [half.per_byte for half in packed],
        )
        frames += [half.symbols for half in packed]
        side += [part.reshape(-1) for tensor in snapped for part in (tensor.exponents, tensor.centres)]
        side += [np.array([snapped[1].centre_exponent], np.int16), *(half.strays for half in packed)]
    aside = squeeze(_planes(np.concatenate(side) if side else np.zeros(0, np.int16)))
    header = _HEADER.pack(
        MAGIC,
        _KINDS.index(kind),
        FLOAT_TYPES.index(dtype),
        shape.kv_heads,
        coded.tokens,
        shape.key_dim,
        shape.value_dim,
        GROUP_TOKENS,
        len(aside),
    )
    return b"".join([header, sizes.tobytes(), aside, *frames])


def decode_floats(data: bytes, kind: Kind, spec: LayerSpec, span: Span | None = None) -> Iterator[tuple[Span, FloatKv]]:
    """The numbers of `span`, all by default, group by group, each with its place counted from the start of `span`.

    Group by group, because what fits into the processor's cache is restored twice as fast. The arrays are the
    caller's. Raises `ValueError` for damaged bytes and for those of the other kind or another spec.
    """
    first = 0 if span is None else span.start
    for group in open_groups(data, kind, spec, span):
        at = slice(group.wanted.start - group.tokens.start, group.wanted.stop - group.tokens.start)
        numbers = FloatKv(dequantize_keys(group.keys)[:, at], dequantize_values(group.values)[:, at])
        yield Span(group.wanted.start - first, group.wanted.stop - first), numbers


def assemble(spec: LayerSpec, tokens: int, parts: Iterator[tuple[Span, FloatKv]]) -> LayerKv:
    """`tokens` tokens of KV in the type of `spec`, from parts and their places."""
    shape, numpy_type = spec.shape, carrier(spec.dtype)
    first = next(parts, None)  # memory is taken only when a part has shown that the bytes are what they should be
    count = 0 if first is None else tokens
    keys = np.empty((shape.kv_heads, count, shape.key_dim), numpy_type)
    values = np.empty((shape.kv_heads, count, shape.value_dim), numpy_type)
    for at, part in chain([] if first is None else [first], parts):
        keys[:, at.start : at.stop] = narrow(part.keys, spec.dtype)
        values[:, at.start : at.stop] = narrow(part.values, spec.dtype)
    return LayerKv(keys, values)


def open_groups(data: bytes, kind: Kind, spec: LayerSpec, span: Span | None = None) -> Iterator[OpenGroup]:
    """The groups that hold a token of `span`, decompressed.

    Raises `ValueError` for damaged bytes and for those of the other kind or another spec.
    """
    places, view = locate_parts([data], kind, spec, span), memoryview(data)
    coded = places.coded
    start, size = places.sides[0].tolist()
    starts = places.side_starts[0].tolist()
    side = _unplane(expand(view[start : start + size], 2 * starts[-1]))
    for number in coded.groups_of(span):
        tokens = coded.group(number)
        part = tokens if span is None else Span(max(tokens.start, span.start), min(tokens.stop, span.stop))
        yield OpenGroup(tokens, part, *_open(places, number, side[starts[number] :], view))


def locate_parts(layers: Sequence[bytes], kind: Kind, spec: LayerSpec, span: Span | None = None) -> CodedLayout:
    """The places of all parts in layers with equal headers; `span` is what will be read.

    Raises `ValueError` for bytes that are damaged, as far as that shows, and for those of the other kind or another
    spec: before memory is taken for what they say.
    """
    coded = describe(layers[0])
    if coded.kind != kind or (span is not None and span.stop > coded.tokens):
        raise ValueError(f"this is a {coded.kind} of the KV of {coded.tokens} tokens")
    if (coded.dtype, coded.shape, coded.tokens) != (spec.dtype, spec.shape, spec.tokens):
        raise ValueError("quantized KV of another shape, type or number of tokens")
    start = _HEADER.size + coded.groups * _SIZES.itemsize
    total = np.array([len(data) for data in layers])
    sides = np.array([[start, _HEADER.unpack_from(data)[-1]] for data in layers])
    if total.min() < start or (total < sides.sum(1)).any():
        raise ValueError("quantized KV is cut off")
    sizes = np.stack([np.frombuffer(data, _SIZES, coded.groups, _HEADER.size) for data in layers])
    lengths, strays = sizes["bytes"].astype(np.int64), sizes["strays"].astype(np.int64)  # [layers, groups, 2]
    stops = sides.sum(1)[:, None] + np.cumsum(lengths.reshape(len(layers), -1), axis=1)
    if (total != (stops[:, -1] if coded.groups else sides.sum(1))).any():
        raise ValueError("quantized KV is cut off, or longer than it says")
    per_byte = sizes["per_byte"].astype(np.int64)
    if coded.groups and not 1 <= per_byte.min() <= per_byte.max() <= DENSEST:
        raise ValueError("quantized KV is damaged: there cannot be that many codes in a byte")
    if (strays > _numbers_of_groups(coded)).any():  # each takes memory
        raise ValueError("quantized KV is damaged: more strays than numbers")
    counts = strays.sum(2) + np.array([coded.side_numbers(number) for number in range(coded.groups)], np.int64)
    side_starts = np.concatenate([np.zeros((len(layers), 1), np.int64), np.cumsum(counts, axis=1)], axis=1)
    frames = np.stack([stops.reshape(lengths.shape) - lengths, lengths], axis=-1)
    return CodedLayout(coded, frames, per_byte, strays, sides, side_starts)


def _numbers_of_groups(coded: Coded) -> NDArray[np.int64]:
    """How many keys and how many values each group has, `[groups, 2]`."""
    tokens = np.array([len(coded.group(number)) for number in range(coded.groups)], np.int64)
    return tokens[:, None] * coded.shape.kv_heads * np.array([coded.shape.key_dim, coded.shape.value_dim], np.int64)


def _open(
    places: CodedLayout, number: int, side: NDArray[np.int16], data: memoryview
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Keys and values of a group, whose side numbers come first in `side`."""
    shape, tokens = places.coded.shape, len(places.coded.group(number))
    heads, keys_count, values_count = shape.kv_heads, shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim
    widths = [keys_count, keys_count, heads * tokens, values_count, 1, *places.strays[0, number].tolist()]
    parts = np.split(side, np.cumsum(widths))
    halves = []
    for half, dim in enumerate((shape.key_dim, shape.value_dim)):
        start, size = places.frames[0, number, half].tolist()
        packed = Packed(int(places.per_byte[0, number, half]), bytes(data[start : start + size]), parts[5 + half])
        codes = unpack(packed, heads * tokens * dim).reshape(heads, tokens, dim)
        exponents, centres = parts[2 * half].reshape(heads, -1), parts[2 * half + 1].reshape(heads, dim)
        halves.append(QuantizedTensor(codes, exponents, centres, int(parts[4][0]) if half else 0))
    return halves[0], halves[1]


def _shape_of(numbers: FloatKv) -> LayerShape:
    if numbers.keys.ndim != 3 or numbers.values.ndim != 3 or numbers.keys.shape[:2] != numbers.values.shape[:2]:
        raise ValueError("keys and values of a layer have the same heads and tokens: [kv_heads, tokens, dim]")
    shape = LayerShape(numbers.keys.shape[0], numbers.keys.shape[2], numbers.values.shape[2])
    if 0 in (shape.kv_heads, shape.key_dim, shape.value_dim):
        raise ValueError("a layer without numbers cannot be quantized")
    return shape


def _planes(numbers: NDArray[np.int16]) -> bytes:
    """Low bytes, then high bytes: the high ones are nearly all equal."""
    planes: bytes = numbers.astype(_SIDE_TYPE).view(np.uint8).reshape(-1, 2).T.tobytes()
    return planes


def _unplane(data: bytes) -> NDArray[np.int16]:
    planes = np.frombuffer(data, np.uint8).reshape(2, -1)
    return np.ascontiguousarray(planes.T).view(_SIDE_TYPE).reshape(-1).astype(np.int16, copy=False)
