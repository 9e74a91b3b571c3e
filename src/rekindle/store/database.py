"""The SQLite file under the catalog: opening, versions, connections, transactions.

One connection reads, one writes; both are used under their lock. The file is checked before every use: if the folder
was deleted, replaced or set aside, or the process forked, the connections are opened anew.
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
from rekindle.store.files import Files
from rekindle.store.schema import APPLICATION_ID, MIGRATIONS

READ_TIMEOUT_SECONDS = 0.2  # a lookup must not wait for long: a miss is cheaper
WRITE_TIMEOUT_SECONDS = 10.0  # writing happens in the background
_CHECKPOINT_PAGES = 2000

Connect = Callable[..., sqlite3.Connection]


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
    ) -> None:
        self.path = path
        self.read_only = False
        self._files = files
        self._connect = connect
        self._migrations = migrations
        self._write_timeout_seconds = write_timeout_seconds
        self._read_lock = threading.Lock()
        self._write_lock = threading.RLock()
        self._open_lock = threading.RLock()
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._process = os.getpid()
        self._abandoned: list[Any] = []  # of a forked parent: closing them here could disturb it
        self._ensure()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view of the catalog."""
        with self._read_lock, self._minding_corruption():
            reader, _ = self._ensure()
            reader.execute("BEGIN")
            try:
                yield reader
            finally:
                if reader.in_transaction:
                    reader.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing. Raises `CacheUnusable` if the catalog can only be read."""
        with self._write_lock, self._minding_corruption():
            _, writer = self._ensure()
            if writer is None:
                raise CacheUnusable(f"{self.path.parent} can only be read.")
            writer.execute("BEGIN IMMEDIATE")
            try:
                yield writer
                writer.execute("COMMIT")
            except BaseException:
                if writer.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        writer.execute("ROLLBACK")
                if writer.in_transaction:  # a transaction that cannot be ended would block everything after it
                    self._forget()
                raise

    def size_bytes(self) -> int:
        """Bytes of the catalog with its log."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                total += Path(f"{self.path}{suffix}").stat().st_size
        return total

    def checkpoint(self) -> None:
        """Move the log into the file and cut it."""
        with self._write_lock:
            _, writer = self._ensure()
            if writer is not None:
                writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def vacuum(self) -> None:
        """Give the space of removed rows back to the disk."""
        with self._write_lock:
            _, writer = self._ensure()
            if writer is not None:
                writer.execute("VACUUM")

    def close(self) -> None:
        """Close both connections. Idempotent; a later use opens them again."""
        with self._write_lock, self._read_lock:
            self._forget()

    def _forget(self) -> None:
        for connection in (self._reader, self._writer):
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
        self._reader = self._writer = None

    @contextmanager
    def _minding_corruption(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if _is_corruption(error):
                with self._open_lock:
                    self._set_aside()
            raise

    def _ensure(self) -> tuple[sqlite3.Connection, sqlite3.Connection | None]:
        with self._open_lock:
            if self._process != os.getpid():
                self._abandoned += [self._reader, self._writer]
                self._reader = self._writer = None
                self._process = os.getpid()
            if self._reader is not None and _inode(self.path) != self._inode:
                self._forget()  # deleted or replaced meanwhile
            if self._reader is None:
                self._open()
            assert self._reader is not None
            return self._reader, self._writer

    def _open(self) -> None:
        try:
            self._open_file()
        except sqlite3.DatabaseError as error:
            self._forget()
            if not _is_corruption(error):
                raise CacheUnusable(f"The cache's catalog {self.path} cannot be opened: {error}.") from error
            self._set_aside()
            try:
                self._open_file()
            except sqlite3.DatabaseError as again:
                self._forget()
                raise CacheUnusable(f"The cache's catalog {self.path} cannot be made anew: {again}.") from again
        except OSError as error:
            self._forget()
            raise CacheUnusable(f"The cache folder {self.path.parent} cannot be used: {error}.") from error
        except BaseException:
            self._forget()
            raise

    def _open_file(self) -> None:
        self.read_only = not self._prepare_file()
        self._inode = _inode(self.path)
        if self.read_only:
            self._reader = self._connect_read_only()
            self._check_version(self._reader)
        else:
            self._reader = self._connection(READ_TIMEOUT_SECONDS)
            self._writer = self._connection(self._write_timeout_seconds)
            self._check_version(self._reader)
            self._migrate(self._writer)

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
            connection.execute("PRAGMA journal_mode=WAL").fetchall()
            connection.execute("PRAGMA synchronous=NORMAL")  # a lost last commit is a missing entry, never a wrong one
            connection.execute("PRAGMA cache_size=-4096")
            connection.execute("PRAGMA temp_store=MEMORY")
            connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
            connection.execute("PRAGMA journal_size_limit=1048576")
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

    def _set_aside(self) -> None:
        """Rename a catalog that cannot be read. Its extents, which nobody lists any more, go with `collect`."""
        self._forget()
        if _inode(self.path) != self._inode:
            return  # another process did it already
        stamp = f"broken-{time.time_ns()}"
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                Path(f"{self.path}{suffix}").replace(f"{self.path}.{stamp}{suffix}")


def _is_corruption(error: sqlite3.DatabaseError) -> bool:
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
