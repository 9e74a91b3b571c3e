"""No test of models sees what other tools keep for whoever runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.models import ollama
from tests.models.ggufs import Hub, leave_home


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home: an empty one."""
    leave_home(tmp_path / "user", monkeypatch)
    monkeypatch.setattr(ollama, "_SERVICE_FOLDERS", (str(tmp_path / "service" / "models"),))
    return tmp_path / "user"


@pytest.fixture
def hub(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub that has what the test publishes."""
    import huggingface_hub

    stand_in = Hub(tiny_folder)
    monkeypatch.setattr(huggingface_hub, "model_info", stand_in.info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in.snapshot)
    return stand_in
