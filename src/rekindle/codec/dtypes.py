"""The numbers of KV as numpy computes with them: brain floats have no numpy type and are carried raw, as `uint16`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.kv import KvLayout, KvType

FLOAT_TYPES: tuple[KvType, ...] = ("float32", "float16", "bfloat16")

_LARGEST = {"float32": float(np.finfo(np.float32).max), "float16": 65504.0, "bfloat16": 2.0**128 - 2.0**120}


def carrier(dtype: KvType) -> np.dtype[Any]:
    """The numpy type that carries these numbers."""
    return KvLayout(dtype, ()).numpy_dtype


def widen(array: NDArray[Any], dtype: KvType) -> NDArray[np.float32]:
    """The same numbers as float32, exactly. Raises `ValueError` if the array does not carry floats of that type."""
    if dtype not in FLOAT_TYPES:
        raise ValueError(f"{dtype} KV is quantized by its engine already: keep it raw, or as a lossless difference")
    if array.dtype != carrier(dtype):
        raise ValueError(f"{dtype} KV is carried as {carrier(dtype)}, this array holds {array.dtype}")
    if dtype == "bfloat16":
        wide: NDArray[np.float32] = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return array.astype(np.float32, copy=False)


def narrow(array: NDArray[np.float32], dtype: KvType) -> NDArray[Any]:
    """Finite float32 numbers as the nearest of that type, ties to even; beyond its largest they become the largest."""
    if dtype == "float32":
        return array
    bounded = np.clip(array, -_LARGEST[dtype], _LARGEST[dtype])
    if dtype == "float16":
        return bounded.astype(np.float16)
    bits = bounded.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nearest: NDArray[np.uint16] = ((bits + half) >> np.uint32(16)).astype(np.uint16)
    return nearest
