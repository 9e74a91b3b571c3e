"""The SQLite file under the catalog: opening, versions, connections, transactions.

One connection reads, one writes; each is opened, used and closed under its own lock. The file is looked at before every
use: if the folder was deleted, replaced or set aside, or the process forked, the connection is opened anew.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rekindle.errors import CacheUnusable
from rekindle.store import forks
from rekindle.store.files import Files
from rekindle.store.schema import APPLICATION_ID, MIGRATIONS

READ_TIMEOUT_SECONDS = 0.2  # a lookup must not wait for long: a miss is cheaper
WRITE_TIMEOUT_SECONDS = 10.0  # writing happens in the background
_PAGE_BYTES = 4096
_CUT_ATTEMPTS, _CUT_PAUSE_SECONDS, _CUT_AGAIN_SECONDS = 50, 0.005, 1.0
_SCRUB_ATTEMPTS = 20

Connect = Callable[..., sqlite3.Connection]


class _Side:
    """One connection and its lock. Only who holds the lock opens, uses or closes it."""

    def __init__(self, timeout_seconds: float) -> None:
        self.lock = threading.RLock()
        self.timeout_seconds = timeout_seconds
        self.connection: sqlite3.Connection | None = None
        self.inode: tuple[int, int] | None = None
        self.process = os.getpid()
        self.abandoned: list[Any] = []  # of a forked parent: closing them here could disturb it

    def forget(self) -> None:
        """Close the connection."""
        connection, self.connection = self.connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def leave_to_parent(self) -> None:
        """In a forked child: use nothing of the parent's."""
        self.abandoned.append(self.connection)
        self.connection = None
        self.process = os.getpid()


