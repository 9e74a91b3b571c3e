"""Every call that can fail, failing once at every place: nothing raises, nothing wrong is served, limits hold.

A scenario runs once without faults, to count its calls, and then once a call and error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.core.keys import token_bytes
from rekindle.errors import CacheUnusable
from rekindle.store.check import check
from rekindle.store.disk import Machine
from rekindle.store.files import Files, Handle
from rekindle.store.purge import TokenRun
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.faults.folders import NO_MEMORY, file_bytes, fill, load_or_lose, problems, prompt
from tests.kvs import KV_SPACE, keep, load

LIMIT = (2 << 20) + 400_000  # the catalog's log may take the first part; room for a few of the prompts below
TOKENS = 700
SETTINGS = StoreSettings(disk_limit=LIMIT, memory_limit=0)
PRETENDED_DISK, SHARE = 7_800_000, "32%"
SHARED = StoreSettings(disk_limit=SHARE, memory_limit=0)
PROMPTS = [prompt(number, TOKENS) for number in range(6)]
SYSTEM_ERRORS = (OSError, sqlite3.Error, CacheUnusable)  # what DiskStore lets through, by its contract


class FailingFiles(Files):
    """The real files, where one call fails: the `nth` of `method`, counted from 1."""

    def __init__(self, method: str = "", nth: int = 0, error: int = errno.EIO) -> None:
        super().__init__()
        self.fault = method, nth
        self.error = error
        self.calls: Counter[str] = Counter()

    def _step(self, method: str) -> None:
        self.calls[method] += 1
        if self.fault == (method, self.calls[method]):
            raise OSError(self.error, os.strerror(self.error))

    def make_folder(self, path: Path) -> None:
        self._step("make_folder")
        super().make_folder(path)

    def create(self, path: Path) -> Handle:
        self._step("create")
        return super().create(path)

    def open(self, path: Path) -> Handle:
        self._step("open")
        return super().open(path)

    def write_some(self, handle: Handle, offset: int, data: memoryview) -> int:
        self._step("write_some")
        return super().write_some(handle, offset, data)

    def read_some(self, handle: Handle, offset: int, out: memoryview) -> int:
        self._step("read_some")
        return super().read_some(handle, offset, out)

    def sync(self, handle: Handle) -> None:
        self._step("sync")
        super().sync(handle)

    def sync_file(self, path: Path) -> None:
        self._step("sync_file")
        super().sync_file(path)

    def sync_folder(self, path: Path) -> None:
        self._step("sync_folder")
        super().sync_folder(path)

    def close(self, handle: Handle) -> None:
        super().close(handle)  # the descriptor goes even when closing fails
        self._step("close")

    def size(self, handle: Handle) -> int:
        self._step("size")
        return super().size(handle)

    def remove(self, path: Path) -> bool:
        self._step("remove")
        return super().remove(path)

    def place(self, draft: Path, path: Path) -> None:
        self._step("place")
        super().place(draft, path)

    def status(self, path: Path) -> os.stat_result | None:
        self._step("status")
        return super().status(path)

    def names(self, folder: Path) -> list[str]:
        self._step("names")
        return super().names(folder)

    def try_lock(self, path: Path) -> Handle | None:
        self._step("try_lock")
        return super().try_lock(path)

    def free_bytes(self, folder: Path) -> int:
        self._step("free_bytes")
        return PRETENDED_DISK - file_bytes(folder)


METHODS = [name for name in vars(FailingFiles) if not name.startswith("_")]


class Connections:
    """A `connect` whose connections fail once: the `nth` statement that begins with `word`, over all of them."""

    def __init__(self, word: str = "", nth: int = 0, text: str = "", *, undone: bool = False) -> None:
        self.fault = word, nth
        self.text = text
        self.undone = undone  # whether SQLite gave the transaction up by itself, as it does for some errors
        self.calls: Counter[str] = Counter()

    def __call__(self, *arguments: Any, **options: Any) -> sqlite3.Connection:
        step, undone = self._step, self.undone

        class Failing(sqlite3.Connection):
            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                try:
                    step(statement)
                except sqlite3.OperationalError:
                    if undone and self.in_transaction:
                        super().execute("ROLLBACK")
                    raise
                return super().execute(statement, *values)

        return sqlite3.connect(*arguments, factory=Failing, **options)

    def _step(self, statement: str) -> None:
        words = {"any", statement.split()[0]}
        self.calls.update(words)
        if self.fault[0] in words and self.calls[self.fault[0]] == self.fault[1]:
            raise sqlite3.OperationalError(self.text)


def run_scenario(folder: Path, machine: Machine, settings: StoreSettings = SETTINGS) -> None:
    """Open, keep until something is evicted, load, use, pin, remove, tend, purge, keep and load once more, close.

    Raises `CacheUnusable` if the store cannot be opened, and nothing else.
    """
    with TieredStore(folder, settings, machine) as store:
        for tokens in PROMPTS:
            keep(store, tokens)
            load_or_lose(store, tokens)
            store.record_use(store.lookup(KV_SPACE, tokens), 1.0)
        keep(store, prompt(5, TOKENS + 100))
        load_or_lose(store, prompt(5, TOKENS + 100))
        with contextlib.suppress(*SYSTEM_ERRORS):
            store.disk.pin(store.disk.entries()[-1:])
        store.maintain()
        with contextlib.suppress(*SYSTEM_ERRORS):
            store.disk.remove(store.disk.entries()[:1])
        store.maintain()
        with contextlib.suppress(*SYSTEM_ERRORS):
            store.disk.collect()
        with contextlib.suppress(*SYSTEM_ERRORS):
            store.purge("local", "", [TokenRun("words", token_bytes(PROMPTS[1][600:640]))])
        assert keep(store, prompt(9)).outcome in ("kept", "failed", "refused")
        load_or_lose(store, prompt(9))
        store.maintain()


def expect_sound(folder: Path) -> None:
    """Without faults, the folder serves right numbers only, is clean, keeps its limit, and takes more."""
    assert file_bytes(folder) <= LIMIT
    with TieredStore(folder, SETTINGS) as store:
        for tokens in [*PROMPTS, prompt(5, TOKENS + 100), prompt(9)]:
            load(store, tokens)
        assert check(store.disk).problems == ()
        assert keep(store, prompt(10)).outcome == "kept"
        assert load(store, prompt(10)) == 80
        assert file_bytes(folder) <= LIMIT


def expect_working(folder: Path, machine: Machine, settings: StoreSettings = SETTINGS) -> None:
    """Run the scenario with its fault: it may not open, or it does its work and still works after it."""
    with contextlib.suppress(CacheUnusable):
        run_scenario(folder, machine, settings)
    if folder.exists():
        expect_sound(folder)


def _places(count: int, most: int = 40) -> Iterator[int]:
    """The numbers from 1 to `count`: all of them, or `most` spread evenly, the first ten among them."""
    chosen = {*range(1, min(count, 10) + 1), *(1 + step * count // most for step in range(most))}
    return iter(sorted(place for place in chosen if place <= count))


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """How often the scenario calls what, without faults."""
    counted: Counter[str] = Counter()
    for name, settings in (("fixed", SETTINGS), ("shared", SHARED)):
        folder = tmp_path_factory.mktemp("calls") / name
        files, connections = FailingFiles(), Connections()
        run_scenario(folder, Machine(files=files, connect=connections), settings)
        expect_sound(folder)
        if name == "fixed":
            counted = files.calls + connections.calls
        else:
            counted["free_bytes"] = files.calls["free_bytes"]
    return counted


def test_the_scenario_meets_every_call_and_evicts(calls: Counter[str], tmp_path: Path) -> None:
    assert [name for name in METHODS if calls[name] == 0] == []
    assert calls["COMMIT"] > 15
    with TieredStore(tmp_path / "cache", SETTINGS) as store:
        kept = sum(keep(store, tokens).outcome == "kept" for tokens in PROMPTS)
        assert len(store.disk.entries()) < kept


def test_what_would_fit_alone_is_never_refused_for_lack_of_room(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "cache", SETTINGS) as store:
        kept = [keep(store, prompt(number, TOKENS)) for number in range(20)]
        assert {each.reason for each in kept} == {""}
        assert file_bytes(tmp_path / "cache") <= LIMIT


def test_the_limit_holds_at_every_moment_of_a_write(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    sizes: list[int] = []

    class Measuring(Files):
        def write_some(self, handle: Handle, offset: int, data: memoryview) -> int:
            done = super().write_some(handle, offset, data)
            sizes.append(file_bytes(folder))
            return done

        def sync(self, handle: Handle) -> None:
            super().sync(handle)
            sizes.append(file_bytes(folder))

    with TieredStore(folder, SETTINGS, Machine(files=Measuring())) as store:
        for number in range(40):
            keep(store, prompt(number, 100 + number * 37 % 900))
            sizes.append(file_bytes(folder))
            store.record_use(store.lookup(KV_SPACE, prompt(number, 100)), 1.0)
            if number % 7 == 0:
                store.maintain()
                sizes.append(file_bytes(folder))
    assert len(sizes) > 100
    assert max(sizes) <= LIMIT


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("method", METHODS)
def test_a_file_operation_that_fails_anywhere_costs_at_most_what_it_was_for(
    tmp_path: Path, calls: Counter[str], method: str, error: int
) -> None:
    settings = SHARED if method == "free_bytes" else SETTINGS
    for nth in _places(calls[method]):
        machine = Machine(files=FailingFiles(method, nth, error))
        try:
            expect_working(tmp_path / str(nth), machine, settings)
        except Exception as problem:
            raise AssertionError(f"call {nth} of {calls[method]} of {method}: {problem!r}") from problem


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("word", "text", "undone"),
    [
        ("BEGIN", "disk I/O error", False),
        ("BEGIN", "database or disk is full", False),
        ("COMMIT", "disk I/O error", False),
        ("COMMIT", "database or disk is full", False),
        ("COMMIT", "database or disk is full", True),
    ],
)
def test_a_transaction_that_fails_anywhere_costs_at_most_what_it_was_for(
    tmp_path: Path, calls: Counter[str], word: str, text: str, undone: bool
) -> None:
    for nth in _places(calls[word], most=50):
        machine = Machine(connect=Connections(word, nth, text, undone=undone), write_timeout_seconds=0.2)
        try:
            expect_working(tmp_path / str(nth), machine)
        except Exception as problem:
            raise AssertionError(f"{word} {nth} of {calls[word]}: {problem!r}") from problem


@pytest.mark.exhaustive
def test_a_statement_that_fails_anywhere_costs_at_most_what_it_was_for(tmp_path: Path, calls: Counter[str]) -> None:
    for nth in _places(calls["any"], most=60):
        machine = Machine(connect=Connections("any", nth, "disk I/O error"), write_timeout_seconds=0.2)
        try:
            expect_working(tmp_path / str(nth), machine)
        except Exception as problem:
            raise AssertionError(f"statement {nth} of {calls['any']}: {problem!r}") from problem


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("free_bytes", "place")])
def test_a_store_works_on_after_a_file_operation_failed(tmp_path: Path, method: str) -> None:
    with TieredStore(tmp_path / "count", NO_MEMORY, Machine(files=(counter := FailingFiles()))) as store:
        opening = counter.calls[method]
        _use(store)
        count = counter.calls[method] - opening
    assert count > 0
    for nth in _places(count):
        files = FailingFiles(method, opening + nth)
        with TieredStore(tmp_path / str(nth), NO_MEMORY, Machine(files=files)) as store:
            _use(store)
            assert files.calls[method] >= opening + nth, "the fault never came"
            _expect_use(store)


def _use(store: TieredStore) -> None:
    """Keep, load, tend, remove and clear, whatever fails."""
    keep(store, prompt(1))
    load_or_lose(store, prompt(1))
    store.record_use(store.lookup(KV_SPACE, prompt(1)))
    store.maintain()
    with contextlib.suppress(*SYSTEM_ERRORS):
        store.disk.remove(store.disk.entries())
    with contextlib.suppress(*SYSTEM_ERRORS):
        store.clear()


def _expect_use(store: TieredStore) -> None:
    """Keep, load, tend and check, all without fail."""
    for number in (2, 1):
        assert keep(store, prompt(number)).outcome in ("kept", "known")
        assert load(store, prompt(number)) == 80
    store.maintain()
    assert check(store.disk).problems == ()


@pytest.mark.parametrize("word", ["COMMIT", "BEGIN", "ROLLBACK", "any"])
def test_a_store_works_on_after_a_statement_failed(tmp_path: Path, word: str) -> None:
    with TieredStore(tmp_path / "count", NO_MEMORY, Machine(connect=(counter := Connections()))) as store:
        opening = counter.calls[word]
        _use(store)
        count = counter.calls[word] - opening
    for nth in _places(count):
        connections = Connections(word, opening + nth, "disk I/O error")
        with TieredStore(
            tmp_path / str(nth), NO_MEMORY, Machine(connect=connections, write_timeout_seconds=0.2)
        ) as store:
            _use(store)
            assert connections.calls[word] >= opening + nth, "the fault never came"
            _expect_use(store)


# -- faults that last --------------------------------------------------------------------------------------------------


class BrokenFiles(Files):
    """The real files, where some methods fail for as long as `broken` says."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: dict[str, int] = {}
        self.stuck: set[Path] = set()

    def _step(self, method: str) -> None:
        if method in self.broken:
            raise OSError(self.broken[method], os.strerror(self.broken[method]))

    def create(self, path: Path) -> Handle:
        self._step("create")
        return super().create(path)

    def write_some(self, handle: Handle, offset: int, data: memoryview) -> int:
        self._step("write_some")
        return super().write_some(handle, offset, data)

    def read_some(self, handle: Handle, offset: int, out: memoryview) -> int:
        self._step("read_some")
        return super().read_some(handle, offset, out)

    def sync(self, handle: Handle) -> None:
        self._step("sync")
        super().sync(handle)

    def remove(self, path: Path) -> bool:
        if path in self.stuck:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        return super().remove(path)


