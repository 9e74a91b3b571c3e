"""The SQLite file under the catalog: opening, versions, connections, transactions.

One connection reads, one writes; each is opened, used and closed under its own lock. The file is checked before every
use: if the folder was deleted, replaced or set aside, or the process forked, the connection is reopened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rekindle.errors import CacheUnusable
from rekindle.store.catalog.schema import APPLICATION_ID, MIGRATIONS, is_of_another_program, statements
from rekindle.store.files import Files

log = logging.getLogger("rekindle.store")

READ_TIMEOUT_SECONDS = 0.2  # a lookup must not wait for long: a miss is cheaper
WRITE_TIMEOUT_SECONDS = 10.0  # writing happens in the background
_PAGE_BYTES = 4096
_CUT_ATTEMPTS, _CUT_PAUSE_SECONDS, _CUT_AGAIN_SECONDS = 50, 0.005, 1.0
_SCRUB_ATTEMPTS, _SCRUB_WAIT_SECONDS = 20, 0.25

Connect = Callable[..., sqlite3.Connection]


class SharedConnection:
    """A connection and its lock. Only the holder of the lock opens, uses or closes it."""

    def __init__(self, timeout_seconds: float) -> None:
        self.lock = threading.RLock()
        self.timeout_seconds = timeout_seconds
        self.connection: sqlite3.Connection | None = None
        self.inode: tuple[int, int] | None = None
        self.in_memory = False  # a copy, because the disk is too full to open the file
        self.process = os.getpid()
        self.abandoned: list[Any] = []  # of a forked parent: closing them here could disturb it

    def forget(self) -> None:
        connection, self.connection = self.connection, None
        self.in_memory = False
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def leave_to_parent(self) -> None:
        """In a forked child: abandon the parent's connection."""
        self.abandoned.append(self.connection)
        self.connection = None
        self.process = os.getpid()


