"""A catalog that is broken, locked, foreign, newer, read-only or gone: misses and "not kept", never a wrong number."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.errors import CacheUnusable, KvLost
from rekindle.store.catalog.database import Database
from rekindle.store.catalog.schema import APPLICATION_ID, MIGRATIONS
from rekindle.store.check import check
from rekindle.store.disk import CATALOG, Machine
from rekindle.store.files import Files
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.faults.folders import (
    NO_MEMORY,
    WITH_MEMORY,
    as_nobody,
    copy,
    fill,
    load_or_lose,
    open_to_all,
    problems,
    prompt,
)
from tests.kvs import KV_SPACE, keep, load

PROMPTS = [prompt(1), prompt(1, 150), prompt(2, 64), prompt(3, 200), prompt(4, 33)]
IMPATIENT = Machine(write_timeout_seconds=0.05)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few prompts. Do not change it: copy it."""
    folder = tmp_path_factory.mktemp("catalog") / "sound"
    fill(folder, PROMPTS)
    return folder


@contextmanager
def left_with_a_log(folder: Path) -> Iterator[None]:
    """Keep prompts so that they stand in the catalog's log only, as after a crash."""
    with TieredStore(folder, NO_MEMORY) as store:
        for tokens in PROMPTS:
            assert keep(store, tokens).outcome == "kept"
        assert (folder / f"{CATALOG}-wal").stat().st_size > 0
        yield


def _use(folder: Path, settings: StoreSettings = NO_MEMORY) -> list[int | None]:
    """Open the folder, load every prompt, keep every prompt, load again, tend; what the first loads served."""
    with TieredStore(folder, settings, IMPATIENT) as store:
        served = [load_or_lose(store, tokens) for tokens in PROMPTS]
        for tokens in PROMPTS:
            keep(store, tokens)
            load_or_lose(store, tokens)
        store.maintain()
    return served


