"""The write budget: a size a day, which adds up; low, only what was seen before is written; spent, nothing is."""

from __future__ import annotations

import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from rekindle.core.kv import Span
from rekindle.core.size import human_bytes, parse_limit
from rekindle.errors import InvalidSetting
from rekindle.settings import Settings
from rekindle.store import report
from rekindle.store.catalog.schema import MIGRATIONS
from rekindle.store.check import check
from rekindle.store.disk import Machine
from rekindle.store.extents import WrittenExtent
from rekindle.store.folder import CATALOG
from rekindle.store.limits import WriteBudget
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import Kept, TieredStore
from tests.kvs import KV_SPACE, keep, load, make_kv
from tests.store.test_limits import Clock, prompt

DAY = 86_400
NOON = time.mktime((2030, 3, 12, 12, 0, 0, 0, 0, 0))  # a Tuesday


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON)


@pytest.fixture(scope="module")
def size(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes of a prompt's file."""
    with TieredStore(tmp_path_factory.mktemp("size") / "c", StoreSettings(disk_limit="50MB", memory_limit=0)) as store:
        return keep(store, prompt(0)).size_bytes


def opened(folder: Path, clock: Clock, write_budget: int | None, **more: object) -> TieredStore:
    settings = StoreSettings(disk_limit="50MB", memory_limit=0, write_budget=write_budget, **more)  # type: ignore[arg-type]
    return TieredStore(folder, settings, Machine(clock=clock))


def left(store: TieredStore) -> int:
    budget = store.disk.write_budget()
    assert budget is not None
    return budget.left_bytes


def outcomes(store: TieredStore, numbers: range) -> list[str]:
    return [keep(store, prompt(number)).outcome for number in numbers]


def test_what_is_written_is_spent_and_given_back_evenly(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, 10 * size) as store:
        assert left(store) == 30 * size
        assert outcomes(store, range(12)) == ["kept"] * 12
        assert left(store) == 18 * size
        clock.now += DAY / 2
        assert left(store) == 23 * size
        clock.now += 10 * DAY
        assert left(store) == 30 * size


def test_what_is_not_spent_adds_up_to_three_days(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, size) as store:
        assert outcomes(store, range(5)) == ["kept"] * 3 + ["refused"] * 2
        clock.now += 30 * DAY
        assert outcomes(store, range(3, 8)) == ["kept"] * 3 + ["refused"] * 2


@pytest.mark.parametrize("days", [1, 4])
def test_an_agent_that_writes_all_day_gets_no_more_than_the_budget(
    tmp_path: Path, clock: Clock, size: int, days: int
) -> None:
    with opened(tmp_path / "c", clock, 4 * size) as store:
        outcome = []
        for number in range(days * 24 * 2):
            outcome.append(keep(store, prompt(number, 640)).outcome)
            clock.now += 1800
        assert outcome[:9] == ["kept"] * 9, "a burst is not refused"
        assert 9 + 3 * days <= outcome.count("kept") <= 9 + 4 * days
        assert left(store) >= 2 * size, "the last quarter is for what was seen before"


def test_when_it_is_low_only_what_was_seen_before_is_written(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, 4 * size) as store:
        assert store.why_scarce() is None
        assert outcomes(store, range(10)) == ["kept"] * 10
        assert store.why_scarce() == f"the write budget ({human_bytes(4 * size)} a day) is low until about 18:00"
        first = keep(store, prompt(20))
        assert first.outcome == "refused"
        assert first.reason == f"it was seen for the first time, and {store.why_scarce()}"
        assert keep(store, prompt(20)).outcome == "kept", "the second time it pays"
        system = prompt(20) + prompt(21)
        assert isinstance(store.admit(KV_SPACE, system), Kept)
        assert store.admit(KV_SPACE, prompt(20) + prompt(21, 320) + prompt(22)) == Span(640, 960), (
            "as far as it was seen"
        )
        clock.now += 2 * DAY
        assert store.why_scarce() is None
        assert keep(store, prompt(30)).outcome == "kept"


def test_what_was_asked_to_be_kept_is_refused_only_when_all_is_spent(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, 4 * size) as store:
        kept = 0
        while isinstance(gap := store.admit(KV_SPACE, prompt(kept), wanted=True), Span):
            assert store.keep(KV_SPACE, prompt(kept), make_kv(prompt(kept), gap)).outcome == "kept"
            kept += 1
        assert kept == 12
        assert gap.outcome == "refused"
        assert re.search(r"^the write budget \(.* kB a day\) is spent until about 1[78]:\d\d$", gap.reason)
        larger = store.admit(KV_SPACE, prompt(99, 640 * 16), wanted=True)
        assert isinstance(larger, Kept) and "never allows that much at once" in larger.reason


def test_the_day_is_named_when_it_is_another() -> None:
    assert (
        WriteBudget(1000, 3000, NOON).why_refused(750)
        == "the write budget (1.0 kB a day) is spent until about Wed 06:00"
    )
    assert (
        WriteBudget(1000, 3000, NOON).why_refused(250) == "the write budget (1.0 kB a day) is spent until about 18:00"
    )
    assert WriteBudget(1000, 2250, NOON).why_scarce() is None
    assert WriteBudget(0, 0, NOON).why_refused(1) and WriteBudget(0, 0, NOON).why_scarce() is None


def test_a_request_that_is_written_twice_is_seen_once(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, None, admission="second-use") as store:
        for _ in range(2):
            early = store.admit(KV_SPACE, prompt(0), last=False)
            assert isinstance(early, Kept) and early.outcome == "early"
        assert store.counts.refused == 0
        assert isinstance(store.admit(KV_SPACE, prompt(0)), Kept)
        assert store.counts.refused == 1
        assert store.admit(KV_SPACE, prompt(0), last=False) == Span(0, 640)
        assert store.admit(KV_SPACE, prompt(0)) == Span(0, 640)


def test_refused_and_written_are_counted_for_every_process(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, 4 * size) as store:
        outcomes(store, range(6))
        clock.now += 2 * 3600
        assert outcomes(store, range(6, 12)) == ["kept"] * 4 + ["refused"] * 2
        assert store.counts.refused == 2
    with opened(tmp_path / "c", clock, None) as other:
        found = report.written(other.disk, 4 * size)
        assert found["written_hour_bytes"] == 4 * size and found["written_day_bytes"] == 10 * size
        assert found["refused_day_writes"] == 2
        assert found["write_budget_left_bytes"] < 3 * size and "is low until" in found["write_budget_low"]
        clock.now += DAY - 2 * 3600
        assert report.written(other.disk, None) == {
            "written_hour_bytes": 0,
            "written_day_bytes": 4 * size,
            "refused_day_writes": 2,
            "write_budget_left_bytes": None,
            "write_budget_low": None,
        }


def test_two_processes_spend_one_budget(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, size) as one, opened(tmp_path / "c", clock, size) as two:
        found = [keep(store, prompt(number)).outcome for number, store in enumerate([one, two, two, one, two])]
        assert found == ["kept"] * 3 + ["refused"] * 2
        assert left(one) == left(two) == 0
        clock.now += 3 * DAY
        assert keep(two, prompt(10)).outcome == "kept" and left(one) == 2 * size


def test_what_another_process_is_writing_is_spent_already(tmp_path: Path, clock: Clock, size: int) -> None:
    """Else two that begin at the same time would write twice what is left."""
    with opened(tmp_path / "c", clock, size) as one, opened(tmp_path / "c", clock, size) as two:
        write, seen = one.disk.extents.write, list[int]()

        def look(*args: Any) -> WrittenExtent:
            seen.append(left(two))
            return write(*args)

        one.disk.extents.write = look  # type: ignore[method-assign]
        assert keep(one, prompt(0)).outcome == "kept"
        assert seen and seen[0] < 2 * size == left(two)


def test_without_a_budget_nothing_is_refused_and_nothing_spent(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, size) as store:
        outcomes(store, range(2))
        with opened(tmp_path / "c", clock, None) as free:
            assert outcomes(free, range(2, 12)) == ["kept"] * 10
        assert left(store) == size, "what another setting writes is not taken from it"
        assert report.written(store.disk, None)["written_day_bytes"] == 12 * size


def test_a_budget_of_another_size_takes_over_what_is_spent(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, 10 * size) as store:
        outcomes(store, range(10))
    with opened(tmp_path / "c", clock, size) as store:
        assert left(store) == 0
        clock.now += 3 * DAY
        assert left(store) == 3 * size, "it waits for its own days only"


@pytest.mark.parametrize("ahead", [-365 * DAY, -DAY, -3600, 3600, DAY, 365 * DAY])
def test_a_clock_that_leaps_and_comes_back_does_not_block_writing(
    tmp_path: Path, clock: Clock, size: int, ahead: int
) -> None:
    with opened(tmp_path / "c", clock, size) as store:
        assert outcomes(store, range(4)) == ["kept"] * 3 + ["refused"]
        for moved in (ahead, -ahead):
            clock.now += moved
            outcomes(store, range(10, 20))
            assert left(store) <= 3 * size
        clock.now += 3 * DAY + 601
        assert left(store) == 3 * size and keep(store, prompt(50)).outcome == "kept"
        assert check(store.disk).problems == ()


def test_a_clock_that_is_set_back_a_little_gives_nothing_away(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, size) as store:
        outcomes(store, range(2))
        clock.now -= 300
        assert left(store) == size
        assert outcomes(store, range(2, 5)) == ["kept", "refused", "refused"]
        clock.now += 300
        assert left(store) == 0
        assert report.written(store.disk, size)["written_hour_bytes"] == 3 * size


def test_a_catalog_from_before_the_budget_was_a_days_opens_with_all_of_it(
    tmp_path: Path, clock: Clock, size: int
) -> None:
    with opened(tmp_path / "c", clock, None) as store:
        keep(store, prompt(0))
    connection = sqlite3.connect(tmp_path / "c" / CATALOG)
    connection.execute("ALTER TABLE bytes_written DROP COLUMN spent")
    connection.execute("ALTER TABLE bytes_written DROP COLUMN refused")
    connection.execute("DROP TABLE fingerprints")  # of a later version
    connection.execute("PRAGMA user_version=1")
    connection.commit()
    connection.close()
    with opened(tmp_path / "c", clock, size) as store:
        assert load(store, prompt(0)) == 640 and left(store) == 3 * size
        assert report.written(store.disk, size)["written_hour_bytes"] == size
        assert keep(store, prompt(1)).outcome == "kept" and left(store) == 2 * size
        with store.disk.database.reading() as rows:
            assert rows.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)