@pytest.mark.parametrize("method", ["create", "write_some", "sync"])
def test_while_the_disk_is_full_what_is_there_is_served_and_afterwards_keeping_goes_on(
    tmp_path: Path, method: str
) -> None:
    files = BrokenFiles()
    with TieredStore(tmp_path / "cache", SETTINGS, Machine(files=files)) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        files.broken = {method: errno.ENOSPC}
        for number in range(2, 12):
            kept = keep(store, prompt(number))
            assert (kept.outcome, "No space left" in kept.reason) == ("failed", True)
            assert load(store, prompt(1)) == 80
            assert load(store, prompt(number)) == 0
        assert len(list((tmp_path / "cache" / "extents").iterdir())) == 1
        assert store.counts.write_failures == 10
        files.broken = {}
        assert keep(store, prompt(2)).outcome == "kept"
        assert load(store, prompt(2)) == 80
        assert check(store.disk).problems == ()


def test_what_cannot_be_read_for_a_while_is_lost_for_that_while_only(tmp_path: Path) -> None:
    files = BrokenFiles()
    fill(tmp_path / "cache", [prompt(1)])
    with TieredStore(tmp_path / "cache", NO_MEMORY, Machine(files=files)) as store:
        files.broken = {"read_some": errno.EIO}
        assert [load_or_lose(store, prompt(1)) for _ in range(3)] == [None] * 3
        assert store.counts.read_failures == 3
        files.broken = {}
        assert load(store, prompt(1)) == 80


