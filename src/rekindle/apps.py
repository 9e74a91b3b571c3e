"""Apps: the applications that ask, their states, and what the cache keeps for them.

A state is foreground (in use), background (may return) or killed; the names of iOS, Android and browsers are mapped to
these (`LIFECYCLE`). An app can be tied to a process: when that ends,
whichever process notices first marks the app killed. On Linux desktops, systemd shows which apps run.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from rekindle.core.scope import APP_STATES, AppState, Scope, check_name
from rekindle.errors import CacheUnusable, InvalidSetting, nearest
from rekindle.store.catalog import app_rows
from rekindle.store.catalog.app_rows import AppRow, AppShare
from rekindle.store.disk import DiskStore

Platform = Literal["ios", "android", "web"]


@dataclass(frozen=True)
class Lifecycle:
    """A platform's name for a state. `also` are other names, such as the callback that announces it."""

    platform: Platform
    name: str
    state: AppState
    also: tuple[str, ...] = ()


LIFECYCLE = (
    Lifecycle("ios", "active", "foreground", ("sceneDidBecomeActive", "applicationDidBecomeActive")),
    Lifecycle("ios", "inactive", "foreground", ("sceneWillResignActive", "sceneWillEnterForeground")),
    Lifecycle("ios", "background", "background", ("sceneDidEnterBackground", "applicationDidEnterBackground")),
    # As published, a suspended app counts as killed. But it is in memory, and a tap away: its KV is worth keeping.
    Lifecycle("ios", "suspended", "background"),
    Lifecycle("ios", "unattached", "killed", ("sceneDidDisconnect",)),
    Lifecycle("ios", "not running", "killed", ("applicationWillTerminate", "terminated")),
    Lifecycle("android", "resumed", "foreground", ("onResume",)),
    Lifecycle("android", "started", "foreground", ("onStart",)),
    Lifecycle("android", "created", "background", ("onCreate",)),
    Lifecycle("android", "paused", "foreground", ("onPause",)),  # partly visible, or about to be hidden
    Lifecycle("android", "stopped", "background", ("onStop",)),
    Lifecycle("android", "destroyed", "killed", ("onDestroy",)),
    Lifecycle("android", "IMPORTANCE_FOREGROUND", "foreground"),
    Lifecycle("android", "IMPORTANCE_VISIBLE", "foreground"),
    Lifecycle("android", "IMPORTANCE_FOREGROUND_SERVICE", "background"),
    Lifecycle("android", "IMPORTANCE_TOP_SLEEPING", "background"),
    Lifecycle("android", "IMPORTANCE_PERCEPTIBLE", "background"),
    Lifecycle("android", "IMPORTANCE_SERVICE", "background"),
    Lifecycle("android", "IMPORTANCE_CANT_SAVE_STATE", "background"),
    Lifecycle("android", "IMPORTANCE_CACHED", "background"),
    Lifecycle("android", "IMPORTANCE_GONE", "killed"),
    # onTrimMemory: what it implies for the app itself, not how scarce memory is.
    Lifecycle("android", "TRIM_MEMORY_RUNNING_MODERATE", "foreground"),
    Lifecycle("android", "TRIM_MEMORY_RUNNING_LOW", "foreground"),
    Lifecycle("android", "TRIM_MEMORY_RUNNING_CRITICAL", "foreground"),
    Lifecycle("android", "TRIM_MEMORY_UI_HIDDEN", "background"),
    Lifecycle("android", "TRIM_MEMORY_BACKGROUND", "background"),
    Lifecycle("android", "TRIM_MEMORY_MODERATE", "background"),
    Lifecycle("android", "TRIM_MEMORY_COMPLETE", "background"),
    Lifecycle("web", "visible", "foreground"),
    Lifecycle("web", "passive", "foreground"),
    Lifecycle("web", "hidden", "background", ("pagehide",)),
    Lifecycle("web", "frozen", "background"),
    Lifecycle("web", "discarded", "killed"),
)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


_STATES: dict[str, AppState] = {
    **{_plain(name): row.state for row in LIFECYCLE for name in (row.name, *row.also)},
    **{state: state for state in APP_STATES},
}


