"""The file of a library: where it is, how it is checked, and what happens when it is damaged.

    STEM.sqlite     the library
    STEM.2.sqlite   the library after STEM.sqlite was found damaged, and so on: the highest number is current

A damaged file is never written to, renamed or removed: what can be read of it goes into a new file, which gets its name
when it is complete and durable. So every process finds either the old file or the complete new one. A library's file is
never empty: an empty one counts as damaged.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rekindle.core.identity import digest_of_fields
from rekindle.core.size import count_of
from rekindle.errors import CacheUnusable, KnowledgeUnusable
from rekindle.json_file import JsonMemo
from rekindle.knowledge.rows import bump_generation
from rekindle.knowledge.salvage import Loss, SalvageResult, read_losses, salvage, write_losses, wrong_passages
from rekindle.knowledge.schema import MIGRATIONS
from rekindle.machine import home_folder
from rekindle.store.catalog.database import Database, SharedConnection
from rekindle.store.catalog.schema import APPLICATION_ID
from rekindle.store.files import Files

log = logging.getLogger("rekindle.knowledge")

LOG_BYTES = 64 << 20
_CHECKED_SECONDS = 24 * 3600.0  # then it is checked again even if nothing was written: disks rot
_MAX_REMEMBERED = 1000
_WAIT_SECONDS = 600.0  # for another process that is salvaging
_PART = ".part"
_MAX_MISSING = 4  # consecutive files that somebody removed by hand
_NEWEST_VERSION = 1000  # a larger version number is damage
_TABLES = frozenset(re.findall(r"CREATE (?:VIRTUAL )?TABLE (\w+)", "".join(MIGRATIONS)))


class LibraryFile(Database):
    """The database of a library: durable, checked when it is opened, salvaged when it is damaged."""

    def __init__(self, first: Path) -> None:
        """`first` is its path before any damage. Raises `CacheUnusable`, `OSError`, `sqlite3.Error`."""
        self.first = first
        self._follow()
        self._checked_at: float | None = None
        super().__init__(self.path, Files(), migrations=MIGRATIONS, log_bytes=LOG_BYTES, durable=True)

    @contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction, durable when it ends; with `durable=False` it may be lost as a whole on power failure."""
        while True:
            with ExitStack() as stack:
                if not durable:
                    stack.enter_context(self._writer.lock)
                    self._ensure(self._writer).execute("PRAGMA synchronous=NORMAL")
                    stack.callback(self._make_durable)
                connection = stack.enter_context(super().writing())
                if self._is_replaced():
                    continue  # another process has just salvaged it: a write here would be lost
                yield connection
                return

    def _make_durable(self) -> None:
        if self._writer.connection is not None:
            self._writer.connection.execute("PRAGMA synchronous=FULL")

    def close(self) -> None:
        """Close both connections. Idempotent; a later use opens them again."""
        super().close()
        if self._checked_at is not None and self._file_bytes("-wal") == 0:
            _remember(self.path, self._checked_at)

    def _ensure(self, side: SharedConnection) -> sqlite3.Connection:
        if self._is_replaced():
            self._follow()
        return super()._ensure(side)

    def _is_replaced(self) -> bool:
        """Whether another file is current now. Called before every use, so without pathlib, which is slower."""
        return os.path.exists(self._next) or not os.path.exists(self.path)  # noqa: PTH110

    def _follow(self) -> None:
        self.path = current_file(self.first)
        self._next = str(next_file(self.path))

    def _prepare_file(self) -> bool:
        """Create a missing file with its tables; check an existing one. False if it can only be read."""
        if not self.path.exists():
            self._files.make_folder(self.path.parent)
            with locked(self.first):
                if not self.path.exists():
                    _build(self.path, lambda _: None)
        usable = super()._prepare_file()
        if usable and (self._checked_at is None or _is_old(self._checked_at)):
            self._check()
        return usable

    def _check(self) -> None:
        """Check the file unless that was done lately, and salvage it if it is damaged."""
        self._checked_at = _recall(self.path)
        # A file that another process has open was checked by it; then only SQLite's own quick check is run.
        in_use = Path(f"{self.path}-wal").exists()
        if self._checked_at is not None and not in_use:
            return
        damage = damage_of(self.path, passages=self._checked_at is None)
        if damage is not None:
            self._salvage(damage)
        if damage is not None or self._checked_at is None:
            self._checked_at = time.time()
            _remember(self.path, self._checked_at)

    def _set_aside(self, side: SharedConnection) -> None:
        """Where the catalog discards a damaged file, a library is salvaged."""
        side.forget()
        if current_file(self.first) == self.path and not self.read_only:
            self._salvage("it cannot be read")

    def _salvage(self, damage: str) -> None:
        saved_as = next_file(self.path)
        log.warning("The library %s is damaged (%s). What can be read goes into %s.", self.path, damage, saved_as)
        with locked(self.first), _unwritten(self.path):
            if not saved_as.exists():  # by another process meanwhile
                salvage_file(self.path, saved_as)
        self._follow()