def test_a_file_that_cannot_be_removed_stays_counted_and_does_not_stop_eviction(tmp_path: Path) -> None:
    files = BrokenFiles()
    with TieredStore(tmp_path / "cache", SETTINGS, Machine(files=files)) as store:
        assert keep(store, prompt(20, TOKENS)).outcome == "kept"
        (row,) = store.disk.entries()
        files.stuck = {store.disk.extents.path(row.name)}
        outcomes = []
        for tokens in PROMPTS:
            outcomes.append(keep(store, tokens).outcome)
            assert file_bytes(tmp_path / "cache") <= LIMIT
        store.maintain()
        assert load(store, prompt(20, TOKENS)) == 0, "it should have been evicted"
        assert "failed" not in outcomes
        with store.disk.database.reading() as connection:
            counted = connection.execute("SELECT state, bytes FROM extents WHERE id=?", (row.id,)).fetchall()
        assert counted == [("dropping", row.size_bytes)]
        files.stuck = set()
        store.maintain()
        assert check(store.disk).problems == ()
        assert not store.disk.extents.path(row.name).exists()


# -- platforms ---------------------------------------------------------------------------------------------------------


class ShortFiles(Files):
    """A system that takes and gives few bytes at once."""

    def write_some(self, handle: Handle, offset: int, data: memoryview) -> int:
        return super().write_some(handle, offset, data[: max(1, len(data) // 3)])

    def read_some(self, handle: Handle, offset: int, out: memoryview) -> int:
        return super().read_some(handle, offset, out[: max(1, len(out) // 3)])


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(ShortFiles, id="short"),
        pytest.param(lambda: ShortFiles(positioned=False), id="short without offsets"),
        pytest.param(lambda: Files(positioned=False), id="without offsets"),
        pytest.param(lambda: Files(full_sync=fcntl.F_GETFD), id="full sync"),
        pytest.param(lambda: Files(full_sync=9999), id="unknown full sync"),
        pytest.param(lambda: Files(sharing_violations=True), id="sharing violations"),
    ],
)
def test_every_platform_writes_what_every_other_reads(tmp_path: Path, files: Callable[[], Files]) -> None:
    folder = tmp_path / "cache"
    with TieredStore(folder, SETTINGS, Machine(files=files())) as store:
        assert sum(keep(store, tokens).outcome == "kept" for tokens in PROMPTS) >= 4
        keep(store, PROMPTS[0])
        store.maintain()
        served = [load(store, tokens) for tokens in PROMPTS]
        assert sum(served) >= TOKENS
        assert check(store.disk).problems == ()
    with TieredStore(folder, SETTINGS) as store:
        assert [load(store, tokens) for tokens in PROMPTS] == served
        assert keep(store, prompt(9)).outcome == "kept"
    with TieredStore(folder, SETTINGS, Machine(files=files())) as store:
        assert load(store, prompt(9)) == 80
    assert problems(folder, SETTINGS) == ()


@pytest.mark.parametrize(
    ("full_sync", "plain_syncs"), [(fcntl.F_GETFD, 0), (9999, 1), (None, 1)], ids=["known", "unknown", "none"]
)
def test_a_file_is_synced_once_by_the_fullest_sync_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_sync: int | None, plain_syncs: int
) -> None:
    synced: list[int] = []
    really = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), really(descriptor)))
    with TieredStore(tmp_path / "cache", NO_MEMORY, Machine(files=Files(full_sync=full_sync))) as store:
        synced.clear()  # the marker of a new folder
        assert keep(store, prompt(1)).outcome == "kept"
        assert len(synced) == plain_syncs


