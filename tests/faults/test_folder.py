"""The folder and the machine around it: other people's things, rights, clocks, forks, descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import CacheUnusable
from rekindle.store.check import check
from rekindle.store.disk import CATALOG, Machine
from rekindle.store.files import Files, Handle
from rekindle.store.memory import MemoryTier
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.faults.folders import (
    NO_MEMORY,
    WITH_MEMORY,
    as_nobody,
    file_bytes,
    fill,
    flip,
    load_or_lose,
    open_to_all,
    problems,
    prompt,
)
from tests.kvs import KV_SPACE, keep, load

both_tiers = pytest.mark.parametrize("settings", [NO_MEMORY, WITH_MEMORY], ids=["disk", "memory"])
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
SMALL_LIMIT = (2 << 20) + 700_000
NOW = 1.9e9  # seconds since 1970

# -- what is no cache --------------------------------------------------------------------------------------------------


def test_a_file_in_place_of_the_folder_is_refused_with_a_sentence_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a diary")
    for folder in (tmp_path / "cache", tmp_path / "cache" / "below"):
        with pytest.raises(CacheUnusable, match=r"\.$"):
            TieredStore(folder, NO_MEMORY)
    assert (tmp_path / "cache").read_text() == "a diary"


def test_a_folder_that_holds_other_things_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "letters"
    folder.mkdir(mode=0o755)
    (folder / "letter").write_text("dear")
    with pytest.raises(CacheUnusable, match="somebody else's"):
        TieredStore(folder, NO_MEMORY)
    assert [path.name for path in folder.iterdir()] == ["letter"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000])
def test_a_folder_whose_name_no_system_takes_is_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(CacheUnusable, match=r"\.$"):
        TieredStore(tmp_path / name, NO_MEMORY)


@pytest.mark.parametrize("name", ["extents", "writers"])
def test_a_file_where_a_folder_of_the_cache_should_be_is_left_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "cache"
    fill(folder, [prompt(1)])
    with TieredStore(folder, NO_MEMORY) as store:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).write_text("foreign")
        load_or_lose(store, prompt(1))
        assert keep(store, prompt(2)).outcome == "failed"
        store.maintain()
    with pytest.raises(CacheUnusable, match="is not a folder"):
        TieredStore(folder, NO_MEMORY)
    assert (folder / name).read_text() == "foreign"
    (folder / name).unlink()
    with TieredStore(folder, NO_MEMORY) as store:
        assert keep(store, prompt(2)).outcome == "kept"
        assert load(store, prompt(2)) == 80


def test_foreign_things_beside_the_catalog_are_never_touched(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    fill(folder, [prompt(1)])
    (folder / "notes").write_text("mine")
    (folder / "more").mkdir()
    with TieredStore(folder, NO_MEMORY) as store:
        assert load(store, prompt(1)) == 80
        check(store.disk, fix=True)
        store.disk.remove(store.disk.entries())
        store.disk.collect()
    assert (folder / "notes").read_text() == "mine"
    assert (folder / "more").is_dir()


def test_foreign_things_among_the_writers_do_not_stop_tending(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    clock = Clock(NOW)
    settings = StoreSettings(disk_limit="50MB", memory_limit=0, ttl_seconds=60)
    with TieredStore(folder, settings, Machine(clock=clock)) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        for name in ("foreign", "0123456789abcdef"):
            (folder / "writers" / name).mkdir()
        clock.now += 61
        store.maintain()
        assert list((folder / "extents").iterdir()) == []
        assert {"foreign", "0123456789abcdef"} <= {path.name for path in (folder / "writers").iterdir()}


# -- rights ------------------------------------------------------------------------------------------------------------


def _rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_nobody_else_can_enter_the_folder_or_read_a_file(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        folder = tmp_path / "above" / "cache"
        with TieredStore(folder, NO_MEMORY) as store:
            assert keep(store, prompt(1)).outcome == "kept"
            assert (folder / f"{CATALOG}-wal").exists()
            everything = [folder, *folder.rglob("*")]
            assert len(everything) >= 8
            for path in everything:
                assert _rights(path) == (0o700 if path.is_dir() else 0o600), path
    finally:
        os.umask(before)


def test_a_folder_that_others_could_enter_is_narrowed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    fill(folder, [prompt(1)])
    folder.chmod(0o755)
    with TieredStore(folder, NO_MEMORY):
        assert _rights(folder) == 0o700


def test_an_empty_folder_that_others_could_enter_is_narrowed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o755)
    with TieredStore(folder, NO_MEMORY) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        assert _rights(folder) == 0o700


@needs_root
def test_a_folder_that_cannot_be_made_is_refused_with_a_sentence(readable: Path) -> None:
    (readable / "empty").mkdir(mode=0o755)
    (readable / "closed").mkdir(mode=0o700)
    fill(readable / "private", [prompt(1)])
    answer = as_nobody(
        """
