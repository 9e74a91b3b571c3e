"""Apps that are processes: when the process ends, the app is killed, whoever notices."""

from __future__ import annotations

import sqlite3
import time

import psutil

from rekindle.core.app import check_name
from rekindle.errors import CacheUnusable, InvalidSetting
from rekindle.store import app_rows
from rekindle.store.disk import DiskStore

_LOOK_SECONDS = 0.5
_BORN_APART_SECONDS = 1.0  # by which two looks at the same process may differ, where clocks are put right


def process_name(process: int) -> str:
    """What a process calls itself, as an app may be called. Raises `InvalidSetting` if there is none of that id."""
    try:
        name = str(psutil.Process(process).name()).encode("utf-8", "replace").decode("utf-8")  # any bytes may be in it
        return name or str(process)
    except (psutil.Error, ValueError) as error:
        raise InvalidSetting(f"There is no process {process} to watch ({error}).") from None


def watch(disk: DiskStore, tenant: str, name: str, process: int) -> None:
    """From now on the app lives as long as the process: every process that uses the folder looks after it.

    Raises `InvalidSetting` if there is no such process, `CacheUnusable` if it cannot be noted.
    """
    check_name(name)
    try:
        born = psutil.Process(process).create_time()
    except (psutil.Error, ValueError) as error:
        raise InvalidSetting(f"There is no process {process} to watch ({error}).") from None
    try:
        with disk.database.writing() as connection:
            row = app_rows.app(connection, tenant, name)
            state = "foreground" if row is None or row.state == "killed" else row.state
            if not app_rows.set_state(connection, tenant, name, state, disk.clock(), disk.room.allows):
                raise CacheUnusable(f"There is no room to remember the app {name!r}. Raise the disk limit.")
            app_rows.watch(connection, tenant, name, process, born)
    except (OSError, sqlite3.Error) as error:
        raise CacheUnusable(f"The cache in {disk.folder} could not be used: {error}. Try again.") from error


def mark_ended(disk: DiskStore) -> list[str]:
    """Mark the apps killed whose processes ended; their names. Raises as the catalog does."""
    with disk.database.reading() as connection:
        watched = [row for row in app_rows.apps(connection) if row.process is not None and row.born is not None]
    ended = [row for row in watched if not _lives(row)]
    if ended and not disk.database.read_only:
        with disk.database.writing() as connection:
            for row in ended:
                app_rows.kill(connection, row, disk.clock())
    return [row.name for row in ended]


def wait_for_end(disk: DiskStore, tenant: str, name: str) -> bool:
    """Wait until the process of an app ends, and mark the app; False if nobody watches one for it any more."""
    while True:
        with disk.database.reading() as connection:
            row = app_rows.app(connection, tenant, name)
        if row is None or row.process is None:
            return row is not None and row.state == "killed"
        if not _lives(row):
            mark_ended(disk)
        else:
            time.sleep(_LOOK_SECONDS)


def _lives(row: app_rows.AppRow) -> bool:
    """Whether it is still the same process. One that ended and was not collected by its parent does not live."""
    if row.process is None or row.born is None:
        return False
    try:
        process = psutil.Process(row.process)
        same = abs(process.create_time() - row.born) <= _BORN_APART_SECONDS
        return same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, ValueError):  # it is there, and not ours to look at
        return True
