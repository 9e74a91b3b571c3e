"""What is kept, what goes, and when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.base import folder_bytes
from rekindle.core.keys import BLOCK_TOKENS, KvSpace
from rekindle.core.kv import Span
from rekindle.core.scope import Scope
from rekindle.core.size import Limit, parse_duration, parse_limit
from rekindle.errors import InvalidSetting, PinRefused
from rekindle.store import report
from rekindle.store.catalog.catalog import Tail
from rekindle.store.check import check
from rekindle.store.disk import Machine
from rekindle.store.evict import POLICIES, EvictionState, chance, rank
from rekindle.store.files import Files
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import Kept, TieredStore
from tests.kvs import KV_SPACE, keep, load, make_kv

ROOMY = StoreSettings(disk_limit="50MB", memory_limit=0)
LOG_BYTES = 2 << 20  # what a small cache sets aside for its catalog's log


class Clock:
    """A clock that a test moves."""

    def __init__(self, now: float = 1_900_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def prompt(number: int, tokens: int = 640) -> list[int]:
    return [number * 10_000 + place for place in range(tokens)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def known(store: TieredStore, count: int) -> list[int]:
    """Which of the numbered prompts are known whole."""
    return [n for n in range(count) if store.lookup(KV_SPACE, prompt(n)).length == 640]


@pytest.mark.parametrize("policy", ["utility", "lru"])
def test_what_was_not_used_for_longest_goes_first(tmp_path: Path, clock: Clock, policy: str) -> None:
    settings = StoreSettings(disk_limit="50MB", memory_limit=0, policy=policy)
    with TieredStore(tmp_path / "c", settings, Machine(clock=clock)) as store:
        for number in range(5):
            keep(store, prompt(number))
            clock.now += 3600
        store.record_use(store.lookup(KV_SPACE, prompt(0)))
        store.maintain()
        size = store.disk.entries()[0].size_bytes
        total = 5 * size + store.disk.database.size_bytes()
        store.disk.room.prune(total - size)
        assert known(store, 5) == [0, 2, 3, 4]


def test_the_chance_of_reuse_falls_with_age_and_rises_with_hits() -> None:
    young, old, busy = (
        chance(1, 0.0, max_hits=10),
        chance(1, 86_400.0, max_hits=10),
        chance(10, 86_400.0, max_hits=10),
    )
    assert old < young < busy
    assert chance(1, -500.0, max_hits=10) == young  # a clock that went back


def test_ranking_needs_no_more_than_it_gives() -> None:
    tails = (Tail(extent=n, live=1, blocks=1, size_bytes=1, hits=0, used=float(n)) for n in range(100_000, 0, -1))
    assert [tail.extent for tail in rank(tails, POLICIES["lru"], EvictionState(0.0), 3)] == [1, 2, 3]


def test_tails_go_before_heads(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        system = prompt(0, 320)
        for number in range(1, 6):
            keep(store, system + prompt(number, 320))
        while len(store.disk.entries()) > 1:
            size = sum(row.size_bytes for row in store.disk.entries()) + store.disk.database.size_bytes()
            store.disk.room.prune(size - 1)
            assert check(store.disk).problems == ()
            if store.disk.entries():
                assert load(store, system) == 320


def test_a_cold_tail_goes_and_its_hot_head_stays(tmp_path: Path, clock: Clock) -> None:
    """The system prompt was kept together with the first question; the question alone is forgotten."""
    settings = StoreSettings(disk_limit="50MB", memory_limit=0)
    with TieredStore(tmp_path / "c", settings, Machine(clock=clock)) as store:
        system = prompt(0, 320)
        keep(store, system + prompt(1, 2000))
        for _ in range(5):
            clock.now += 60
            store.record_use(store.lookup(KV_SPACE, system))
        store.maintain()
        (before,) = store.disk.entries()
        store.disk.room.prune(before.size_bytes + store.disk.database.size_bytes() - 1)
        (after,) = store.disk.entries()
        assert after.name != before.name and after.size_bytes < before.size_bytes / 4  # rewritten without the tail
        assert (after.hits, after.kept, after.live, after.blocks) == (before.hits, before.kept, 10, 10)
        assert load(store, system + prompt(1, 2000)) == 320
        assert check(store.disk).problems == ()


def test_pinned_entries_and_what_they_hang_on_never_go(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        keep(store, prompt(0))
        keep(store, prompt(0) + prompt(1))
        keep(store, prompt(2))
        child = max(store.disk.entries(), key=lambda row: row.depth)
        store.disk.pin([child])
        store.disk.room.prune(0)
        assert load(store, prompt(0) + prompt(1)) == 1280
        assert known(store, 3) == [0]
        store.disk.pin([child], pinned=False)
        store.disk.room.prune(0)
        assert store.disk.entries() == []


def test_of_what_is_larger_than_the_limit_the_first_blocks_are_kept(tmp_path: Path) -> None:
    limit, large = LOG_BYTES + 1_000_000, prompt(9, 8_000)
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit=limit, memory_limit=0)) as store:
        assert keep(store, prompt(0)).outcome == "kept"
        kept = keep(store, large)
        assert kept.outcome == "kept" and not kept.whole
        first = load(store, large)  # and they are what computing gives
        assert len(large) / 4 < first < len(large) and not first % BLOCK_TOKENS
        assert folder_bytes(tmp_path / "c") <= limit
        for _ in range(2):  # it is as large as before: asked for again, nothing goes for it
            keep(store, large)
            assert load(store, large) >= first and folder_bytes(tmp_path / "c") <= limit
        assert check(store.disk).problems == ()
    with TieredStore(tmp_path / "c", ROOMY) as store:  # the limit was raised: the rest follows
        assert keep(store, large).whole and load(store, large) == len(large)
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit=limit, memory_limit=0)) as store:  # and lowered again
        store.maintain()
        assert folder_bytes(tmp_path / "c") <= limit
        keep(store, large)
        assert load(store, large) >= len(large) / 4 and folder_bytes(tmp_path / "c") <= limit


def test_where_eviction_cannot_free_enough_the_first_blocks_are_kept(tmp_path: Path) -> None:
    limit = LOG_BYTES + 1_000_000
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit=limit, memory_limit=0)) as store:
        for number in range(4):
            assert keep(store, prompt(number)).outcome == "kept"
        store.disk.pin(store.disk.entries())
        kept = keep(store, prompt(9, 8_000))
        assert kept.outcome == "kept" and not kept.whole and 0 < load(store, prompt(9, 8_000)) < 8_000
        assert known(store, 4) == [0, 1, 2, 3] and folder_bytes(tmp_path / "c") <= limit


def test_a_limit_that_lets_nothing_in_is_logged_once_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Files, "free_bytes", lambda *_: 15_000_000)
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit="10%", memory_limit=0)) as store:
        assert [keep(store, prompt(number, 5_000)).outcome for number in range(2)] == ["refused"] * 2
        assert store.counts.refused == 2
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("KV is not kept on disk: with what cannot be evicted it needs ")
    assert "the disk limit (10 % of the free disk) allows 1." in line and "--disk-limit 2GB" in line


def of_tenant(tenant: str) -> KvSpace:
    return replace(KV_SPACE, namespace=replace(KV_SPACE.namespace, tenant=tenant))


def pin_all_that_may_be(store: TieredStore, tenant: str | None) -> int:
    """Pin one entry after the other until that is refused; how many bytes that are."""
    for entry in report.entries(store.disk, scope=None if tenant is None else Scope(tenant)):
        pinned = sum(row.size_bytes for row in store.disk.entries() if row.pinned)
        try:
            store.disk.pin([entry.extent], tenant=tenant)
        except PinRefused as refusal:
            assert "Unpin" in str(refusal)
            assert sum(row.size_bytes for row in store.disk.entries() if row.pinned) == pinned, "nothing changed"
            return pinned
    raise AssertionError("everything could be pinned")


@pytest.mark.parametrize("limit", [LOG_BYTES + 1_000_000, LOG_BYTES + 2_000_000])
def test_whatever_is_pinned_others_find_room(tmp_path: Path, limit: int) -> None:
    """A tenant pins a quarter, all tenants together half; then another one's KV is kept, again and again."""
    greedy, third, last = (of_tenant(name) for name in ("greedy", "third", "last"))
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit=limit, memory_limit=0)) as store:
        for number in range(limit // 20_000):
            assert keep(store, prompt(number), greedy if number % 2 else third).outcome == "kept"
        assert 0 < pin_all_that_may_be(store, "greedy") <= limit / 4
        assert 0 < pin_all_that_may_be(store, None) <= limit / 2
        for number in range(20):
            assert keep(store, prompt(number), last).outcome == "kept"
            assert load(store, prompt(number), last) == 640
        assert folder_bytes(tmp_path / "c") <= limit
        assert check(store.disk).problems == ()


def test_what_is_pinned_may_be_pinned_again_and_unpinned_above_the_bound(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        for number in range(4):
            keep(store, prompt(number))
        store.disk.pin(store.disk.entries()[:3])
    small = StoreSettings(disk_limit=LOG_BYTES + 300_000, memory_limit=0)  # the limit was lowered since
    with TieredStore(tmp_path / "c", small) as store:
        rows = store.disk.entries()
        store.disk.pin(rows[:1])
        with pytest.raises(PinRefused):
            store.disk.pin(rows[3:])
        store.disk.pin(rows, pinned=False)
        assert not any(row.pinned for row in store.disk.entries())


def test_a_limit_that_was_lowered_holds_after_the_next_tending(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        for number in range(200):
            keep(store, prompt(number))
    limit = LOG_BYTES + 3_000_000
    assert folder_bytes(tmp_path / "c") > limit
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit=limit, memory_limit=0)) as store:
        store.maintain()
        assert 0 < len(store.disk.entries()) < 200
    assert folder_bytes(tmp_path / "c") <= limit


def test_a_share_of_the_disk_is_of_what_is_free_or_ours() -> None:
    assert parse_limit("10%").resolve(5000) == 500
    assert Limit(None, 0.1).resolve(0) == 0


def test_what_expired_is_not_served_and_can_be_kept_again(tmp_path: Path, clock: Clock) -> None:
    settings = StoreSettings(disk_limit="50MB", memory_limit="1MB", ttl_seconds=100)
    with TieredStore(tmp_path / "c", settings, Machine(clock=clock)) as store:
        keep(store, prompt(0))
        keep(store, prompt(0) + prompt(1))
        clock.now += 99
        assert load(store, prompt(0)) == 640
        clock.now += 2
        assert load(store, prompt(0)) == 0
        assert keep(store, prompt(0)).outcome == "kept"
        assert load(store, prompt(0) + prompt(1)) == 640
        clock.now += 101
        store.maintain()
        assert store.disk.entries() == [] and list((tmp_path / "c" / "extents").iterdir()) == []


def test_on_second_use_only_what_was_met_before_is_kept(tmp_path: Path) -> None:
    settings = StoreSettings(disk_limit="50MB", memory_limit=0, admission="second-use")
    with TieredStore(tmp_path / "c", settings) as store:
        system = prompt(0, 320)
        assert isinstance(store.admit(KV_SPACE, system + prompt(1)), Kept)
        gap = store.admit(KV_SPACE, system + prompt(2))
        assert gap == Span(0, 320)  # the system prompt was met twice, the questions once each
        assert store.keep(KV_SPACE, system + prompt(2), make_kv(system + prompt(2), gap)).outcome == "kept"
        assert load(store, system + prompt(3)) == 320
        assert store.admit(KV_SPACE, system + prompt(2)) == Span(320, 960)


def test_memory_holds_what_fits_and_serves_it_after_the_file_went(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit="50MB", memory_limit=100_000)) as store:
        for number in range(4):
            keep(store, prompt(number))
            assert store.memory.size_bytes <= 100_000
        assert len(store.memory) == 2
        for path in (tmp_path / "c" / "extents").iterdir():
            path.unlink()
        assert load(store, prompt(3)) == 640


