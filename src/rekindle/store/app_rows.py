"""The apps of a catalog, their states, and which of them used which blocks. Functions take the transaction.

    apps   one row an app: its state, since when, and the process that is watched for it
    users  one row for an app and an extent: the app used the extent's blocks up to and with place `last`

Uses of an extent are always of its first blocks, so one number says which. Who gives no name is user 0: it has no
row among the apps, counts as in the background and is never killed. Users of an extent are noted from the first app
on that comes across it: what has none belongs to nobody who gave a name.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rekindle.core.app import AppState, Asker

NOBODY = 0  # the user who gave no name
MOST_APPS = 1024  # of a tenant
MOST_USERS = 16  # of an extent
MOST_ROWS = 50_000  # of users in all
_LATE_SECONDS = 600.0  # what was said of an app so long after a use that is only now written, a wrong clock said
_APP_BYTES, _USER_BYTES = 8192, 4096  # what a row may make the catalog grow by: a page of each index, at worst


@dataclass(frozen=True)
class AppRow:
    """An app as the catalog knows it. `process` and `born` are the id and the start of the process that is watched."""

    id: int
    tenant: str
    name: str
    state: AppState
    since: float
    seen: float
    requests: int = 0
    process: int | None = None
    born: float | None = None


# Times are compared with others: in a damaged catalog they may be anything.
_COLUMNS = "id, tenant, name, state, CAST(since AS REAL), CAST(seen AS REAL), requests, process, born"


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many apps of each state use something. Nobody at all counts as one in the background."""

    foreground: int = 0
    background: int = 0
    killed: int = 0

    @property
    def live(self) -> int:
        """How many of them may ask again."""
        return self.foreground + self.background

    @property
    def dead(self) -> bool:
        """Whether it is of killed apps alone."""
        return self.killed > 0 and self.live == 0


@dataclass(frozen=True, slots=True)
class Place:
    """The blocks of an extent up to and with `last`; the name tells whether it is still the same one."""

    extent: int
    name: str
    last: int


class Allows(Protocol):
    """Says whether the catalog may grow by so many bytes in this transaction."""

    def __call__(self, connection: sqlite3.Connection, size_bytes: int, /) -> bool: ...


@dataclass(frozen=True)
class AppUse:
    """Somebody used blocks: an app, or, without one, nobody who gave a name.

    `requests` is how many requests that was, if it is to be counted here.
    """

    app: Asker | None
    places: Sequence[Place]
    at: float
    allows: Allows
    requests: int = 0

    def write(self, connection: sqlite3.Connection) -> None:
        """Note it, as far as there is room."""
        if self.app is None:
            for place in self.places:
                if _has_users(connection, place.extent):
                    add_user(connection, place, NOBODY, self.at, self.allows)
            return
        id = see(connection, self.app, self.at, self.allows, self.requests)
        for place in self.places:
            if not _has_users(connection, place.extent):  # somebody kept it who gave no name
                add_user(connection, _whole(connection, place), NOBODY, self.at, self.allows)
            if id is not None:
                add_user(connection, place, id, self.at, self.allows)


def see(connection: sqlite3.Connection, asker: Asker, now: float, allows: Allows, requests: int = 0) -> int | None:
    """An app asks: its number; None if it is new and there is no room. One that was killed is alive again.

    But not if it was killed after it began to ask: requests are noted late.
    """
    row = app(connection, asker.tenant, asker.name)
    began = now if asker.at is None else min(asker.at, now)
    if row is None:
        state = asker.state or "foreground"
        return _add(connection, AppRow(0, asker.tenant, asker.name, state, began, now, requests), allows)
    state = _state(row, asker, now)
    since = row.since if state == row.state else began
    connection.execute(
        "UPDATE apps SET state=?, since=?, seen=?, requests=requests+? WHERE id=?",
        (state, since, now, requests, row.id),
    )
    return row.id


