"""Differences under faults: whatever happens to them or to what they stand on, KV is right to the bit, or lost."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.core.keys import KvSpace, token_bytes
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.errors import CacheUnusable, KvLost
from rekindle.store.catalog import catalog
from rekindle.store.check import check
from rekindle.store.disk import CATALOG, Machine
from rekindle.store.files import Handle
from rekindle.store.purge import TokenRun
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.faults.folders import REPOSITORY, copy, file_bytes, flip
from tests.faults.test_injected import METHODS, SYSTEM_ERRORS, BrokenFiles, Connections, FailingFiles
from tests.faults.test_purge import KILLED, DyingConnections, DyingFiles, places
from tests.store.test_delta_base import (
    BASE,
    KV_SPACES,
    LATE,
    ONE,
    ROOMY,
    TWO,
    adapted,
    fetch,
    is_same,
    keep,
    load,
    load_or_lose,
    problems,
    quantized,
    rows_of,
    stands_on,
)

T = list(range(1000, 1200))
LONGER = [*T, *range(3000, 3100)]
OTHER = list(range(7000, 7500))
QUANTIZED = (quantized(BASE), quantized(ONE))
LIMIT = (2 << 20) + 1_500_000
SETTINGS = replace(ROOMY, disk_limit=LIMIT)
USED_METHODS = [name for name in METHODS if name not in ("free_bytes", "make_folder", "names", "place", "sync_file")]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prompt on the base's KV space and as differences on two adapters', exact and quantized."""
    folder = tmp_path_factory.mktemp("anchors") / "cache"
    with TieredStore(folder, SETTINGS) as store:
        for kv_space in (*KV_SPACES, *QUANTIZED):
            assert keep(store, T, kv_space).outcome == "kept"
        assert keep(store, OTHER, BASE).outcome == "kept"
        assert keep(store, OTHER[:200], ONE).outcome == "kept"
        assert [row.coding for row in store.disk.entries()].count("exact") == 3
    return folder


def expect_right(store: TieredStore) -> None:
    """Every KV space serves what was kept, or has lost it; what was lost is not found again, and can be kept again."""
    for kv_space in (*KV_SPACES, LATE):
        before = store.lookup(kv_space, LONGER).length
        if load_or_lose(store, LONGER, kv_space) is None:
            assert store.lookup(kv_space, LONGER).length < before, "what was lost is found again"
        assert keep(store, LONGER, kv_space).outcome in ("kept", "known")
        assert load(store, LONGER, kv_space) == len(LONGER)


def expect_sound(folder: Path) -> None:
    """Without faults, the folder is clean, serves right numbers only, keeps its limit, and takes more."""
    assert file_bytes(folder) <= LIMIT
    with TieredStore(folder, SETTINGS) as store:
        assert problems(store) == ()
        for kv_space in (*KV_SPACES, LATE):
            load(store, LONGER, kv_space)
            load(store, OTHER, kv_space)
        for kv_space in QUANTIZED:
            fetch(store, T, kv_space)
        expect_right(store)
        assert problems(store) == ()
    assert file_bytes(folder) <= LIMIT


def use(store: TieredStore) -> None:
    """Keep differences, load, trim and write anew, re-base; whatever fails."""
    keep(store, T, LATE)
    keep(store, LONGER, BASE)
    keep(store, LONGER, ONE)
    for kv_space in (BASE, ONE, LATE):
        load_or_lose(store, LONGER, kv_space)
        store.record_use(store.lookup(kv_space, LONGER), 1.0)
    with contextlib.suppress(*SYSTEM_ERRORS), store.disk.database.writing() as connection:
        for row in catalog.extents(connection, "state='live' AND live>10"):
            catalog.cut(connection, row.id, 7)
    store.maintain()
    with contextlib.suppress(*SYSTEM_ERRORS):
        store.disk.remove(rows_of(store, BASE)[:1])
    with contextlib.suppress(*SYSTEM_ERRORS):
        store.disk.remove(rows_of(store, quantized(BASE)))
    load_or_lose(store, LONGER, TWO)
    store.maintain()


