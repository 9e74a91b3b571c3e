"""Small integers to bytes and back: packed a few to a byte, then entropy-coded by zstd.

The entropy coder of zstd gives each byte at least one bit and a whole number of bits. Codes of 2 or 3 bits therefore
stand two, three or four to a byte: what a byte loses by rounding is then shared. The last symbol of an alphabet stands
for a code that does not fit into it; such codes follow in a list of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

_RADIX = {1: 256, 2: 16, 3: 6, 4: 4}  # codes a byte -> symbols a code; radix ** codes <= 256
_RARE = 1 / 500  # strays cost about 24 bits each: so few cost less than the denser packing saves
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
        raise ValueError(f"codes cannot stand {packed.per_byte} to a byte")
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
    """How many codes of these magnitudes stand in a byte: as many as leave few strays."""
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
