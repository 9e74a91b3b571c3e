"""A purge that fails or is killed at any call: the folder is sound, and doing it again leaves no trace."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle.codec.extent import header_length
from rekindle.core.identity import Identity
from rekindle.core.keys import token_bytes
from rekindle.core.kv import LayerKv
from rekindle.errors import CacheUnusable, KvLost
from rekindle.store.catalog import catalog
from rekindle.store.check import check
from rekindle.store.disk import DiskStore, Machine
from rekindle.store.files import Files
from rekindle.store.purge import TokenRun, purge
from rekindle.store.tiered import TieredStore
from tests.faults.folders import NO_MEMORY, copy, flip, load_or_lose, problems
from tests.faults.test_injected import METHODS, BrokenFiles, Connections, FailingFiles, SharingFiles
from tests.kvs import KV_SPACE, keep, load, make_kv
from tests.store.test_purge import kv_traces, numbers, traces

SECRET, HEAD = numbers(0, 70), numbers(1, 70)
ASKED = [*HEAD, *SECRET, *numbers(2, 60)]
WENT_ON = [*ASKED, *numbers(3, 100)]
EVICTED = [*numbers(4, 100), *SECRET]
ELSE = numbers(5, 100)
IDENTITY = Identity("weights", "config", "words", "template", "float16", "rope")
RUNS = [TokenRun("words", token_bytes(SECRET))]
KILLED = 77


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the secret in live blocks, in what hangs on them, behind live blocks, and in the history."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    with TieredStore(folder, NO_MEMORY) as store:
        for tokens in (ELSE, ASKED, WENT_ON, EVICTED):
            assert keep(store, tokens).outcome == "kept"
        with store.disk.database.writing() as connection:
            catalog.cut(connection, store.disk.entries()[-1].id, 3)
        store.note(KV_SPACE, IDENTITY, ASKED, b"", {"known": "quoted"})
    assert traces(folder, SECRET)
    return folder


def expect_sound(folder: Path) -> None:
    """What is served is right and the folder clean."""
    with TieredStore(folder, NO_MEMORY) as store:
        for tokens in (ASKED, WENT_ON, EVICTED):
            load(store, tokens)
        assert load(store, ELSE) == 100
        assert check(store.disk).problems == ()


def expect_purged(folder: Path) -> None:
    """After one more purge, without faults, nothing of the secret is left, and what was before it is."""
    disk = DiskStore(folder, NO_MEMORY)
    purge(disk, "local", "", RUNS)
    disk.close()
    expect_gone(folder)
    expect_sound(folder)


def expect_gone(folder: Path) -> None:
    assert traces(folder, SECRET) == []
    for tokens, first in ((ASKED, 2), (WENT_ON, 2), (EVICTED, 3)):
        assert kv_traces(folder, tokens, first) == []


def die(step: Callable[[str], None], name: str) -> None:
    """Whatever would fail, dies instead: nothing is cleaned up."""
    try:
        step(name)
    except (OSError, sqlite3.OperationalError):
        os._exit(KILLED)


class DyingFiles(FailingFiles):
    def _step(self, method: str) -> None:
        die(super()._step, method)


class DyingConnections(Connections):
    def _step(self, statement: str) -> None:
        die(super()._step, statement)


def in_child(folder: Path, machine: Machine) -> int:
    """Purge in a forked process; how it ended."""
    child = os.fork()
    if child == 0:
        try:
            purge(DiskStore(folder, NO_MEMORY, machine), "local", "", RUNS)
        except BaseException:  # noqa: BLE001  (told by the exit status)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count(folder: Path) -> Counter[str]:
    """Purge a copy without faults: what it calls, methods of the system and first words of statements."""
    files, connections = FailingFiles(), Connections()
    disk = DiskStore(copy(folder, "count"), NO_MEMORY, Machine(files=files, connect=connections))
    purge(disk, "local", "", RUNS)
    calls = files.calls + connections.calls
    disk.close()
    return calls


def places(calls: int, most: int) -> list[int]:
    """Numbers of calls, evenly spread, the first and the last among them."""
    return sorted({1 + round(step * (calls - 1) / (most - 1)) for step in range(most)})


def test_a_purge_without_faults_leaves_nothing(filled: Path) -> None:
    expect_purged(copy(filled, "whole"))


def test_a_purge_killed_at_any_statement_can_be_finished(filled: Path) -> None:
    calls = count(filled)["any"]
    for nth in places(calls, 14):
        folder = copy(filled, "killed")
        assert in_child(folder, Machine(connect=DyingConnections("any", nth, "killed"))) == KILLED
        expect_sound(folder)
        expect_purged(folder)


@pytest.mark.parametrize("word", ["COMMIT", "VACUUM", "PRAGMA"])
def test_a_purge_killed_before_a_commit_or_a_cleaning_can_be_finished(filled: Path, word: str) -> None:
    calls = count(filled)[word]
    assert calls
    for nth in places(calls, 5):
        folder = copy(filled, "killed")
        assert in_child(folder, Machine(connect=DyingConnections(word, nth, "killed"))) == KILLED
        expect_sound(folder)
        expect_purged(folder)


@pytest.mark.parametrize(
    "method",
    ["create", "open", "write_some", "read_some", "sync", "close", "remove", "sync_folder", "sync_file"],
)
def test_a_purge_killed_at_any_call_of_the_system_can_be_finished(filled: Path, method: str) -> None:
    calls = count(filled)[method]
    assert calls
    for nth in places(calls, 3):
        folder = copy(filled, "killed")
        assert in_child(folder, Machine(files=DyingFiles(method, nth))) == KILLED
        expect_sound(folder)
        expect_purged(folder)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("free_bytes", "make_folder")])
def test_a_purge_where_the_system_fails_once_says_so_or_removes_everything(filled: Path, method: str) -> None:
    calls = count(filled)[method]
    for nth in places(calls, 3) if calls else []:
        folder = copy(filled, "failed")
        try:
            disk = DiskStore(folder, NO_MEMORY, Machine(files=FailingFiles(method, nth, errno.EIO)))
            purge(disk, "local", "", RUNS)
        except CacheUnusable:
            expect_sound_or_less(folder)
        else:
            disk.close()
            expect_gone(folder)
        expect_purged_or_less(folder)


@pytest.mark.parametrize("text", ["disk I/O error", "database or disk is full", "database is locked"])
def test_a_purge_where_the_catalog_fails_once_says_so_or_removes_everything(filled: Path, text: str) -> None:
    calls = count(filled)["any"]
    for nth in places(calls, 4):
        folder = copy(filled, "failed")
        try:
            machine = Machine(connect=Connections("any", nth, text), write_timeout_seconds=0.2)
            purge(DiskStore(folder, NO_MEMORY, machine), "local", "", RUNS)
        except CacheUnusable as error:
            assert "again" in str(error) or "cannot be opened" in str(error)
        else:
            expect_gone(folder)
        expect_purged(folder)


def expect_sound_or_less(folder: Path) -> None:
    """As `expect_sound`, but what could not be read may have gone."""
    with TieredStore(folder, NO_MEMORY) as store:
        assert [load_or_lose(store, tokens) is not None for tokens in (ASKED, WENT_ON, EVICTED, ELSE)] == [True] * 4
        assert check(store.disk).problems == ()


def expect_purged_or_less(folder: Path) -> None:
    with TieredStore(folder, NO_MEMORY) as store:
        store.purge("local", "", RUNS)
    expect_gone(folder)
    expect_sound_or_less(folder)


def test_a_file_that_cannot_be_removed_is_told_and_goes_the_next_time(filled: Path) -> None:
    folder, files = copy(filled, "stuck"), BrokenFiles()
    disk = DiskStore(folder, NO_MEMORY, Machine(files=files))
    files.stuck = set((folder / "extents").iterdir())
    with pytest.raises(CacheUnusable, match="Run it again"):
        purge(disk, "local", "", RUNS)
    disk.close()
    expect_purged(folder)


def test_where_open_files_cannot_be_removed_the_purge_says_that_somebody_reads(filled: Path) -> None:
    folder = copy(filled, "open")
    with TieredStore(folder, NO_MEMORY, Machine(files=SharingFiles())) as store:
        feed = store.load(KV_SPACE, store.lookup(KV_SPACE, ASKED))
        with pytest.raises(CacheUnusable, match="another process"):
            store.purge("local", "", RUNS)
        feed.close()
        store.purge("local", "", RUNS)
    expect_gone(folder)


@pytest.mark.parametrize("where", ["header", "kv"])
def test_a_file_that_lost_blocks_and_is_damaged_goes_as_a_whole(filled: Path, where: str) -> None:
    folder = copy(filled, "damaged")
    with TieredStore(folder, NO_MEMORY) as store:
        (row,) = [row for row in store.disk.entries() if row.live == 3]
        path = store.disk.extents.path(row.name)
        flip(path, 100 if where == "header" else header_length(path.read_bytes()[:8], path.stat().st_size))
        store.purge("local", "", RUNS)
        assert not path.exists() and load(store, EVICTED) == 0
    expect_gone(folder)
    assert problems(folder) == ()


def test_who_found_something_before_a_purge_gets_it_right_or_not_at_all(filled: Path) -> None:
    folder = copy(filled, "readers")
    with TieredStore(folder, NO_MEMORY) as reader, TieredStore(folder, NO_MEMORY) as other:
        match = reader.lookup(KV_SPACE, WENT_ON)
        feed = reader.load(KV_SPACE, match)
        other.purge("local", "", RUNS)
        right = make_kv(WENT_ON, feed.span)
        for layer in feed.layers:  # its files are open: what it reads is still what was kept
            out = LayerKv(right.layers[layer].keys.copy() * 0, right.layers[layer].values.copy() * 0)
            feed.fill(layer, out)
            assert (out.keys == right.layers[layer].keys).all() and (out.values == right.layers[layer].values).all()
        feed.close()
        with pytest.raises(KvLost):
            reader.load(KV_SPACE, match)
        assert load(reader, WENT_ON) == 64


def test_what_is_kept_while_a_purge_waits_for_it_goes_too(filled: Path) -> None:
    folder = copy(filled, "keeping")
    reserved, go_on = threading.Event(), threading.Event()

    class Slow(Files):
        def sync(self, handle: Any) -> None:
            reserved.set()
            assert go_on.wait(20)
            super().sync(handle)

    with (
        TieredStore(folder, NO_MEMORY, Machine(files=Slow())) as writer,
        TieredStore(folder, NO_MEMORY) as store,
    ):
        late = [*numbers(9, 33), *SECRET]
        thread = threading.Thread(target=lambda: keep(writer, late))
        thread.start()
        assert reserved.wait(20)
        threading.Timer(0.2, go_on.set).start()
        store.purge("local", "", RUNS)
        thread.join()
        assert load(store, late) == 32
    expect_gone(folder)