class Watching(FailingFiles):
    """Failing files that know which of them are open."""

    def __init__(self, method: str = "", nth: int = 0, error: int = errno.EIO) -> None:
        super().__init__(method, nth, error)
        self.open_now: dict[int, Path] = {}

    def create(self, path: Path) -> Handle:
        handle = super().create(path)
        self.open_now[handle.descriptor] = path
        return handle

    def open(self, path: Path) -> Handle:
        handle = super().open(path)
        self.open_now[handle.descriptor] = path
        return handle

    def close(self, handle: Handle) -> None:
        self.open_now.pop(handle.descriptor, None)  # a lock was not opened here
        super().close(handle)


@pytest.fixture(scope="module")
def calls(sound: Path) -> Counter[str]:
    """How often the work calls what, without faults."""
    files, connections = Watching(), Connections()
    folder = copy(sound, "count")
    with TieredStore(folder, SETTINGS, Machine(files=files, connect=connections)) as store:
        use(store)
        counted = files.calls + connections.calls
        assert any(stands_on(store, row) for row in rows_of(store, ONE))
        assert [row.coding for row in rows_of(store, quantized(ONE))] == ["quantized"]
        assert not any(stands_on(store, row) for row in rows_of(store, quantized(ONE))), "it was to be re-based"
    assert files.open_now == {}
    expect_sound(folder)
    return counted


def fail_file(sound: Path, method: str, nth: int, error: int) -> None:
    folder, files = copy(sound, "failing"), Watching(method, nth, error)
    with (
        contextlib.suppress(CacheUnusable),
        TieredStore(folder, SETTINGS, Machine(files=files)) as store,
    ):
        use(store)
    assert files.open_now == {}, "a file was left open"
    expect_sound(folder)


def fail_statement(sound: Path, word: str, nth: int, text: str) -> None:
    folder = copy(sound, "failing")
    machine = Machine(connect=Connections(word, nth, text), write_timeout_seconds=0.2)
    with contextlib.suppress(CacheUnusable), TieredStore(folder, SETTINGS, machine) as store:
        use(store)
    expect_sound(folder)


def killed(folder: Path, machine: Machine) -> int:
    """Do the work in a forked process; how it ended."""
    child = os.fork()
    if child == 0:
        try:
            with TieredStore(folder, SETTINGS, machine) as store:
                use(store)
        except BaseException:  # noqa: BLE001  (told by the exit status)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("method", USED_METHODS)
def test_a_file_operation_that_fails_costs_at_most_what_it_was_for(
    sound: Path, calls: Counter[str], method: str
) -> None:
    assert calls[method]
    for nth in places(calls[method], 4)[1:3]:
        fail_file(sound, method, nth, errno.EIO)


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("method", USED_METHODS)
def test_a_file_operation_that_fails_anywhere_costs_at_most_what_it_was_for(
    sound: Path, calls: Counter[str], method: str, error: int
) -> None:
    for nth in range(1, calls[method] + 1):
        try:
            fail_file(sound, method, nth, error)
        except Exception as problem:
            raise AssertionError(f"call {nth} of {calls[method]} of {method}: {problem!r}") from problem


@pytest.mark.parametrize("word", ["BEGIN", "COMMIT", "INSERT", "UPDATE", "any"])
def test_a_statement_that_fails_costs_at_most_what_it_was_for(sound: Path, calls: Counter[str], word: str) -> None:
    assert calls[word]
    for nth in places(calls[word], 4)[1:3]:
        fail_statement(sound, word, nth, "disk I/O error")


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("text", ["disk I/O error", "database or disk is full"])
def test_a_statement_that_fails_anywhere_costs_at_most_what_it_was_for(
    sound: Path, calls: Counter[str], text: str, part: int
) -> None:
    for nth in range(1 + part, calls["any"] + 1, 8):
        try:
            fail_statement(sound, "any", nth, text)
        except Exception as problem:
            raise AssertionError(f"statement {nth} of {calls['any']}: {problem!r}") from problem


@pytest.mark.parametrize("method", ["create", "open", "write_some", "read_some", "sync", "close", "remove"])
def test_killed_at_a_call_of_the_system_leaves_a_sound_folder(sound: Path, calls: Counter[str], method: str) -> None:
    for nth in places(calls[method], 4)[1:3]:
        folder = copy(sound, "killed")
        assert killed(folder, Machine(files=DyingFiles(method, nth))) == KILLED
        expect_sound(folder)


