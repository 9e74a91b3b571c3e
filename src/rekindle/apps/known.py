"""The apps that a cache knows: who asked, in what state they are, and what is kept for them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.apps.state import state_of
from rekindle.core.app import AppState, check_name
from rekindle.errors import CacheUnusable
from rekindle.store import app_rows
from rekindle.store.app_rows import AppRow, Share
from rekindle.store.disk import DiskStore

Killed = Callable[[str, str], None]  # with tenant and name


@dataclass(frozen=True)
class App:
    """One app of one tenant.

    size_bytes, private_bytes   the KV that it used, and what of it no other app did
    process                     the process that is watched: when it ends, the app is killed
    """

    tenant: str
    name: str
    state: AppState
    requests: int
    seen: float
    since: float
    process: int | None
    size_bytes: int = 0
    private_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


class Apps:
    """The apps of a cache folder, as its catalog has them: every process that uses the folder sees the same.

    Without a cache there are none, and saying something of one raises `CacheUnusable`, as does trouble with the disk.
    """

    def __init__(self, disk: DiskStore | None, tenant: str, killed: Killed | None = None) -> None:
        """`tenant`: whose apps are meant where nothing is said. `killed` is told of apps that are set so here."""
        self._disk = disk
        self._tenant = tenant
        self._killed = killed

    def ls(self, tenant: str | None = None) -> list[App]:
        """The apps, those seen last at the end."""
        if self._disk is None:
            return []
        return listed(self._disk, self._tenant if tenant is None else tenant)

    def set(self, name: str, state: str, tenant: str | None = None) -> App:
        """Say in what state an app is: foreground, background, killed, or as iOS and Android call it.

        What a killed app alone has used goes soon; what others use too stays. Raises `InvalidSetting`.
        """
        own, meant = self._tenant if tenant is None else tenant, state_of(state)
        check_name(name)
        with _writing(self._disk) as (disk, connection):
            if not app_rows.set_state(connection, own, name, meant, disk.clock(), disk.room.allows):
                raise CacheUnusable(f"There is no room to remember the app {name!r}. Raise the disk limit.")
            row = app_rows.app(connection, own, name)
        if meant == "killed" and self._killed is not None:
            self._killed(own, name)
        assert row is not None
        return _app(row, Share())


def listed(disk: DiskStore, tenant: str | None = None) -> list[App]:
    """The apps of a tenant, or of all, with what is kept for them. Raises `CacheUnusable`."""
    with _trouble(disk), disk.database.reading() as connection:
        shares = app_rows.shares(connection, tenant)
        return [_app(row, shares.get(row.id, Share())) for row in app_rows.apps(connection, tenant)]


@contextmanager
def _writing(disk: DiskStore | None) -> Iterator[tuple[DiskStore, sqlite3.Connection]]:
    if disk is None:
        raise CacheUnusable("There is no cache, so nothing is remembered of apps. Open one without cache='off'.")
    with _trouble(disk), disk.database.writing() as connection:
        yield disk, connection


@contextmanager
def _trouble(disk: DiskStore) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise CacheUnusable(f"The cache in {disk.folder} could not be used: {error}. Try again.") from error


def _app(row: AppRow, share: Share) -> App:
    return App(
        row.tenant,
        row.name,
        row.state,
        row.requests,
        row.seen,
        row.since,
        row.process,
        share.size_bytes,
        share.private_bytes,
    )
