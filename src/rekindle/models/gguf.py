"""The header of a GGUF file, read in milliseconds: what the model is, and whether the file is complete.

A large model may be split into several files (`NAME-00001-of-00003.gguf`), each a GGUF file with its own tensors; the
metadata of the model is in the first.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rekindle.errors import BrokenModel, ModelNotFound, NotAModel

MAGIC = b"GGUF"
_VERSIONS = (2, 3)

# Metadata types: number -> struct code. 8 is text, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9

# Tensor types: number -> (values per block, bytes per block). Tensors of other types count as empty.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1),
    25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66),
    39: (32, 17),
}  # fmt: skip
# Limits on what is kept of a header and how long it is read, whatever the file says.
_MAX_PAIRS, _MAX_TENSORS, _MAX_ARRAY_TEXTS = 1 << 13, 1 << 16, 1 << 22
_LARGEST_TEXT_BYTES = 1 << 20  # longer ones, such as a whole tokenizer as JSON, are skipped like arrays
_MAX_TEXT_BYTES = 8 << 20
_BUFFER_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")

_ARCHITECTURE = "general.architecture"
# Architectures that compute embeddings.
_EMBEDDING = frozenset(
    {"bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert", "neo-bert",
     "nomic-bert", "nomic-bert-moe", "t5encoder"}
)  # fmt: skip


@dataclass(frozen=True)
class GgufHeader:
    """What precedes the tensors of one file. Of arrays and very long texts only the length is kept, in `lengths`."""

    metadata: dict[str, Any]
    lengths: dict[str, int]
    tensors: int
    values: int  # in all tensors of this file

    @property
    def architecture(self) -> str:
        """The model's family, as llama.cpp names it."""
        return str(self.metadata.get(_ARCHITECTURE, "unknown"))

    def number(self, name: str, default: int) -> int:
        """An integer of the metadata, or the default."""
        value = self.metadata.get(name)
        return value if isinstance(value, int) else default

    @property
    def embeds(self) -> bool:
        """Whether the model computes embeddings instead of text."""
        return self.architecture in _EMBEDDING


class _Counts(NamedTuple):
    """The number of tensors and of metadata pairs."""

    tensors: int
    pairs: int


class _Extent(NamedTuple):
    """The number of values of a tensor, and where its data ends, from the start of all tensor data."""

    values: int
    end: int


@dataclass
class _Budget:
    """How much more text of a header is kept, and how many more texts in arrays are read."""

    text_bytes: int
    array_texts: int

    def take_text(self, size_bytes: int) -> None:
        """Raise `struct.error` if that is too much."""
        self.text_bytes -= size_bytes
        if self.text_bytes < 0:
            raise struct.error("more text than any model has")

    def take_array_texts(self, count: int) -> None:
        """Raise `struct.error` if there are too many."""
        self.array_texts -= count
        if self.array_texts < 0:
            raise struct.error("arrays of more texts than any model has")


class _Skipped(NamedTuple):
    """An array or a very long text, of which only the length is kept."""

    length: int


_DAMAGES = (struct.error, UnicodeDecodeError, KeyError, EOFError)


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of one file, a whole model or a part of one.

    Raises `NotAModel` for another kind of file, `BrokenModel` for a damaged one, `ModelNotFound` for one that this
    user may not read.
    """
    with _open(path) as file:
        try:
            return _read(file, path)
        except _DAMAGES as error:
            raise BrokenModel(f"{path} has a damaged GGUF header ({error}). Get the file again.") from error


def check_parts(parts: Sequence[Path]) -> GgufHeader:
    """Check that these are all files of one model, in order; returns the header of the first.

    Raises what `read_header` raises, `BrokenModel` for parts of different models, and `NotAModel` for a model without
    weights.
    """
    headers = [read_header(part) for part in parts]
    for number, (part, header) in enumerate(zip(parts, headers, strict=True)):
        _check_place(part, header, number, len(parts))
    found = sum(header.tensors for header in headers)
    expected = headers[0].number("split.tensors.count", found)
    if len(parts) > 1 and found != expected:
        raise BrokenModel(
            f"{parts[0]} and its other parts have {found:,} tensors, the model has {expected:,}: they do not belong "
            "together. Get all of them again."
        )
    if not found:
        raise NotAModel(f"{parts[0]} holds a vocabulary but no weights. Get the file of the model.")
    return headers[0]


def embeds(path: Path) -> bool:
    """Whether a file's model computes embeddings, from its first bytes. False if it cannot be read."""
    try:
        with _open(path) as file:
            value = next((v for name, v in _pairs(file, _begin(file, path).pairs) if name == _ARCHITECTURE), None)
    except (NotAModel, BrokenModel, ModelNotFound, OSError, *_DAMAGES):
        return False  # loading it raises the error
    return value in _EMBEDDING


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except PermissionError as error:
        raise ModelNotFound(f"{path} may not be read by this user. Change its permissions, or copy it.") from error


