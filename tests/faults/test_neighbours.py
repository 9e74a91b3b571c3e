"""Other processes in the same folder: with another key, a long read, a catalog set aside under somebody's feet."""

from __future__ import annotations

import errno
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.base import folder_bytes
from rekindle.core.kv import Span
from rekindle.store.catalog import catalog
from rekindle.store.check import check
from rekindle.store.disk import CATALOG, DiskStore, Machine
from rekindle.store.files import Files, Handle
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, keep, load, make_kv

ROOMY = StoreSettings(disk_limit="50MB", memory_limit=0)
KEYED = StoreSettings(disk_limit="50MB", memory_limit=0, key=bytes(range(32)))
LIMIT = (2 << 20) + 1_500_000
SMALL = StoreSettings(disk_limit=LIMIT, memory_limit=0)


def prompt(number: int, tokens: int = 640) -> list[int]:
    return [number * 10_000 + place for place in range(tokens)]


def make_sparse(store: TieredStore) -> None:
    """Free most blocks of every extent, and leave it at that."""
    with store.disk.database.writing() as connection:
        for row in store.disk.entries():
            catalog.cut(connection, row.id, 3)


def test_who_lacks_the_key_destroys_nothing(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", KEYED) as store:
        for number in range(5):
            keep(store, prompt(number))
        make_sparse(store)
    stranger = DiskStore(tmp_path / "c", ROOMY)
    stranger.collect()
    stranger.close()
    with TieredStore(tmp_path / "c", KEYED) as store:
        assert [load(store, prompt(number)) for number in range(5)] == [96] * 5
        assert check(store.disk).problems == ()


def test_collecting_makes_a_sparse_cache_smaller_at_once(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        for number in range(20):
            keep(store, prompt(number))
        before = sum(row.size_bytes for row in store.disk.entries())
        make_sparse(store)
        store.disk.collect()
        files = list((tmp_path / "c" / "extents").iterdir())
        assert len(files) == 20 and sum(path.stat().st_size for path in files) < before / 3
        assert [load(store, prompt(number)) for number in range(20)] == [96] * 20


def test_files_of_a_lost_catalog_go_whoever_noticed_the_loss(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", SMALL) as store:
        while keep(store, prompt(len(store.disk.entries()))).outcome == "kept" and len(store.disk.entries()) < 10:
            pass
    (tmp_path / "c" / CATALOG).write_bytes(b"garbage" * 1000)
    DiskStore(tmp_path / "c", SMALL).close()  # looks, and keeps nothing
    with TieredStore(tmp_path / "c", SMALL) as store:
        assert store.disk.entries() == []
        assert list((tmp_path / "c" / "extents").iterdir()) == []
        assert not list((tmp_path / "c").glob("*.broken-*"))


def test_one_sparse_file_that_cannot_be_read_does_not_stop_keeping(tmp_path: Path) -> None:
    class OneBad(Files):
        bad = ""

        def open(self, path: Path) -> Handle:
            if path.stem == self.bad:
                raise OSError(errno.EIO, "injected")
            return super().open(path)

    files = OneBad()
    with TieredStore(tmp_path / "c", SMALL, Machine(files=files)) as store:
        for number in range(5):
            keep(store, prompt(number))
        make_sparse(store)
        files.bad = store.disk.entries()[0].name
        outcomes = {keep(store, prompt(number)).outcome for number in range(10, 60)}
        assert outcomes == {"kept"}
        assert folder_bytes(tmp_path / "c") <= LIMIT


def test_while_somebody_reads_for_long_the_limit_holds_and_afterwards_keeping_goes_on(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", SMALL) as store:
        keep(store, prompt(0))
        with closing(sqlite3.connect(tmp_path / "c" / CATALOG, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM blocks").fetchone()
            outcomes = set()
            for number in range(1, 120):
                outcomes.add(keep(store, prompt(number)).outcome)
                assert folder_bytes(tmp_path / "c") <= LIMIT
            assert outcomes <= {"kept", "failed", "refused"} and "failed" in outcomes
            assert load(store, prompt(1)) in (0, 640)
        store.disk.database._next_cut = 0.0  # a second later
        assert keep(store, prompt(500)).outcome == "kept"
        assert check(store.disk).problems == ()


def test_a_number_of_a_lost_catalog_is_nobody_elses(tmp_path: Path) -> None:
    """A reserves, the catalog is lost, B reserves the same number in the new one: A must not publish on B's row."""
    tokens = prompt(1)
    with TieredStore(tmp_path / "c", ROOMY) as first, TieredStore(tmp_path / "c", ROOMY) as second:

        class Interrupting(Files):
            done = False

            def sync(self, handle: Handle) -> None:
                super().sync(handle)
                if not Interrupting.done:
                    Interrupting.done = True
                    second.disk.database.discard()
                    assert keep(second, prompt(2)).outcome == "kept"

        first.disk.extents.files = Interrupting()
        assert first.keep(KV_SPACE, tokens, make_kv(tokens, Span(0, 640))).outcome == "refused"
        assert Interrupting.done
        assert (load(first, tokens), load(second, prompt(2))) == (0, 640)
        assert check(second.disk).problems == ()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE extents SET blocks=0",
        "UPDATE extents SET kv_space=77",
        "DELETE FROM kv_spaces",
        "UPDATE extents SET live=-5",
    ],
)
def test_rows_that_make_no_sense_never_raise_out_of_the_store(tmp_path: Path, damage: str) -> None:
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit=LIMIT, memory_limit="1MB")) as store:
        for number in range(5):
            keep(store, prompt(number))
        with store.disk.database.writing() as connection:
            connection.execute(damage)
        for number in range(40):
            keep(store, prompt(number))
            store.lookup(KV_SPACE, prompt(number))
        store.maintain()
        check(store.disk, fix=True)
        assert check(store.disk).problems == ()
        assert keep(store, prompt(99)).outcome == "kept"
