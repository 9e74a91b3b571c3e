"""Options of llama.cpp, without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rekindle.errors import InvalidSetting, nearest

# ggml's numbers of types
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}
KV_BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5}  # of a number
_LARGEST = 1 << 31
MAX_SEQUENCES = 255  # and one spare
PLAIN_KV_TYPES = ("f32", "f16", "bf16")

FlashAttention = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class LlamaOptions:
    """None: what suits the model and the machine. See `Settings` for the meaning."""

    device: str = "auto"
    context_tokens: int | None = None
    threads: int | None = None
    batch_tokens: int = 2048
    micro_batch_tokens: int = 512
    flash_attention: FlashAttention = "auto"
    gpu_layers: int | None = None
    kv_type: str = "f16"
    kv_tokens: int | None = None
    sequences: int = 64
    swa_full: bool = True
    llama_library: str | None = None

    def __post_init__(self) -> None:
        if self.kv_type not in KV_TYPES:
            raise InvalidSetting(f"kv_type={self.kv_type!r} is unknown.{nearest(self.kv_type, KV_TYPES)}")
        for name in ("threads", "batch_tokens", "micro_batch_tokens", "kv_tokens", "sequences"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < _LARGEST:
                raise InvalidSetting(f"{name}={value} makes no sense. Use 1 or more, or leave it out.")
        if self.sequences > MAX_SEQUENCES:
            raise InvalidSetting(f"sequences={self.sequences} is more than llama.cpp takes. Use up to {MAX_SEQUENCES}")
        if self.kv_type not in PLAIN_KV_TYPES and self.flash_attention == "off":
            raise InvalidSetting(f"kv_type={self.kv_type!r} needs flash attention. Leave flash_attention='off' out.")
        if self.gpu_layers is not None and not 0 <= self.gpu_layers < _LARGEST:
            raise InvalidSetting(f"gpu_layers={self.gpu_layers} makes no sense. Use 0 or more; none: as many as fit.")
        if self.device == "cpu" and self.gpu_layers:
            raise InvalidSetting(f"device='cpu' contradicts gpu_layers={self.gpu_layers}. Leave one of them out.")

    @property
    def wants_gpu(self) -> bool:
        """Whether a GPU was asked for explicitly."""
        return self.device not in ("auto", "cpu")