def test_what_was_read_from_disk_is_held_in_memory_after_tending(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        keep(store, prompt(0))
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit="50MB", memory_limit="1MB")) as store:
        assert load(store, prompt(0)) == 640 and len(store.memory) == 0
        store.maintain()
        assert len(store.memory) == 1
        store.disk.remove(store.disk.entries())
        store.maintain()
        assert len(store.memory) == 0


def test_uses_are_counted_and_ranked(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        keep(store, prompt(0))
        for _ in range(3):
            store.record_use(store.lookup(KV_SPACE, prompt(0)[:40]), saved_ms=5.0)
        store.maintain()
        (row,) = store.disk.entries()
        assert (row.hits, row.saved_ms) == (3, 15.0)
        with store.disk.database.reading() as connection:
            hits = [r[0] for r in connection.execute("SELECT hits FROM blocks ORDER BY place")]
        assert hits == [3, 3] + [0] * 18


def test_a_million_rows_do_not_slow_a_lookup_down(tmp_path: Path) -> None:
    """By the plans that SQLite makes, not by the clock: every query of a lookup uses an index."""
    settings = StoreSettings(disk_limit="50MB", memory_limit=0, ttl_seconds=1000)
    with TieredStore(tmp_path / "c", settings) as store:
        keep(store, prompt(0))
        with store.disk.database.reading() as connection:
            asked: list[str] = []
            connection.set_trace_callback(asked.append)
        store.lookup(KV_SPACE, prompt(0, 1000))
        with store.disk.database.reading() as connection:
            connection.set_trace_callback(None)
            queries = {query for query in asked if query.startswith("SELECT")}
            plans = {query: connection.execute(f"EXPLAIN QUERY PLAN {query}").fetchall() for query in queries}
    assert len(queries) > 5
    assert all("SCAN" not in step[3] for steps in plans.values() for step in steps), plans


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MB", 512_000_000), ("1.5 GiB", 1610612736), ("1000", 1000), ("2k", 2000), ("0", 0), (" 3 tb ", 3 * 10**12)],
)
def test_sizes_are_written_as_people_write_them(text: str, size: int) -> None:
    assert parse_limit(text).size_bytes == size


@pytest.mark.parametrize("text", ["", "many", "-1", "10 %%", "101%", "5 parsecs", "1e9"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidSetting, match="MB|most|negative"):
        parse_limit(text)


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90", "90s", "2m", "1.5h", "7d")] == [90, 90, 120, 5400, 604800]
    with pytest.raises(InvalidSetting):
        parse_duration("soon")


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "fifo"},
        {"admission": "never"},
        {"ttl_seconds": 0},
        {"write_budget": "10%"},
        {"disk_limit": "lots"},
        {"memory_limit": -1},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        StoreSettings(**wrong)  # type: ignore[arg-type]


def test_a_key_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="16 to 64"):
        TieredStore(tmp_path / "c", StoreSettings(key=b"short"))
