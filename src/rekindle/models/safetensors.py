"""Safetensors files without torch: the header, checked against the file before anything is read, and float tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.kv import Span
from rekindle.errors import BrokenModel
from rekindle.safe_read import MAX_VALUES, VALUE_BYTES, parse_untrusted_json

_LARGEST_HEADER_BYTES = 16 << 20  # that of 100,000 tensors
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4,
    "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
_MAX_DIMENSIONS = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's type as the format names it, its shape, and its byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    data: Span


def read_tensor_infos(path: Path) -> dict[str, TensorInfo]:
    """The header of a file: its tensors by name. They fill the file without gap or overlap.

    Raises `BrokenModel` for any other file, `OSError` if it cannot be read.
    """
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise BrokenModel(f"{path} is empty or cut off after {size_bytes} bytes. Get it again.")
        start = 8 + int.from_bytes(prefix, "little")
        if start - 8 > min(_LARGEST_HEADER_BYTES, size_bytes - 8):
            raise BrokenModel(f"{path} is not a safetensors file (its header would be {start:,} bytes). Get it again.")
        header = file.read(start - 8)
    try:
        fields = parse_untrusted_json(header, MAX_VALUES + size_bytes // VALUE_BYTES)
        if not isinstance(fields, dict):
            raise ValueError("it is no object")
        fields.pop("__metadata__", None)
        places = {name: _parse_info(about, start) for name, about in fields.items()}
        _check_no_gaps(places, start)
    except ValueError as error:
        raise BrokenModel(f"{path} has a damaged safetensors header ({error}). Get it again.") from error
    end = max((place.data.stop for place in places.values()), default=start)
    if size_bytes != end:
        raise BrokenModel(f"{path} has {size_bytes:,} bytes, its header says {end:,}. Get it again.")
    return places


def _parse_info(about: Any, start: int) -> TensorInfo:
    fields: Any = about if isinstance(about, dict) else {}
    dtype, shape, offsets = (fields.get(name, ()) for name in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError("a tensor has no type, shape or place")
    if len(shape) > _MAX_DIMENSIONS or offsets[0] > offsets[1]:
        raise ValueError("a tensor has a shape or place that cannot be")
    size_bytes = offsets[1] - offsets[0]
    if dtype in _ITEM_BYTES and math.prod(shape) * _ITEM_BYTES[dtype] != size_bytes:
        raise ValueError(f"{dtype} {shape} cannot be {size_bytes:,} bytes")
    return TensorInfo(dtype, tuple(shape), Span(start + offsets[0], start + offsets[1]))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def _check_no_gaps(places: dict[str, TensorInfo], start: int) -> None:
    """Raise `ValueError` unless each tensor begins where another ends: else a small file could claim large tensors."""
    for place in sorted((place.data for place in places.values()), key=lambda data: (data.start, data.stop)):
        if place.start != start:
            raise ValueError("tensors overlap, or leave a gap")
        start = place.stop


_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read_floats(paths: Sequence[Path]) -> dict[str, NDArray[np.float32]]:
    """All float tensors of the files, by name; integer tensors are left out.

    Raises `BrokenModel` for a header that says what cannot be.
    """
    tensors: dict[str, NDArray[np.float32]] = {}
    for path in paths:
        for name, place in read_tensor_infos(path).items():
            if place.dtype in _FLOATS:
                tensors[name] = _read(path, name, place)
    return tensors


def _read(path: Path, name: str, place: TensorInfo) -> NDArray[np.float32]:
    kind = np.dtype(_FLOATS[place.dtype])
    count = len(place.data) // kind.itemsize
    raw = np.fromfile(path, kind, count, offset=place.data.start)
    if raw.size != count:
        raise BrokenModel(f"{path} ends inside {name}. Get it again.")
    if place.dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32).reshape(place.shape)
    return raw.astype(np.float32, copy=False).reshape(place.shape)