def library_path(folder: Path, tenant: str, salt: str) -> Path:
    """The first file of a tenant's and salt's library: its path before any damage."""
    return folder.expanduser().absolute() / f"{digest_of_fields('rekindle/library/1', tenant, salt)}.sqlite"


def library_owners(folder: Path) -> list[tuple[str, str]]:
    """Tenant and salt of every library in a folder; a file that cannot be read is left out."""
    found: dict[tuple[str, str], None] = {}
    for path in sorted(folder.expanduser().absolute().glob("*.sqlite")):
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
                about = dict(connection.execute("SELECT name, value FROM about WHERE name IN ('tenant', 'salt')"))
        except (sqlite3.Error, UnicodeDecodeError, OSError):
            continue
        owner = (str(about.get("tenant")), str(about.get("salt")))
        if number_of(library_path(folder, *owner), path) is not None:  # it is whose it says
            found[owner] = None
    return list(found)


def current_file(first: Path) -> Path:
    """The file in use: `first`, unless it was damaged and there is a newer one."""
    found = first
    while after := [path for path in _successors(found) if os.path.exists(path)]:  # noqa: PTH110
        found = after[-1]
    if found == first and not first.exists():  # older ones may have been removed by hand
        numbers = [number_of(first, path) for path in first.parent.glob(f"{first.stem}.*{first.suffix}")]
        last = max((number for number in numbers if number is not None), default=1)
        return first if last == 1 else first.with_name(f"{first.stem}.{last}{first.suffix}")
    return found


def _successors(path: Path) -> list[Path]:
    """The paths of the next files; several, because somebody may have removed one in between."""
    following = [path]
    for _ in range(_MAX_MISSING):
        following.append(next_file(following[-1]))
    return following[1:]


def number_of(first: Path, path: Path) -> int | None:
    """The number of a library's file, from 1; None if the path is no file of it."""
    if path == first:
        return 1
    found = re.fullmatch(rf"{re.escape(first.stem)}\.(\d{{1,6}}){re.escape(first.suffix)}", path.name)
    return None if found is None else int(found[1])


def next_file(path: Path) -> Path:
    """The path of the file that a damaged one is salvaged into."""
    found = re.fullmatch(r"(.*)\.(\d{1,6})", path.stem)
    stem, number = (found[1], int(found[2])) if found else (path.stem, 1)
    return path.with_name(f"{stem}.{number + 1}{path.suffix}")


def damaged_files(first: Path) -> list[Path]:
    """Damaged files of a library: they may hold texts that were forgotten since."""
    current = current_file(first)
    older = [path for path in first.parent.glob(f"{first.stem}*") if number_of(first, path) and path != current]
    return sorted([*older, *(p for p in first.parent.glob(f"{first.name}.broken-*") if not p.name.endswith("-shm"))])


@dataclass(frozen=True)
class LibraryCheck:
    """Result of a check: the damage (None if the file is sound), damaged files that still exist, and the salvage if
    one was made.
    """

    damage: str | None
    damaged_files: tuple[Path, ...]
    salvaged: SalvageResult | None = None


def check_library(first: Path, *, fix: bool) -> LibraryCheck:
    """Check the whole file of a library, including its word index. Raises `KnowledgeUnusable`."""
    path, salvaged = current_file(first), None
    try:
        damage = damage_of(path, words=True)
        if damage is not None and fix:
            with locked(first), _unwritten(path):
                if not next_file(path).exists():
                    salvaged = salvage_file(path, next_file(path))
    except (sqlite3.Error, OSError, CacheUnusable) as error:
        raise KnowledgeUnusable(f"The library {path} cannot be checked: {error}") from error
    return LibraryCheck(damage, tuple(damaged_files(first)), salvaged)


def damage_of(path: Path, *, passages: bool = True, words: bool = False) -> str | None:
    """What is wrong with a library's file; None if it is sound. `passages` compares each passage with its digest,
    `words` checks the word index.

    Raises `CacheUnusable` for a sound file that is no library, or one of a later version.
    """
    if path.stat().st_size == 0:
        return "it is empty"
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            return _damage_in(connection, path, passages=passages, words=words and os.access(path, os.W_OK))
    except UnicodeDecodeError:
        return "a text is no text"
    except sqlite3.OperationalError as error:
        # A missing table or column; a header that claims the file is read-only.
        if str(error).startswith("no such") or ("readonly" in str(error) and os.access(path, os.W_OK)):
            return str(error)
        raise  # locked, or a disk that cannot be read now: that says nothing about the file
    except sqlite3.DatabaseError as error:
        return str(error)


