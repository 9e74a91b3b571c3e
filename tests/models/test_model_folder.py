"""Models for loops of transformers: their folder, and what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

import rekindle
from rekindle.errors import ModelNotFound
from rekindle.models import registry
from rekindle.models.files import ModelFiles
from rekindle.models.registry import loaded_name


def test_the_folder_of_a_model_that_is_not_pulled_says_how_to_pull_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path))
    with pytest.raises(ModelNotFound, match="Get it with: rekindle pull smollm2"):
        rekindle.model_folder("smollm2")
    (tmp_path / "x.gguf").touch()
    registry.add("raw", "decoder", "test", ModelFiles("raw", tmp_path / "none", tmp_path / "x.gguf"))
    with pytest.raises(ModelNotFound, match="raw is not here in Hugging Face form. Get it with: rekindle pull raw"):
        rekindle.model_folder("raw")


def test_a_model_that_was_loaded_from_a_folder_has_its_pulled_name_or_the_folders(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path))
    registry.add("mine", "decoder", "test", ModelFiles("mine", tiny_folder))
    assert rekindle.model_folder("mine") == tiny_folder and loaded_name(str(tiny_folder)) == "mine"
    (tmp_path / "other").mkdir()
    assert loaded_name(str(tmp_path / "other")) == "other"
    assert loaded_name("ORG/NAME") == "ORG/NAME" and loaded_name("") == ""
