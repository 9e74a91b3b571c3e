"""From a model's name to a loaded engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.core.model import ModelFiles
from rekindle.engine.base import Engine
from rekindle.errors import EngineMissing, InvalidSetting
from rekindle.models.download import Progress, require_space
from rekindle.models.gguf import read_header
from rekindle.models.pull import obtain

ENGINES = ("hf",)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a model: which engine, where, in which numbers, with how long a context."""

    engine: str = "hf"
    device: str = "auto"
    dtype: str = "auto"
    context_tokens: int | None = None


def load_engine(model: str, options: EngineOptions, progress: Progress | None = None) -> Engine:
    """Find (or pull) a model and load it. Raises `ModelError`, `EngineMissing` or `InvalidSetting`."""
    if options.engine not in ENGINES:
        raise InvalidSetting(f"engine={options.engine!r} is unknown. Use {', '.join(ENGINES)}.")
    require_hf()  # before anything is fetched
    files = obtain(model, progress)
    prepare(files, progress)
    from rekindle.engine.hf import HfEngine

    _tell(progress, "load", 0, 1)
    engine = HfEngine.load(files, device=options.device, dtype=options.dtype, context_tokens=options.context_tokens)
    _tell(progress, "load", 1, 1)
    return engine


def prepare(files: ModelFiles, progress: Progress | None = None) -> None:
    """Write the Hugging Face form of a GGUF model, if it is not there yet: once, about half a minute."""
    if files.gguf is None or files.converted:
        return
    require_space(files.folder.parent, 4 * read_header(files.gguf).values, f"The converted form of {files.name}")
    from rekindle.engine.dequant import convert

    _tell(progress, "convert", 0, 1)
    convert(files.gguf, files.folder)
    _tell(progress, "convert", 1, 1)


def require_hf(have: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raises `EngineMissing` if the Hugging Face engine's packages are not installed."""
    missing = [name for name in ("torch", "transformers", "accelerate", "gguf", "safetensors") if not have(name)]
    if missing:
        raise EngineMissing(
            f"The Hugging Face engine needs {', '.join(missing)}. Install it with: pip install 'rekindle[hf]'"
        )


def _tell(progress: Progress | None, stage: str, done: int, total: int) -> None:
    if progress is not None:
        progress(stage, done, total)