from rekindle.errors import CacheUnusable
for name in ("new", "empty", "closed", "closed/new", "private"):
    try:
        TieredStore(Path(arguments[0]) / name, NO_MEMORY)
    except CacheUnusable as unusable:
        answer[name] = str(unusable)
    except Exception as error:
        answer[name] = repr(error)
""",
        readable,
    )
    assert set(answer) == {"new", "empty", "closed", "closed/new", "private"}
    assert [text for text in answer.values() if not str(text).endswith(".")] == []


@needs_root
def test_extents_that_may_not_be_read_are_lost_and_stay_for_those_who_may(readable: Path) -> None:
    folder = readable / "cache"
    fill(folder, [prompt(1)])
    open_to_all(folder)
    (path,) = (folder / "extents").iterdir()
    path.chmod(0o600)
    answer = as_nobody(
        """
with TieredStore(Path(arguments[0]), NO_MEMORY) as store:
    answer["served"] = [load_or_lose(store, prompt(1)) for _ in range(2)]
    answer["counts"] = store.counts.quarantined
""",
        folder,
    )
    assert answer == {"served": [None, None], "counts": 0}
    with TieredStore(folder, NO_MEMORY) as store:
        assert load(store, prompt(1)) == 80


# -- deleted while running ---------------------------------------------------------------------------------------------


@both_tiers
@pytest.mark.parametrize("name", [".", "extents", "writers"])
def test_after_the_folder_is_deleted_while_running_keeping_works_again(
    tmp_path: Path, name: str, settings: StoreSettings
) -> None:
    folder = tmp_path / "cache"
    with TieredStore(folder, settings) as store:
        for number in (1, 2):
            assert keep(store, prompt(number)).outcome == "kept"
            assert load(store, prompt(number)) == 80
        shutil.rmtree(folder / name)
        for number in (1, 2):
            load_or_lose(store, prompt(number))
        for number in (3, 1, 2):
            assert keep(store, prompt(number)).outcome in ("kept", "known")
            assert load(store, prompt(number)) == 80
        store.maintain()
        for number in (3, 1, 2):
            keep(store, prompt(number))
            assert load(store, prompt(number)) == 80
    problems(folder, fix=True)
    assert problems(folder) == ()
    assert _rights(folder) == 0o700


def test_a_folder_replaced_by_another_cache_is_used_as_it_is(tmp_path: Path) -> None:
    folder, other = tmp_path / "cache", tmp_path / "other"
    fill(other, [prompt(2, 200)])
    with TieredStore(folder, WITH_MEMORY) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        folder.rename(tmp_path / "moved")
        other.rename(folder)
        assert load(store, prompt(1)) == 0
        assert load_or_lose(store, prompt(2, 200)) in (200, None)
        assert keep(store, prompt(3)).outcome == "kept"
    problems(folder, fix=True)
    assert problems(folder) == ()
    with TieredStore(tmp_path / "moved", NO_MEMORY) as store:
        assert load(store, prompt(1)) == 80
        assert store.lookup(KV_SPACE, prompt(3)).length == 0


# -- clocks ------------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that stands where it is put."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("policy", ["utility", "lru"])
def test_limits_hold_and_numbers_are_right_whatever_the_clock_does(tmp_path: Path, policy: str) -> None:
    clock, chance = Clock(NOW), random.Random(3)
    settings = StoreSettings(disk_limit=SMALL_LIMIT, memory_limit=0, policy=policy, ttl_seconds=5000)
    kept = served = 0
    with TieredStore(tmp_path / "cache", settings, Machine(clock=clock)) as store:
        for step in range(60):
            clock.now = chance.choice([0.0, NOW, clock.now - 4000, clock.now + 4000, -1e9, 1e11, NOW])
            number = chance.randrange(30)
            kept += keep(store, prompt(number, 700)).outcome == "kept"
            served += bool(load(store, prompt(number, 700)))
            match = store.lookup(KV_SPACE, prompt(chance.randrange(30), 700))
            store.record_use(match, 3.0)
            if step % 5 == 0:
                store.maintain()
            assert file_bytes(tmp_path / "cache") <= SMALL_LIMIT
        assert check(store.disk).problems == ()
    assert kept > 20
    assert served > 20


def test_what_expired_and_went_does_not_come_back_with_the_clock(tmp_path: Path) -> None:
    clock = Clock(NOW)
    settings = StoreSettings(disk_limit="50MB", memory_limit="10MB", ttl_seconds=60)
    with TieredStore(tmp_path / "cache", settings, Machine(clock=clock)) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        clock.now += 59
        assert load(store, prompt(1)) == 80
        clock.now += 2
        assert load(store, prompt(1)) == 0
        store.maintain()
        assert list((tmp_path / "cache" / "extents").iterdir()) == []
        clock.now = NOW
        assert load(store, prompt(1)) == 0
        assert keep(store, prompt(1)).outcome == "kept"
        assert load(store, prompt(1)) == 80


def test_what_expired_can_be_kept_again(tmp_path: Path) -> None:
    clock = Clock(NOW)
    settings = StoreSettings(disk_limit="50MB", memory_limit=0, ttl_seconds=60)
    with TieredStore(tmp_path / "cache", settings, Machine(clock=clock)) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        clock.now += 61
        keep(store, prompt(1))
        store.maintain()
        keep(store, prompt(1))
        assert load(store, prompt(1)) == 80


def test_a_clock_that_was_ahead_does_not_spend_the_write_budget_for_ever(tmp_path: Path) -> None:
    clock = Clock(NOW + 365 * 86400)
    settings = StoreSettings(disk_limit="50MB", memory_limit=0, write_budget=10_000)
    with TieredStore(tmp_path / "cache", settings, Machine(clock=clock)) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        assert keep(store, prompt(2)).outcome == "refused"
        clock.now = NOW
        keep(store, prompt(2))
        clock.now += 2 * 3600
        assert keep(store, prompt(2)).outcome in ("kept", "known")


# -- forks -------------------------------------------------------------------------------------------------------------


def _in_child(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start `work` in a forked child; a function that waits for it and gives what it returned."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = json.dumps(work())
        except BaseException as error:  # noqa: BLE001
            answer = json.dumps(repr(error))
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)

    def wait() -> Any:
        with os.fdopen(reader, "rb") as file:
            answer = file.read()
        os.waitpid(child, 0)
        return json.loads(answer) if answer else None

    return wait


@both_tiers
def test_a_forked_child_uses_the_store_and_does_not_disturb_its_parent(tmp_path: Path, settings: StoreSettings) -> None:
    with TieredStore(tmp_path / "cache", settings) as store:
        assert keep(store, prompt(1)).outcome == "kept"

        def work() -> list[object]:
            found = load(store, prompt(1))
            outcomes = [keep(store, prompt(number)).outcome for number in (2, 3)]
            store.maintain()
            found += load(store, prompt(2))
            store.close()
            return [found, *outcomes]

        assert _in_child(work)() == [160, "kept", "kept"]
        assert [load(store, prompt(number)) for number in (1, 2, 3)] == [80, 80, 80]
        assert keep(store, prompt(4)).outcome == "kept"
        assert check(store.disk).problems == ()


def test_parent_and_child_that_write_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "cache", NO_MEMORY) as store:
        assert keep(store, prompt(0)).outcome == "kept"

        def work() -> list[str]:
            return [keep(store, prompt(number)).outcome for number in range(100, 140)]

        wait = _in_child(work)
        own = [keep(store, prompt(number)).outcome for number in range(1, 40)]
        assert {*own, *wait()} == {"kept"}
        assert {load(store, prompt(number)) for number in [*range(40), *range(100, 140)]} == {80}
        assert check(store.disk).problems == ()


def test_what_a_child_keeps_after_its_parent_closed_the_store_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    store = TieredStore(folder, NO_MEMORY)
    assert keep(store, prompt(1)).outcome == "kept"
    (closed, close), (early, say_early), (opened, say_opened) = os.pipe(), os.pipe(), os.pipe()

    def work() -> list[str]:
        os.read(closed, 1)
        outcomes = [keep(store, prompt(2)).outcome]
        os.write(say_early, b".")
        os.read(opened, 1)
        return [*outcomes, *(keep(store, prompt(number)).outcome for number in (4, 5))]

    wait = _in_child(work)
    store.close()
    os.write(close, b".")
    os.read(early, 1)
    with TieredStore(folder, NO_MEMORY) as other:
        assert keep(other, prompt(3)).outcome == "kept"
        os.write(say_opened, b".")
        assert wait() == ["kept", "kept", "kept"]
        assert [load(other, prompt(number)) for number in range(1, 6)] == [80] * 5
        assert check(other.disk).problems == ()
    for descriptor in (closed, close, early, say_early, opened, say_opened):
        os.close(descriptor)


def test_a_child_that_closes_the_store_does_not_take_its_parents_room_away(tmp_path: Path) -> None:
    folder = tmp_path / "cache"

    class Forking(Files):
        def sync(self, handle: Handle) -> None:
            super().sync(handle)
            _in_child(store.close)()
            with TieredStore(folder, NO_MEMORY):  # clears up after writers that died
                pass

    fill(folder, [])
    with TieredStore(folder, NO_MEMORY, Machine(files=Forking())) as store:
        kept = keep(store, prompt(1))
        assert (kept.outcome, kept.reason) == ("kept", "")
        assert load(store, prompt(1)) == 80
        assert check(store.disk).problems == ()


def test_the_room_of_a_child_that_died_while_writing_is_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    parent = os.getpid()

    class Dying(Files):
        def sync(self, handle: Handle) -> None:
            if os.getpid() != parent:
                os._exit(1)
            super().sync(handle)

    with TieredStore(folder, NO_MEMORY, Machine(files=Dying())) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        assert _in_child(lambda: keep(store, prompt(2)).outcome)() is None
        assert len(list((folder / "extents").iterdir())) == 2
        store.maintain()
        assert len(list((folder / "extents").iterdir())) == 1
        assert keep(store, prompt(2)).outcome == "kept"
        assert check(store.disk).problems == ()


# -- descriptors -------------------------------------------------------------------------------------------------------


def _descriptors() -> list[str]:
    """What this process has open."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            links.append(str(path.readlink()))
    return links


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@both_tiers
def test_descriptors_do_not_grow_with_use_or_failure(tmp_path: Path, settings: StoreSettings) -> None:
    folder = tmp_path / "cache"

    def use(store: TieredStore, number: int) -> None:
        tokens = prompt(number, 96)
        if number % 20 == 1:  # the catalog was just overwritten: that may be noticed only now
            keep(store, tokens)
            load_or_lose(store, tokens)
            return
        assert keep(store, tokens).outcome == "kept"
        assert load(store, tokens) == 96
        store.load(KV_SPACE, store.lookup(KV_SPACE, tokens)).close()
        path = store.disk.extents.path(store.disk.entries()[-1].name)
        store.memory = MemoryTier(store.memory.limit_bytes)
        if number % 3 == 0:
            flip(path, path.stat().st_size - 1)  # found out while reading
        elif number % 3 == 1:
            flip(path, 20)  # found out while opening, unless its header is remembered
        else:
            path.unlink()
        load_or_lose(store, tokens)
        store.maintain()
        with pytest.raises(CacheUnusable):
            TieredStore(folder / CATALOG, settings)
        if number % 20 == 0:
            (folder / CATALOG).write_bytes(b"garbage" * 1000)
            store.lookup(KV_SPACE, tokens)
            store.lookup(KV_SPACE, tokens)
        if number % 20 == 10:
            TieredStore(folder, settings).close()

    with TieredStore(folder, settings) as store:
        for number in range(1, 30):
            use(store, number)
        before = len(_descriptors())
        for number in range(30, 230):
            use(store, number)
        assert len(_descriptors()) <= before
    with TieredStore(tmp_path / "another", settings):
        pass
    assert len(_descriptors()) < before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_descriptors_do_not_leak_into_a_program_that_is_started(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    seen: list[str] = []
    started = (
        "import os\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    try: print(os.readlink(f'/proc/self/fd/{name}'))\n"
        "    except OSError: pass\n"
    )

    class Starting(Files):
        def sync(self, handle: Handle) -> None:
            seen.append(subprocess.check_output([sys.executable, "-c", started], close_fds=False, text=True))
            super().sync(handle)

    fill(folder, [])
    with TieredStore(folder, NO_MEMORY, Machine(files=Starting())) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        with store.load(KV_SPACE, store.lookup(KV_SPACE, prompt(1))):
            own = _descriptors()
            seen.append(subprocess.check_output([sys.executable, "-c", started], close_fds=False, text=True))
    assert sum(str(folder) in link for link in own) >= 4  # catalog, log, lock, extent
    assert len(seen) == 2
    assert [line for text in seen for line in text.splitlines() if str(folder) in line] == []