def _expect_as_new(folder: Path) -> None:
    """The folder can be fixed, and then it works."""
    problems(folder, fix=True)
    assert problems(folder) == ()
    with TieredStore(folder, NO_MEMORY) as store:
        for tokens in PROMPTS:
            assert keep(store, tokens).outcome in ("kept", "known")
        assert [load(store, tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]
        store.maintain()
        names = {f"{row.name}.kv" for row in store.disk.entries()}
        assert {path.name for path in (folder / "extents").iterdir()} == names


def _broken(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".broken-" in path.name]


# -- broken ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [15, 16, 100, 4096, 70_000])
def test_garbage_in_place_of_the_catalog_is_set_aside_and_all_is_computed(sound: Path, size: int) -> None:
    folder = copy(sound, "garbage")
    (folder / CATALOG).write_bytes(random.Random(size).randbytes(size))
    with TieredStore(folder, NO_MEMORY) as store:
        assert [store.lookup(KV_SPACE, tokens).length for tokens in PROMPTS] == [0] * len(PROMPTS)
        assert keep(store, PROMPTS[0]).outcome == "kept"
        assert load(store, PROMPTS[0]) == len(PROMPTS[0])
    _expect_as_new(folder)
    assert _broken(folder) == []


def test_what_a_broken_catalog_listed_is_stray_and_goes_when_it_is_collected(sound: Path) -> None:
    folder = copy(sound, "strays")
    (folder / CATALOG).write_bytes(b"garbage" * 1000)
    with TieredStore(folder, NO_MEMORY) as store:
        assert {problem.kind for problem in check(store.disk).problems} <= {"stray"}
        store.disk.collect()
        assert check(store.disk).problems == ()
    assert list((folder / "extents").iterdir()) == []
    assert _broken(folder) == []


def test_a_catalog_that_cannot_be_read_is_renamed_not_destroyed(sound: Path) -> None:
    folder = copy(sound, "renamed")
    (folder / CATALOG).write_bytes(b"garbage" * 1000)
    Database(folder / CATALOG, Files()).close()
    (name,) = _broken(folder)
    assert (folder / name).read_bytes() == b"garbage" * 1000


@pytest.mark.parametrize("size", [0, 1, 99, 4096, 4097, 12_288, 40_000])
def test_a_truncated_catalog_never_serves_wrong_numbers_and_heals(sound: Path, size: int) -> None:
    folder = copy(sound, "truncated")
    os.truncate(folder / CATALOG, size)
    _use(folder)
    _expect_as_new(folder)


@pytest.mark.parametrize("settings", [NO_MEMORY, WITH_MEMORY], ids=["disk", "memory"])
def test_a_byte_changed_anywhere_in_the_catalog_never_serves_wrong_numbers_and_never_raises(
    sound: Path, settings: StoreSettings
) -> None:
    size = (sound / CATALOG).stat().st_size
    chance = random.Random(11)
    served_something = 0
    raised: dict[int, str] = {}
    for offset in [*range(0, 100, 7), *chance.sample(range(100, size), 140)]:
        folder = copy(sound, "flipped")
        _change(folder / CATALOG, offset, chance.randrange(1, 256))
        try:
            served_something += any(_use(folder, settings))
        except CacheUnusable as unusable:
            assert str(unusable).endswith("."), "not a sentence"
        except AssertionError:
            raise
        except Exception as error:  # noqa: BLE001
            raised[offset] = repr(error)
    assert raised == {}
    assert served_something > 100, "the test damages too much to show anything"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE blocks SET tokens=CAST(tokens AS TEXT)",
        "UPDATE blocks SET tokens=7",
        "UPDATE blocks SET tokens=zeroblob(128)",
        "UPDATE blocks SET tokens=zeroblob(3)",
        "UPDATE blocks SET key=hex(key)",
        "UPDATE blocks SET parent=key",
        "UPDATE blocks SET place=place+1",
        "UPDATE blocks SET place='first' WHERE place=0",
        "UPDATE blocks SET place=-place",
        "UPDATE blocks SET extent='none' WHERE extent=1",
        "UPDATE blocks SET extent=1+extent%5",
        "UPDATE blocks SET kv_space=kv_space+1",
        "UPDATE extents SET name=CAST(name AS BLOB)",
        "UPDATE extents SET name='../../etc/' || name",
        "UPDATE extents SET bytes='many'",
        "UPDATE extents SET bytes=bytes+1",
        "UPDATE extents SET digest=NULL",
        "UPDATE extents SET digest=hex(digest)",
        "UPDATE extents SET kept='long ago'",
        "UPDATE extents SET live='all', blocks='all'",
        "UPDATE extents SET blocks=0",
        "UPDATE extents SET live=0",
        "UPDATE extents SET state='writing'",
        "UPDATE extents SET depth='deep'",
        "UPDATE extents SET hits='many', used='often'",
        "DELETE FROM extents WHERE id=1",
        "DELETE FROM blocks WHERE place=1",
        "DELETE FROM totals",
        "UPDATE totals SET bytes='many'",
        "UPDATE totals SET bytes=-1000000000",
        "DELETE FROM kv_spaces",
        "UPDATE kv_spaces SET digest=CAST(digest AS BLOB)",
        "DROP TABLE blocks",
        "DROP INDEX blocks_key",
        "DROP TABLE totals",
    ],
)
def test_rows_that_make_no_sense_never_serve_wrong_numbers_never_raise_and_can_be_fixed(
    sound: Path, change: str
) -> None:
    folder = copy(sound, "senseless")
    with closing(sqlite3.connect(folder / CATALOG, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints=1")
        connection.execute(change.replace("UPDATE ", "UPDATE OR REPLACE ", 1))
    _use(folder)
    _expect_as_new(folder)


def test_a_byte_changed_anywhere_in_the_catalog_is_repaired_by_a_check_that_fixes(sound: Path) -> None:
    size = (sound / CATALOG).stat().st_size
    chance = random.Random(12)
    raised: dict[int, str] = {}
    for offset in chance.sample(range(size), 150):
        folder = copy(sound, "reused")
        _change(folder / CATALOG, offset, chance.randrange(1, 256))
        try:
            _expect_as_new(folder)
        except Exception as error:  # noqa: BLE001
            raised[offset] = f"{error!r:.100}"
    assert raised == {}


def _change(path: Path, offset: int, mask: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def test_a_damaged_log_never_serves_wrong_numbers_and_heals(tmp_path: Path) -> None:
    crashed = tmp_path / "crashed"
    with left_with_a_log(crashed):
        pristine = copy(crashed, "pristine")
    size = (pristine / f"{CATALOG}-wal").stat().st_size
    chance = random.Random(5)
    lost_something = 0
    for offset in [0, 8, 20, 24, 33, *chance.sample(range(size), 25)]:
        folder = copy(pristine, "log")
        (folder / f"{CATALOG}-shm").unlink()
        _change(folder / f"{CATALOG}-wal", offset, chance.randrange(1, 256))
        lost_something += _use(folder) != [len(tokens) for tokens in PROMPTS]
        _expect_as_new(folder)
    assert lost_something > 5
    for cut in (0, 1, 31, 32, 4096, size // 2, size - 1):
        folder = copy(pristine, "log")
        os.truncate(folder / f"{CATALOG}-wal", cut)
        _use(folder)
        _expect_as_new(folder)


def test_a_catalog_broken_while_it_is_used_is_set_aside_and_keeping_goes_on(sound: Path) -> None:
    for settings in (NO_MEMORY, WITH_MEMORY):
        folder = copy(sound, "running")
        with TieredStore(folder, settings, IMPATIENT) as store, TieredStore(folder, settings, IMPATIENT) as other:
            assert load(store, PROMPTS[0]) == load(other, PROMPTS[0]) == len(PROMPTS[0])
            with (folder / CATALOG).open("r+b") as file:
                file.write(b"\xff" * (folder / CATALOG).stat().st_size)
            for tokens in PROMPTS:
                load_or_lose(store, tokens)
                load_or_lose(other, tokens)
                keep(store, tokens)
                keep(other, tokens)
            store.maintain()
            other.maintain()
            for tokens in PROMPTS:
                assert keep(store, tokens).outcome in ("kept", "known")
                assert load(store, tokens) == load(other, tokens) == len(tokens)
        _expect_as_new(folder)


# -- locked ------------------------------------------------------------------------------------------------------------


def test_while_another_holds_the_catalog_lookups_are_right_and_keeps_fail_softly(sound: Path) -> None:
    folder = copy(sound, "locked")
    with TieredStore(folder, NO_MEMORY, IMPATIENT) as store:
        with closing(sqlite3.connect(folder / CATALOG, isolation_level=None)) as holder:
            holder.execute("BEGIN EXCLUSIVE")
            assert load_or_lose(store, PROMPTS[0]) in (None, 0, len(PROMPTS[0]))
            store.record_use(store.lookup(KV_SPACE, PROMPTS[0]), 5.0)
            assert keep(store, prompt(9)).outcome == "failed"
            store.maintain()
            assert store.counts.write_failures >= 1
            holder.execute("ROLLBACK")
        assert keep(store, prompt(9)).outcome == "kept"
        assert load(store, prompt(9)) == 80
        store.maintain()
        assert check(store.disk).problems == ()


def test_a_store_opened_while_another_holds_the_catalog_works_or_says_that_it_cannot(sound: Path) -> None:
    folder = copy(sound, "held")
    for mode in ("NORMAL", "EXCLUSIVE"):
        with closing(sqlite3.connect(folder / CATALOG, isolation_level=None)) as holder:
            holder.execute(f"PRAGMA locking_mode={mode}")
            holder.execute("BEGIN EXCLUSIVE")
            holder.execute("UPDATE totals SET bytes=bytes")
            try:
                with TieredStore(folder, NO_MEMORY, IMPATIENT) as store:
                    assert load_or_lose(store, PROMPTS[3]) in (None, 0, len(PROMPTS[3]))
                    assert keep(store, prompt(9)).outcome == "failed"
            except CacheUnusable as unusable:
                assert str(unusable).endswith(".")
                assert mode == "EXCLUSIVE"
            holder.execute("ROLLBACK")
    with TieredStore(folder, NO_MEMORY, IMPATIENT) as store:
        assert keep(store, prompt(9)).outcome == "kept"
        assert check(store.disk).problems == ()


def test_a_catalog_locked_between_reserving_and_publishing_leaves_no_room_taken(sound: Path) -> None:
    folder = copy(sound, "between")
    with closing(sqlite3.connect(folder / CATALOG, isolation_level=None, check_same_thread=False)) as holder:

        class Locking(Files):
            locks = True

            def sync(self, handle):
                super().sync(handle)
                if self.locks:
                    holder.execute("BEGIN IMMEDIATE")

        machine = Machine(files=Locking(), write_timeout_seconds=0.05)
        with TieredStore(folder, NO_MEMORY, machine) as store:
            assert keep(store, prompt(9)).outcome == "failed"
            assert load(store, PROMPTS[1]) == len(PROMPTS[1])
            holder.execute("ROLLBACK")
            machine.files.locks = False
            with store.disk.database.reading() as connection:
                assert connection.execute("SELECT count(*) FROM extents WHERE state='writing'").fetchone() == (1,)
            store.maintain()
            with store.disk.database.reading() as connection:
                assert connection.execute("SELECT count(*) FROM extents WHERE state='writing'").fetchone() == (0,)
            assert check(store.disk).problems == ()


# -- somebody else's ---------------------------------------------------------------------------------------------------


def test_a_catalog_of_a_newer_version_is_refused_with_a_sentence_and_left_as_it_is(sound: Path) -> None:
    folder = copy(sound, "newer")
    with closing(sqlite3.connect(folder / CATALOG)) as connection:
        connection.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
        connection.commit()
    before = (folder / CATALOG).read_bytes()
    with pytest.raises(CacheUnusable, match=r"newer Rekindle .*Upgrade, or choose another folder"):
        TieredStore(folder, NO_MEMORY)
    assert (folder / CATALOG).read_bytes() == before
    assert _broken(folder) == []


def test_a_catalog_that_becomes_newer_while_it_is_used_is_a_miss(sound: Path) -> None:
    folder = copy(sound, "upgraded")
    newer = copy(sound, "newer")
    with closing(sqlite3.connect(newer / CATALOG)) as connection:
        connection.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
        connection.commit()
    with TieredStore(folder, NO_MEMORY) as store:
        assert load(store, PROMPTS[0]) == len(PROMPTS[0])
        for suffix in ("-wal", "-shm"):
            (folder / f"{CATALOG}{suffix}").unlink(missing_ok=True)
        (newer / CATALOG).replace(folder / CATALOG)
        assert store.lookup(KV_SPACE, PROMPTS[0]).length == 0
        assert keep(store, prompt(9)).outcome == "failed"
        store.maintain()


def test_a_foreign_database_is_refused_with_a_sentence_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    fill(folder, [])
    (folder / CATALOG).unlink()
    with closing(sqlite3.connect(folder / CATALOG)) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.execute("INSERT INTO recipes VALUES ('soup')")
        connection.commit()
    before = (folder / CATALOG).read_bytes()
    with pytest.raises(CacheUnusable, match=r"not a Rekindle catalog\. Choose another folder"):
        TieredStore(folder, NO_MEMORY)
    with closing(sqlite3.connect(folder / CATALOG)) as connection:
        assert connection.execute("SELECT name FROM recipes").fetchall() == [("soup",)]
    assert (folder / CATALOG).read_bytes() == before


def test_an_empty_catalog_file_is_made_a_catalog(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    fill(folder, [])
    (folder / CATALOG).unlink()
    (folder / CATALOG).touch()
    fill(folder, PROMPTS)
    assert problems(folder) == ()


def test_a_folder_in_place_of_the_catalog_is_refused_with_a_sentence(tmp_path: Path) -> None:
    fill(tmp_path / "cache", [])
    (tmp_path / "cache" / CATALOG).unlink()
    (tmp_path / "cache" / CATALOG).mkdir()
    with pytest.raises(CacheUnusable, match=r"not a regular file\. .*\.$"):
        TieredStore(tmp_path / "cache", NO_MEMORY)


def test_a_migration_that_fails_leaves_the_old_catalog(sound: Path) -> None:
    folder = copy(sound, "migrating")
    with pytest.raises(CacheUnusable, match=r"\.$"):
        Database(folder / CATALOG, Files(), migrations=(*MIGRATIONS, "CREATE TABLE more (x); CREATE TABLE more (x);"))
    with TieredStore(folder, NO_MEMORY) as store:
        assert [load(store, tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]
        with store.disk.database.reading() as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
            assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)


# -- read-only ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_folder_that_can_only_be_read_is_served_and_not_written(readable: Path) -> None:
    folder = readable / "cache"
    fill(folder, PROMPTS)
    open_to_all(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    answer = as_nobody(
        """
folder = Path(arguments[0])
for settings in (NO_MEMORY, WITH_MEMORY):
    with TieredStore(folder, settings) as store:
        answer["served"] = [load(store, prompt(1, 150)), load(store, prompt(3, 200))]
        store.record_use(store.lookup(KV_SPACE, prompt(3, 200)), 1.0)
        answer["kept"] = keep(store, prompt(9)).outcome
        store.maintain()
        store.maintain()
        answer["again"] = load(store, prompt(1, 150))
        answer["problems"] = [p.kind for p in check(store.disk).problems]
        answer["read_only"] = store.disk.database.read_only
""",
        folder,
    )
    assert answer["served"] == [150, 200]
    assert answer["kept"] == "failed"
    assert answer["again"] == 150
    assert answer["read_only"] is True
    assert set(answer["problems"]) <= {"rights"}
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_folder_that_can_only_be_read_is_served_while_another_writes_it(readable: Path) -> None:
    folder = readable / "cache"
    with TieredStore(folder, NO_MEMORY) as store:
        for tokens in PROMPTS:
            assert keep(store, tokens).outcome == "kept"
        open_to_all(folder)
        answer = as_nobody(
            """
with TieredStore(Path(arguments[0]), NO_MEMORY) as store:
    answer["served"] = [load(store, prompt(1, 150)), load(store, prompt(3, 200))]
    answer["kept"] = keep(store, prompt(9)).outcome
""",
            folder,
        )
        assert answer == {"served": [150, 200], "kept": "failed"}
        assert keep(store, prompt(9)).outcome == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_damaged_file_that_can_only_be_read_is_lost_every_time_and_never_served(readable: Path) -> None:
    folder = readable / "cache"
    fill(folder, PROMPTS[:1])
    (path,) = (folder / "extents").iterdir()
    _change(path, path.stat().st_size - 1, 1)
    open_to_all(folder)
    answer = as_nobody(
        """
with TieredStore(Path(arguments[0]), NO_MEMORY) as store:
    answer["served"] = [load_or_lose(store, prompt(1)) for _ in range(3)]
""",
        folder,
    )
    assert answer["served"] in ([None, None, None], [None, 0, 0])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_broken_catalog_that_can_only_be_read_is_refused_with_a_sentence(readable: Path) -> None:
    folder = readable / "cache"
    fill(folder, PROMPTS[:1])
    (folder / CATALOG).write_bytes(b"garbage" * 1000)
    open_to_all(folder)
    answer = as_nobody(
        """
from rekindle.errors import CacheUnusable
try:
    TieredStore(Path(arguments[0]), NO_MEMORY)
except CacheUnusable as unusable:
    answer["refused"] = str(unusable)
""",
        folder,
    )
    assert str(answer["refused"]).endswith(".")
    assert (folder / CATALOG).read_bytes() == b"garbage" * 1000


# -- gone --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [[CATALOG], [CATALOG, f"{CATALOG}-wal", f"{CATALOG}-shm"]], ids=["file", "with log"])
@pytest.mark.parametrize("settings", [NO_MEMORY, WITH_MEMORY], ids=["disk", "memory"])
def test_a_catalog_deleted_while_it_is_used_is_made_anew(
    sound: Path, settings: StoreSettings, names: list[str]
) -> None:
    folder = copy(sound, "deleted")
    with TieredStore(folder, settings) as store, TieredStore(folder, settings) as other:
        assert keep(store, prompt(8)).outcome == "kept"
        assert load(store, PROMPTS[3]) == load(other, PROMPTS[3]) == 200
        for name in names:
            (folder / name).unlink()
        for tokens in PROMPTS:
            assert load_or_lose(store, tokens) in (0, None)
        for tokens in PROMPTS:
            assert keep(store, tokens).outcome == "kept"
            assert load(store, tokens) == load(other, tokens) == len(tokens)
        assert keep(other, prompt(9)).outcome == "kept"
        assert load(store, prompt(9)) == 80
    _expect_as_new(folder)


def test_a_catalog_made_anew_by_another_never_mixes_up_what_memory_holds(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    adapted = replace(KV_SPACE, adapter="a" * 32)
    with TieredStore(folder, WITH_MEMORY) as store:
        assert keep(store, prompt(1)).outcome == "kept"  # the first extent
        assert len(store.memory) == 1
        (folder / CATALOG).unlink()
        with TieredStore(folder, NO_MEMORY) as other:
            assert keep(other, prompt(1), adapted).outcome == "kept"  # the first extent, too
        (row,) = store.disk.entries()
        match = store.lookup(adapted, prompt(1))
        assert match.length == 80
        try:
            with store.load(adapted, match) as feed:
                kv_spaces = {source.header.plan.kv_space for source in feed._sources}
        except KvLost:
            kv_spaces = set()
        assert kv_spaces <= {store.disk.kv_space_digest(adapted)}, "KV of the base model was served for the adapter"
        assert row.state == "live"


def test_a_catalog_made_anew_by_another_costs_none_of_its_entries(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with TieredStore(folder, WITH_MEMORY) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        (folder / CATALOG).unlink()
        with TieredStore(folder, NO_MEMORY) as other:
            assert keep(other, prompt(2)).outcome == "kept"
        assert load_or_lose(store, prompt(2)) == 80, "a sound entry was taken for a damaged one"
        assert store.counts.quarantined == 0
        assert {problem.kind for problem in check(store.disk).problems} <= {"stray"}


def test_a_row_that_leads_to_another_kv_space_is_not_served_from_memory(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    adapted = replace(KV_SPACE, adapter="a" * 32)
    with TieredStore(folder, WITH_MEMORY) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        assert keep(store, prompt(1), adapted).outcome == "kept"
        with store.disk.database.writing() as connection:  # each KV space's blocks now lead to the other's extent
            connection.execute("UPDATE blocks SET extent=extent+10")
            connection.execute("UPDATE blocks SET extent=CASE extent WHEN 11 THEN 2 ELSE 1 END")
        for kv_space in (KV_SPACE, adapted):
            with pytest.raises(KvLost):
                store.load(kv_space, store.lookup(kv_space, prompt(1))).close()
            assert store.lookup(kv_space, prompt(1)).length == 0
