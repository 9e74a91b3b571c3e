"""The model a bench measures with: a real one, or random weights of a well-known shape."""

from __future__ import annotations

from benchmarks.base import BenchOptions
from rekindle.engine.base import Engine
from rekindle.engine.load import EngineOptions, load_engine
from rekindle.errors import InvalidSetting


def settle(engine: Engine) -> None:
    """Wait until the device is idle."""
    if engine.device != "cpu":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def load(options: BenchOptions) -> Engine:
    """Load it. Raises as `load_engine` does, and `InvalidSetting` for a shape on another engine than hf."""
    if options.shape is not None:
        if options.engine == "llamacpp":
            raise InvalidSetting("--shape builds models for --engine hf. Give llama.cpp a real one with --model.")
        from benchmarks.shapes import build

        return build(options.shape, options.device, options.dtype, options.seed)
    return load_engine(options.model, EngineOptions(options.engine, options.device, options.dtype))
