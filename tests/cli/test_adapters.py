"""`rekindle adapters`, and --adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Session
from rekindle.errors import AdapterNotFound, AdapterRefused, InvalidSetting
from tests.cli.test_commands import rekindle
from tests.lora import save_lora


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))
    random = np.random.default_rng(0)
    down, up = random.normal(0, 1, (2, 32)).astype("f4"), random.normal(0, 1, (32, 2)).astype("f4")
    return save_lora(tmp_path / "lora", {"model.layers.1.self_attn.q_proj": (down, up)}, lora_alpha=64)


def listed() -> list[dict[str, Any]]:
    """What was added: some come with the package."""
    found = json.loads(rekindle("adapters", "ls", "--json").stdout)
    return [told for told in found if not told["packaged"]]


def test_an_adapter_that_was_added_is_used_by_its_name(folder: Path, tiny_folder: Path) -> None:
    assert "rank 2" in rekindle("adapters", "add", "writer", str(folder)).stdout
    (told,) = listed()
    assert (told["name"], told["rank"], told["problem"]) == ("writer", 2, None)
    assert "writer" in rekindle("adapters", "ls").stdout
    by_name = rekindle("run", str(tiny_folder), "Hello", "-n", "8", "--adapter", "writer").stdout
    by_path = rekindle("run", str(tiny_folder), "Hello", "-n", "8", "--adapter", f"w={folder}").stdout
    with Session(tiny_folder) as session:
        plain = session.chat("Hello", max_tokens=8).text
        session.adapters.load("x", folder)
        adapted = session.chat("Hello", max_tokens=8, adapter="x").text
    assert by_name == by_path == adapted + "\n" != plain + "\n"
    assert rekindle("adapters", "rm", "writer").exit_code == 0
    assert listed() == []


def test_a_folder_that_went_away_is_listed_with_what_is_wrong(folder: Path) -> None:
    rekindle("adapters", "add", "writer", str(folder))
    (folder / "adapter_config.json").unlink()
    (told,) = listed()
    assert "adapter_config.json" in told["problem"]
    assert "not a LoRA adapter" in " ".join(rekindle("adapters", "ls").stdout.split())
    shutil.rmtree(folder)
    (told,) = listed()
    assert told["problem"] == f"There is no folder {folder}. Give the folder that PEFT saved."


def test_what_is_wrong_is_said_before_anything_is_remembered(folder: Path, tiny_folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    assert isinstance(rekindle("adapters", "add", "writer", str(folder)).exception, AdapterRefused)
    assert isinstance(rekindle("adapters", "add", "a name", str(folder)).exception, InvalidSetting)
    assert isinstance(rekindle("adapters", "rm", "writer").exception, AdapterNotFound)
    assert listed() == []
    missing = rekindle("run", str(tiny_folder), "Hello", "--adapter", "writer").exception
    assert isinstance(missing, AdapterNotFound) and "rekindle adapters add" in str(missing)


def test_those_of_the_package_are_known_and_stay(folder: Path) -> None:
    found = {told["name"]: told for told in json.loads(rekindle("adapters", "ls", "--json").stdout)}
    assert {"json", "list", "pirate"} <= set(found)
    assert all(told["problem"] is None and told["size_bytes"] < 2_000_000 for told in found.values())
    assert "came with Rekindle" in str(rekindle("adapters", "rm", "pirate").exception)
    rekindle("adapters", "add", "pirate", str(folder))  # one's own comes first
    assert [told["name"] for told in listed()] == ["pirate"]
    assert rekindle("adapters", "rm", "pirate").exit_code == 0