@pytest.mark.parametrize("word", ["COMMIT", "INSERT", "UPDATE"])
def test_killed_at_a_statement_leaves_a_sound_folder(sound: Path, calls: Counter[str], word: str) -> None:
    for nth in places(calls[word], 4)[1:3]:
        folder = copy(sound, "killed")
        assert killed(folder, Machine(connect=DyingConnections(word, nth, "killed"))) == KILLED
        expect_sound(folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["create", "write_some", "sync", "remove", "COMMIT"])
def test_killed_anywhere_leaves_a_sound_folder(sound: Path, calls: Counter[str], method: str) -> None:
    for nth in range(1, calls[method] + 1):
        folder = copy(sound, "killed")
        machine = (
            Machine(connect=DyingConnections(method, nth, "killed"))
            if method == "COMMIT"
            else Machine(files=DyingFiles(method, nth))
        )
        try:
            assert killed(folder, machine) == KILLED
            expect_sound(folder)
        except Exception as problem:
            raise AssertionError(f"call {nth} of {calls[method]} of {method}: {problem!r}") from problem


@pytest.mark.parametrize("method", ["create", "write_some", "sync"])
def test_while_the_disk_is_full_differences_are_served_and_afterwards_kept(sound: Path, method: str) -> None:
    folder, files = copy(sound, "full"), BrokenFiles()
    with TieredStore(folder, SETTINGS, Machine(files=files)) as store:
        files.broken = {method: errno.ENOSPC}
        assert keep(store, T, LATE).outcome == "failed"
        assert [load(store, T, kv_space) for kv_space in KV_SPACES] == [200] * 3
        with contextlib.suppress(*SYSTEM_ERRORS):
            store.disk.remove(rows_of(store, BASE)[:1])
        for kv_space in KV_SPACES:
            load(store, T, kv_space)
        assert problems(store) == ()
        files.broken = {}
        expect_right(store)
        assert problems(store) == ()


def test_what_cannot_be_read_for_a_while_is_lost_for_that_while_only(sound: Path) -> None:
    folder, files = copy(sound, "unreadable"), BrokenFiles()
    with TieredStore(folder, SETTINGS, Machine(files=files)) as store:
        files.broken = {"read_some": errno.EIO}
        assert [load_or_lose(store, T, kv_space) for kv_space in KV_SPACES] == [None] * 3
        assert keep(store, T, LATE).outcome == "kept", "without its anchor, as a whole"
        files.broken = {}
        assert [load(store, T, kv_space) for kv_space in (*KV_SPACES, LATE)] == [200] * 4
        assert stands_on(store, rows_of(store, LATE)[0]) == []


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "flips"),
    [
        pytest.param(0, 1, id="disk"),
        pytest.param(0, 12, id="disk, many", marks=pytest.mark.exhaustive),
        pytest.param("10MB", 12, id="memory, many", marks=pytest.mark.exhaustive),
    ],
)
def test_a_flipped_bit_anywhere_gives_the_right_numbers_or_none(sound: Path, memory: str | int, flips: int) -> None:
    rng = random.Random(5)
    settings = replace(SETTINGS, memory_limit=memory)
    with TieredStore(copy(sound, "right"), settings) as store:
        right = {kv_space: fetch(store, T, kv_space) for kv_space in QUANTIZED}
    losses = 0
    for path in sorted((sound / "extents").iterdir()):
        for _ in range(flips):
            folder = copy(sound, "flipped")
            target = folder / "extents" / path.name
            flip(target, rng.randrange(target.stat().st_size), rng.randrange(8))
            with TieredStore(folder, settings) as store:
                for kv_space in QUANTIZED:
                    with contextlib.suppress(KvLost):
                        assert is_same(fetch(store, T, kv_space), right[kv_space])
                expect_right(store)
                losses += store.counts.quarantined
                store.maintain()
                check(store.disk, fix=True)
                assert problems(store) == ()
                assert [load(store, LONGER, kv_space) for kv_space in KV_SPACES][1:] == [300, 300]
    assert losses > 2 * flips


