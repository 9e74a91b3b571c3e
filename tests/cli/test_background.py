"""What commands say and do where a model stays loaded in the background: through the commands alone."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rekindle.cli.main import app
from tests.daemons import daemons

SECONDS = 60.0


@pytest.fixture
def background(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Commands leave their model loaded; the current folder is the test's. No process outlives the test."""
    folder = Path(tempfile.mkdtemp(prefix="rk-"))  # a short path, as those of sockets must be
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("REKINDLE_DAEMON", "yes")
    monkeypatch.chdir(tmp_path)
    yield
    for process in daemons(folder):
        process.kill()
        process.wait(SECONDS)
    shutil.rmtree(folder)


def rekindle(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def loaded() -> list[tuple[str, int]]:
    return [(one["model"], one["pid"]) for one in json.loads(rekindle("ps", "--json").stdout)]


def test_a_typo_in_a_models_name_leaves_the_loaded_model_loaded(background: None, tiny_gguf: Path) -> None:
    assert rekindle("run", str(tiny_gguf), "Hello", "-n", "1").exit_code == 0
    before = loaded()
    assert [model for model, _ in before] == [str(tiny_gguf)]
    for typo in ("smolm2", "tiny.gguf", "./nosuch", "nosuch.gguf"):
        assert rekindle("run", typo, "Hello").exit_code == 1
    assert loaded() == before


def test_nobody_else_reads_the_log_and_the_lock_of_the_background_process(background: None, tiny_gguf: Path) -> None:
    before = os.umask(0)
    try:
        assert rekindle("run", str(tiny_gguf), "Hello", "-n", "1").exit_code == 0
    finally:
        os.umask(before)
    files = [path for path in Path(os.environ["XDG_RUNTIME_DIR"]).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".lock", ".log"}
    assert [path for path in files if path.stat().st_mode & 0o077] == []


def test_a_missing_relative_file_is_named_as_it_was_typed(background: None, tiny_gguf: Path) -> None:
    run = ("run", str(tiny_gguf), "Hello", "-n", "1")
    cases = {
        ("run", "nosuch.gguf", "Hello"): "There is no file nosuch.gguf.",
        ("run", "nosuch.gguf", "Hello", "--no-daemon"): "There is no file nosuch.gguf.",
        (*run, "--file", "nosuch.txt"): "There is no file nosuch.txt.",
        (*run, "--file", "nosuch.pdf"): "There is no file nosuch.pdf.",
        (*run, "--adapter", "own=nosuch"): "There is no folder nosuch. Give the folder that PEFT saved.",
        (*run, "--tier-secret", "nosuch.key"): "There is no file nosuch.key.",
        ("warm", "nosuch.txt", "-m", str(tiny_gguf)): "There is no file nosuch.txt.",
        ("explain", "nosuch.txt", "-m", str(tiny_gguf)): "There is no file nosuch.txt.",
        ("serve", "nosuch.gguf"): "There is no file nosuch.gguf.",
    }
    said = {arguments: str(rekindle(*arguments).exception) for arguments in cases}
    assert said == cases