def test_a_full_sync_that_fails_is_not_taken_for_one_that_is_unknown(tmp_path: Path) -> None:
    files = Files(full_sync=fcntl.F_GETPIPE_SZ)  # not for files: EBADF
    fill(tmp_path / "cache", [])
    with TieredStore(tmp_path / "cache", NO_MEMORY, Machine(files=files)) as store:
        assert keep(store, prompt(1)).outcome == "failed"
        assert load(store, prompt(1)) == 0
        assert list((tmp_path / "cache" / "extents").iterdir()) == []


class SharingFiles(Files):
    """A system where an open file cannot be removed."""

    def __init__(self) -> None:
        super().__init__(sharing_violations=True)
        self.opened: dict[int, Path] = {}

    def create(self, path: Path) -> Handle:
        handle = super().create(path)
        self.opened[id(handle)] = path
        return handle

    def open(self, path: Path) -> Handle:
        handle = super().open(path)
        self.opened[id(handle)] = path
        return handle

    def close(self, handle: Handle) -> None:
        self.opened.pop(id(handle), None)
        super().close(handle)

    def unlink(self, path: Path) -> None:
        if path in self.opened.values():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        super().unlink(path)


def _counted_bytes(store: TieredStore) -> int:
    with store.disk.database.reading() as connection:
        return int(connection.execute("SELECT bytes FROM totals").fetchone()[0])


