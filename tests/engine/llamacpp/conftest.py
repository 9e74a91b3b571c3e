"""Tiny GGUF models, and engines over them that are closed with the test. Nothing here imports llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rekindle.engine.llamacpp.engine import LlamaCppEngine

Load = Callable[..., "LlamaCppEngine"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama. Do not change the file: copy it."""
    from tests.tiny_gguf import write_llama

    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def opaque_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models whose state can only be kept whole, by architecture."""
    from tests.tiny_hybrids import OPAQUE

    folder = tmp_path_factory.mktemp("opaque")
    return {name: write(folder / f"{name}.gguf") for name, (write, _) in OPAQUE.items()}


def _loader(opened: list[Any]) -> Load:
    def load(path: Path, **options: Any) -> LlamaCppEngine:
        from rekindle.engine.llamacpp.engine import LlamaCppEngine
        from rekindle.engine.llamacpp.options import LlamaOptions
        from tests.tiny_gguf import files_of

        # One thread: of tiny models several only wait for each other.
        opened.append(LlamaCppEngine(files_of(path), LlamaOptions(**{"threads": 1, "device": "cpu", **options})))
        return opened[-1]

    return load


@pytest.fixture
def load() -> Iterator[Load]:
    """Loads an engine that lasts as long as the test."""
    opened: list[Any] = []
    yield _loader(opened)
    for engine in opened:
        engine.close()


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[LlamaCppEngine]:
    """An engine over the tiny llama, for all tests of a module: leave no sequence open."""
    opened: list[Any] = []
    yield _loader(opened)(tiny)
    for one in opened:
        one.close()