def _state(row: AppRow, asker: Asker, now: float = math.inf) -> AppState:
    """The state of an app that asks: as it says, unless somebody said something of it since it began to ask."""
    if asker.at is not None and asker.at <= row.since <= now + _LATE_SECONDS:
        return row.state
    return asker.state or ("foreground" if row.state == "killed" else row.state)


def crowd_of(connection: sqlite3.Connection, asker: Asker) -> Crowd:
    """An app that asks, as a crowd of one."""
    row = app(connection, asker.tenant, asker.name)
    state = asker.state or "foreground" if row is None else _state(row, asker)
    return Crowd(int(state == "foreground"), int(state == "background"), int(state == "killed"))


def set_state(
    connection: sqlite3.Connection, tenant: str, name: str, state: AppState, now: float, allows: Allows
) -> bool:
    """Somebody says in what state an app is, new or not; False if it is new and there is no room for it."""
    row = app(connection, tenant, name)
    if row is None:
        return _add(connection, AppRow(0, tenant, name, state, now, now), allows) is not None
    if row.state != state:
        connection.execute("UPDATE apps SET state=?, since=? WHERE id=?", (state, now, row.id))
    if state == "killed":
        connection.execute("UPDATE apps SET process=NULL, born=NULL WHERE id=?", (row.id,))
    return True


def watch(connection: sqlite3.Connection, tenant: str, name: str, process: int, born: float) -> None:
    """An app lives as long as that process does."""
    connection.execute("UPDATE apps SET process=?, born=? WHERE tenant=? AND name=?", (process, born, tenant, name))


def kill(connection: sqlite3.Connection, row: AppRow, now: float) -> None:
    """The process that was watched for an app ended; nothing if another is watched by now."""
    connection.execute(
        "UPDATE apps SET state='killed', since=?, process=NULL, born=NULL WHERE id=? AND process IS ? AND born IS ?",
        (now, row.id, row.process, row.born),
    )


def apps(connection: sqlite3.Connection, tenant: str | None = None) -> list[AppRow]:
    """The apps of a tenant, or of all, those seen last at the end."""
    select = f"SELECT {_COLUMNS} FROM apps WHERE ?1 IS NULL OR tenant=?1 ORDER BY seen, id"
    return [AppRow(*row) for row in connection.execute(select, (tenant,)).fetchall()]


def app(connection: sqlite3.Connection, tenant: str, name: str) -> AppRow | None:
    """The app of that name."""
    select = f"SELECT {_COLUMNS} FROM apps WHERE tenant=? AND name=?"
    row = connection.execute(select, (tenant, name)).fetchone()
    return None if row is None else AppRow(*row)


def any_known(connection: sqlite3.Connection) -> bool:
    """Whether any app gave its name so far."""
    return connection.execute("SELECT 1 FROM apps LIMIT 1").fetchone() is not None


def forget_all(connection: sqlite3.Connection) -> None:
    """Forget every app and what it used."""
    connection.execute("DELETE FROM apps")
    connection.execute("DELETE FROM users")


def add_user(connection: sqlite3.Connection, place: Place, app: int, now: float, allows: Allows) -> None:
    """An app used an extent's first blocks; nothing if it is another extent by now.

    Rows are bounded, of an extent and of all. What is deleted for a new one leaves a place to write to, so the
    catalog does not grow. Where nothing can be, the extent has no users at all afterwards: some would be worse, since
    it would be taken for private when those are killed.
    """
    if connection.execute("SELECT 1 FROM extents WHERE id=? AND name=?", (place.extent, place.name)).fetchone() is None:
        return
    known = connection.execute("SELECT 1 FROM users WHERE extent=? AND app=?", (place.extent, app)).fetchone()
    if known is None:
        own, every = connection.execute(
            "SELECT (SELECT count(*) FROM users WHERE extent=?), (SELECT count(*) FROM users)", (place.extent,)
        ).fetchone()
        if own >= MOST_USERS:
            _merge_user(connection, place.extent)
        elif every >= MOST_ROWS or not allows(connection, _USER_BYTES):
            if own == every:  # there is no other that could make place
                connection.execute("DELETE FROM users WHERE extent=?", (place.extent,))
                return
            _drop_users(connection, place.extent)
    connection.execute(
        "INSERT INTO users VALUES (?,?,?,?) ON CONFLICT (extent, app) DO UPDATE SET last=max(last, excluded.last), "
        "used=excluded.used",
        (place.extent, app, place.last, now),
    )