def test_a_damaged_delta_base_costs_what_stands_on_it_and_all_of_it_can_be_kept_again(sound: Path) -> None:
    folder = copy(sound, "damaged")
    with TieredStore(folder, SETTINGS) as store:
        (base,) = [row for row in rows_of(store, BASE) if row.tokens == 200]
        path = store.disk.extents.path(base.name)
        flip(path, path.stat().st_size - 1)
        assert [load_or_lose(store, T, kv_space) for kv_space in (ONE, TWO)] == [None, None]
        assert keep(store, T, ONE).outcome == "kept"
        assert load(store, T, ONE) == 200
        assert keep(store, T, TWO).outcome == "kept"
        assert load(store, T, TWO) == 200
        assert load_or_lose(store, T, BASE) == 0  # it was found out already
        store.maintain()
        assert problems(store) == () and load(store, T, ONE) == 200


@pytest.mark.parametrize("how", ["missing", "empty", "cut off", "another's"])
def test_a_delta_base_whose_file_is_no_more_what_it_was_gives_nothing_wrong(sound: Path, how: str) -> None:
    folder = copy(sound, "file")
    with TieredStore(folder, SETTINGS) as store:
        (base,), (two,) = [r for r in rows_of(store, BASE) if r.tokens == 200], rows_of(store, TWO)
        path = store.disk.extents.path(base.name)
        if how == "missing":
            path.unlink()
        else:
            data = {
                "empty": b"",
                "cut off": path.read_bytes()[:-50],
                "another's": store.disk.extents.path(two.name).read_bytes(),
            }
            path.write_bytes(data[how])
    with TieredStore(folder, SETTINGS) as store:
        assert [load_or_lose(store, T, kv_space) for kv_space in KV_SPACES] == [None] * 3
        assert [store.lookup(kv_space, T).length for kv_space in KV_SPACES] == [0] * 3
        expect_right(store)
    assert check_fixed(folder) == ()


def check_fixed(folder: Path) -> tuple[object, ...]:
    with TieredStore(folder, SETTINGS) as store:
        check(store.disk, fix=True)
        return problems(store)


@pytest.mark.parametrize("codec", ["raw", "quantized"])
def test_a_delta_whose_base_is_said_to_be_in_another_kv_space_is_lost(tmp_path: Path, codec: str) -> None:
    """The same tokens in the same place, whole, but of another adapter: only the numbers are others."""
    base, one, two = (replace(kv_space, codec=codec) for kv_space in KV_SPACES)
    with TieredStore(tmp_path / "c", replace(SETTINGS, exact=None)) as store:
        assert keep(store, T, two).outcome == "kept"
    with TieredStore(tmp_path / "c", SETTINGS) as store:
        keep(store, T, base)
        keep(store, T, one)
        before = fetch(store, T, one)
        (row,), (other,) = rows_of(store, one), rows_of(store, two)
        assert stands_on(store, row) == [rows_of(store, base)[0].id]
        with store.disk.database.writing() as connection:
            connection.execute("UPDATE delta_bases SET base=? WHERE extent=?", (other.id, row.id))
        try:
            assert is_same(fetch(store, T, one), before)
        except KvLost:
            assert store.lookup(one, T).length == 0
        else:
            pytest.fail("it should not be served")


def test_a_delta_whose_base_has_other_numbers_in_the_same_place_is_lost(tmp_path: Path) -> None:
    """An anchor that is sound in itself, so that only what comes of both can tell."""
    with TieredStore(tmp_path / "c", SETTINGS) as store:
        keep(store, T, BASE)
        keep(store, T, ONE)
        (base,) = rows_of(store, BASE)
        extent = store.disk.open(base, store.disk.kv_space_digest(BASE))
        store.disk.extents.release(extent)
        store.disk.extents.path(base.name).unlink()
        written = store.disk.extents.write(extent.header.plan, adapted(T, Span(0, 200), TWO).layers)
        with store.disk.database.writing() as connection:
            connection.execute("UPDATE extents SET digest=? WHERE id=?", (written.digest, base.id))
    with TieredStore(tmp_path / "c", SETTINGS) as store:
        assert len(fetch(store, T, BASE).span) == 200
        assert load_or_lose(store, T, ONE) is None
        assert keep(store, T, ONE).outcome == "kept"
        assert load(store, T, ONE) == 200


