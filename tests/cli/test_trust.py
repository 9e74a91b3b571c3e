"""`rekindle trust`: what it prints, what it refuses, and what commands say of a file that is not trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle.cli.main import app
from rekindle.errors import InvalidSetting
from rekindle.settings import Settings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cloned"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def ok(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["trust", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def error(*arguments: str) -> str:
    with pytest.raises(InvalidSetting) as raised:
        CliRunner().invoke(app, ["trust", *arguments], catch_exceptions=False)
    return str(raised.value)


def listed() -> dict[str, str]:
    return {one["file"]: one["state"] for one in json.loads(ok("--list", "--json"))}


def test_a_file_is_trusted_listed_changed_and_trusted_no_longer(folder: Path) -> None:
    file = folder / "rekindle.toml"
    assert listed() == {}
    file.write_text('context = 5\ntenant = "us"\norigin = "http://\\u001b[2Korigin.example"\n')
    told = ok("rekindle.toml")
    assert told.splitlines() == [
        f"{file} is trusted until it is changed. It sets:",
        '  tenant = "us"',
        '  origin = "http://\\u001b[2Korigin.example"',  # nothing that a terminal would obey
    ]
    assert Settings.load().tenant == "us"
    assert listed() == {str(file): "trusted"}
    file.write_text('tenant = "them"')
    assert listed() == {str(file): "changed since it was trusted"}
    assert ok("--list") == f"{file}: changed since it was trusted\n"
    assert Settings.load().tenant == "local"
    assert "It sets:" in ok(str(file))
    assert Settings.load().tenant == "them"
    file.unlink()
    assert listed() == {str(file): "cannot be read"}
    assert ok("--remove", "rekindle.toml") == f"{file} is no longer trusted.\n"
    assert listed() == {}


def test_what_cannot_be_trusted_is_refused_in_words(folder: Path) -> None:
    assert "Name the file: rekindle trust rekindle.toml" in error()
    assert "There is no file rekindle.toml." in error("rekindle.toml")
    assert "REKINDLE_CONFIG" in error("other.toml")
    assert "was not trusted" in error("--remove", "rekindle.toml")
    (folder / "rekindle.toml").write_text('tenant = "us"\ncontext = "many"')
    assert "context in rekindle.toml is 'many'" in error("rekindle.toml")
    assert listed() == {}


def test_a_command_says_on_one_line_what_it_ignores_and_its_output_stays_the_same(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rekindle", "cache", "stats", "--json"]
    kv = tmp_path / "kv"

    def run() -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "REKINDLE_CACHE": str(kv)}
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=120)

    before = run()
    (folder / "rekindle.toml").write_text('tenant = "you"\norigin = "http://evil.example"\n')
    after = run()
    assert (after.returncode, after.stdout) == (before.returncode, before.stdout)
    (line,) = after.stderr.removesuffix(before.stderr).splitlines()
    assert line.endswith(f"ignored: tenant, origin. To apply them: rekindle trust {folder}/rekindle.toml")