def _damage_in(connection: sqlite3.Connection, path: Path, *, passages: bool, words: bool) -> str | None:
    def value(query: str) -> object:
        return connection.execute(query).fetchone()[0]

    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    ours = value("PRAGMA application_id") == APPLICATION_ID
    if tables and not ours and not tables & {"documents", "chunks"}:
        raise CacheUnusable(f"{path} is not a Rekindle library. Choose another folder for it.")
    (structure,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if structure != "ok":
        return str(structure)
    version = int(str(value("PRAGMA user_version")))
    if ours and len(MIGRATIONS) < version <= _NEWEST_VERSION:
        raise CacheUnusable(f"{path} was written by a newer Rekindle. Upgrade, or choose another folder for it.")
    if not ours or not 0 < version <= len(MIGRATIONS):
        return "its first page is not what was written"
    if version == len(MIGRATIONS) and not tables >= _TABLES:
        return "tables are missing"
    if passages and next(wrong_passages(connection), None) is not None:
        return "a passage is not what was put"
    if words:
        connection.execute("INSERT INTO words(words) VALUES('integrity-check')")
    return None


def salvage_file(damaged: Path, saved_as: Path) -> SalvageResult:
    """Salvage a damaged library into a new, durable file, with a record of what was lost."""
    done: list[SalvageResult] = []

    def fill(database: Database) -> None:
        done.append(salvage(damaged, database))
        with database.writing() as connection:
            loss = Loss(time.time(), str(damaged), done[0].lost_documents, done[0].lost_passages, done[0].names)
            write_losses(connection, [*read_losses(connection), loss])
            bump_generation(connection)

    _build(saved_as, fill)
    log.warning("%s", describe_salvage(done[0], damaged))
    return done[0]


def describe_salvage(done: SalvageResult, damaged: Path) -> str:
    return (
        f"Saved: {count_of(done.documents, 'document')} with {count_of(done.passages, 'passage')}. "
        f"Lost: {count_of(done.lost_documents, 'document')} and {count_of(done.lost_passages, 'passage')}. "
        f"{damaged} stays as it is."
    )


def _build(path: Path, fill: Callable[[Database], None]) -> None:
    """Build a library's file that appears under its name when it is complete. Call it while `locked`."""
    files = Files()
    part = path.with_name(f"{path.name}{_PART}")
    try:
        database = Database(part, files, migrations=MIGRATIONS, log_bytes=LOG_BYTES)
        try:
            fill(database)
        finally:
            database.close()
        files.sync_file(part)
        part.rename(path)  # we hold the lock, so the name is free
        files.sync_folder(path.parent)
    finally:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{part}{suffix}").unlink(missing_ok=True)


@contextmanager
def locked(first: Path) -> Iterator[None]:
    """Hold the lock for building and salvaging a library's files; leftovers of processes that died are removed.

    Raises `TimeoutError` if another process holds it for too long.
    """
    files, lock = Files(), first.with_suffix(".lock")
    held = files.lock(lock, _WAIT_SECONDS)
    try:
        for left in first.parent.glob(f"{first.stem}*{_PART}*"):
            left.unlink(missing_ok=True)
        yield
    finally:
        lock.unlink(missing_ok=True)
        files.close(held)


@contextmanager
def _unwritten(path: Path) -> Iterator[None]:
    """Block writers of a damaged file: what they wrote after the salvage would be lost."""
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(closing(sqlite3.connect(path, timeout=10.0, isolation_level=None)))
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):  # another process keeps writing: try again later
                raise
        except sqlite3.DatabaseError:
            pass  # a file that cannot be locked cannot be written to either
        yield


def _state(path: Path) -> list[int]:
    about = path.stat()
    return [about.st_ino, about.st_size, about.st_mtime_ns]


def _remembered() -> JsonMemo:
    return JsonMemo(home_folder() / "libraries.json", _MAX_REMEMBERED)


def _remember(path: Path, checked_at: float) -> None:
    """Record that a file is as it was left after a check, and that SQLite wrote everything since."""
    with suppress(OSError):
        _remembered().keep(str(path), [*_state(path), checked_at])


def _recall(path: Path) -> float | None:
    """When a file was last checked, if it is still the same; None if unknown or too long ago.

    A process that has it open, or was killed, changed it without recording so: then only the inode is compared.
    """
    known, now = _remembered().recall(str(path)), _state(path)
    if not isinstance(known, list) or len(known) != 4 or not isinstance(known[3], float) or _is_old(known[3]):
        return None
    same = known[0] == now[0] if Path(f"{path}-wal").exists() else known[:3] == now
    return known[3] if same else None


def _is_old(checked_at: float) -> bool:
    return not 0 <= time.time() - checked_at < _CHECKED_SECONDS