GARBAGE = (1, "text", -1, 0, 2, 2**62, 1.5, 1e300, b"\xff" * 9)


@pytest.mark.parametrize(
    "garbage", [GARBAGE[:2], pytest.param(GARBAGE[2:], marks=pytest.mark.exhaustive)], ids=["some", "more"]
)
@pytest.mark.parametrize("column", ["extent", "base", "at", "place", "blocks"])
def test_garbage_in_a_row_of_delta_bases_gives_the_right_numbers_or_none(
    sound: Path, column: str, garbage: tuple[object, ...]
) -> None:
    for value in garbage:
        folder = copy(sound, "garbage")
        with closing(sqlite3.connect(folder / CATALOG)) as connection, connection:
            connection.execute(f"UPDATE OR REPLACE delta_bases SET {column}=?", (value,))
        with TieredStore(folder, SETTINGS) as store:
            for kv_space in (*KV_SPACES, LATE):
                load_or_lose(store, T, kv_space)
                assert keep(store, T, kv_space).outcome in ("kept", "known", "failed", "refused")
                load_or_lose(store, T, kv_space)
            store.maintain()
        with TieredStore(folder, SETTINGS) as store:
            check(store.disk, fix=True)
            assert problems(store) == ()
            expect_right(store)
            assert problems(store) == ()


def test_rows_of_delta_bases_that_are_gone_make_the_difference_lost(sound: Path) -> None:
    folder = copy(sound, "rowless")
    with closing(sqlite3.connect(folder / CATALOG)) as connection, connection:
        connection.execute("DELETE FROM delta_bases")
    with TieredStore(folder, SETTINGS) as store:
        assert {problem.kind for problem in problems(store)} == {"damaged"}
        assert [load_or_lose(store, T, kv_space) for kv_space in KV_SPACES] == [200, None, None]
        expect_right(store)
        check(store.disk, fix=True)
        assert problems(store) == ()