def crowds(connection: sqlite3.Connection, *, whole: bool) -> dict[int, Crowd]:
    """Who uses the last live block of each extent, or, with `whole`, any of its blocks; those of nobody left out."""
    rows = connection.execute(
        "SELECT u.extent, total(a.state='foreground'), total(a.state IS NULL OR a.state='background'), "
        "total(a.state='killed') FROM users u JOIN extents e ON e.id=u.extent LEFT JOIN apps a ON a.id=u.app "
        "WHERE ? OR u.last>=e.live-1 GROUP BY u.extent",
        (whole,),
    )
    return {extent: Crowd(*map(int, counts)) for extent, *counts in rows}


@dataclass(frozen=True, slots=True)
class Private:
    """The blocks of an extent from `start` on are of killed apps alone."""

    extent: int
    start: int
    block_bytes: int  # what one of them takes, about


def private(connection: sqlite3.Connection, killed_before: float, extent: int | None = None) -> list[Private]:
    """What is of apps alone that have been killed since then, in all extents or one, the deepest first.

    Whether something else hangs on it is for `hung_on` to say. Pinned extents are nobody's private ones.
    """
    rows = connection.execute(
        "SELECT u.extent, e.bytes / max(1, e.blocks), "
        "max(CASE WHEN a.state='killed' AND a.since<=?1 THEN -1 ELSE u.last END) AS shared "
        "FROM users u JOIN extents e ON e.id=u.extent LEFT JOIN apps a ON a.id=u.app "
        "WHERE e.state='live' AND NOT e.pinned AND (?2 IS NULL OR e.id=?2) "
        "GROUP BY u.extent HAVING shared<e.live-1 ORDER BY e.depth DESC",
        (killed_before, extent),
    )
    return [Private(id, shared + 1, size_bytes) for id, size_bytes, shared in rows.fetchall()]


def hung_on(connection: sqlite3.Connection, extent: int) -> int:
    """From which place on nothing of another extent hangs or stands on an extent's blocks."""
    row = connection.execute(
        "SELECT max(place) FROM (SELECT b.place FROM blocks b "
        "JOIN blocks c ON c.parent=b.key AND c.shelf=b.shelf AND c.extent<>b.extent WHERE b.extent=?1 "
        "UNION ALL SELECT place+blocks-1 FROM anchors WHERE anchor=?1)",
        (extent,),
    ).fetchone()
    return 0 if row[0] is None else int(row[0]) + 1


@dataclass(frozen=True)
class Share:
    """What an app has in a cache: bytes that it used, and those of them that no other did."""

    size_bytes: int = 0
    private_bytes: int = 0


def shares(connection: sqlite3.Connection, tenant: str | None = None) -> dict[int, Share]:
    """What each app has, by its number. What several apps used counts for each of them."""
    rows = connection.execute(
        "SELECT u.app, e.bytes, e.blocks, min(u.last+1, e.live), (SELECT max(o.last)+1 FROM users o "
        "WHERE o.extent=u.extent AND o.app<>u.app) FROM users u JOIN apps a ON a.id=u.app "
        "JOIN extents e ON e.id=u.extent WHERE e.state='live' AND (?1 IS NULL OR a.tenant=?1)",
        (tenant,),
    )
    found: dict[int, Share] = {}
    for app, size_bytes, blocks, used, others in rows:
        had = found.get(app, Share())
        own = size_bytes * used // max(1, blocks)
        alone = size_bytes * max(0, used - (others or 0)) // max(1, blocks)
        found[app] = Share(had.size_bytes + own, had.private_bytes + alone)
    return found


