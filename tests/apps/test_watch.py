"""Apps that are processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rekindle.apps import Apps, list_apps, mark_ended, process_name, wait_for_end, watch_process
from rekindle.core.scope import Scope
from rekindle.errors import CacheUnusable, InvalidSetting
from rekindle.store.catalog import app_rows
from rekindle.store.disk import DiskStore
from rekindle.store.settings import StoreSettings

OWN = Scope("local")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "c", StoreSettings(disk_limit="50MB"))
    yield store
    store.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def states(disk: DiskStore) -> dict[str, str]:
    return {app.name: app.state for app in list_apps(disk)}


def test_an_app_is_killed_when_its_process_ends_whoever_looks(
    disk: DiskStore, process: subprocess.Popen[bytes]
) -> None:
    watch_process(disk, OWN, "mail", process.pid)
    watch_process(disk, OWN, "notes", os.getpid())
    assert mark_ended(disk) == [] and states(disk) == {"mail": "foreground", "notes": "foreground"}
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:  # not collected yet: it is gone all the same
        pass
    assert mark_ended(disk) == ["mail"]
    assert states(disk) == {"mail": "killed", "notes": "foreground"}
    assert mark_ended(disk) == []


def test_waiting_for_a_process_ends_with_it(disk: DiskStore, process: subprocess.Popen[bytes]) -> None:
    watch_process(disk, OWN, "mail", process.pid)
    threading.Timer(0.05, process.kill).start()
    assert wait_for_end(disk, OWN, "mail") is True
    assert states(disk) == {"mail": "killed"}


def test_a_process_that_has_the_number_of_an_ended_one_is_another(disk: DiskStore) -> None:
    watch_process(disk, OWN, "mail", os.getpid())
    with disk.database.writing() as connection:
        connection.execute("UPDATE apps SET born=born-1000")
    assert mark_ended(disk) == ["mail"]


def test_what_was_found_ended_is_not_marked_if_another_is_watched_by_now(disk: DiskStore) -> None:
    watch_process(disk, OWN, "mail", os.getpid())
    with disk.database.writing() as connection:
        (row,) = app_rows.apps(connection)
        connection.execute("UPDATE apps SET process=1, born=5")
        app_rows.kill(connection, row, 0.0)
    assert states(disk) == {"mail": "foreground"}


def test_an_app_that_is_set_killed_is_watched_no_more(disk: DiskStore) -> None:
    watch_process(disk, OWN, "mail", os.getpid())
    Apps(disk, OWN).set("mail", "killed")
    assert [(app.state, app.process) for app in list_apps(disk)] == [("killed", None)]
    assert wait_for_end(disk, OWN, "mail") is True


def test_there_must_be_something_to_watch(disk: DiskStore) -> None:
    missing = max(psutil.pids()) + 100_000
    for act in (lambda: watch_process(disk, OWN, "mail", missing), lambda: process_name(missing)):
        with pytest.raises(InvalidSetting, match="no process"):
            act()
    assert wait_for_end(disk, OWN, "mail") is False


def test_without_a_cache_there_are_no_apps() -> None:
    assert Apps(None, OWN).ls() == []
    with pytest.raises(CacheUnusable, match="cache"):
        Apps(None, OWN).set("mail", "killed")


def test_whoever_sets_an_app_killed_is_told(disk: DiskStore) -> None:
    told: list[tuple[Scope, str]] = []
    apps = Apps(disk, OWN, lambda scope, name: told.append((scope, name)))
    apps.set("mail", "background")
    apps.set("mail", "killed")
    apps.set("mail", "killed", "other")
    assert told == [(OWN, "mail"), (Scope("other"), "mail")]
    assert [app.tenant for app in apps.ls()] == ["local"]