def test_where_open_files_cannot_be_removed_they_go_later_and_stay_counted_till_then(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with TieredStore(folder, NO_MEMORY, Machine(files=SharingFiles())) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        (row,) = store.disk.entries()
        feed = store.load(KV_SPACE, store.lookup(KV_SPACE, prompt(1)))
        assert store.disk.remove([row]) == 0
        assert load(store, prompt(1)) == 0
        store.maintain()
        assert store.disk.extents.path(row.name).exists()
        assert _counted_bytes(store) == row.size_bytes
        assert check(store.disk).problems == ()
        feed.close()
        store.maintain()
        assert not store.disk.extents.path(row.name).exists()
        assert _counted_bytes(store) == 0
        assert keep(store, prompt(1)).outcome == "kept"
        assert load(store, prompt(1)) == 80


def test_where_open_files_cannot_be_removed_the_limit_holds_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with TieredStore(folder, SETTINGS, Machine(files=SharingFiles())) as store:
        feeds = []
        outcomes = Counter[str]()
        for number in range(30, 50):
            tokens = prompt(number, TOKENS)
            outcomes[keep(store, tokens).outcome] += 1
            if store.lookup(KV_SPACE, tokens).length:
                feeds.append(store.load(KV_SPACE, store.lookup(KV_SPACE, tokens)))
            assert file_bytes(folder) <= LIMIT
        assert outcomes["refused"] > 0, "nothing was held open"
        for feed in feeds:
            feed.close()
        store.maintain()
        assert keep(store, prompt(50, TOKENS)).outcome == "kept"
        assert load(store, prompt(50, TOKENS)) == TOKENS
        assert check(store.disk).problems == ()
