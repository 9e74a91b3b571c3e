"""Unsigned integers of a layer as byte planes: all first bytes, then all second bytes, each plane compressed.

    header | extra, for who writes it | sizes of the frames | keys, values of group 0: a frame a plane | group 1 | ...

Differences of similar numbers are small: their high bytes are nearly all zero, their low bytes noise. Apart, the ones
shrink to almost nothing and the others are not made longer. A plane of zeros has no frame at all.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.codec.packing import expand, squeeze
from rekindle.core.keys import BLOCK_TOKENS
from rekindle.core.kv import LayerShape, Span

GROUP_TOKENS = 4 * BLOCK_TOKENS
_HEADER = struct.Struct("<4sBHIIII")  # magic, bytes a number, heads, tokens, dims, length of the extra bytes
_SIZE = np.dtype("<u4")


@dataclass(frozen=True, eq=False)
class Planes:
    """Keys and values of one layer as unsigned integers, and a few bytes that belong to them."""

    keys: NDArray[Any]  # [kv_heads, tokens, key_dim]
    values: NDArray[Any]  # [kv_heads, tokens, value_dim]
    extra: bytes = b""


def fold(differences: NDArray[Any]) -> NDArray[Any]:
    """Signed integers as unsigned, small ones of either sign becoming small: 0, -1, 1, -2, ... to 0, 1, 2, 3, ..."""
    bits = 8 * differences.dtype.itemsize
    return ((differences << 1) ^ (differences >> (bits - 1))).view(f"u{differences.dtype.itemsize}")


def unfold(folded: NDArray[Any]) -> NDArray[Any]:
    one = folded.dtype.type(1)
    signed: NDArray[Any] = ((folded >> one) ^ (~(folded & one) + one)).view(f"i{folded.dtype.itemsize}")
    return signed


def write(magic: bytes, planes: Planes) -> bytes:
    """The integers as bytes. Raises `ValueError` unless keys and values have the same type, heads and tokens."""
    keys, values = planes.keys, planes.values
    if keys.ndim != 3 or values.ndim != 3 or keys.shape[:2] != values.shape[:2] or keys.dtype != values.dtype:
        raise ValueError("keys and values of a layer have the same type, heads and tokens: [kv_heads, tokens, dim]")
    heads, tokens, key_dim = keys.shape
    frames = [
        frame
        for start in range(0, tokens, GROUP_TOKENS)
        for half in (keys, values)
        for frame in _frames(half[:, start : start + GROUP_TOKENS])
    ]
    sizes = np.array([len(frame) for frame in frames], _SIZE)
    header = _HEADER.pack(magic, keys.itemsize, heads, tokens, key_dim, values.shape[2], len(planes.extra))
    return b"".join([header, planes.extra, sizes.tobytes(), *frames])


@dataclass(frozen=True)
class PlanesSpec:
    """The byte planes that a reader expects: nothing else is decompressed."""

    magic: bytes
    dtype: np.dtype[Any]
    shape: LayerShape
    tokens: int


def read(data: bytes, spec: PlanesSpec, span: Span | None = None) -> Planes:
    """The integers of the tokens `span`, all by default; the extra bytes always whole.

    Raises `ValueError` for damaged bytes and for those of another spec, before memory is taken for what they say.
    """
    dtype = spec.dtype
    if len(data) < _HEADER.size:
        raise ValueError("not byte planes: too short")
    reported, itemsize, heads, tokens, key_dim, value_dim, extra = _HEADER.unpack_from(data)
    same = (reported, itemsize, tokens) == (spec.magic, dtype.itemsize, spec.tokens)
    if not same or LayerShape(heads, key_dim, value_dim) != spec.shape:
        raise ValueError("these byte planes are not of this kind, type, shape and number of tokens")
    wanted = Span(0, tokens) if span is None else span
    groups = -(-tokens // GROUP_TOKENS)
    start = _HEADER.size + extra + groups * 2 * itemsize * _SIZE.itemsize
    if wanted.stop > tokens or len(data) < start:
        raise ValueError("byte planes are cut off")
    sizes = np.frombuffer(data, _SIZE, groups * 2 * itemsize, _HEADER.size + extra).astype(np.int64)
    stops = start + np.cumsum(sizes).reshape(groups, 2, itemsize)  # of each frame
    if (int(stops[-1, -1, -1]) if groups else start) != len(data):
        raise ValueError("byte planes are cut off, or longer than they say")
    starts = stops - sizes.reshape(stops.shape)
    halves: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
    for group in range(wanted.start // GROUP_TOKENS, -(-wanted.stop // GROUP_TOKENS)):
        first = group * GROUP_TOKENS
        count = min(GROUP_TOKENS, tokens - first)
        at = slice(max(wanted.start - first, 0), wanted.stop - first)
        for half, dim in enumerate((key_dim, value_dim)):
            frames = [memoryview(data)[a:b] for a, b in zip(starts[group, half], stops[group, half], strict=True)]
            numbers = _numbers(frames, heads * count * dim, dtype).reshape(heads, count, dim)
            halves[half].append(numbers[:, at])
    keys, values = (
        np.concatenate(parts, axis=1) if parts else np.zeros((heads, 0, dim), dtype)
        for parts, dim in zip(halves, (key_dim, value_dim), strict=True)
    )
    return Planes(keys, values, data[_HEADER.size : _HEADER.size + extra])


def _frames(numbers: NDArray[Any]) -> list[bytes]:
    """A frame for each byte of the numbers, lowest first; an empty one for zeros."""
    planes = ((numbers >> (8 * place)).astype(np.uint8) for place in range(numbers.itemsize))  # truncated to a byte
    return [squeeze(plane.tobytes()) if plane.any() else b"" for plane in planes]


def _numbers(frames: list[memoryview], count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    numbers = np.zeros(count, dtype)
    for place, frame in enumerate(frames):
        if len(frame):
            numbers |= np.frombuffer(expand(frame, count), np.uint8).astype(dtype) << (8 * place)
    return numbers
