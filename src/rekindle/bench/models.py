"""The model a bench measures with: a real one, or random weights of a well-known shape."""

from __future__ import annotations

from rekindle.bench.base import BenchOptions
from rekindle.engine.hf import HfEngine
from rekindle.run.load import EngineOptions, load_engine


def load(options: BenchOptions) -> HfEngine:
    """Load it. Raises as `load_engine` does."""
    if options.shape is not None:
        from rekindle.bench.shapes import build

        return build(options.shape, options.device, options.dtype, options.seed)
    loaded = load_engine(options.model, EngineOptions(options.engine, options.device, options.dtype))
    assert isinstance(loaded, HfEngine)
    return loaded