@pytest.mark.parametrize("flips", [10, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_any_flipped_bit_of_the_catalog_gives_the_right_numbers_or_none(sound: Path, flips: int) -> None:
    rng = random.Random(7)
    with TieredStore(copy(sound, "right"), SETTINGS) as store:
        right = {kv_space: fetch(store, T, kv_space) for kv_space in QUANTIZED}
    with closing(sqlite3.connect(sound / CATALOG)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = (sound / CATALOG).stat().st_size
    for _ in range(flips):
        folder = copy(sound, "catalog")
        flip(folder / CATALOG, rng.randrange(100, size), rng.randrange(8))
        with TieredStore(folder, SETTINGS) as store:
            for _again in range(2):
                for kv_space in KV_SPACES:
                    load_or_lose(store, T, kv_space)
                for kv_space in QUANTIZED:
                    with contextlib.suppress(KvLost):
                        found = fetch(store, T, kv_space)
                        assert is_same(found, first_of(right[kv_space], len(found.span)))
                keep(store, T, LATE)
                store.maintain()


def first_of(kv: Kv, count: int) -> Kv:
    layers = tuple(LayerKv(layer.keys[:, :count], layer.values[:, :count]) for layer in kv.layers)
    return Kv(replace(kv.span, stop=count), kv.layout, layers)


def test_a_lost_catalog_costs_everything_and_nothing_stands_on_what_was_before(sound: Path) -> None:
    folder = copy(sound, "lost")
    for path in folder.glob(f"{CATALOG}*"):
        path.unlink()
    with TieredStore(folder, SETTINGS) as store:
        assert [load(store, T, kv_space) for kv_space in KV_SPACES] == [0, 0, 0]
        assert keep(store, T, ONE).outcome == "kept"
        assert load(store, T, ONE) == 200
        expect_right(store)
        assert problems(store) == ()


# -- others at the same time -------------------------------------------------------------------------------------------


def fill(store: TieredStore, kv_space: KvSpace, feed: object) -> Kv:
    """All that a feed brings."""
    right = adapted(T, feed.span, kv_space)  # type: ignore[attr-defined]
    layers = tuple(LayerKv(layer.keys * 0, layer.values * 0) for layer in right.layers)
    for number, layer in enumerate(layers):
        feed.fill(number, layer)  # type: ignore[attr-defined]
    return Kv(right.span, right.layout, layers)


@pytest.mark.parametrize("how", ["remove", "purge", "prune"])
def test_a_reader_that_found_a_delta_before_its_base_went_gets_it_right_or_nothing(sound: Path, how: str) -> None:
    folder = copy(sound, "readers")
    with TieredStore(folder, SETTINGS) as reader, TieredStore(folder, SETTINGS) as other:
        match = reader.lookup(ONE, T)
        with reader.load(ONE, match) as feed:
            if how == "remove":
                other.disk.remove(rows_of(other, BASE))
            elif how == "purge":
                other.purge("local", "", [TokenRun("words", token_bytes(T[40:60]))])
            else:
                other.disk.room.prune(0)
            assert is_same(fill(reader, ONE, feed), adapted(T, match.pieces[0].span, ONE))
        with pytest.raises(KvLost):
            reader.load(ONE, match)
        load(reader, T, ONE)
        assert problems(other) == ()


def test_a_delta_base_that_goes_while_a_difference_is_written_is_noticed(sound: Path) -> None:
    folder = copy(sound, "meanwhile")

    class Removing(FailingFiles):
        """Somebody removes the anchor when the difference is on disk but not listed."""

        def sync(self, handle: Handle) -> None:
            super().sync(handle)
            if not self.fault[1]:
                self.fault = ("", 1)
                with TieredStore(folder, SETTINGS) as other:
                    other.disk.remove(rows_of(other, BASE))

    with TieredStore(folder, SETTINGS, Machine(files=Removing())) as store:
        kept = keep(store, T, LATE)
        assert kept.outcome in ("refused", "kept")
        assert load(store, T, LATE) == (200 if kept.outcome == "kept" else 0)
        assert problems(store) == ()
        assert keep(store, T, LATE).outcome in ("kept", "known")
        assert load(store, T, LATE) == 200 and problems(store) == ()


def test_processes_that_keep_remove_and_evict_at_once_agree(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    script = f"""
import random, sys
from tests.faults.test_delta_base import *
number = int(sys.argv[1])
rng = random.Random(number)
served = 0
with TieredStore({str(folder)!r}, SETTINGS) as store:
    for turn in range(24):
        tokens = LONGER[:rng.choice([70, 96, 200, 300])]
        kv_space = rng.choice([*KV_SPACES, LATE])
        keep(store, tokens, kv_space)
        for kv_space in (*KV_SPACES, LATE):
            served += load_or_lose(store, LONGER, kv_space) or 0
        if turn % 4 == 3:
            rows = store.disk.entries()
            if rows:
                store.disk.remove([rng.choice(rows)])
        if turn % 5 == 4:
            store.maintain()
        if turn % 9 == 8:
            store.disk.room.prune(store.disk.database.size_bytes() + 10_000)
    assert store.counts.write_failures == 0, store.counts
    assert store.counts.quarantined == 0, store.counts
    assert served
"""
    workers = [
        subprocess.Popen([sys.executable, "-c", script, str(number)], cwd=REPOSITORY, stderr=subprocess.PIPE)
        for number in range(2)
    ]
    for worker in workers:
        _, complaint = worker.communicate(timeout=120)
        assert worker.returncode == 0, complaint.decode()
    with TieredStore(folder, SETTINGS) as store:
        assert problems(store) == ()
        expect_right(store)


def test_a_folder_that_can_only_be_read_serves_differences(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy(sound, "read-only")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    with TieredStore(folder, SETTINGS) as store:
        assert store.disk.database.read_only
        assert [load(store, T, kv_space) for kv_space in KV_SPACES] == [200] * 3
        assert keep(store, T, LATE).outcome == "failed"


def test_another_way_of_coding_reads_what_was_kept_before(sound: Path) -> None:
    for settings in (replace(SETTINGS, exact=None, quantized=None), StoreSettings(disk_limit=LIMIT, memory_limit=0)):
        with TieredStore(copy(sound, "settings"), settings) as store:
            assert [load(store, T, kv_space) for kv_space in KV_SPACES] == [200] * 3
            store.disk.remove(rows_of(store, BASE))
            assert [load(store, T, kv_space) for kv_space in KV_SPACES] == [0, 200, 200]
            assert problems(store) == ()