def state_of(name: str) -> AppState:
    """The state of a name: one of the three, or of `LIFECYCLE`. Case, spaces and underscores do not matter.

    Raises `InvalidSetting` with the nearest name.
    """
    state = _STATES.get(_plain(name))
    if state is None:
        known = [*APP_STATES, *(row.name for row in LIFECYCLE)]
        raise InvalidSetting(f"{name[:80]!r} is not an app's state.{nearest(name, known)} Use {', '.join(APP_STATES)}.")
    return state


OnKilled = Callable[[Scope, str], None]  # (scope, name)


@dataclass(frozen=True)
class App:
    """One app of one tenant under one salt.

    salt_digest                 identifies the salt without revealing it; empty for none
    size_bytes, private_bytes   the KV that it used, and the part that no other app used
    process                     the process that is watched: when it ends, the app is killed
    """

    tenant: str
    salt_digest: str
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
        """Set the state of an app: foreground, background, killed, or a name of iOS or Android.

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
        return _app(row, AppShare())

    def _whose(self, tenant: str | None, salt: str | None) -> Scope:
        return Scope(self._scope.tenant if tenant is None else tenant, self._scope.salt if salt is None else salt)


def list_apps(disk: DiskStore, scope: Scope | None = None) -> list[App]:
    """The apps of a scope, or of all, with their sizes. Raises `CacheUnusable`."""
    with _trouble(disk), disk.database.reading() as connection:
        shares = app_rows.shares(connection, scope)
        return [_app(row, shares.get(row.id, AppShare())) for row in app_rows.apps(connection, scope)]


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


def _app(row: AppRow, share: AppShare) -> App:
    return App(
        row.tenant,
        row.salt_digest,
        row.name,
        row.state,
        row.requests,
        row.seen,
        row.since,
        row.process,
        share.size_bytes,
        share.private_bytes,
    )


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


# Units of apps have the names app[-LAUNCHER]-ID[@RANDOM].service and app[-LAUNCHER]-ID-RANDOM.scope, with \x2d for a
# hyphen in a part (systemd.io/DESKTOP_ENVIRONMENTS). The manager of a user makes a cgroup for each: a folder.
_UNIT = re.compile(r"app-(?:[^-@]+-)?([^-@]+)(?:@[^@]*\.service|\.service|-[^-@]+\.scope)")
_CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd")


def systemd_manager(roots: tuple[str, ...] | None = None) -> Path:
    """The cgroup of this user's manager of systemd. Raises `InvalidSetting` if there is none."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    for root in roots or _CGROUPS:
        manager = Path(root, "user.slice", f"user-{user}.slice", f"user@{user}.service")
        if manager.is_dir():
            return manager
    raise InvalidSetting(
        "No systemd runs apps for this user. Watch a process with `rekindle apps watch PID`, or let the app say its "
        "state: `rekindle apps set APP STATE`, PUT /v1/rekindle/apps/APP."
    )


def running_apps(manager: Path) -> set[str]:
    """The ids of the apps that run under a user's manager, such as org.gnome.Evince."""
    found, slices = set(), [manager]
    while slices:
        group = slices.pop()
        try:
            folders = [entry.name for entry in os.scandir(group) if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:  # it ended meanwhile
            continue
        slices += [group / name for name in folders if name.endswith(".slice")]
        units = [match for name in folders if (match := _UNIT.fullmatch(name))]
        found |= {re.sub(r"\\x([0-9a-f]{2})", lambda code: chr(int(code[1], 16)), unit[1]) for unit in units}
    return found


def follow_units(disk: DiskStore, scope: Scope, manager: Path, before: set[str]) -> tuple[set[str], list[App]]:
    """The apps that run now, and those whose states were changed since `before` ran.

    An app that ended is killed; a killed one that runs again is in the foreground. Only apps that sent requests
    under their id are changed. Raises `CacheUnusable`.
    """
    now = running_apps(manager)
    known = {app.name: app.state for app in list_apps(disk, scope)} if now != before else {}
    changes: list[tuple[str, AppState]] = [
        *((name, "killed") for name in sorted(before - now) if known.get(name, "killed") != "killed"),
        *((name, "foreground") for name in sorted(now - before) if known.get(name) == "killed"),
    ]
    return now, [Apps(disk, scope).set(name, state) for name, state in changes]