class Database:
    """A catalog file. Raises `CacheUnusable` when it cannot be opened; a corrupt one is set aside and recreated.

    `claim` creates or checks the folder before the file is opened, written or set aside.
    """

    def __init__(
        self,
        path: Path,
        files: Files,
        *,
        connect: Connect = sqlite3.connect,
        migrations: tuple[str, ...] = MIGRATIONS,
        write_timeout_seconds: float = WRITE_TIMEOUT_SECONDS,
        log_bytes: int = 8 << 20,
        durable: bool = False,
        claim: Callable[[], None] | None = None,
    ) -> None:
        """`durable`: committed transactions survive a power loss."""
        self.path = path
        self.read_only = False
        self.log_limit_bytes = log_bytes
        self._files = files
        self._connect = connect
        self._claim = claim or partial(files.make_folder, path.parent)
        self._migrations = migrations
        self._synchronous = "FULL" if durable else "NORMAL"
        self._next_cut = 0.0
        self._open_lock = threading.Lock()
        self._reader = SharedConnection(READ_TIMEOUT_SECONDS)
        self._writer = SharedConnection(write_timeout_seconds)
        with self._reader.lock:
            self._ensure(self._reader)
        _OPEN.add(self)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view of the catalog; nested calls share it. Never waits for writers."""
        with self._reader.lock:
            outer = self._reader.connection if self._reader.process == os.getpid() else None
            if outer is not None and outer.in_transaction:  # the lock is ours, so the transaction is too
                yield outer
                return
            with self._transaction(self._reader, "BEGIN") as connection:
                yield connection

    @contextmanager
    def scanning(self) -> Iterator[sqlite3.Connection]:
        """A view for long reads on a separate connection: neither lookups nor writers wait for it."""
        with self._transaction(self._reader if self.read_only else self._writer, "BEGIN") as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, all or nothing.

        Raises `CacheUnusable` if the catalog is read-only, or if its log is long and cannot be truncated: half of the
        log's limit is reserved for this transaction.
        """
        with self._writer.lock:
            self.refuse_read_only()
            self._claim()
            self._cut_log(self.log_limit_bytes // 4)
            if self.log_bytes() > self.log_limit_bytes // 2:
                raise CacheUnusable("Another process has been reading the catalog for too long: its log cannot be cut.")
            with self._transaction(self._writer, "BEGIN IMMEDIATE") as connection:
                yield connection

    @property
    def lacks_room(self) -> bool:
        """Whether it can only be read because the disk is full."""
        return self._reader.in_memory or self._writer.in_memory

    def refuse_read_only(self) -> None:
        """Raises `CacheUnusable` if nothing can be written now."""
        with self._writer.lock:
            self._ensure(self._writer)  # there may be room again
        if self._writer.in_memory:
            raise CacheUnusable(
                f"The disk of {self.path.parent} is full. Free some space, or run: rekindle cache clear"
            )
        if self.read_only:
            raise CacheUnusable(f"{self.path.parent} is read-only.")

    @contextmanager
    def _transaction(self, channel: SharedConnection, begin: str) -> Iterator[sqlite3.Connection]:
        with channel.lock:
            try:
                connection = self._ensure(channel)
                connection.execute(begin)
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException as error:
                    if connection.in_transaction:
                        with contextlib.suppress(sqlite3.Error):
                            connection.execute("ROLLBACK")
                    # A transaction that cannot be ended, or an aborted query that still holds its view, would block the
                    # next transactions.
                    if connection.in_transaction or isinstance(error, sqlite3.Error):
                        channel.forget()
                    raise
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if _is_corruption(error):
                    self._set_aside(channel)
                raise

    def size_bytes(self) -> int:
        """Bytes of the catalog and its log."""
        return self._file_bytes("") + self.log_bytes()

    def claimed_bytes(self) -> int:
        """Bytes of the catalog and the limit of its log: the log grows with every transaction."""
        return self._file_bytes("") + max(self.log_bytes(), self.log_limit_bytes)

    def log_bytes(self) -> int:
        """Bytes of the log and its index."""
        return self._file_bytes("-wal") + self._file_bytes("-shm")

    def shrink(self, *, rewrite: bool) -> None:
        """Give the space of removed rows back to the disk, and truncate the log.

        Free pages always; with `rewrite` also the free space inside pages, for which the log briefly takes as much as
        the file.
        """
        if self.read_only:
            return
        with self._writer.lock:
            while self._free_pages(max_count=max(1, self.log_limit_bytes // 32 // _PAGE_BYTES)):
                pass
            if rewrite:
                self._ensure(self._writer).execute("VACUUM")
            self._cut_log(above_bytes=0)

    def _free_pages(self, max_count: int) -> bool:
        """Truncate at most `max_count` free pages in one transaction; whether there may be more."""
        with self.writing() as connection:
            before = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
            for _ in range(min(max_count, before)):
                connection.execute("PRAGMA incremental_vacuum(1)")  # Python steps it once, which is one page
            after = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
        return 0 < after < before

    def scrub(self) -> None:
        """Rewrite the file, so that no trace of removed rows is in it, and empty the log: also after power loss.

        The log and memory briefly take as much as the file. Raises `CacheUnusable` if another process reads for too
        long to empty the log.
        """
        self.refuse_read_only()
        with self._writer.lock:
            self._cut_log(above_bytes=0)
            # Zeroing deleted rows is not enough: rebalanced pages keep copies of rows that moved away.
            self._ensure(self._writer).execute("PRAGMA checkpoint_fullfsync=1")  # macOS: past the drive's cache
            self._ensure(self._writer).execute("VACUUM")
            for _ in range(_SCRUB_ATTEMPTS):
                self._next_cut = 0.0
                if self._cut_log(above_bytes=0, wait_seconds=_SCRUB_WAIT_SECONDS):
                    # The log now only holds later writes. SQLite syncs the file when it moves the log there, but not
                    # the log when it empties it.
                    self._files.sync_file(Path(f"{self.path}-wal"))
                    self._files.sync_folder(self.path.parent)
                    return
        raise CacheUnusable(
            f"Another process has been reading {self.path} for too long, so its log still holds what was removed. "
            "Run it again when that process is done."
        )

    def remove(self) -> None:
        """Remove the file and its log, which needs no room. The next use makes a new one."""
        with self._writer.lock, self._reader.lock:
            self._claim()
            self._writer.forget()
            self._reader.forget()
            for suffix in ("-wal", "-shm", ""):
                self._files.remove(Path(f"{self.path}{suffix}"))

    def discard(self) -> None:
        """Set aside a catalog that cannot be repaired."""
        with self._writer.lock:
            self._ensure(self._writer)
            self._set_aside(self._writer)

    def close(self) -> None:
        """Close both connections. Idempotent; a later use opens them again."""
        for channel in (self._reader, self._writer):
            with channel.lock:
                channel.forget()

    def before_fork(self) -> None:
        """SQLite must not be carried through a fork: the child would rely on locks that it does not hold."""
        for channel in (self._reader, self._writer):
            channel.lock.acquire()
            if channel.connection is not None and not channel.connection.in_transaction:
                channel.forget()

    def after_fork(self) -> None:
        """Resume in parent and child; each opens its own connections when needed."""
        for channel in (self._writer, self._reader):
            channel.lock.release()

    def _cut_log(self, above_bytes: int, wait_seconds: float = 0.0) -> bool:
        """Move the log into the file, if SQLite did not: others were reading, or moving it themselves.

        With `wait_seconds` it is tried once, while writers wait. Returns whether the log was empty at that moment.
        """
        if self.log_bytes() <= above_bytes or time.monotonic() < self._next_cut:
            return False
        connection = self._ensure(self._writer)
        # SQLite holds its locks while it waits.
        connection.execute(f"PRAGMA busy_timeout={int(wait_seconds * 1000)}")
        try:
            for _ in range(1 if wait_seconds else _CUT_ATTEMPTS):
                try:
                    busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                except sqlite3.OperationalError:
                    busy = 1
                if not busy:
                    return True
                time.sleep(_CUT_PAUSE_SECONDS)
            self._next_cut = time.monotonic() + _CUT_AGAIN_SECONDS
            return False
        finally:
            connection.execute(f"PRAGMA busy_timeout={int(self._writer.timeout_seconds * 1000)}")

    def _file_bytes(self, suffix: str) -> int:
        try:
            return Path(f"{self.path}{suffix}").stat().st_size
        except OSError:
            return 0

    def _ensure(self, channel: SharedConnection) -> sqlite3.Connection:
        """The connection, reopened if the process forked or the file was replaced."""
        if channel.process != os.getpid():
            channel.leave_to_parent()
        if channel.connection is not None and _inode(self.path) != channel.inode:
            channel.forget()  # deleted or replaced
        if channel.in_memory and self._files.has_room(self.path.parent):
            channel.forget()
        if channel.connection is None:
            with self._open_lock:
                self._open(channel)
        assert channel.connection is not None
        return channel.connection

    def _open(self, channel: SharedConnection) -> None:
        try:
            try:
                self._open_file(channel)
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if not _is_corruption(error):
                    raise
                self._set_aside(channel)
                self._open_file(channel)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            channel.forget()
            raise CacheUnusable(f"The cache's catalog {self.path} cannot be opened: {error}.") from error
        except OSError as error:
            channel.forget()
            raise CacheUnusable(f"The cache folder {self.path.parent} cannot be used: {error}.") from error
        except BaseException:
            channel.forget()
            raise

    def _open_file(self, channel: SharedConnection) -> None:
        self._claim()
        self.read_only = not self._prepare_file()
        channel.inode = _inode(self.path)
        if self.read_only:
            channel.connection = self._connect_read_only()
            self._check_version(channel.connection)
            return
        try:
            # Wait for a file that is being created, maybe by several processes at once.
            new = self._file_bytes("") <= _PAGE_BYTES
            channel.connection = self._connection(self._writer.timeout_seconds if new else channel.timeout_seconds)
            self._migrate(channel.connection)
            channel.connection.execute(f"PRAGMA busy_timeout={int(channel.timeout_seconds * 1000)}")
        except sqlite3.OperationalError:
            if self._files.has_room(self.path.parent):
                raise
            channel.forget()
            channel.connection = self._copy_in_memory()
            if self._check_version(channel.connection) != len(self._migrations):
                raise  # a new file: there is nothing to read in it
            self.read_only = channel.in_memory = True

    def _copy_in_memory(self) -> sqlite3.Connection:
        """What the file has now. Others write to it as soon as there is room, which SQLite cannot notice while it has
        no room for the index of its log."""
        address = f"{self.path.resolve().as_uri()}?mode=ro&immutable=1"
        copied = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        with contextlib.closing(self._connect(address, uri=True, isolation_level=None)) as file:
            file.backup(copied)
        return copied

    def _prepare_file(self) -> bool:
        """Create the file with private permissions; SQLite gives its log the same. False if it can only be read."""
        try:
            if not self.path.exists():
                with contextlib.suppress(FileExistsError):
                    self._files.close(self._files.create(self.path))
        except PermissionError:
            if not self.path.exists():
                raise
            return False
        except OSError:
            if self.path.parent.is_dir() and self.path.exists():
                return False
            raise
        return os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)

    def _connection(self, timeout_seconds: float) -> sqlite3.Connection:
        connection = self._connect(
            self.path, timeout=timeout_seconds, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        try:
            if self._check_version(connection) == 0:
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            _use_log(connection, timeout_seconds)
            # NORMAL may lose the last commits in a power loss: a missing entry, never a wrong one.
            connection.execute(f"PRAGMA synchronous={self._synchronous}")
            connection.execute(f"PRAGMA fullfsync={self._synchronous == 'FULL':d}")  # macOS: past the drive's cache
            connection.execute("PRAGMA secure_delete=ON")  # removed tokens are overwritten
            connection.execute("PRAGMA cache_size=-4096")
            connection.execute("PRAGMA temp_store=MEMORY")
            connection.execute(f"PRAGMA wal_autocheckpoint={max(1, self.log_limit_bytes // 8 // _PAGE_BYTES)}")
            connection.execute(f"PRAGMA journal_size_limit={self.log_limit_bytes // 8}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect_read_only(self) -> sqlite3.Connection:
        # `immutable` is for folders where the log's index cannot be created: then nobody can write to it either.
        for mode in ("mode=ro", "mode=ro&immutable=1"):
            address = f"{self.path.resolve().as_uri()}?{mode}"
            connection = self._connect(
                address, uri=True, timeout=READ_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
                return connection
            except sqlite3.OperationalError:
                connection.close()
                if "immutable" in mode:
                    raise
        raise AssertionError

    def _check_version(self, connection: sqlite3.Connection) -> int:
        # The tables first: another process may create them and set the version between the two reads.
        tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        application = int(connection.execute("PRAGMA application_id").fetchone()[0])
        if tables and application != APPLICATION_ID:
            raise CacheUnusable(f"{self.path} is not a Rekindle catalog. Choose another folder for the cache.")
        if version > len(self._migrations):
            raise CacheUnusable(
                f"{self.path} was written by a newer Rekindle (format {version}, this one knows "
                f"{len(self._migrations)}). Upgrade, or choose another folder for the cache."
            )
        return version

    def _migrate(self, connection: sqlite3.Connection) -> None:
        if self._check_version(connection) == len(self._migrations):
            return
        connection.execute("BEGIN EXCLUSIVE")
        said: list[tuple[str]] = []
        try:
            done = self._check_version(connection)  # another process may have been first
            for number, script in enumerate(self._migrations[done:], start=done + 1):
                for statement in statements(script):
                    said += connection.execute(statement).fetchall()
                connection.execute(f"PRAGMA user_version={number}")
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # our number into the file itself
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        for (sentence,) in said:
            log.warning("%s: %s.", self.path.parent, sentence)

    def _set_aside(self, channel: SharedConnection) -> None:
        """Rename an unreadable catalog, unless it belongs to another program; other processes find the new file."""
        channel.forget()
        if _inode(self.path) != channel.inode:
            return  # another process did it already
        self._claim()
        if is_of_another_program(self._files.read(self.path, 100)):
            raise CacheUnusable(f"{self.path} is not a Rekindle catalog. Choose another folder for the cache.")
        stamp = f"broken-{time.time_ns()}"
        for suffix in ("-wal", "-shm", ""):  # the file last: while it exists, nobody creates a new log
            with contextlib.suppress(OSError):
                Path(f"{self.path}{suffix}").replace(f"{self.path}.{stamp}{suffix}")


def _is_corruption(error: sqlite3.DatabaseError | UnicodeDecodeError) -> bool:
    if isinstance(error, UnicodeDecodeError):  # a text of the schema, or of SQLite's error, is not UTF-8
        return True
    code = getattr(error, "sqlite_errorcode", None)  # Python 3.11
    if code is not None:
        return code & 0xFF in (11, 26)  # SQLITE_CORRUPT, SQLITE_NOTADB
    return "malformed" in str(error) or "not a database" in str(error)


def _use_log(connection: sqlite3.Connection, timeout_seconds: float) -> None:
    """Write ahead. SQLite itself does not wait where several processes do this to a new file at once."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(_CUT_PAUSE_SECONDS)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


# SQLite must not be in use while its process forks: every open database stops before and resumes in parent and child.
_OPEN: weakref.WeakSet[Database] = weakref.WeakSet()


class _Stopped(threading.local):
    """The databases that the forking thread has stopped."""

    databases: list[Database] = []  # noqa: RUF012  (always replaced, never changed)


_stopped = _Stopped()


def _before_fork() -> None:
    _stopped.databases = list(_OPEN)
    for database in _stopped.databases:
        database.before_fork()


def _after_fork() -> None:
    for database in reversed(_stopped.databases):
        database.after_fork()
    _stopped.databases = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
