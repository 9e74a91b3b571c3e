"""Options of ONNX Runtime, without importing it."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.errors import InvalidSetting
from rekindle.models.onnx_folder import OnnxForm

_LARGEST = 1 << 31
GRAPH_DTYPES: dict[OnnxForm, str] = {"onnx": "float32", "onnx-fp16": "float16", "onnx-int4": "int4"}  # as `dtype` names


@dataclass(frozen=True)
class OnnxOptions:
    """None: what suits the model and the machine. See `Settings` for the meaning."""

    device: str = "auto"
    context_tokens: int | None = None
    threads: int | None = None
    batch_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("threads", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < _LARGEST:
                raise InvalidSetting(f"{name}={value} makes no sense. Use 1 or more, or leave it out.")
