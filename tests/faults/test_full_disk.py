"""A full disk: what is stored is served as from a read-only folder, and clearing the cache needs no room.

The disk is full at every call that takes room, until enough files were removed.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.cache.open_store import open_store
from rekindle.errors import CacheUnusable
from rekindle.settings import Settings
from rekindle.store import purge
from rekindle.store.disk import DiskStore, Machine
from rekindle.store.files import Files, Handle
from rekindle.store.tiered import TieredStore
from tests.faults.folders import NO_MEMORY, prompt
from tests.kvs import KV_SPACE, keep, load

PROMPTS = [prompt(number, 700) for number in range(4)]
ROOM = 1 << 30


class FullDisk(Files):
    """Takes nothing until `needed` files were removed from it; `sqlite` is how SQLite finds it."""

    def __init__(self, needed: int) -> None:
        super().__init__()
        self.needed = needed

    @property
    def is_full(self) -> bool:
        return self.needed > 0

    def _take(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def create(self, path: Path) -> Handle:
        self._take()
        return super().create(path)

    def write_some(self, handle: Handle, offset: int, data: memoryview) -> int:
        self._take()
        return super().write_some(handle, offset, data)

    def remove(self, path: Path) -> bool:
        self.needed -= path.exists()
        return super().remove(path)

    def free_bytes(self, folder: Path) -> int:
        return 0 if self.is_full else ROOM

    def connect(self, *arguments: Any, **options: Any) -> sqlite3.Connection:
        disk = self

        class Full(sqlite3.Connection):
            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                if disk.is_full and "journal_mode=WAL" in statement:
                    raise sqlite3.OperationalError("disk I/O error")  # no room for the index of the log
                if disk.is_full and statement.startswith(("DELETE", "UPDATE", "INSERT", "VACUUM")):
                    raise sqlite3.OperationalError("database or disk is full")
                return super().execute(statement, *values)

        return sqlite3.connect(*arguments, factory=Full, **options)

    @property
    def machine(self) -> Machine:
        return Machine(files=self, connect=self.connect)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with TieredStore(tmp_path / "cache", NO_MEMORY) as store:
        for tokens in PROMPTS:
            assert keep(store, tokens).outcome == "kept"
    yield tmp_path / "cache"


def extents(folder: Path) -> list[Path]:
    return list((folder / "extents").iterdir())


def test_a_store_on_a_full_disk_serves_and_keeps_again_once_there_is_room(folder: Path) -> None:
    disk = FullDisk(needed=1)
    with TieredStore(folder, NO_MEMORY, disk.machine) as store:
        assert load(store, PROMPTS[1]) == 700
        store.record_use(store.lookup(KV_SPACE, PROMPTS[1]), 1.0)
        kept = keep(store, prompt(9))
        assert kept.outcome == "failed" and "full" in kept.reason
        store.maintain()
        disk.needed = 0
        assert keep(store, prompt(9)).outcome == "kept"
        assert load(store, prompt(9)) == 80
        store.maintain()


@pytest.mark.parametrize("opened", ["before", "on the full disk"])
@pytest.mark.parametrize("needed", [1, 3, 5, 99])
def test_clearing_frees_room_on_a_full_disk(opened: str, needed: int, folder: Path) -> None:
    """Of 99, more than there are: then the catalog goes, too."""
    disk = FullDisk(0 if opened == "before" else needed)
    store = DiskStore(folder, NO_MEMORY, disk.machine)
    disk.needed = needed
    assert purge.clear(store) == len(PROMPTS)
    store.close()
    assert extents(folder) == []
    disk.needed = 0
    with TieredStore(folder, NO_MEMORY) as store:
        assert [load(store, tokens) for tokens in PROMPTS] == [0] * len(PROMPTS)
        assert keep(store, PROMPTS[0]).outcome == "kept" and load(store, PROMPTS[0]) == 700


def test_clearing_that_fails_for_another_reason_removes_no_file_before_its_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(folder, NO_MEMORY)
    monkeypatch.setattr(store.room, "cut_all", lambda _: exec("raise OSError(errno.EIO, 'broken')", globals()))
    with pytest.raises(CacheUnusable):
        purge.clear(store)
    assert len(extents(folder)) == len(PROMPTS)
    store.close()


def test_a_named_cache_that_a_full_disk_has_no_room_for_is_gone_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(needed=1)
    monkeypatch.setattr(Files, "create", FullDisk.create)
    monkeypatch.setattr(Files, "_take", disk._take, raising=False)
    monkeypatch.setattr(Files, "free_bytes", lambda *_: 0)
    (tmp_path / "cache").mkdir()
    assert open_store(Settings(cache=str(tmp_path / "cache"))) is None
    monkeypatch.setattr(Files, "free_bytes", lambda *_: ROOM)
    with pytest.raises(CacheUnusable):
        open_store(Settings(cache=str(tmp_path / "cache")))
