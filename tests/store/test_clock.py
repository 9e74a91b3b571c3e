"""Clocks that are wrong: what is old by them is not served, and not deleted either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.core.scope import AppRef
from rekindle.store.catalog import app_rows
from rekindle.store.disk import Machine
from rekindle.store.evict import ClockMemory
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import keep, load
from tests.store.test_limits import Clock, prompt

DAY = 86400.0
WEEK = StoreSettings(disk_limit="50MB", memory_limit=0, ttl_seconds=7 * DAY)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path, clock: Clock) -> Iterator[Path]:
    """A cache with three prompts of today."""
    with opened(tmp_path / "c", clock) as store:
        assert [keep(store, prompt(number)).outcome for number in range(3)] == ["kept"] * 3
    return tmp_path / "c"


def opened(folder: Path, clock: Clock, settings: StoreSettings = WEEK) -> TieredStore:
    return TieredStore(folder, settings, Machine(clock=clock))


def used_at(folder: Path, clock: Clock, now: float) -> None:
    """A machine whose clock says that opens the cache, uses it, and tidies it up."""
    clock.now = now
    with opened(folder, clock) as store:
        store.maintain()
        for number in range(3):
            load(store, prompt(number))
        keep(store, prompt(9))
        store.maintain()
        store.disk.collect()


def served(folder: Path, clock: Clock) -> int:
    with opened(folder, clock) as store:
        return sum(load(store, prompt(number)) > 0 for number in range(3))


@pytest.mark.parametrize("wrong", [0.0, 1.0, -1e9, 946_684_800.0, 1.7e9, 1.9e9 - 3600, 2.1e9, 4e9, 1e12])
def test_a_boot_with_a_wrong_clock_deletes_nothing(folder: Path, clock: Clock, wrong: float) -> None:
    now = clock.now
    used_at(folder, clock, wrong)
    used_at(folder, clock, wrong + 3600)
    clock.now = now + 7200
    assert served(folder, clock) == 3


@pytest.mark.parametrize("days", [1, 5, 400])
def test_a_clock_that_stays_at_1970_never_deletes(folder: Path, clock: Clock, days: int) -> None:
    now = clock.now
    for day in range(0, days, max(1, days // 5)):
        used_at(folder, clock, day * DAY)
    clock.now = now + 7200
    assert served(folder, clock) == 3


def test_a_catalog_from_before_clocks_were_remembered_is_safe_from_the_first_boot_on(
    folder: Path, clock: Clock
) -> None:
    with opened(folder, clock) as store, store.disk.database.writing() as connection:
        connection.execute("DELETE FROM clock")
    now = clock.now
    used_at(folder, clock, 5.0)
    used_at(folder, clock, now + 100 * DAY)
    clock.now = now + 60
    assert served(folder, clock) == 3


def test_what_is_too_old_is_not_served_while_the_clock_is_not_believed(folder: Path, clock: Clock) -> None:
    clock.now += 40 * DAY
    assert served(folder, clock) == 0
    assert len(list((folder / "extents").iterdir())) == 3


def test_a_leap_of_the_clock_is_believed_when_it_has_run_on_for_a_day(folder: Path, clock: Clock) -> None:
    """Who comes back after two months finds what is too old deleted one day later."""
    now = clock.now + 60 * DAY
    for hour in (0, 1, 23):
        clock.now = now + hour * 3600
        with opened(folder, clock) as store:
            store.maintain()
        assert len(list((folder / "extents").iterdir())) == 3
    clock.now = now + 24 * 3600
    with opened(folder, clock) as store:
        store.maintain()
    assert list((folder / "extents").iterdir()) == []


def test_time_that_simply_passes_deletes_what_is_too_old(folder: Path, clock: Clock) -> None:
    clock.now += 7 * DAY + 1
    with opened(folder, clock) as store:
        store.maintain()
    assert list((folder / "extents").iterdir()) == []


def test_a_clock_that_was_ahead_for_long_and_is_put_right_is_believed_after_a_day(folder: Path, clock: Clock) -> None:
    """Else a cache that once saw 2040 would keep everything until then."""
    now = clock.now
    for wrong in (now + 1000 * DAY, now + 1001 * DAY):
        used_at(folder, clock, wrong)
    for day in (0, 1):
        clock.now = now + day * DAY
        with opened(folder, clock) as store:
            store.maintain()
            keep(store, prompt(20 + day))
    clock.now = now + 2 * DAY
    with opened(folder, clock) as store:
        store.maintain()
        assert keep(store, prompt(22)).outcome == "kept"
        assert load(store, prompt(22)) > 0
    clock.now += 7 * DAY + 1
    with opened(folder, clock) as store:
        store.maintain()
    assert list((folder / "extents").iterdir()) == []


def test_clocks_that_jump_about_are_never_believed() -> None:
    memory = ClockMemory(1.9e9)
    for now in (2.5e9, 1.8e9, 3e9, 1.8e9 + 2 * DAY, 2.5e9 + 40 * DAY, 2.5e9, 1.75e9):
        memory = memory.next(now)
        assert memory.odd_since is not None
        assert memory.latest == 1.9e9
    assert memory.next(1.9e9 + 5).odd_since is None


@pytest.mark.usefixtures("crowded")
def test_by_a_wrong_clock_nothing_of_killed_apps_is_deleted(tmp_path: Path, clock: Clock) -> None:
    settings = replace(WEEK, ttl_seconds=None, killed_ttl_seconds=5 * DAY)
    app = AppRef("local", "notes")
    with opened(tmp_path / "c", clock, settings) as store:
        assert keep(store, prompt(1), app=app).outcome == "kept"
        with store.disk.database.writing() as connection:
            app_rows.set_state(connection, app.scope, "notes", "killed", clock.now, store.disk.room.allows)
        store.maintain()
    now = clock.now
    for wrong in (0.0, now + 3650 * DAY):
        clock.now = wrong
        with opened(tmp_path / "c", clock, settings) as store:
            store.maintain()
    clock.now = now + DAY
    with opened(tmp_path / "c", clock, settings) as store:
        assert load(store, prompt(1)) > 0
        clock.now = now + 6 * DAY
        store.maintain()
        assert load(store, prompt(1)) == 0
