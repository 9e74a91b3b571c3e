"""What other tools have on this machine that can be used in place: Ollama, the hub's cache, LM Studio."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rekindle.core.model import ModelFiles
from rekindle.errors import ModelError
from rekindle.models import ollama
from rekindle.models.gguf import embeds
from rekindle.models.quant import words_for
from rekindle.models.shelves import models_of, repositories
from rekindle.models.sources import is_repository


@dataclass(frozen=True, slots=True)
class Found:
    """A GGUF model of another tool; `name` is what to type for it."""

    name: str
    kind: str
    keeper: str
    gguf: Path
    size_bytes: int


def found() -> list[Found]:
    """What is there, by tool and name. What cannot be read, or is not whole, is left out; nothing is raised."""
    return [*_in_ollama(), *_on_shelves()]


def _in_ollama() -> Iterator[Found]:
    for name in ollama.names():
        with suppress(ModelError, OSError):
            yield _describe(str(name), "Ollama", ollama.find_weights(name))


def _on_shelves() -> Iterator[Found]:
    for repository in repositories():
        if not is_repository(repository):
            continue  # a folder of another kind
        models = models_of(repository)
        for name, model in models.items():
            with suppress(OSError):  # as a missing part gives one
                yield _describe(words_for(repository, name, list(models)), model.keeper, model.path)


def _describe(name: str, keeper: str, gguf: Path) -> Found:
    parts = ModelFiles(name, gguf.parent, gguf).parts
    return Found(name, "embedder" if embeds(gguf) else "decoder", keeper, gguf, sum(p.stat().st_size for p in parts))