def _read(file: BinaryIO, path: Path) -> GgufHeader:
    counts = _begin(file, path)
    metadata, lengths = {}, {}
    for name, value in _pairs(file, counts.pairs):
        if isinstance(value, _Skipped):
            lengths[name] = value.length
        else:
            metadata[name] = value
    values = end = 0
    for _ in range(counts.tensors):
        extent = _tensor_extent(file)
        values, end = values + extent.values, max(end, extent.end)
    needed = file.tell()
    if counts.tensors:  # without tensors there is no padding either
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise struct.error(f"an alignment of {alignment!r}")
        needed = -(-needed // alignment) * alignment + end
    size = path.stat().st_size
    if size < needed:
        raise BrokenModel(f"{path} ends after {size:,} of {needed:,} bytes. Get the file again.")
    return GgufHeader(metadata, lengths, counts.tensors, values)


def _begin(file: BinaryIO, path: Path) -> _Counts:
    if file.read(4) != MAGIC:
        raise NotAModel(f"{path} is not a GGUF file (it does not begin with GGUF).")
    (version,) = _unpack(file, "I")
    if version not in _VERSIONS:
        raise BrokenModel(f"{path} has GGUF version {version}; versions 2 and 3 are known. Convert it again.")
    counts = _Counts(*_unpack(file, "QQ"))
    if counts.tensors > _MAX_TENSORS or counts.pairs > _MAX_PAIRS:
        raise struct.error(f"{counts.tensors:,} tensors and {counts.pairs:,} pairs of metadata")
    return counts


def _check_place(part: Path, header: GgufHeader, number: int, count: int) -> None:
    """Raise `BrokenModel` if the header contradicts the file name. A lone file may say part 1 of 1, or nothing."""
    said_number, said_count = header.number("split.no", 0), header.number("split.count", 0) or 1
    if (said_number, said_count) != (number, count):
        raise BrokenModel(
            f"{part} calls itself part {said_number + 1} of {said_count}; by its name it is part {number + 1} of "
            f"{count}. Give it the name it was published under, or get it again."
        )


def _pairs(file: BinaryIO, count: int) -> Iterator[tuple[str, Any]]:
    """The metadata: names and values."""
    budget = _Budget(_MAX_TEXT_BYTES, _MAX_ARRAY_TEXTS)
    for _ in range(count):
        name = _text(file, budget)
        (kind,) = _unpack(file, "I")
        yield name, _value(file, kind, budget)


def _tensor_extent(file: BinaryIO) -> _Extent:
    _skip(file, *_unpack(file, "Q"))
    (dimensions,) = _unpack(file, "I")
    if dimensions > 8:
        raise struct.error(f"a tensor of {dimensions} dimensions")
    values = 1
    for size in _unpack(file, "Q" * dimensions):
        values *= size
    kind, offset = _unpack(file, "IQ")
    per_block, block_bytes = _BLOCKS.get(kind, (1, 0))
    return _Extent(values, offset + -(-values // per_block) * block_bytes)


def _value(file: BinaryIO, kind: int, budget: _Budget) -> Any:
    if kind == _TEXT:
        (length,) = _unpack(file, "Q")
        if length > _LARGEST_TEXT_BYTES:
            _skip(file, length)
            return _Skipped(length)
        return _decoded(file, length, budget)
    if kind != _ARRAY:
        return _unpack(file, _SCALARS[kind])[0]
    inner, count = _unpack(file, "IQ")
    if inner == _TEXT:
        budget.take_array_texts(count)
        _skip_texts(file, count)
    else:
        _skip(file, count * struct.calcsize("<" + _SCALARS[inner]))
    return _Skipped(count)


def _skip_texts(file: BinaryIO, count: int) -> None:
    """Skip `count` texts. Their lengths are read from a large buffer: two file calls for each of 150,000 tokens would
    take a quarter of a second."""
    unpack, data, at, last = _LENGTH.unpack_from, b"", 0, -1  # at: of the next length in data; last: highest possible
    for _ in range(count):
        if at > last:
            _skip(file, at - len(data))
            data, at = file.read(_BUFFER_BYTES), 0
            last = len(data) - _LENGTH.size
            if last < 0:
                raise EOFError("the file ends inside the header")
        (length,) = unpack(data, at)
        at += 8 + length
    _skip(file, at - len(data))


def _skip(file: BinaryIO, size_bytes: int) -> None:
    """Seek forward, or back if negative."""
    if size_bytes > os.fstat(file.fileno()).st_size:
        raise EOFError("the file ends inside the header")
    file.seek(size_bytes, 1)


def _text(file: BinaryIO, budget: _Budget) -> str:
    (length,) = _unpack(file, "Q")
    return _decoded(file, length, budget)


def _decoded(file: BinaryIO, length: int, budget: _Budget) -> str:
    if length > _LARGEST_TEXT_BYTES:
        raise struct.error(f"a name of {length} bytes")
    budget.take_text(length)
    return _exactly(file, length).decode("utf-8")


def _unpack(file: BinaryIO, code: str) -> tuple[Any, ...]:
    layout = struct.Struct("<" + code)
    return layout.unpack(_exactly(file, layout.size))


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise EOFError("the file ends inside the header")
    return data