class Database:
    """A catalog file. Raises `CacheUnusable` when it cannot be opened; a corrupt one is set aside and made anew."""

    def __init__(
        self,
        path: Path,
        files: Files,
        *,
        connect: Connect = sqlite3.connect,
        migrations: tuple[str, ...] = MIGRATIONS,
        write_timeout_seconds: float = WRITE_TIMEOUT_SECONDS,
        log_bytes: int = 8 << 20,
    ) -> None:
        self.path = path
        self.read_only = False
        self.log_limit_bytes = log_bytes
        self._files = files
        self._connect = connect
        self._migrations = migrations
        self._next_cut = 0.0
        self._open_lock = threading.Lock()
        self._reader = _Side(READ_TIMEOUT_SECONDS)
        self._writer = _Side(write_timeout_seconds)
        with self._reader.lock:
            self._ensure(self._reader)
        forks.watch(self)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view of the catalog; within another one, the same. Never waits for writers."""
        with self._reader.lock:
            outer = self._reader.connection if self._reader.process == os.getpid() else None
            if outer is not None and outer.in_transaction:  # whose else could it be: the lock is ours
                yield outer
                return
            with self._transaction(self._reader, "BEGIN") as connection:
                yield connection

    @contextmanager
    def scanning(self) -> Iterator[sqlite3.Connection]:
        """A view for long reads: beside `reading`, so that no lookup waits, and no writer of another process."""
        with self._transaction(self._reader if self.read_only else self._writer, "BEGIN") as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing.

        Raises `CacheUnusable` if the catalog can only be read, or if its log is long and cannot be cut: half of what
        the log may take is for this transaction.
        """
        if self.read_only:
            raise CacheUnusable(f"{self.path.parent} can only be read.")
        with self._writer.lock:
            self._cut_log(self.log_limit_bytes // 4)
            if self.log_bytes() > self.log_limit_bytes // 2:
                raise CacheUnusable("Somebody has been reading the catalog for too long: its log cannot be cut.")
            with self._transaction(self._writer, "BEGIN IMMEDIATE") as connection:
                yield connection

    @contextmanager
    def _transaction(self, side: _Side, begin: str) -> Iterator[sqlite3.Connection]:
        with side.lock:
            try:
                connection = self._ensure(side)
                connection.execute(begin)
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException as error:
                    if connection.in_transaction:
                        with contextlib.suppress(sqlite3.Error):
                            connection.execute("ROLLBACK")
                    # A transaction that cannot be ended, or a query that broke off and still holds its view, would
                    # block what comes after it.
                    if connection.in_transaction or isinstance(error, sqlite3.Error):
                        side.forget()
                    raise
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if _is_corruption(error):
                    self._set_aside(side)
                raise

    def size_bytes(self) -> int:
        """Bytes of the catalog and its log."""
        return self._file_bytes("") + self.log_bytes()

    def claimed_bytes(self) -> int:
        """The same, but with all the room that the log may take: it grows with every transaction."""
        return self._file_bytes("") + max(self.log_bytes(), self.log_limit_bytes)

    def log_bytes(self) -> int:
        """Bytes of the log and its index."""
        return self._file_bytes("-wal") + self._file_bytes("-shm")

    def shrink(self) -> None:
        """Give the space of removed rows back to the disk, and cut the log."""
        if not self.read_only:
            with self._writer.lock:
                self._ensure(self._writer).execute("PRAGMA incremental_vacuum").fetchall()
                self._cut_log(above_bytes=0)

    def scrub(self) -> None:
        """Write the file anew, so that no trace of removed rows is in it, and empty the log.

        For a moment the log takes as much as the file, and memory too. Raises `CacheUnusable` if another process
        has been reading for so long that the log could not be emptied.
        """
        if self.read_only:
            raise CacheUnusable(f"{self.path.parent} can only be read.")
        with self._writer.lock:
            self._cut_log(above_bytes=0)
            # Zeroing what is deleted is not enough: pages that were balanced keep copies of rows that moved away.
            self._ensure(self._writer).execute("VACUUM")
            for _ in range(_SCRUB_ATTEMPTS):
                self._next_cut = 0.0
                self._cut_log(above_bytes=0)
                if self._file_bytes("-wal") == 0:
                    return
        raise CacheUnusable(
            f"Another process has been reading {self.path} for too long, so its log still holds what was removed. "
            "Run it again when that process is done."
        )

    def discard(self) -> None:
        """Set the catalog aside, whatever it says: it cannot be mended."""
        with self._writer.lock:
            self._ensure(self._writer)
            self._set_aside(self._writer)

    def close(self) -> None:
        """Close both connections. Idempotent; a later use opens them again."""
        for side in (self._reader, self._writer):
            with side.lock:
                side.forget()

    def before_fork(self) -> None:
        """SQLite must not be carried through a fork: the child would believe in locks that it does not have."""
        for side in (self._reader, self._writer):
            side.lock.acquire()
            if side.connection is not None and not side.connection.in_transaction:
                side.forget()

    def after_fork(self) -> None:
        """Go on, in parent and child alike; each opens its own connections when it needs them."""
        for side in (self._writer, self._reader):
            side.lock.release()

    def _cut_log(self, above_bytes: int) -> None:
        """Move the log into the file, if that did not happen by itself: others were reading, or at it themselves."""
        if self.log_bytes() <= above_bytes or time.monotonic() < self._next_cut:
            return
        connection = self._ensure(self._writer)
        connection.execute("PRAGMA busy_timeout=0")  # SQLite would wait with its hands on the locks
        try:
            for _ in range(_CUT_ATTEMPTS):
                try:
                    busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                except sqlite3.OperationalError:
                    busy = 1
                if not busy:
                    return
                time.sleep(_CUT_PAUSE_SECONDS)
            self._next_cut = time.monotonic() + _CUT_AGAIN_SECONDS
        finally:
            connection.execute(f"PRAGMA busy_timeout={int(self._writer.timeout_seconds * 1000)}")

    def _file_bytes(self, suffix: str) -> int:
        try:
            return Path(f"{self.path}{suffix}").stat().st_size
        except OSError:
            return 0

    def _ensure(self, side: _Side) -> sqlite3.Connection:
        """The side's connection, opened anew if the process forked or the file is another one by now."""
        if side.process != os.getpid():
            side.leave_to_parent()
        if side.connection is not None and _inode(self.path) != side.inode:
            side.forget()  # deleted or replaced meanwhile
        if side.connection is None:
            with self._open_lock:
                self._open(side)
        assert side.connection is not None
        return side.connection

    def _open(self, side: _Side) -> None:
        try:
            try:
                self._open_file(side)
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if not _is_corruption(error):
                    raise
                self._set_aside(side)
                self._open_file(side)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            side.forget()
            raise CacheUnusable(f"The cache's catalog {self.path} cannot be opened: {error}.") from error
        except OSError as error:
            side.forget()
            raise CacheUnusable(f"The cache folder {self.path.parent} cannot be used: {error}.") from error
        except BaseException:
            side.forget()
            raise

    def _open_file(self, side: _Side) -> None:
        self.read_only = not self._prepare_file()
        side.inode = _inode(self.path)
        if self.read_only:
            side.connection = self._connect_read_only()
            self._check_version(side.connection)
        else:
            side.connection = self._connection(side.timeout_seconds)
            self._migrate(side.connection)

    def _prepare_file(self) -> bool:
        """Make folder and file with narrow rights; SQLite gives its log the same. False if they can only be read."""
        try:
            self._files.make_folder(self.path.parent)
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
            connection.execute("PRAGMA journal_mode=WAL").fetchall()
            connection.execute("PRAGMA synchronous=NORMAL")  # a lost last commit is a missing entry, never a wrong one
            connection.execute("PRAGMA secure_delete=ON")  # tokens of removed rows are nobody's any more
            connection.execute("PRAGMA cache_size=-4096")
            connection.execute("PRAGMA temp_store=MEMORY")
            connection.execute(f"PRAGMA wal_autocheckpoint={max(1, self.log_limit_bytes // 8 // _PAGE_BYTES)}")
            connection.execute(f"PRAGMA journal_size_limit={self.log_limit_bytes // 8}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect_read_only(self) -> sqlite3.Connection:
        # `immutable` is for folders where not even the log's index can be made: then nobody writes it either.
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
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        application = int(connection.execute("PRAGMA application_id").fetchone()[0])
        tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
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
        try:
            done = self._check_version(connection)  # another process may have been first
            for number, script in enumerate(self._migrations[done:], start=done + 1):
                for statement in _statements(script):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version={number}")
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _set_aside(self, side: _Side) -> None:
        """Rename a catalog that cannot be read; the other side finds the new one by itself."""
        side.forget()
        if _inode(self.path) != side.inode:
            return  # another process did it already
        stamp = f"broken-{time.time_ns()}"
        for suffix in ("-wal", "-shm", ""):  # the file last: as long as it is there, nobody makes a new log
            with contextlib.suppress(OSError):
                Path(f"{self.path}{suffix}").replace(f"{self.path}.{stamp}{suffix}")


def _is_corruption(error: sqlite3.DatabaseError | UnicodeDecodeError) -> bool:
    if isinstance(error, UnicodeDecodeError):  # a text of the schema, or SQLite's complaint about it, is no text
        return True
    code = getattr(error, "sqlite_errorcode", None)  # Python 3.11
    if code is not None:
        return code & 0xFF in (11, 26)  # SQLITE_CORRUPT, SQLITE_NOTADB
    return "malformed" in str(error) or "not a database" in str(error)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one: `executescript` would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