def _add(connection: sqlite3.Connection, new: AppRow, allows: Allows) -> int | None:
    """Add an app; its number. Where there is no room, another of its tenant is forgotten for it."""
    (count,) = connection.execute("SELECT count(*) FROM apps WHERE tenant=?", (new.tenant,)).fetchone()
    if count >= MOST_APPS or not allows(connection, _APP_BYTES):
        if not count:
            return None
        _forget(connection, new.tenant)
    cursor = connection.execute(
        "INSERT INTO apps (tenant, name, state, since, seen, requests) VALUES (?,?,?,?,?,?)",
        (new.tenant, new.name, new.state, new.since, new.seen, new.requests),
    )
    return cursor.lastrowid


def _forget(connection: sqlite3.Connection, tenant: str) -> None:
    """Forget an app, a killed one first, else the longest unseen; what it used is from now on of no name."""
    (id,) = connection.execute(
        "SELECT id FROM apps WHERE tenant=? ORDER BY state<>'killed', seen, id LIMIT 1", (tenant,)
    ).fetchone()
    for (extent,) in connection.execute("SELECT extent FROM users WHERE app=?", (id,)).fetchall():
        _unname(connection, extent, id)
    connection.execute("DELETE FROM apps WHERE id=?", (id,))


def _unname(connection: sqlite3.Connection, extent: int, app: int) -> None:
    """What an app used of an extent is from now on of no name, and so never taken for private."""
    (last,) = connection.execute("SELECT last FROM users WHERE extent=? AND app=?", (extent, app)).fetchone()
    connection.execute("UPDATE users SET last=max(last, ?) WHERE extent=? AND app=0", (last, extent))
    connection.execute("UPDATE OR IGNORE users SET app=0 WHERE extent=? AND app=?", (extent, app))
    connection.execute("DELETE FROM users WHERE extent=? AND app=? AND app<>0", (extent, app))


def _merge_user(connection: sqlite3.Connection, extent: int) -> None:
    """Make place for another user of an extent: a killed one goes, else the oldest loses its name."""
    app, state = connection.execute(
        "SELECT u.app, a.state FROM users u LEFT JOIN apps a ON a.id=u.app WHERE u.extent=? AND u.app<>0 "
        "ORDER BY a.state IS NOT 'killed', u.used LIMIT 1",
        (extent,),
    ).fetchone()
    if state == "killed":
        connection.execute("DELETE FROM users WHERE extent=? AND app=?", (extent, app))
    else:
        _unname(connection, extent, app)


def _drop_users(connection: sqlite3.Connection, extent: int) -> None:
    """Make place for a user of an extent: forget all users of another, so that nobody takes that one for private.

    One that no killed app used, if there is one, else the one that was used longest ago.
    """
    (other,) = connection.execute(
        "SELECT u.extent FROM users u LEFT JOIN apps a ON a.id=u.app WHERE u.extent<>? GROUP BY u.extent "
        "ORDER BY total(a.state IS 'killed')>0, max(u.used) LIMIT 1",
        (extent,),
    ).fetchone()
    connection.execute("DELETE FROM users WHERE extent=?", (other,))


def _has_users(connection: sqlite3.Connection, extent: int) -> bool:
    return connection.execute("SELECT 1 FROM users WHERE extent=? LIMIT 1", (extent,)).fetchone() is not None


def _whole(connection: sqlite3.Connection, place: Place) -> Place:
    row = connection.execute("SELECT live FROM extents WHERE id=?", (place.extent,)).fetchone()
    return place if row is None else Place(place.extent, place.name, max(place.last, int(row[0]) - 1))
