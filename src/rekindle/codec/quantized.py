"""KV of one layer as small integers, entropy-coded.

    header | sizes of each group | side: steps, centres, strays | keys, values of group 0 | of group 1 | ...

A group is 128 tokens, four blocks, the last maybe fewer: enough to compress almost as well as all together, few enough
to decode for one block. Everything small comes first, together, because it would be twice as long if compressed group
by group. Keys have a step a channel of a group, values a step a token.

Each layer is coded on its own, so that loading can go layer by layer.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

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
    narrow_into,
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
_SIZES = struct.Struct("<IIIIBB")  # bytes of keys and values of a group, their strays, their codes a byte
_SIDE_TYPE = np.dtype("<i2")
_BATCH_NUMBERS = 1 << 18  # restored together: more fall out of the processor's cache, fewer take longer in Python


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

    def batches(self, span: Span, token_numbers: int) -> list[tuple[range, int]]:
        """The groups of `span` with the number of tokens of each; several together where all their tokens are wanted,
        as many as the processor's cache holds at `token_numbers` numbers a token."""
        size, found = self.group_tokens, list[tuple[range, int]]()
        first, stop = -(-span.start // size), span.stop // size  # whole groups
        at_a_time = max(1, _BATCH_NUMBERS // (token_numbers * size))
        for number in self.groups_of(span):
            if first <= number < stop and found and found[-1][0].stop > first and len(found[-1][0]) < at_a_time:
                found[-1] = range(found[-1][0].start, number + 1), size
            else:
                found.append((range(number, number + 1), len(self.group(number))))
        return found

    def groups_of(self, span: Span | None) -> range:
        """The groups that hold a token of `span`, all by default."""
        if span is None:
            return range(self.groups)
        return range(span.start // self.group_tokens, -(-span.stop // self.group_tokens)) if len(span) else range(0)

    @property
    def tokens_of_groups(self) -> NDArray[np.int64]:
        """Number of tokens of each group, `[groups]`."""
        tokens = np.full(self.groups, self.group_tokens, np.int64)
        tokens[-1:] += self.tokens - self.groups * self.group_tokens
        return tokens


class CodedFrame(NamedTuple):
    """The codes of the keys or values of a group."""

    start: int
    stop: int
    per_byte: int
    strays: int


class CodedGroup(NamedTuple):
    tokens: int
    side_start: int  # its first number of the side
    halves: tuple[CodedFrame, CodedFrame]  # keys, values


@dataclass(frozen=True, eq=False)
class CodedLayout:
    """The places of the parts of a coded layer; nothing is decompressed.

    The side is one frame: low bytes of all its numbers, then high bytes. Of a group they are: exponents and centres of
    the keys, exponents and centres of the values, the exponent of these centres, strays of both halves.
    """

    coded: Coded
    groups: Sequence[CodedGroup]
    side_start: int
    side_stop: int
    side_numbers: int


@dataclass(frozen=True, eq=False)
class FloatKv:
    """Keys and values of some tokens as float32."""

    keys: NDArray[np.float32]  # [kv_heads, tokens, key_dim]
    values: NDArray[np.float32]  # [kv_heads, tokens, value_dim]


def encode(kv: LayerKv, dtype: KvType, bits: LayerBits) -> bytes:
    """The KV of one layer with about `bits` bits a number.

    Raises `ValueError` for numbers that are not finite, for KV that is no float, and for a layer without numbers.
    """
    return encode_floats(FloatKv(widen(kv.keys, dtype), widen(kv.values, dtype)), dtype, "whole", bits)


def decode(data: bytes, spec: LayerSpec, span: Span | None = None, into: KvType | None = None) -> LayerKv:
    """The KV of the tokens `span`, all by default, in the type `into`, by default the one it had.

    Raises `ValueError` for bytes that are damaged or hold anything but what `spec` says.
    """
    opened, dtype = open_layer(data, "whole", spec, span), into or spec.dtype
    heads, tokens, numpy_type = spec.shape.kv_heads, len(opened.span), carrier(dtype)
    keys, values = (np.empty((heads, tokens, dim), numpy_type) for dim in (spec.shape.key_dim, spec.shape.value_dim))
    opened.restore(0, keys, dtype)
    opened.restore(1, values, dtype)
    return LayerKv(keys, values)


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
    sizes: list[bytes] = []
    side: list[NDArray[np.int16]] = []
    frames: list[bytes | memoryview] = []
    for number in range(coded.groups):
        at = slice(coded.group(number).start, coded.group(number).stop)
        keys, values = numbers.keys[:, at], numbers.values[:, at]
        snapped = (
            quantize_keys(keys, bits.keys) if bits.keys else zeros(keys.shape, token_steps=False),
            quantize_values(values, bits.values) if bits.values else zeros(values.shape, token_steps=True),
        )
        packed = [pack(tensor.codes) for tensor in snapped]
        lengths = *(len(half.symbols) for half in packed), *(len(half.strays) for half in packed)
        sizes.append(_SIZES.pack(*lengths, *(half.per_byte for half in packed)))
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
    return b"".join([header, *sizes, aside, *frames])


def open_layer(data: bytes, kind: Kind, spec: LayerSpec, span: Span | None = None) -> OpenLayer:
    """A coded layer, of which the tokens `span` are wanted, all by default.

    Raises `ValueError` for damaged bytes and for those of the other kind or another spec.
    """
    places, view = locate_parts(data, kind, spec, span), memoryview(data)
    side = _unplane(expand([view[places.side_start : places.side_stop]], 2 * places.side_numbers))
    return OpenLayer(view, places, side, Span(0, spec.tokens) if span is None else span)


@dataclass(frozen=True, eq=False)
class OpenLayer:
    """A coded layer whose numbers beside the codes are decompressed, and which of its tokens are wanted."""

    data: memoryview
    places: CodedLayout
    side: NDArray[np.int16]
    span: Span

    def restore(self, half: int, out: NDArray[Any], dtype: KvType, *, delta: bool = False) -> None:
        """Write keys (0) or values (1) of the wanted tokens to `out` `[kv_heads, tokens, dim]`; a delta is added to
        what is there. Two threads may restore a half each. Raises `ValueError` for damaged bytes.
        """
        coded, span = self.places.coded, self.span
        heads, dim = coded.shape.kv_heads, out.shape[2]
        memory = np.empty(0, np.float32)
        for groups, tokens in coded.batches(span, heads * dim):
            shape = len(groups), heads, tokens, dim
            memory = memory if math.prod(shape) <= memory.size else np.empty(math.prod(shape), np.float32)
            numbers = memory[: math.prod(shape)].reshape(shape)
            first = coded.group(groups[0]).start
            start, stop = max(first, span.start), min(first + len(groups) * tokens, span.stop)
            own = out[:, start - span.start : stop - span.start]
            self._dequantize(half, groups, numbers)
            if stop - start < len(groups) * tokens:  # one group, in part
                numbers, own = numbers[:, :, start - first : stop - first], own[None]
            else:
                own = own.reshape(heads, len(groups), tokens, dim).swapaxes(0, 1)  # a view: an axis is split
            if delta:
                numbers += widen(own, dtype)
            # A copy, and no operation that writes there: copying does not read a place before it is written.
            narrow_into(numbers, dtype, own)

    def _dequantize(self, half: int, groups: range, codes: NDArray[np.float32]) -> None:
        """Write keys or values of some groups to `codes` `[groups, kv_heads, tokens, dim]`."""
        places, (count, heads, tokens, dim) = self.places, codes.shape
        keys, values = heads * places.coded.shape.key_dim, heads * places.coded.shape.value_dim
        at, width = (2 * keys, heads * tokens) if half else (0, keys)  # of the exponents; the centres come next
        last = 2 * keys + heads * tokens + values  # the exponent of the centres; strays come next
        count_centres = heads * dim
        packed: list[Packed] = []
        side: list[NDArray[np.int16]] = []
        last_exponents: list[int] = []
        for group in places.groups[groups.start : groups.stop]:
            frame, first, stray = group.halves[half], group.side_start + at, group.side_start + last + 1
            stray += group.halves[0].strays if half else 0
            packed.append(
                Packed(frame.per_byte, self.data[frame.start : frame.stop], self.side[stray : stray + frame.strays])
            )
            side.append(self.side[first : first + width + count_centres])
            last_exponents.append(group.side_start + last)
        for _, alike in groupby(range(count), key=lambda group: packed[group].per_byte):
            run = list(alike)
            unpack(packed[run[0] : run[-1] + 1], codes[run[0] : run[-1] + 1])
        joined = np.concatenate(side).reshape(count, -1)
        tensor = QuantizedTensor(
            codes,
            joined[:, :width].reshape(count, heads, -1),
            joined[:, width:].reshape(count, heads, dim),
            self.side[last_exponents][:, None, None],
        )
        (dequantize_values if half else dequantize_keys)(tensor)


def locate_parts(data: bytes, kind: Kind, spec: LayerSpec, span: Span | None = None) -> CodedLayout:
    """The places of all parts of a coded layer; `span` is what will be read.

    Raises `ValueError` for bytes that are damaged, as far as that shows, and for those of the other kind or another
    spec: before memory is taken for what they say. In plain Python: for the few groups of a layer that is sooner than
    arrays.
    """
    coded, shape = describe(data), spec.shape
    if coded.kind != kind or (span is not None and span.stop > coded.tokens):
        raise ValueError(f"this is a {coded.kind} of the KV of {coded.tokens} tokens")
    if (coded.dtype, coded.shape, coded.tokens) != (spec.dtype, shape, spec.tokens):
        raise ValueError("quantized KV of another shape, type or number of tokens")
    side_start = _HEADER.size + coded.groups * _SIZES.size
    place = side_stop = side_start + _HEADER.unpack_from(data)[-1]
    if len(data) < side_stop:
        raise ValueError("quantized KV is cut off")
    groups: list[CodedGroup] = []
    side_numbers = 0
    sizes = _SIZES.iter_unpack(memoryview(data)[_HEADER.size : side_start])
    for number, (key_bytes, value_bytes, key_strays, value_strays, *per_byte) in enumerate(sizes):
        tokens = len(coded.group(number))
        if not all(1 <= codes <= DENSEST for codes in per_byte):
            raise ValueError("quantized KV is damaged: there cannot be that many codes in a byte")
        numbers = shape.kv_heads * tokens
        if key_strays > numbers * shape.key_dim or value_strays > numbers * shape.value_dim:  # each takes memory
            raise ValueError("quantized KV is damaged: more strays than numbers")
        keys = CodedFrame(place, place + key_bytes, per_byte[0], key_strays)
        place = keys.stop + value_bytes
        values = CodedFrame(keys.stop, place, per_byte[1], value_strays)
        groups.append(CodedGroup(tokens, side_numbers, (keys, values)))
        side_numbers += shape.kv_heads * (2 * shape.key_dim + shape.value_dim + tokens) + 1 + key_strays + value_strays
    if place != len(data):
        raise ValueError("quantized KV is cut off, or longer than it says")
    return CodedLayout(coded, groups, side_start, side_stop, side_numbers)


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
    low, high = np.frombuffer(data, np.uint8).reshape(2, -1).astype(np.uint16)
    numbers: NDArray[np.int16] = (low | high << np.uint16(8)).view(np.int16)
    return numbers
