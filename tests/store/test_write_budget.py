"""The write budget: within 24 hours no more than its size is written, by all processes and whatever the clock does."""

from __future__ import annotations

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
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import Kept, TieredStore
from tests.kvs import KV_SPACE, keep, load
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
    return int(report.written(store.disk, store.settings.write_budget_bytes)["write_budget_left_bytes"])


def outcomes(store: TieredStore, numbers: range) -> list[str]:
    return [keep(store, prompt(number)).outcome for number in numbers]


def test_what_is_written_counts_for_a_day(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, 3 * size) as store:
        assert outcomes(store, range(2)) == ["kept"] * 2
        clock.now += DAY / 2
        assert left(store) == size and outcomes(store, range(2, 5)) == ["kept", "refused", "refused"]
        clock.now += DAY / 2 - 60
        assert left(store) == 0
        clock.now += 60
        assert left(store) == 2 * size, "what was written at noon is a day old"
        assert outcomes(store, range(5, 8)) == ["kept", "kept", "refused"]


def test_what_is_not_written_does_not_add_up(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, size) as store:
        clock.now += 30 * DAY
        assert outcomes(store, range(2)) == ["kept", "refused"]


def test_within_any_day_no_more_than_the_budget_is_written(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, 4 * size) as store:
        kept = []
        for number in range(60):
            kept.append(keep(store, prompt(number)).outcome == "kept")
            clock.now += 3600
    assert sum(kept) == 4 * 3, "and all of it, day after day"
    assert max(sum(kept[hour : hour + 24]) for hour in range(len(kept))) == 4


def test_until_the_last_byte_a_prompt_is_written_at_its_first_use(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, 4 * size) as store:
        assert outcomes(store, range(4)) == ["kept"] * 4 and left(store) == 0
        with store.disk.database.reading() as connection:
            assert connection.execute("SELECT count(*) FROM seen_keys").fetchone() == (0,)


def test_a_refusal_says_when_there_is_room_again(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, 4 * size) as store:
        for hours in (10, 1, 0.5):  # written at 12:00, 22:00, 23:00 and 23:30
            assert keep(store, prompt(int(10 * hours))).outcome == "kept"
            clock.now += hours * 3600
        assert keep(store, prompt(1)).outcome == "kept"
        name = f"the write budget ({human_bytes(4 * size)} a day)"
        for count, then in ((640, "Wed 12:00"), (2 * 640, "Wed 22:00")):
            refusal = store.admit(KV_SPACE, prompt(99, count))
            assert isinstance(refusal, Kept) and refusal.outcome == "refused"
            assert refusal.reason == f"{name} is spent until about {then}"
        clock.now += 3600  # Wednesday, 00:30
        refusal = store.admit(KV_SPACE, prompt(99))
        assert isinstance(refusal, Kept) and refusal.reason == f"{name} is spent until about 12:00"
        clock.now += 11.5 * 3600
        assert keep(store, prompt(99)).outcome == "kept"
        larger = store.admit(KV_SPACE, prompt(98, 640 * 16))
        assert isinstance(larger, Kept) and larger.reason.endswith(f", and {name} never allows that much")


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
        outcomes(store, range(2))
        clock.now += 2 * 3600
        assert outcomes(store, range(2, 6)) == ["kept"] * 2 + ["refused"] * 2
        assert store.counts.refused == 2
    with opened(tmp_path / "c", clock, None) as other:
        assert report.written(other.disk, 5 * size) == {
            "written_hour_bytes": 2 * size,
            "written_day_bytes": 4 * size,
            "refused_day_writes": 2,
            "write_budget_left_bytes": size,
        }
        clock.now += DAY - 2 * 3600
        assert report.written(other.disk, None) == {
            "written_hour_bytes": 0,
            "written_day_bytes": 2 * size,
            "refused_day_writes": 2,
            "write_budget_left_bytes": None,
        }


def test_two_processes_share_one_budget(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, 3 * size) as one, opened(tmp_path / "c", clock, 3 * size) as two:
        found = [keep(store, prompt(number)).outcome for number, store in enumerate([one, two, two, one, two])]
        assert found == ["kept"] * 3 + ["refused"] * 2
        assert left(one) == left(two) == 0
        clock.now += DAY
        assert keep(two, prompt(10)).outcome == "kept" and left(one) == 2 * size


def test_what_another_process_is_writing_counts_already(tmp_path: Path, clock: Clock, size: int) -> None:
    """Else two that begin at the same time would write twice what is left."""
    with opened(tmp_path / "c", clock, 3 * size) as one, opened(tmp_path / "c", clock, 3 * size) as two:
        write, seen = one.disk.extents.write, list[int]()

        def look(*args: Any) -> WrittenExtent:
            seen.append(left(two))
            return write(*args)

        one.disk.extents.write = look  # type: ignore[method-assign]
        assert keep(one, prompt(0)).outcome == "kept"
        assert seen and seen[0] < 2 * size == left(two)


def test_what_is_written_without_a_budget_is_never_refused_and_counts(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, 3 * size) as store:
        outcomes(store, range(2))
        with opened(tmp_path / "c", clock, None) as free:
            assert outcomes(free, range(2, 12)) == ["kept"] * 10
        assert left(store) == 0 and keep(store, prompt(20)).outcome == "refused"
        assert report.written(store.disk, None)["written_day_bytes"] == 12 * size


