"""What removing leaves behind: files that nothing lists, rows that nothing refers to, pages and a log with old bytes.

remove_traces   takes all of that out of a folder, and returns when it is on the medium: power loss brings nothing back
clear           removes everything that is kept and remembered, and its traces
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Container, Set

from rekindle.errors import CacheUnusable
from rekindle.store.catalog import app_rows, catalog, variant_rows
from rekindle.store.disk import DiskStore

_WAIT_SECONDS, _PAUSE_SECONDS = 30.0, 0.02  # for a keep that is under way
_TABLES = ("requests", "identities", "apps", "app_uses", "seen_keys", "bytes_written")


def clear(disk: DiskStore) -> int:
    """Remove everything that was kept or remembered when it was called, pinned or not; how many files that were.

    What others keep meanwhile stays, unless it hangs on something that goes. Raises `CacheUnusable` if it cannot be
    finished; what was done till then stays done, and running it again does the rest.
    """
    if disk.database.read_only:
        raise CacheUnusable(f"{disk.folder} can only be read: nothing can be removed from it.")
    try:
        return _clear(disk)
    except (OSError, sqlite3.Error) as error:
        raise CacheUnusable(f"Not everything could be removed from {disk.folder}: {error}. Run it again.") from error


def _clear(disk: DiskStore) -> int:
    started, going = disk.clock(), disk.entries()
    with disk.database.reading() as connection:
        (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM extents").fetchone()
    disk.room.cut_all(going)
    writing = being_written(disk)  # computed before, or a copy of what went: nothing that comes later is
    await_writers(lambda: writing & being_written(disk))
    late = [row for row in disk.entries() if row.id in writing or row.kept <= started]
    disk.room.cut_all(late)
    variant_rows.sweep(disk.database)
    with disk.database.writing() as connection:
        for table in _TABLES:
            connection.execute(f"DELETE FROM {table}")
        connection.execute("UPDATE totals SET cleared=?", (disk.clock(),))
        catalog.pin(connection, (), pinned=True)
    gone = {row.id for row in late} | writing
    remove_traces(disk, lambda row: row.id <= last or row.id in gone)
    return len(going) + len(late)


def being_written(disk: DiskStore, kv_spaces: Container[int] | None = None) -> set[int]:
    """The extents, of these KV spaces or of all, that somebody alive is writing."""
    disk.room.recover()
    with disk.database.reading() as connection:
        rows = catalog.extents(connection, "state='writing' AND state<>'live'")
    return {row.id for row in rows if kv_spaces is None or row.kv_space in kv_spaces}


def await_writers(writing: Callable[[], Set[int]]) -> None:
    """Wait until nothing is written any more of what `writing` says. Raises `CacheUnusable` if that takes too long."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while writing():
        if time.monotonic() > deadline:
            raise CacheUnusable("Another process has been writing to the cache for too long. Run it again.")
        time.sleep(_PAUSE_SECONDS)


def remove_traces(disk: DiskStore, must_go: Callable[[catalog.Extent], bool]) -> None:
    """Take out of files and catalog what removed extents and rows left there.

    Raises `CacheUnusable` if the file of an extent that must go cannot be removed now, or the log cannot be emptied.
    """
    room, database = disk.room, disk.database
    room.recover()
    room.sweep()
    room.remove_strays()
    with database.writing() as connection:
        catalog.sweep_kv_spaces(connection)
        app_rows.sweep(connection)
    longer = database.size_bytes() - database.log_limit_bytes
    if longer > 0:  # than the log may become anyway
        room.hold_limit(spare_bytes=longer)
    disk.files.sync_folder(disk.extents.folder)  # also for what others removed and did not sync
    database.scrub()
    with database.reading() as connection:
        left = catalog.extents(connection, "state IN ('dropping', 'quarantined') AND state<>'live'")
    if any(map(must_go, left)):
        raise CacheUnusable(
            f"Files of {disk.folder} cannot be removed: perhaps another process has them open. "
            "Run it again when that process is done."
        )
