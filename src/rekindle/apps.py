"""Apps: the applications that ask, their states, and what the cache keeps for them.

A state is foreground (in use), background (may return) or killed. An app can be tied to a process: when that ends, the
process that notices it first marks the app killed.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from rekindle.core.scope import APP_STATES, AppState, Scope, check_name
from rekindle.errors import CacheUnusable, InvalidSetting, nearest
from rekindle.store.catalog import app_rows
from rekindle.store.catalog.app_rows import AppRow
from rekindle.store.disk import DiskStore


def state_of(name: str) -> AppState:
    """The state of that name. Raises `InvalidSetting` for any other name."""
    for state in APP_STATES:
        if state == name.strip().lower():
            return state
    given = name[:80]
    raise InvalidSetting(f"{given!r} is not an app's state.{nearest(given, APP_STATES)}")


OnKilled = Callable[[Scope, str], None]  # (scope, name)


@dataclass(frozen=True)
class App:
    """One app of one tenant under one salt.

    salt_digest   identifies the salt without revealing it; empty for none
    process       the process that is watched: when it ends, the app is killed
    """

    tenant: str
    salt_digest: str
    name: str
    state: AppState
    requests: int
    seen: float
    since: float
    process: int | None

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


class Apps:
    """The apps of a cache folder, from its catalog: every process that uses the folder sees the same.

    Without a cache there are none, and `set` raises `CacheUnusable`, as do disk errors.
    """

    def __init__(self, disk: DiskStore | None, scope: Scope, killed: OnKilled | None = None) -> None:
        """`scope` is the default tenant and salt. `killed` is called for apps that are set killed here."""
        self._disk = disk
        self._scope = scope
        self._killed = killed

    def ls(self, tenant: str | None = None, cache_salt: str | None = None) -> list[App]:
        """The apps, the most recently seen last."""
        return [] if self._disk is None else list_apps(self._disk, self._whose(tenant, cache_salt))

    def set(self, name: str, state: str, tenant: str | None = None, cache_salt: str | None = None) -> App:
        """Set the state of an app: foreground, background or killed.

        KV that only a killed app used is evicted soon; what others use stays. Raises `InvalidSetting`.
        """
        own, meant = self._whose(tenant, cache_salt), state_of(state)
        check_name(name)
        with _writing(self._disk) as (disk, connection):
            if not app_rows.set_state(connection, own, name, meant, disk.clock(), disk.room.allows):
                raise CacheUnusable(f"There is no room to remember the app {name!r}. Raise the disk limit.")
            row = app_rows.app(connection, own, name)
        if meant == "killed" and self._killed is not None:
            self._killed(own, name)
        assert row is not None
        return _app(row)

    def _whose(self, tenant: str | None, salt: str | None) -> Scope:
        return Scope(self._scope.tenant if tenant is None else tenant, self._scope.salt if salt is None else salt)


def list_apps(disk: DiskStore, scope: Scope | None = None) -> list[App]:
    """The apps of a scope, or of all. Raises `CacheUnusable`."""
    with _trouble(disk), disk.database.reading() as connection:
        return [_app(row) for row in app_rows.apps(connection, scope)]


@contextmanager
def _writing(disk: DiskStore | None) -> Iterator[tuple[DiskStore, sqlite3.Connection]]:
    if disk is None:
        raise CacheUnusable("Apps are remembered in the cache, which is off. Leave out cache='off'.")
    with _trouble(disk), disk.database.writing() as connection:
        yield disk, connection


@contextmanager
def _trouble(disk: DiskStore) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise CacheUnusable(f"The cache in {disk.folder} could not be used: {error}. Try again.") from error


def _app(row: AppRow) -> App:
    return App(row.tenant, row.salt_digest, row.name, row.state, row.requests, row.seen, row.since, row.process)


LOOK_SECONDS = 0.5
_BORN_APART_SECONDS = 1.0  # tolerance for the start time of a process, which clock corrections shift


def process_name(process: int) -> str:
    """The name of a process, as an app name. Raises `InvalidSetting` if there is no such process."""
    try:
        name = str(psutil.Process(process).name()).encode("utf-8", "replace").decode("utf-8")  # it may hold any bytes
        return name or str(process)
    except (psutil.Error, ValueError) as error:
        raise InvalidSetting(f"There is no process {process} to watch ({error}).") from None


def watch_process(disk: DiskStore, scope: Scope, name: str, process: int) -> None:
    """Tie an app to a process: whichever process uses the folder marks it killed after the process ends.

    Raises `InvalidSetting` if there is no such process, `CacheUnusable` if it cannot be stored.
    """
    check_name(name)
    try:
        born = psutil.Process(process).create_time()
    except (psutil.Error, ValueError) as error:
        raise InvalidSetting(f"There is no process {process} to watch ({error}).") from None
    with _writing(disk) as (_, connection):
        row = app_rows.app(connection, scope, name)
        state = "foreground" if row is None or row.state == "killed" else row.state
        if not app_rows.set_state(connection, scope, name, state, disk.clock(), disk.room.allows):
            raise CacheUnusable(f"There is no room to remember the app {name!r}. Raise the disk limit.")
        app_rows.watch(connection, scope, name, process, born)


def mark_ended(disk: DiskStore) -> list[str]:
    """Mark apps killed whose processes ended, and return their names. Raises as the catalog does."""
    with disk.database.reading() as connection:
        watched = [row for row in app_rows.apps(connection) if row.process is not None and row.born is not None]
    ended = [row for row in watched if not _lives(row)]
    if ended and not disk.database.read_only:
        with disk.database.writing() as connection:
            for row in ended:
                app_rows.kill(connection, row, disk.clock())
    return [row.name for row in ended]


def wait_for_end(disk: DiskStore, scope: Scope, name: str) -> bool:
    """Wait until the process of an app ends, and mark the app; False if it is no longer tied to a process."""
    while True:
        with disk.database.reading() as connection:
            row = app_rows.app(connection, scope, name)
        if row is None or row.process is None:
            return row is not None and row.state == "killed"
        if not _lives(row):
            mark_ended(disk)
        else:
            time.sleep(LOOK_SECONDS)


def _lives(row: app_rows.AppRow) -> bool:
    """Whether it is still the same process, and no zombie."""
    if row.process is None or row.born is None:
        return False
    try:
        process = psutil.Process(row.process)
        same = abs(process.create_time() - row.born) <= _BORN_APART_SECONDS
        return same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, ValueError):  # it exists, but we may not inspect it
        return True
