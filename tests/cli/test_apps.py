"""`rekindle apps`, end to end on a folder, without a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from rekindle.cli.main import app
from rekindle.core.scope import AppRef
from rekindle.errors import CacheUnusable, InvalidSetting
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, keep

ROOMY = StoreSettings(disk_limit="50MB", memory_limit=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        for name, tokens in (("mail", list(range(320))), ("notes", [*range(160), *range(900, 1060)])):
            keep(store, tokens, app=AppRef("local", name))
            store.record_request(KV_SPACE, tokens, AppRef("local", name))
    return tmp_path / "c"


def apps(folder: Path, command: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["apps", command, "--cache", str(folder), *arguments])


def listed(folder: Path, *arguments: str) -> list[dict[str, object]]:
    result = apps(folder, "ls", "--json", *arguments)
    assert result.exit_code == 0, result.exception
    found: list[dict[str, object]] = json.loads(result.stdout)
    return found


def test_ls_shows_who_asked(folder: Path) -> None:
    mail, notes = listed(folder)
    assert (mail["name"], mail["state"], mail["requests"]) == ("mail", "foreground", 1)
    assert notes["name"] == "notes"
    text = apps(folder, "ls").stdout
    assert "mail" in text and "notes" in text and "foreground" in text
    assert listed(folder, "--tenant", "other") == [] and len(listed(folder, "--all")) == 2


@pytest.mark.usefixtures("crowded")
def test_set_changes_the_state_and_the_store_heeds_it(folder: Path) -> None:
    assert apps(folder, "set", "mail", "background").stdout == "mail is background\n"
    assert apps(folder, "set", "mail", "Killed").stdout == "mail is killed\n"
    assert [row["state"] for row in listed(folder)] == ["killed", "foreground"]
    with TieredStore(folder, StoreSettings(disk_limit="50MB", memory_limit=0, killed_ttl_seconds=0)) as store:
        assert store.lookup(KV_SPACE, list(range(320))).length == 160  # what notes shares
        assert store.lookup(KV_SPACE, [*range(160), *range(900, 1060)]).length == 320


def test_looking_at_a_folder_evicts_nothing(folder: Path) -> None:
    apps(folder, "set", "mail", "killed")
    before = listed(folder)
    assert CliRunner().invoke(app, ["cache", "gc", "--cache", str(folder)]).exit_code == 0
    assert listed(folder) == before


def test_what_is_no_state_is_refused(folder: Path) -> None:
    result = apps(folder, "set", "mail", "asleep")
    assert isinstance(result.exception, InvalidSetting) and "foreground" in str(result.exception)


def test_watch_marks_the_app_of_an_ended_process(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        done = apps(folder, "watch", str(process.pid), "--app", "mail", "--no-wait")
        assert done.exit_code == 0 and f"process {process.pid}" in done.stdout
        assert listed(folder)[0]["process"] == process.pid
        process.kill()
        process.wait()
    assert listed(folder)[0]["state"] == "killed"


def test_watch_stays_until_the_process_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        looks: list[float] = []

        def end_it(seconds: float) -> None:
            looks.append(seconds)
            process.kill()
            process.wait()

        monkeypatch.setattr("rekindle.apps.time", SimpleNamespace(**{**vars(time), "sleep": end_it}))
        done = apps(folder, "watch", str(process.pid), "--app", "notes")
    assert done.stdout.splitlines()[-1] == "notes is killed" and len(looks) == 1
    assert {row["name"]: row["state"] for row in listed(folder)}["notes"] == "killed"


def test_a_process_without_a_name_for_its_app_lends_its_own(folder: Path) -> None:
    assert apps(folder, "watch", str(os.getpid()), "--no-wait").exit_code == 0
    assert len(listed(folder)) == 3


def test_clearing_forgets_the_apps(folder: Path) -> None:
    assert CliRunner().invoke(app, ["cache", "clear", "--yes", "--cache", str(folder)]).exit_code == 0
    assert listed(folder) == []


def test_a_folder_without_a_cache_is_told(tmp_path: Path) -> None:
    assert isinstance(apps(tmp_path, "ls").exception, CacheUnusable)
