"""What baselines put into the product is there only while a test needs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.baselines import policies
from rekindle.store import disk_space, tiered
from rekindle.store.evict import POLICIES


@pytest.fixture
def published_policies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(disk_space, "Eviction", disk_space.Eviction)
    monkeypatch.setattr(tiered, "DiskStore", tiered.DiskStore)
    before = dict(POLICIES)
    policies.install()
    yield
    POLICIES.clear()
    POLICIES.update(before)


@pytest.fixture(scope="session")
def spacious(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for prompts of several passages."""
    folder = tmp_path_factory.mktemp("models") / "spacious"
    shutil.copytree(tiny_folder, folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 8192}))
    return folder