@pytest.mark.parametrize("ahead", [-365 * DAY, -DAY, -3600, 3600, DAY, 365 * DAY])
def test_a_clock_that_leaps_and_comes_back_does_not_block_writing(
    tmp_path: Path, clock: Clock, size: int, ahead: int
) -> None:
    with opened(tmp_path / "c", clock, 3 * size) as store:
        assert outcomes(store, range(4)) == ["kept"] * 3 + ["refused"]
        for moved in (ahead, -ahead):
            clock.now += moved
            outcomes(store, range(10, 20))
            assert left(store) <= 3 * size
            assert load(store, prompt(0)) == 640
        clock.now += DAY + 601
        assert left(store) == 3 * size and keep(store, prompt(50)).outcome == "kept"
        assert check(store.disk).problems == ()


def test_a_clock_that_is_set_back_a_little_gives_nothing_away(tmp_path: Path, clock: Clock, size: int) -> None:
    with opened(tmp_path / "c", clock, 3 * size) as store:
        outcomes(store, range(2))
        clock.now -= 300
        assert left(store) == size
        assert outcomes(store, range(2, 5)) == ["kept", "refused", "refused"]
        clock.now += 300
        assert left(store) == 0
        assert report.written(store.disk, 3 * size)["written_hour_bytes"] == 3 * size


def make_older(folder: Path, version: int, *, spent: int | None = None) -> None:
    """Make a catalog one of that version: 1 counted only bytes, 3 also what was spent of a budget that added up."""
    connection = sqlite3.connect(folder / CATALOG)
    if version == 1:
        connection.execute("ALTER TABLE bytes_written DROP COLUMN refused")
        connection.execute("DROP TABLE fingerprints")
    else:
        connection.execute("ALTER TABLE bytes_written ADD COLUMN spent INTEGER")
        connection.execute("UPDATE bytes_written SET spent=?", (spent,))
    connection.execute(f"PRAGMA user_version={version}")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(("version", "spent"), [(1, None), (3, None), (3, 10**9)])
def test_a_catalog_of_before_goes_on_and_says_once_that_a_budget_no_longer_adds_up(
    tmp_path: Path, clock: Clock, size: int, version: int, spent: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "c", clock, None) as store:
        keep(store, prompt(0))
    make_older(tmp_path / "c", version, spent=spent)
    for _ in range(2):
        with opened(tmp_path / "c", clock, 3 * size) as store:
            assert load(store, prompt(0)) == 640 and left(store) == 2 * size, "what it wrote counts"
            assert report.written(store.disk, None)["written_hour_bytes"] == size
            with store.disk.database.reading() as rows:
                assert rows.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    with opened(tmp_path / "c", clock, 3 * size) as store:
        assert outcomes(store, range(1, 4)) == ["kept", "kept", "refused"]
    told = [one for one in caplog.messages if "no longer adds up" in one]
    assert told == ([] if spent is None else [
        f"{tmp_path / 'c'}: the write budget is what may be written within any 24 hours now, and what is not written "
        "no longer adds up. Set a larger write_budget if a day needs more."
    ])  # fmt: skip


@pytest.mark.parametrize("version", [1, 3])
def test_a_catalog_of_before_that_can_only_be_read_is_read_and_stays_as_it_is(
    tmp_path: Path,
    clock: Clock,
    size: int,
    version: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with opened(tmp_path / "c", clock, None) as store:
        keep(store, prompt(0))
    make_older(tmp_path / "c", version, spent=10**9)
    monkeypatch.setattr("rekindle.store.catalog.database.os.access", lambda *_: False)
    with opened(tmp_path / "c", clock, size) as store:
        assert store.disk.database.read_only and load(store, prompt(0)) == 640
        assert isinstance(store.admit(KV_SPACE, prompt(1)), Span) and store.counts.read_failures == 0
        found = report.written(store.disk, size)
        assert found["written_day_bytes"] == 0 and found["write_budget_left_bytes"] is None
        with store.disk.database.reading() as rows:
            assert rows.execute("PRAGMA user_version").fetchone() == (version,)
    assert "no longer adds up" not in caplog.text


def test_keys_seen_once_stay_within_the_limit(tmp_path: Path, clock: Clock) -> None:
    """Many prompts that are not kept must not make the catalog outgrow the folder's limit."""
    settings = StoreSettings(disk_limit=4 << 20, memory_limit=0, admission="second-use")
    with TieredStore(tmp_path / "c", settings, Machine(clock=clock)) as store:
        for number in range(60):
            assert keep(store, prompt(number, 2000)).outcome == "refused"
        with store.disk.database.reading() as connection:
            (rows,) = connection.execute("SELECT count(*) FROM seen_keys").fetchone()
        assert 0 < rows <= store.disk.room.max_seen(4 << 20) < 60 * 63
        assert sum(path.stat().st_size for path in (tmp_path / "c").rglob("*") if path.is_file()) <= 4 << 20


def test_the_default_holds_for_five_years_of_the_smallest_disk() -> None:
    """And a long session of an 8B model fits in a day: ten prompts of 30,000 tokens of 128 KiB."""
    chosen = Settings().write_budget
    assert chosen is not None
    day_bytes = parse_limit(chosen).size_bytes
    assert day_bytes is not None
    assert 5 * 365 * day_bytes <= 150e12 / 2
    assert day_bytes > 10 * 30_000 * (128 << 10)


@pytest.mark.parametrize("name", ["write_budget", "disk_limit", "memory_limit"])
def test_a_bad_size_names_its_setting(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name}='lots' is not a size"):
        StoreSettings(**{name: "lots"})
