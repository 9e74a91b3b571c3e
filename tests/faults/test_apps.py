"""A store killed at any statement or call while apps ask, die and are swept: it is sound, and goes on."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from rekindle.core.scope import AppRef, Scope
from rekindle.store.catalog import app_rows
from rekindle.store.check import check
from rekindle.store.disk import Machine
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.faults.folders import copy, file_bytes, prompt
from tests.faults.test_injected import Connections, FailingFiles
from tests.faults.test_purge import KILLED, DyingConnections, DyingFiles, places
from tests.kvs import KV_SPACE, keep, load

pytestmark = pytest.mark.usefixtures("crowded")

LIMIT = (2 << 20) + 700_000
SETTINGS = StoreSettings(disk_limit=LIMIT, memory_limit=0, killed_ttl_seconds=0)
MAIL, NOTES = AppRef("local", "mail"), AppRef("local", "notes")
SYSTEM = prompt(0, 96)
MINE, SHARED, YOURS = prompt(1, 700), [*SYSTEM, *prompt(2, 500)], [*SYSTEM, *prompt(3, 200)]


def ask(store: TieredStore, tokens: list[int], app_ref: AppRef) -> None:
    keep(store, tokens, app=app_ref)
    store.record_request(KV_SPACE, tokens, app_ref)
    store.maintain()


def kill_mail(store: TieredStore) -> None:
    with store.disk.database.writing() as connection:
        app_rows.set_state(connection, Scope("local"), "mail", "killed", 0.0, store.disk.room.allows)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mail alone has used, what it shares with notes, and what hangs on that; mail was killed."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    with TieredStore(folder, StoreSettings(disk_limit=LIMIT, memory_limit=0, killed_ttl_seconds=None)) as store:
        ask(store, MINE, MAIL)
        ask(store, SHARED, MAIL)
        ask(store, YOURS, NOTES)
        kill_mail(store)
    return folder


def scenario(folder: Path, machine: Machine) -> None:
    """Open, which sweeps; mail comes back and is killed again; another app asks; tend."""
    with TieredStore(folder, SETTINGS, machine) as store:
        ask(store, MINE, MAIL)
        kill_mail(store)
        ask(store, prompt(4, 400), AppRef("local", "chat"))
        store.maintain()


def in_child(folder: Path, machine: Machine) -> int:
    child = os.fork()
    if child == 0:
        try:
            scenario(folder, machine)
        except BaseException:  # noqa: BLE001  (told by the exit status)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def expect_swept(folder: Path) -> None:
    """Once more without faults: what was mail's alone is gone, what notes uses is there, and nothing else is wrong."""
    assert file_bytes(folder) <= LIMIT
    with TieredStore(folder, SETTINGS) as store:
        assert check(store.disk).problems == ()
        kill_mail(store)
        store.maintain()
        assert store.lookup(KV_SPACE, MINE).length == 0
        assert load(store, SHARED) == 96 and load(store, YOURS) == 296
        assert check(store.disk).problems == ()


def count(folder: Path) -> Counter[str]:
    files, connections = FailingFiles(), Connections()
    scenario(copy(folder, "count"), Machine(files=files, connect=connections))
    return files.calls + connections.calls


def test_without_faults_what_was_private_goes(filled: Path) -> None:
    folder = copy(filled, "whole")
    scenario(folder, Machine())
    expect_swept(folder)


@pytest.mark.parametrize(("word", "most"), [("any", 30), ("COMMIT", 12), ("DELETE", 6)])
def test_killed_at_any_statement_the_catalog_is_sound_and_the_sweep_is_done_later(
    filled: Path, word: str, most: int
) -> None:
    calls = count(filled)[word]
    assert calls >= most
    for nth in places(calls, most):
        folder = copy(filled, "killed")
        assert in_child(folder, Machine(connect=DyingConnections(word, nth, "killed"))) == KILLED
        expect_swept(folder)


@pytest.mark.parametrize("method", ["create", "write_some", "sync", "remove", "open"])
def test_killed_at_any_call_of_the_system_the_folder_is_sound(filled: Path, method: str) -> None:
    calls = count(filled)[method]
    assert calls
    for nth in places(calls, 4):
        folder = copy(filled, "killed")
        assert in_child(folder, Machine(files=DyingFiles(method, nth))) == KILLED
        expect_swept(folder)


def test_a_use_that_no_catalog_can_be_told_is_in_nobodys_way(filled: Path) -> None:
    with TieredStore(copy(filled, "senseless"), SETTINGS) as store:
        for name in ("half \ud800", 2**70):
            nobody = AppRef("local", "mail")
            object.__setattr__(nobody, "name", name)  # past the check of names
            store.record_use_by(nobody, (), requests=1)
        ask(store, prompt(4, 400), NOTES)
        assert keep(store, prompt(5)).outcome == "kept"
        with store.disk.database.reading() as connection:
            row = app_rows.app(connection, Scope("local"), "notes")
        assert row is not None and row.requests == 2 and store.counts.write_failures == 0


def test_rows_about_apps_that_make_no_sense_stop_nobody(filled: Path) -> None:
    damages = (
        "UPDATE app_uses SET last=-5",
        "UPDATE OR REPLACE app_uses SET app=999",
        "INSERT INTO app_uses VALUES (12345, 1, 2, 3.0)",
        "UPDATE apps SET since='soon', seen='never'",
    )
    for damage in damages:
        folder = copy(filled, "damaged")
        with TieredStore(folder, SETTINGS) as store:
            with store.disk.database.writing() as connection:
                connection.execute(damage)
            for number in range(10, 30):
                ask(store, prompt(number, 400), AppRef("local", "notes", at=store.disk.clock()))
                load(store, prompt(number, 400))
            check(store.disk, fix=True)
            assert check(store.disk).problems == ()
            assert keep(store, prompt(99)).outcome == "kept", damage
        assert file_bytes(folder) <= LIMIT
