"""Small integers to bytes and back: packed a few to a byte, or as byte planes, then entropy-coded by zstd.

The entropy coder of zstd gives each byte at least one bit and a whole number of bits. So codes of 2 or 3 bits are
packed two, three or four to a byte, which shares the rounding loss. The last symbol of an alphabet marks a code that
does not fit into it; such codes follow in a separate list.

Differences of similar numbers are small: their high bytes are nearly all zero, their low bytes noise. So they are
stored as byte planes: all first bytes, then all second bytes, each plane compressed alone. A plane of zeros has no
frame.

    header | extra bytes of the writer | sizes of the frames | keys, values of group 0: a frame a plane | group 1 | ...
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from rekindle.core.keys import BLOCK_TOKENS
from rekindle.core.kv import LayerShape, Span

_RADIX = {1: 256, 2: 16, 3: 6, 4: 4}  # codes a byte -> symbols a code; radix ** codes <= 256
_RARE = 1 / 500  # strays cost about 24 bits each: a share this small costs less than the denser packing saves
_LEVEL = 1
# Longer matches than zstd would take by itself: codes look random, and a short match costs more than its codes.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(_LEVEL, min_match=7, write_content_size=True)
DENSEST = max(_RADIX)
LARGEST_RATIO = 1 << 16  # more than zstd ever reaches: a block of at most 128 KiB takes at least 4 bytes


@dataclass(frozen=True)
class Packed:
    """Codes as bytes: `symbols` with `per_byte` codes in each byte, and the codes that had no symbol."""

    per_byte: int
    symbols: bytes
    strays: NDArray[np.int16]  # in the order of the codes


def pack(codes: NDArray[np.int16]) -> Packed:
    """The codes as bytes, in the order of the array's axes."""
    flat = codes.reshape(-1)
    size = np.abs(flat.astype(np.int32))
    per_byte = _density(size)
    radix = _RADIX[per_byte]
    reach = radix // 2 - 1
    inside = size <= reach
    symbols = np.where(inside, flat + np.int16(reach), np.int16(radix - 1)).astype(np.uint8)
    padded = np.concatenate([symbols, np.full(-len(symbols) % per_byte, reach, np.uint8)]).reshape(-1, per_byte)
    joined = padded[:, 0].copy()
    for column in range(1, per_byte):
        joined = joined * np.uint8(radix) + padded[:, column]
    return Packed(per_byte, squeeze(joined.tobytes()), flat[~inside])


def unpack(packed: Packed, count: int) -> NDArray[np.int16]:
    """The `count` codes of what `pack` gave. Raises `ValueError` if it is damaged or holds another number."""
    if packed.per_byte not in _RADIX:
        raise ValueError(f"there cannot be {packed.per_byte} codes in a byte")
    symbols = np.frombuffer(expand(packed.symbols, -(-count // packed.per_byte)), np.uint8)
    codes: NDArray[np.int16] = np.take(TABLES[packed.per_byte], symbols, axis=0).reshape(-1)[:count]
    stray = codes == _RADIX[packed.per_byte] // 2
    if np.count_nonzero(stray) != len(packed.strays):
        raise ValueError("codes are damaged: their strays do not match")
    codes[stray] = packed.strays
    return codes


def squeeze(data: bytes) -> bytes:
    """The bytes as one zstd frame."""
    frame: bytes = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(data)
    return frame


def expand(frame: bytes | memoryview, size: int) -> bytes:
    """The `size` bytes of a frame. Raises `ValueError` for anything else, before memory is taken for it."""
    if size > len(frame) * LARGEST_RATIO:
        raise ValueError("a frame is too short for what it should hold")
    try:
        reported = zstandard.get_frame_parameters(frame).content_size
        if reported != size:
            raise ValueError(f"a frame holds {reported} bytes instead of {size}")
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from error
    if len(data) != size:
        raise ValueError("a frame ends early")
    return data


def _density(size: NDArray[np.int32]) -> int:
    """The number of codes of these magnitudes per byte: the largest that leaves few strays."""
    allowed = size.size * _RARE
    for per_byte in (4, 3, 2):
        if np.count_nonzero(size > _RADIX[per_byte] // 2 - 1) <= allowed:
            return per_byte
    return 1


def _table(per_byte: int) -> NDArray[np.int16]:
    """The codes of every byte; the last symbol of the alphabet becomes the code just beyond its reach."""
    radix = _RADIX[per_byte]
    values = np.arange(256)[:, None] // radix ** np.arange(per_byte - 1, -1, -1) % radix
    return (values - (radix // 2 - 1)).astype(np.int16)


TABLES = {per_byte: _table(per_byte) for per_byte in _RADIX}  # byte -> codes, [256, per_byte]


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


def write_planes(magic: bytes, planes: Planes) -> bytes:
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


def read_planes(data: bytes, spec: PlanesSpec, span: Span | None = None) -> Planes:
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
