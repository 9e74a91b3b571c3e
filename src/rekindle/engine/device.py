"""Where a model runs and in which numbers: chosen sensibly, with the reason, or as told."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from rekindle.errors import InvalidSetting

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEVICES = ("cpu", "cuda", "mps")


@dataclass(frozen=True, slots=True)
class Placement:
    """A device and a number type, and why these."""

    device: torch.device
    dtype: torch.dtype
    reason: str

    @property
    def dtype_name(self) -> str:
        """The number type's plain name."""
        return str(self.dtype).removeprefix("torch.")


def place(device: str = "auto", dtype: str = "auto", stored: torch.dtype = torch.float32) -> Placement:
    """Choose where a model with weights of type `stored` runs; raises `InvalidSetting` for what is not there."""
    chosen = _choose_device(device)
    if dtype != "auto":
        if dtype not in DTYPES:
            raise InvalidSetting(f"dtype={dtype!r} is unknown. Use auto, {', '.join(DTYPES)}.")
        return Placement(chosen, DTYPES[dtype], "as told")
    picked, reason = _choose_dtype(chosen, stored)
    return Placement(chosen, picked, reason)


def cpu_computes_bfloat16() -> bool:
    """Whether this CPU has brain-float arithmetic; without it bfloat16 is emulated and far slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    words = set(flags.split())
    return "amx_bf16" in words or "avx512_bf16" in words or (platform.machine() == "aarch64" and "bf16" in words)


def _choose_device(device: str) -> torch.device:
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in DEVICES or (index and not index.isdigit()):
        raise InvalidSetting(f"device={device!r} is unknown. Use auto, {', '.join(DEVICES)}, or cuda:1 and the like.")
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(kind, 1)
    if int(index or 0) >= count:
        raise InvalidSetting(
            f"device={device!r} is not available: this torch ({torch.__version__}) sees {count} of {kind}. "
            "Use device='cpu'."
        )
    return torch.device(device)


def _choose_dtype(device: torch.device, stored: torch.dtype) -> tuple[torch.dtype, str]:
    name = str(stored).removeprefix("torch.")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            if stored == torch.float16:
                return stored, "the weights are float16"
            return torch.bfloat16, "this GPU computes bfloat16"
        return torch.float16, "this GPU has no bfloat16 arithmetic"
    if device.type == "mps":
        return (stored if stored == torch.bfloat16 else torch.float16), "half the memory traffic on this GPU"
    if stored == torch.bfloat16 and cpu_computes_bfloat16():
        return stored, "the weights are bfloat16 and this CPU computes it"
    if stored == torch.float32:
        return stored, "the weights are float32"
    return torch.float32, f"the weights are {name}, which this CPU only emulates"
