"""The header of a GGUF file, read in milliseconds: what the model is, and whether the file is whole."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rekindle.errors import BrokenModel, NotAModel

MAGIC = b"GGUF"
_VERSIONS = (2, 3)

# Metadata types: number -> struct code. 8 is text, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9

# Tensor types: number -> (values a block, bytes a block).
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2),
}  # fmt: skip
_LARGEST_TEXT_BYTES = 64 << 20


@dataclass(frozen=True)
class GgufHeader:
    """What stands before the tensors. Arrays are left out of `metadata`."""

    metadata: dict[str, Any]
    values: int  # numbers in all tensors together

    @property
    def architecture(self) -> str:
        """The model's family, as llama.cpp names it."""
        return str(self.metadata.get("general.architecture", "unknown"))


def read_header(path: Path) -> GgufHeader:
    """Read and check the header; raises `NotAModel` for another kind of file, `BrokenModel` for a damaged one."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise NotAModel(f"{path} is not a GGUF file (it does not begin with GGUF).")
        try:
            return _read(file, path)
        except (struct.error, UnicodeDecodeError, KeyError, EOFError) as error:
            raise BrokenModel(f"{path} has a damaged GGUF header ({error}). Get the file again.") from error


def _read(file: BinaryIO, path: Path) -> GgufHeader:
    (version,) = _unpack(file, "I")
    if version not in _VERSIONS:
        raise BrokenModel(f"{path} has GGUF version {version}; versions 2 and 3 are known. Convert it again.")
    tensors, pairs = _unpack(file, "QQ")
    metadata = {}
    for _ in range(pairs):
        name = _text(file)
        (kind,) = _unpack(file, "I")
        value = _value(file, kind)
        if value is not None:
            metadata[name] = value
    extents = [_tensor_extent(file) for _ in range(tensors)]
    needed = max((end for _, end in extents), default=0)
    alignment = int(metadata.get("general.alignment", 32))
    begin = -(-file.tell() // alignment) * alignment
    size = path.stat().st_size
    if size < begin + needed:
        raise BrokenModel(f"{path} ends after {size:,} of {begin + needed:,} bytes. Get the file again.")
    return GgufHeader(metadata, sum(values for values, _ in extents))


def _tensor_extent(file: BinaryIO) -> tuple[int, int]:
    """How many numbers a tensor has, and where its data ends, counted from the beginning of all tensor data."""
    _text(file)
    (dimensions,) = _unpack(file, "I")
    if dimensions > 8:
        raise struct.error(f"a tensor of {dimensions} dimensions")
    values = 1
    for size in _unpack(file, "Q" * dimensions):
        values *= size
    kind, offset = _unpack(file, "IQ")
    per_block, block_bytes = _BLOCKS.get(kind, (1, 0))
    return int(values), int(offset + -(-values // per_block) * block_bytes)


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind != _ARRAY:
        return _unpack(file, _SCALARS[kind])[0]
    inner, count = _unpack(file, "IQ")
    if inner == _TEXT:
        for _ in range(count):
            (length,) = _unpack(file, "Q")
            file.seek(length, 1)
    else:
        file.seek(count * struct.calcsize("<" + _SCALARS[inner]), 1)
    return None


def _text(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > _LARGEST_TEXT_BYTES:
        raise struct.error(f"a text of {length} bytes")
    return _exactly(file, length).decode("utf-8")


def _unpack(file: BinaryIO, code: str) -> tuple[Any, ...]:
    layout = struct.Struct("<" + code)
    return layout.unpack(_exactly(file, layout.size))


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise EOFError("the file ends inside the header")
    return data
