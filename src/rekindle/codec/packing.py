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
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Packed(NamedTuple):
    """Codes as bytes: `symbols` with `per_byte` codes in each byte, and the codes that had no symbol."""

    per_byte: int
    symbols: bytes | memoryview
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


def unpack(packed: Sequence[Packed], out: NDArray[np.float32]) -> None:
    """Write the codes of what `pack` gave to `out[0]`, `out[1]`, ... as floats, in the order of their axes. All have
    as many codes a byte.

    Raises `ValueError` if they are damaged or hold another number of codes.
    """
    per_byte = packed[0].per_byte
    if per_byte not in _RADIX:
        raise ValueError(f"there cannot be {per_byte} codes in a byte")
    count = out[0].size
    symbols = np.frombuffer(expand([one.symbols for one in packed], -(-count // per_byte)), np.uint8)
    codes = _spread(symbols, per_byte).reshape(len(packed), -1)[:, :count].reshape(out.shape)  # without the padding
    stray = codes == _RADIX[per_byte] - 1
    if [np.count_nonzero(part) for part in stray] != [len(one.strays) for one in packed]:
        raise ValueError("codes are damaged: their strays do not match")
    codes -= np.uint8(_RADIX[per_byte] // 2 - 1)
    out[...] = codes.view(np.int8)
    if any(len(one.strays) for one in packed):
        out[stray] = np.concatenate([one.strays for one in packed])


def _spread(symbols: NDArray[np.uint8], per_byte: int) -> NDArray[np.uint8]:
    """The symbols of all codes, one a byte. Arithmetic on whole arrays is several times as fast as a table."""
    spread = np.empty((len(symbols), per_byte), np.uint8)
    radix = np.uint8(_RADIX[per_byte] % 256)
    for column in range(per_byte - 1, 0, -1):
        above = symbols // radix
        np.subtract(symbols, above * radix, out=spread[:, column])
        symbols = above
    spread[:, 0] = symbols
    return spread


def squeeze(data: bytes) -> bytes:
    """The bytes as one zstd frame."""
    frame: bytes = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(data)
    return frame


def expand(frames: Sequence[bytes | memoryview], size: int) -> bytes:
    """The content of frames, joined, `size` bytes of each. Raises `ValueError` for anything else, before memory is
    taken for it."""
    decompressor, contents = zstandard.ZstdDecompressor(), list[bytes]()
    for frame in frames:
        if size > len(frame) * LARGEST_RATIO:
            raise ValueError("a frame is too short for what it should hold")
        try:
            reported = zstandard.get_frame_parameters(frame).content_size
            if reported != size:
                raise ValueError(f"a frame holds {reported} bytes instead of {size}")
            contents.append(decompressor.decompress(frame, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise ValueError(f"a frame is damaged: {error}") from error
        if len(contents[-1]) != size:
            raise ValueError("a frame ends early")
    return b"".join(contents)


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
    """The signed integers of folded ones."""
    one = folded.dtype.type(1)
    signs = folded & one
    np.negative(signs, out=signs)
    signs ^= folded >> one
    signed: NDArray[Any] = signs.view(f"i{folded.dtype.itemsize}")
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
    opened = open_planes(data, spec, span)
    shape, tokens = spec.shape, len(opened.span)
    keys, values = (np.empty((shape.kv_heads, tokens, dim), spec.dtype) for dim in (shape.key_dim, shape.value_dim))
    for half, out in enumerate((keys, values)):
        for at, numbers in opened.groups(half):
            out[:, at.start : at.stop] = numbers
    return Planes(keys, values, opened.extra)


@dataclass(frozen=True, eq=False)
class OpenPlanes:
    """Byte planes of which the places of all frames are known, and which tokens are wanted."""

    data: memoryview
    spec: PlanesSpec
    span: Span
    extra: bytes
    frames: list[list[list[list[int]]]]  # [groups, 2, bytes a number, 2]: where each frame starts and stops

    def groups(self, half: int) -> Iterator[tuple[Span, NDArray[Any]]]:
        """The wanted keys (0) or values (1), group by group: their place, counted from the start of `span`, and the
        integers `[kv_heads, tokens, dim]` in memory that the next group takes over. Raises `ValueError` for damage."""
        shape, span, total = self.spec.shape, self.span, self.spec.tokens
        dim = shape.value_dim if half else shape.key_dim
        memory = np.empty(shape.kv_heads * min(GROUP_TOKENS, total) * dim, self.spec.dtype)
        for group in range(span.start // GROUP_TOKENS, -(-span.stop // GROUP_TOKENS)):
            first, stop = group * GROUP_TOKENS, min((group + 1) * GROUP_TOKENS, total)
            numbers = memory[: shape.kv_heads * (stop - first) * dim]
            _read_numbers([self.data[a:b] for a, b in self.frames[group][half]], numbers)
            wanted = Span(max(span.start, first), min(span.stop, stop))
            grouped = numbers.reshape(shape.kv_heads, stop - first, dim)
            yield (
                Span(wanted.start - span.start, wanted.stop - span.start),
                grouped[:, wanted.start - first : wanted.stop - first],
            )


def open_planes(data: bytes, spec: PlanesSpec, span: Span | None = None) -> OpenPlanes:
    """Find the frames of the tokens `span`, all by default; nothing is decompressed. Raises as `read_planes` does."""
    if len(data) < _HEADER.size:
        raise ValueError("not byte planes: too short")
    reported, itemsize, heads, tokens, key_dim, value_dim, extra = _HEADER.unpack_from(data)
    same = (reported, itemsize, tokens) == (spec.magic, spec.dtype.itemsize, spec.tokens)
    if not same or LayerShape(heads, key_dim, value_dim) != spec.shape:
        raise ValueError("these byte planes are not of this kind, type, shape and number of tokens")
    wanted = Span(0, tokens) if span is None else span
    groups = -(-tokens // GROUP_TOKENS)
    start = _HEADER.size + extra + groups * 2 * itemsize * _SIZE.itemsize
    if wanted.stop > tokens or len(data) < start:
        raise ValueError("byte planes are cut off")
    sizes = np.frombuffer(data, _SIZE, groups * 2 * itemsize, _HEADER.size + extra).astype(np.int64)
    stops = start + np.cumsum(sizes)
    if (int(stops[-1]) if groups else start) != len(data):
        raise ValueError("byte planes are cut off, or longer than they say")
    frames = np.stack([stops - sizes, stops], axis=-1).reshape(groups, 2, itemsize, 2).tolist()
    return OpenPlanes(memoryview(data), spec, wanted, data[_HEADER.size : _HEADER.size + extra], frames)


def _frames(numbers: NDArray[Any]) -> list[bytes]:
    """A frame for each byte of the numbers, lowest first; an empty one for zeros."""
    planes = ((numbers >> (8 * place)).astype(np.uint8) for place in range(numbers.itemsize))  # truncated to a byte
    return [squeeze(plane.tobytes()) if plane.any() else b"" for plane in planes]


def _read_numbers(frames: list[memoryview], out: NDArray[Any]) -> None:
    """The integers of some planes."""
    planes = out.view(np.uint8).reshape(-1, out.itemsize)
    for place, frame in enumerate(frames):
        at = place if sys.byteorder == "little" else out.itemsize - 1 - place
        planes[:, at] = np.frombuffer(expand([frame], len(out)), np.uint8) if len(frame) else 0
