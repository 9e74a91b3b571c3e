"""The apps of a catalog, their states, and which of them used which blocks. Functions take the transaction.

    apps      one row per app: its state, since when, and the process it is tied to
    app_uses  one row per app and extent: the app used the extent's blocks up to and including place `last`

A use of an extent always covers its first blocks, so one number suffices. Requests without an app name are user 0: it
has no row among the apps, counts as in the background and is never killed. Users of an extent are recorded from the
first named app on: an extent without users was used without app names only.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rekindle.core.identity import digest_of_fields
from rekindle.core.scope import AppRef, AppState, Scope

NOBODY = 0  # the user of requests without an app name
MAX_APPS = 1024  # of a tenant
MAX_USERS = 16  # of an extent
MAX_ROWS = 50_000  # of users in all
_LATE_SECONDS = 600.0  # a report about an app this long after a use that is written only now came from a wrong clock
_APP_BYTES, _USER_BYTES = 8192, 4096  # what a row may make the catalog grow by: a page of each index, at worst


@dataclass(frozen=True)
class AppRow:
    """A row of the table of apps. `process` and `born` are the id and start time of the process it is tied to."""

    id: int
    tenant: str
    salt_digest: str
    name: str
    state: AppState
    since: float
    seen: float
    requests: int = 0
    process: int | None = None
    born: float | None = None


# Times are compared with others: in a damaged catalog they may be anything.
_COLUMNS = "id, tenant, salt_digest, name, state, CAST(since AS REAL), CAST(seen AS REAL), requests, process, born"


@dataclass(frozen=True, slots=True)
class AppUsers:
    """The number of apps in each state that use an extent."""

    foreground: int = 0
    background: int = 0
    killed: int = 0

    @property
    def live(self) -> int:
        """Number of apps that may ask again."""
        return self.foreground + self.background

    @property
    def dead(self) -> bool:
        """Whether only killed apps used it."""
        return self.killed > 0 and self.live == 0


@dataclass(frozen=True, slots=True)
class UsedBlocks:
    """The blocks of an extent up to and including `last`; the name shows whether it is still the same extent."""

    extent: int
    name: str
    last: int


class Allows(Protocol):
    """Whether the catalog may grow by `size_bytes` in this transaction."""

    def __call__(self, connection: sqlite3.Connection, size_bytes: int, /) -> bool: ...


def record_use(
    connection: sqlite3.Connection,
    app: AppRef | None,
    places: Sequence[UsedBlocks],
    at: float,
    allows: Allows,
    requests: int = 0,
) -> None:
    """Record a use of blocks by an app, or without an app name, if there is room, and unless everything was removed
    since. `requests` is the number of requests to count with it."""
    (cleared,) = connection.execute("SELECT CAST(cleared AS REAL) FROM totals").fetchone()
    if cleared - _LATE_SECONDS <= at <= cleared:  # anything older came from a wrong clock
        return
    if app is None:
        for place in places:
            if _has_users(connection, place.extent):
                add_user(connection, place, NOBODY, at, allows)
        return
    id = record_request(connection, app, at, allows, requests)
    for place in places:
        if not _has_users(connection, place.extent):  # it was kept without an app name
            add_user(connection, _whole(connection, place), NOBODY, at, allows)
        if id is not None:
            add_user(connection, place, id, at, allows)


def record_request(
    connection: sqlite3.Connection, app_ref: AppRef, now: float, allows: Allows, requests: int = 0
) -> int | None:
    """Record a request of an app and return the app's number; None if it is new and there is no room.

    A killed app is alive again, unless it was killed after the request began: requests are recorded late.
    """
    row = app(connection, app_ref.scope, app_ref.name)
    began = now if app_ref.at is None else min(app_ref.at, now)
    if row is None:
        state = app_ref.state or "foreground"
        return _add(connection, _new(app_ref.scope, app_ref.name, state, began, now, requests), allows)
    state = _state(row, app_ref, now)
    since = row.since if state == row.state else began
    connection.execute(
        "UPDATE apps SET state=?, since=?, seen=?, requests=requests+? WHERE id=?",
        (state, since, now, requests, row.id),
    )
    return row.id


def _state(row: AppRow, app_ref: AppRef, now: float = math.inf) -> AppState:
    """The state of an app that asks: the one it reports, unless another report came after the request began."""
    if app_ref.at is not None and app_ref.at <= row.since <= now + _LATE_SECONDS:
        return row.state
    return app_ref.state or ("foreground" if row.state == "killed" else row.state)


def set_state(
    connection: sqlite3.Connection, scope: Scope, name: str, state: AppState, now: float, allows: Allows
) -> bool:
    """Set the state of an app, new or not; False if it is new and there is no room for it."""
    row = app(connection, scope, name)
    if row is None:
        return _add(connection, _new(scope, name, state, now, now), allows) is not None
    if row.state != state:
        connection.execute("UPDATE apps SET state=?, since=? WHERE id=?", (state, now, row.id))
    if state == "killed":
        connection.execute("UPDATE apps SET process=NULL, born=NULL WHERE id=?", (row.id,))
    return True


def watch(connection: sqlite3.Connection, scope: Scope, name: str, process: int, born: float) -> None:
    """Tie an app to a process."""
    connection.execute(
        "UPDATE apps SET process=?, born=? WHERE tenant=? AND salt_digest=? AND name=?",
        (process, born, scope.tenant, salt_digest(scope.salt), name),
    )


def kill(connection: sqlite3.Connection, row: AppRow, now: float) -> None:
    """Mark an app killed whose process ended; nothing happens if it is tied to another process since."""
    connection.execute(
        "UPDATE apps SET state='killed', since=?, process=NULL, born=NULL WHERE id=? AND process IS ? AND born IS ?",
        (now, row.id, row.process, row.born),
    )


def key_of(app_ref: AppRef) -> tuple[str, str, str]:
    """What a row of the apps is found by: tenant, digest of the salt, name."""
    return app_ref.tenant, salt_digest(app_ref.salt), app_ref.name


def salt_digest(salt: str) -> str:
    """The digest that replaces a salt: the salt itself is not stored."""
    return digest_of_fields("rekindle/app-salt/1", salt) if salt else ""


def apps(connection: sqlite3.Connection, scope: Scope | None = None) -> list[AppRow]:
    """The apps of a scope, or all, the most recently seen last."""
    select = (
        f"SELECT {_COLUMNS} FROM apps WHERE :tenant IS NULL OR (tenant=:tenant AND salt_digest=:salt) ORDER BY seen, id"
    )
    return [AppRow(*row) for row in connection.execute(select, _whose(scope)).fetchall()]


def _whose(scope: Scope | None) -> dict[str, str | None]:
    if scope is None:
        return {"tenant": None, "salt": None}
    return {"tenant": scope.tenant, "salt": salt_digest(scope.salt)}


def app(connection: sqlite3.Connection, scope: Scope, name: str) -> AppRow | None:
    select = f"SELECT {_COLUMNS} FROM apps WHERE tenant=? AND salt_digest=? AND name=?"
    row = connection.execute(select, (scope.tenant, salt_digest(scope.salt), name)).fetchone()
    return None if row is None else AppRow(*row)


def sweep(connection: sqlite3.Connection) -> None:
    """Remove the apps of tenants without any KV, unless they are tied to a process."""
    connection.execute("DELETE FROM apps WHERE process IS NULL AND tenant NOT IN (SELECT tenant FROM kv_spaces)")


def any_known(connection: sqlite3.Connection) -> bool:
    """Whether any app is registered."""
    return connection.execute("SELECT 1 FROM apps LIMIT 1").fetchone() is not None


def add_user(connection: sqlite3.Connection, place: UsedBlocks, app: int, now: float, allows: Allows) -> None:
    """Record that an app used an extent's first blocks; nothing happens if the number now means another extent.

    Rows are bounded, per extent and in total. An incomplete list would be worse than none, because the extent would be
    taken for private when the listed apps are killed: one user without a name stands for those who find no room among
    the others, and an extent for which there is no row at all ends up without users.
    """
    if connection.execute("SELECT 1 FROM extents WHERE id=? AND name=?", (place.extent, place.name)).fetchone() is None:
        return
    known = connection.execute("SELECT 1 FROM app_uses WHERE extent=? AND app=?", (place.extent, app)).fetchone()
    if known is None:
        own, every = connection.execute(
            "SELECT (SELECT count(*) FROM app_uses WHERE extent=?), (SELECT count(*) FROM app_uses)", (place.extent,)
        ).fetchone()
        if every >= MAX_ROWS or not allows(connection, _USER_BYTES):
            connection.execute("DELETE FROM app_uses WHERE extent=?", (place.extent,))
            return
        app = NOBODY if own >= MAX_USERS else app
    connection.execute(
        "INSERT INTO app_uses VALUES (?,?,?,?) ON CONFLICT (extent, app) DO UPDATE SET last=max(last, excluded.last), "
        "used=excluded.used",
        (place.extent, app, place.last, now),
    )


def users_by_extent(connection: sqlite3.Connection, *, whole: bool) -> dict[int, AppUsers]:
    """The users of the last live block of each extent, or, with `whole`, of any of its blocks; unused ones left out."""
    rows = connection.execute(
        "SELECT u.extent, total(a.state='foreground'), total(a.state IS NULL OR a.state='background'), "
        "total(a.state='killed') FROM app_uses u JOIN extents e ON e.id=u.extent LEFT JOIN apps a ON a.id=u.app "
        "WHERE ? OR u.last>=e.live-1 GROUP BY u.extent",
        (whole,),
    )
    return {extent: AppUsers(*map(int, counts)) for extent, *counts in rows}


@dataclass(frozen=True, slots=True)
class PrivateBlocks:
    """The blocks of an extent from `start` on that only killed apps used."""

    extent: int
    start: int
    block_bytes: int  # approximate size of a block


def private(connection: sqlite3.Connection, killed_before: float, extent: int | None = None) -> list[PrivateBlocks]:
    """Blocks that only apps killed before that time used, in all extents or one, the deepest first.

    Pinned extents are left out. `first_free_block` says which of the blocks other extents need.
    """
    rows = connection.execute(
        "SELECT u.extent, e.bytes / max(1, e.blocks), "
        "max(CASE WHEN a.state='killed' AND a.since<=:killed_before THEN -1 ELSE u.last END) AS shared "
        "FROM app_uses u JOIN extents e ON e.id=u.extent LEFT JOIN apps a ON a.id=u.app "
        "WHERE e.state='live' AND NOT e.pinned AND (:extent IS NULL OR e.id=:extent) "
        "GROUP BY u.extent HAVING shared<e.live-1 ORDER BY e.depth DESC",
        {"killed_before": killed_before, "extent": extent},
    )
    return [PrivateBlocks(id, shared + 1, size_bytes) for id, size_bytes, shared in rows.fetchall()]


def first_free_block(connection: sqlite3.Connection, extent: int) -> int:
    """The first place of an extent from which on no other extent needs its blocks."""
    row = connection.execute(
        "SELECT max(place) FROM (SELECT b.place FROM blocks b "
        "JOIN blocks c ON c.parent=b.key AND c.kv_space=b.kv_space AND c.extent<>b.extent WHERE b.extent=:extent "
        "UNION ALL SELECT place+blocks-1 FROM delta_bases WHERE base=:extent)",
        {"extent": extent},
    ).fetchone()
    return 0 if row[0] is None else int(row[0]) + 1


def _add(connection: sqlite3.Connection, new: AppRow, allows: Allows) -> int | None:
    """Add an app and return its number. If there is no room, another app of its tenant is removed for it."""
    (count,) = connection.execute("SELECT count(*) FROM apps WHERE tenant=?", (new.tenant,)).fetchone()
    if count >= MAX_APPS or not allows(connection, _APP_BYTES):
        if not count:
            return None
        _forget(connection, new.tenant)
    cursor = connection.execute(
        "INSERT INTO apps (tenant, salt_digest, name, state, since, seen, requests) VALUES (?,?,?,?,?,?,?)",
        (new.tenant, new.salt_digest, new.name, new.state, new.since, new.seen, new.requests),
    )
    return cursor.lastrowid


def _new(scope: Scope, name: str, state: AppState, since: float, seen: float, requests: int = 0) -> AppRow:
    return AppRow(0, scope.tenant, salt_digest(scope.salt), name, state, since, seen, requests)


def _forget(connection: sqlite3.Connection, tenant: str) -> None:
    """Remove an app, a killed one first, else the least recently seen; its uses become uses without a name."""
    (id,) = connection.execute(
        "SELECT id FROM apps WHERE tenant=? ORDER BY state<>'killed', seen, id LIMIT 1", (tenant,)
    ).fetchone()
    connection.execute(
        "INSERT INTO app_uses SELECT extent, 0, last, used FROM app_uses WHERE app=? "
        "ON CONFLICT (extent, app) DO UPDATE SET last=max(last, excluded.last)",
        (id,),
    )
    connection.execute("DELETE FROM app_uses WHERE app=?", (id,))
    connection.execute("DELETE FROM apps WHERE id=?", (id,))


def _has_users(connection: sqlite3.Connection, extent: int) -> bool:
    return connection.execute("SELECT 1 FROM app_uses WHERE extent=? LIMIT 1", (extent,)).fetchone() is not None


def _whole(connection: sqlite3.Connection, place: UsedBlocks) -> UsedBlocks:
    row = connection.execute("SELECT live FROM extents WHERE id=?", (place.extent,)).fetchone()
    return place if row is None else UsedBlocks(place.extent, place.name, max(place.last, int(row[0]) - 1))
