"""Libraries with hand-made vectors, and a tiny embedder of random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rekindle.core.document import Document, Passage, Section
from rekindle.engine.embedding.embedder import Embedder, Embeddings
from rekindle.knowledge.library import Library
from rekindle.knowledge.retrieve import Floats, to_stored
from rekindle.knowledge.rows import SplitDocument
from rekindle.models.files import ModelFiles

DIMENSIONS = 8


@pytest.fixture(scope="session")
def embedder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny embedder, made once."""
    from tests.server.soak import tiny_embedder

    return Path(tiny_embedder(tmp_path_factory.mktemp("embedders") / "tiny"))


@pytest.fixture(scope="session")
def embedder(embedder_folder: Path) -> Embedder:
    return Embedder.load(ModelFiles("tiny", embedder_folder))


class Counting(Embedder):
    """The same embedder. It notes the texts that it embeds, and breaks after so many."""

    def __init__(self, inner: Embedder, *, breaks_after: int | None = None, digest: str | None = None) -> None:
        self.__dict__.update(inner.__dict__)
        self.__dict__["digest"] = digest or inner.digest
        self.texts: list[str] = []
        self.breaks_after = breaks_after

    def embed(self, texts: Sequence[str], **more: object) -> Embeddings:  # type: ignore[override]
        if self.breaks_after is not None and len(self.texts) + len(texts) > self.breaks_after:
            raise KeyboardInterrupt
        self.texts += texts
        return super().embed(texts, **more)  # type: ignore[arg-type]


def library(folder: Path, tenant: str = "local", salt: str = "") -> Library:
    """A library in a folder of its own."""
    return Library(folder / "library", tenant, salt)


def vector(seed: int) -> Floats:
    """A vector of unit length, always the same."""
    made = np.random.default_rng(seed).standard_normal(DIMENSIONS).astype(np.float32)
    unit: Floats = made / np.linalg.norm(made)
    return unit


def cut(
    source: str, *texts: str, title: str = "", seed: int = 0, app: str | None = None, file: str | None = None
) -> SplitDocument:
    """A document of these passages, with vectors of these seeds: seed, seed + 1, ..."""
    passages = [Passage(text) for text in texts]
    vectors = to_stored(np.array([vector(seed + at) for at in range(len(texts))]))
    document = Document(source, title or source, tuple(Section(text) for text in texts))
    return SplitDocument(document, passages, vectors, "as given", file, app)
