"""The power goes after a purge or a clear: what was removed does not come back, whatever the system had not yet synced.

A folder stands on a medium that forgets. Until somebody syncs its folder, a removed file is still there; until
somebody syncs it, an emptied log is still full. SQLite itself syncs the catalog whenever it moves the log there, but
not the log when it empties it (`wal.c`: the truncation is the last thing that a checkpoint does).
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle.core.keys import token_bytes
from rekindle.errors import CacheUnusable
from rekindle.store.check import check
from rekindle.store.disk import CATALOG, Machine
from rekindle.store.files import Files
from rekindle.store.purge import TokenRun
from rekindle.store.tiered import TieredStore
from tests.faults.folders import NO_MEMORY
from tests.faults.test_purge import places
from tests.kvs import KV_SPACE, keep, load
from tests.store.test_clear import IDENTITY, OWN, SALT, TENANT, TEXT, WORDS, word_traces
from tests.store.test_purge import kv_traces, numbers, traces

SECRET, HEAD, ELSE = numbers(0, 70), numbers(1, 70), numbers(5, 100)
ASKED = [*HEAD, *SECRET, *numbers(2, 60)]
RUNS = [TokenRun("words", token_bytes(SECRET))]


class Died(BaseException):
    """The power is gone: nothing is tidied up."""


class Medium(Files):
    """Files whose removal is remembered until their folder is synced. Dies at the nth removal or sync, if told."""

    def __init__(self, dies_at: int = 0) -> None:
        super().__init__()
        self.unsynced: dict[Path, bytes] = {}  # what a file had when it was removed, or emptied
        self.steps, self._dies_at = 0, dies_at
        self.vacuumed: Callable[[], None] = lambda: None  # called when a catalog was written anew

    def step(self) -> None:
        self.steps += 1
        if self.steps == self._dies_at:
            raise Died

    def remove(self, path: Path) -> bool:
        self.step()
        if path.is_file():
            self.unsynced[path] = path.read_bytes()
        return super().remove(path)

    def sync_folder(self, path: Path) -> None:
        self.step()
        super().sync_folder(path)
        for gone in [gone for gone in self.unsynced if gone.parent == path and not gone.exists()]:
            del self.unsynced[gone]

    def sync_file(self, path: Path) -> None:
        self.step()
        super().sync_file(path)
        self.unsynced.pop(path, None)

    def connect(self, *arguments: Any, **options: Any) -> sqlite3.Connection:
        log, medium = Path(f"{arguments[0]}-wal"), self

        class Watched(sqlite3.Connection):
            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                before = log.read_bytes() if "wal_checkpoint(TRUNCATE)" in statement and log.exists() else b""
                done = super().execute(statement, *values)
                if before and log.stat().st_size == 0:
                    medium.unsynced[log] = before
                if statement == "VACUUM":
                    medium.vacuumed()
                return done

        return sqlite3.connect(*arguments, factory=Watched, **options)

    def after_power_loss(self, folder: Path, target: Path) -> Path:
        """The folder as it is found when the power is back."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        for path, data in self.unsynced.items():
            if path.is_relative_to(folder):
                place = target / path.relative_to(folder)
                if not place.exists() or place.stat().st_size == 0:
                    place.write_bytes(data)
        return target


def remove_secret(store: TieredStore) -> None:
    store.purge("local", "", RUNS, texts=[TEXT])


def remove_all(store: TieredStore) -> None:
    store.clear()


def fill(folder: Path, medium: Medium) -> TieredStore:
    """A store with the secret in live blocks, in a file that nothing lists any more, and in what was asked."""
    store = TieredStore(folder, NO_MEMORY, Machine(files=medium, connect=medium.connect))
    for tokens in (ELSE, SECRET, ASKED):
        assert keep(store, tokens).outcome == "kept"
    store.disk.remove(store.disk.entries()[1:2])
    assert keep(store, ASKED, OWN).outcome == "kept"
    store.note(KV_SPACE, IDENTITY, ASKED, b"", {"known": TEXT})
    return store


@pytest.mark.parametrize("log_is_lost", [False, True])
@pytest.mark.parametrize("remove", [remove_secret, remove_all])
def test_what_was_removed_does_not_come_back_after_power_loss(
    tmp_path: Path, remove: Callable[[TieredStore], None], log_is_lost: bool
) -> None:
    folder, medium = tmp_path / "c", Medium()
    with fill(folder, medium) as store:
        store.purge(TENANT, SALT, RUNS)
        assert traces(folder, SECRET)
        remove(store)
        lost = medium.after_power_loss(folder, tmp_path / "lost")
    if log_is_lost:
        (lost / f"{CATALOG}-wal").unlink()
    assert traces(lost, SECRET) == [] and kv_traces(lost, ASKED, 2) == []
    assert word_traces(lost, [TEXT, TEXT[10:40]] if remove is remove_secret else WORDS) == []
    with TieredStore(lost, NO_MEMORY) as store:
        assert load(store, ASKED) == (64 if remove is remove_secret else 0)
        assert check(store.disk).problems == ()


def test_a_log_that_others_read_meanwhile_is_empty_for_good_when_all_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.store.catalog.database._CUT_ATTEMPTS", 1)
    folder, medium = tmp_path / "c", Medium()
    with fill(folder, medium) as store:
        store.purge(TENANT, SALT, RUNS)
        assert keep(store, [*numbers(8, 20), *SECRET]).outcome == "kept"  # into the log
        reader = sqlite3.connect(folder / CATALOG, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM blocks").fetchone()
        medium.vacuumed = reader.close  # till then, the log cannot be emptied
        remove_secret(store)
        lost = medium.after_power_loss(folder, tmp_path / "lost")
    assert traces(lost, SECRET) == []


@pytest.mark.parametrize("remove", [remove_secret, remove_all])
def test_after_power_loss_in_the_middle_it_can_be_begun_again(
    tmp_path: Path, remove: Callable[[TieredStore], None]
) -> None:
    medium = Medium()
    with fill(tmp_path / "count", medium) as store:
        before = medium.steps
        remove(store)
        count = medium.steps - before
    for at in (before + nth for nth in places(count, 6)):
        folder, medium = tmp_path / f"c{at}", Medium(dies_at=at)
        store = fill(folder, medium)
        with contextlib.suppress(CacheUnusable), pytest.raises(Died):
            remove(store)
        for log_is_lost in (False, True):
            lost = medium.after_power_loss(folder, tmp_path / "lost")
            if log_is_lost:
                (lost / f"{CATALOG}-wal").unlink(missing_ok=True)
            with TieredStore(lost, NO_MEMORY) as again:
                remove(again)
                if remove is remove_secret:
                    again.purge(TENANT, SALT, RUNS)
                assert check(again.disk).problems == ()
            assert traces(lost, SECRET) == [] and kv_traces(lost, ASKED, 2) == []
        store.close()


def test_evicted_files_are_gone_for_good_before_their_bytes_count_as_free(tmp_path: Path) -> None:
    medium = Medium()
    with fill(tmp_path / "c", medium) as store:
        store.disk.remove(store.disk.entries())
        lost = medium.after_power_loss(tmp_path / "c", tmp_path / "lost")
        assert list((lost / "extents").iterdir()) == []
