"""Tensors of safetensors files as float32 arrays, whatever float they are stored in. No torch.

The library's numpy side cannot read bfloat16, and its other way in holds the whole file beside what is made of it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import BrokenModel

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read_floats(paths: Sequence[Path]) -> dict[str, NDArray[np.float32]]:
    """All float tensors of the files, by name; integer tensors are left out.

    The files passed `check_folder`. Raises `BrokenModel` for a header that says what cannot be.
    """
    tensors: dict[str, NDArray[np.float32]] = {}
    for path in paths:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, about in header.items():
            if about["dtype"] in _FLOATS:
                tensors[name] = _read(path, name, about["dtype"], about["shape"], about["data_offsets"], 8 + length)
    return tensors


def _read(path: Path, name: str, dtype: str, shape: list[int], offsets: list[int], data: int) -> NDArray[np.float32]:
    kind = np.dtype(_FLOATS[dtype])
    start, stop = offsets
    count = int(np.prod(shape, dtype=np.int64))
    if not 0 <= start <= stop or min(shape, default=0) < 0 or stop - start != count * kind.itemsize:
        raise BrokenModel(
            f"{path} says of {name} what cannot be ({dtype} {shape} in {stop - start:,} bytes). Get it again."
        )
    raw = np.fromfile(path, kind, count, offset=data + start)
    if raw.size != count:
        raise BrokenModel(f"{path} ends inside {name}. Get it again.")
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return raw.astype(np.float32, copy=False).reshape(shape)