def test_a_catalog_of_before_that_can_only_be_read_is_read(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, size) as store:
        keep(store, prompt(0))
        with store.disk.database.writing() as connection:
            connection.execute("ALTER TABLE bytes_written DROP COLUMN spent")
            connection.execute("ALTER TABLE bytes_written DROP COLUMN refused")
        store.disk.database.read_only = True
        assert load(store, prompt(0)) == 640
        assert store.why_scarce() is None and store.counts.read_failures == 0
        found = report.written(store.disk, size)
        assert found["written_day_bytes"] == 0 and found["write_budget_left_bytes"] is None


def test_keys_seen_while_it_is_low_stay_within_the_limit(tmp_path: Path, clock: Clock) -> None:
    """Many prompts that are not kept must not make the catalog outgrow the folder's limit."""
    settings = StoreSettings(disk_limit=4 << 20, memory_limit=0, write_budget=1000)
    with TieredStore(tmp_path / "c", settings, Machine(clock=clock)) as store:
        with store.disk.database.writing() as connection:
            store.disk.room.add_written(connection, 3000)
        for number in range(60):
            assert keep(store, prompt(number, 2000)).outcome == "refused"
        with store.disk.database.reading() as connection:
            (rows,) = connection.execute("SELECT count(*) FROM seen_keys").fetchone()
        assert 0 < rows <= store.disk.room.max_seen(4 << 20) < 60 * 63
        assert sum(path.stat().st_size for path in (tmp_path / "c").rglob("*") if path.is_file()) <= 4 << 20


def test_the_default_holds_for_five_years_of_the_smallest_disk() -> None:
    """And a burst of a few dozen long prompts of an 8B model fits: 30,000 tokens of 128 KiB."""
    chosen = Settings().write_budget
    assert chosen is not None
    day_bytes = parse_limit(chosen).size_bytes
    assert day_bytes is not None
    assert 5 * 365 * day_bytes <= 150e12 / 2
    assert WriteBudget(day_bytes, 0, NOON).left_bytes > 24 * 30_000 * (128 << 10)


@pytest.mark.parametrize("name", ["write_budget", "disk_limit", "memory_limit"])
def test_a_bad_size_names_its_setting(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name}='lots' is not a size"):
        StoreSettings(**{name: "lots"})
