"""oneDNN, which multiplies matrices on the CPU, stays on for whoever can use it.

Where one of its products fails, as half precision does on many CPUs, torch switches it off for the whole process. From
then on single precision has other last bits than before, and than in any other process: KV would no longer be equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch.backends import mkldnn

_WANTED = bool(mkldnn.is_available() and mkldnn.enabled)  # type: ignore[no-untyped-call]
_TRIED = 64  # rows and columns: torch does not ask oneDNN for products that are much smaller


@contextmanager
def steady(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Within it, products of this type on this device are always made by the same library."""
    if device.type != "cpu":
        yield
        return
    with _switched(on=_multiplies(dtype)):
        yield


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies numbers of this type here: tried once."""
    if not _WANTED or dtype == torch.float32:
        return _WANTED
    with _switched(on=True), warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        square = torch.ones(_TRIED, _TRIED, dtype=dtype)
        torch.nn.functional.linear(square, square)
        return bool(mkldnn.enabled)


@contextmanager
def _switched(*, on: bool) -> Iterator[None]:
    before = mkldnn.enabled
    mkldnn.enabled = on  # type: ignore[assignment]
    try:
        yield
    finally:
        mkldnn.enabled = before
