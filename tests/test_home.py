"""Tests leave the home of whoever runs them alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.machine import config_folder, data_folder, home_folder
from tests.home import fill_home


def folders() -> list[Path]:
    return [home_folder(), data_folder(), config_folder() or Path()]


@pytest.fixture(scope="module")
def shared() -> list[Path]:
    """What a fixture sees that is made before any test has a home of its own."""
    return folders()


def users_folders() -> list[Path]:
    code = "from rekindle.machine import *; print(home_folder(), data_folder(), config_folder(), sep='\\n')"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("REKINDLE_", "XDG_CONFIG_HOME"))}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines()]


def test_no_fixture_and_no_test_has_the_home_of_the_user(shared: list[Path]) -> None:
    assert not {*shared, *folders()} & {*users_folders()}


@pytest.mark.real
def test_nor_has_a_test_of_the_real_model() -> None:
    assert not {*folders()} & {*users_folders()}


def test_the_home_of_a_run_has_the_models_of_the_user(tmp_path: Path) -> None:
    users = tmp_path / "users"
    model = users / "models" / "small"
    (model / "hf").mkdir(parents=True)
    (model / "hf" / "config.json").write_text("{}")
    (model / "hf" / "model.safetensors").write_bytes(bytes(2 << 20))
    (users / "models" / ".small.lock").touch()
    record = {"name": "small", "source": "a 1", "folder": str(model / "hf"), "gguf": None}
    (model / "model.json").write_text(json.dumps(record))
    home = tmp_path / "own"
    home.mkdir()
    fill_home(home, users)
    own = home / "models" / "small"
    assert json.loads((own / "model.json").read_text()) == {**record, "folder": str(own / "hf")}
    assert (own / "hf" / "model.safetensors").samefile(model / "hf" / "model.safetensors")
    (own / "hf" / "config.json").write_text("changed")
    assert (model / "hf" / "config.json").read_text() == "{}"
    assert sorted(path.name for path in home.rglob("*") if path.is_file()) == [
        "config.json", "model.json", "model.safetensors",
    ]  # fmt: skip
    fill_home(home, tmp_path / "nobody")  # has none
