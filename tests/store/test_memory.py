"""KV in memory above the disk: what is held, in which form, and what leaves first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.core.keys import KvSpace
from rekindle.core.kv import Span
from rekindle.core.scope import AppRef, AppState
from rekindle.store.catalog import app_rows
from rekindle.store.disk import Machine
from rekindle.store.memory import HeldCode, MemoryTier
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, SMALL
from tests.kvs import keep as keep_exact
from tests.store.test_delta_base import BASE, NEAR_CODER, ONE, adapted, fetch, is_same, keep, quantized
from tests.store.test_limits import Clock, prompt

pytestmark = pytest.mark.thorough

PROMPT_BYTES = 640 * SMALL.token_bytes
MAIL, NOTES, CHAT = (AppRef("local", name) for name in ("mail", "notes", "chat"))
T = list(range(200))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(folder: Path, clock: Clock, policy: str = "lru", prompts: int = 3) -> TieredStore:
    settings = StoreSettings("50MB", memory_limit=prompts * PROMPT_BYTES, policy=policy, killed_ttl_seconds=None)
    return TieredStore(folder, settings, Machine(clock=clock))


def ask(store: TieredStore, clock: Clock, number: int, app: AppRef) -> None:
    clock.now += 60
    keep_exact(store, prompt(number), app=app)
    store.record_request(KV_SPACE, prompt(number), app)
    store.maintain()


def say(store: TieredStore, app: AppRef, state: AppState) -> None:
    with store.disk.database.writing() as connection:
        app_rows.set_state(connection, app.scope, app.name, state, store.disk.clock(), store.disk.room.allows)


def held(store: TieredStore, count: int) -> list[int]:
    """Which of the numbered prompts are in memory."""
    pieces = {number: store.lookup(KV_SPACE, prompt(number)).pieces for number in range(count)}
    return [number for number, found in pieces.items() if found and all(store.holds(piece) for piece in found)]


def test_what_was_not_used_for_longest_leaves_memory_first_and_stays_on_disk(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path / "c", clock) as store:
        for number in range(3):
            ask(store, clock, number, MAIL)
        clock.now += 60
        store.record_use(store.lookup(KV_SPACE, prompt(0)))
        ask(store, clock, 3, MAIL)
        assert held(store, 4) == [0, 2, 3]
        assert store.lookup(KV_SPACE, prompt(1)).length == 640


def test_what_a_queued_request_waits_for_leaves_memory_last_until_it_was_read(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path / "c", clock) as store:
        for number in range(3):
            ask(store, clock, number, MAIL)
        release = store.preload(store.lookup(KV_SPACE, prompt(0)).pieces, lambda: False)
        ask(store, clock, 3, MAIL)
        assert held(store, 4) == [0, 2, 3]
        release()
        ask(store, clock, 4, MAIL)
        assert held(store, 5) == [2, 3, 4]


@pytest.mark.parametrize("space", [BASE, quantized(BASE)], ids=["exact", "quantized"])
def test_what_is_preloaded_is_what_was_kept_and_nothing_is_once_cancelled(tmp_path: Path, space: KvSpace) -> None:
    settings = StoreSettings("50MB", memory_limit="10MB", quantized=NEAR_CODER)
    with TieredStore(tmp_path / "c", settings) as store:
        keep(store, T, space)
        expected = fetch(store, T, space)
    with TieredStore(tmp_path / "c", settings) as store:
        pieces = store.lookup(space, T).pieces
        store.preload(pieces, lambda: True)()
        assert len(store.memory) == 0
        release = store.preload(pieces, lambda: False)
        assert len(store.memory) == 1 and store.memory.unclaimed_bytes < store.memory.limit_bytes
        assert is_same(fetch(store, T, space), expected)
        release()
        assert store.memory.unclaimed_bytes == store.memory.limit_bytes


@pytest.mark.parametrize("policy", ["lru", "utility"])
def test_what_only_killed_apps_used_leaves_memory_first(tmp_path: Path, clock: Clock, policy: str) -> None:
    with opened(tmp_path / "c", clock, policy) as store:
        for number, app in enumerate((MAIL, NOTES, CHAT)):
            ask(store, clock, number, app)
        say(store, CHAT, "killed")  # although it asked last
        ask(store, clock, 3, MAIL)
        assert held(store, 4) == [0, 1, 3]


def test_under_utility_apps_in_the_background_leave_memory_before_the_foreground(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path / "c", clock, "utility") as store:
        for number, app in enumerate((MAIL, NOTES, CHAT)):
            ask(store, clock, number, app)
        say(store, NOTES, "background")
        ask(store, clock, 3, MAIL)
        assert held(store, 4) == [0, 2, 3]


def test_a_killed_app_leaves_memory_at_once_and_what_others_use_stays(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path / "c", clock) as store:
        ask(store, clock, 0, MAIL)
        ask(store, clock, 1, MAIL)
        ask(store, clock, 1, NOTES)
        say(store, MAIL, "killed")
        assert [row.name for row in store.free_killed()] == ["mail"]
        assert held(store, 2) == [1]
        assert store.lookup(KV_SPACE, prompt(0)).length == 640


def test_memory_keeps_its_limit_when_the_catalog_cannot_say_what_leaves_first(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path / "c", clock) as store:
        for number in range(3):
            ask(store, clock, number, MAIL)
        before = [(name, store.memory.get(name)) for name in store.memory.names()]
        for tier in (MemoryTier(2 * PROMPT_BYTES), MemoryTier(2 * PROMPT_BYTES, lambda _: [])):
            for name, extent in before:
                assert extent is not None
                tier.put(name, extent)
                assert tier.size_bytes <= tier.limit_bytes
            assert tier.names() == [name for name, _ in before[1:]]


class TestQuantized:
    """Held as it is on disk: whole, or as differences from its base."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[TieredStore]:
        settings = StoreSettings("50MB", memory_limit="10MB", quantized=NEAR_CODER)
        with TieredStore(tmp_path / "c", settings) as store:
            for kv_space in (BASE, ONE):
                keep(store, T, quantized(kv_space))
            store.maintain()
            yield store

    def test_it_takes_as_much_memory_as_on_disk(self, store: TieredStore) -> None:
        forms = [store.memory.get(row.name) for row in store.disk.entries()]
        assert len(forms) == 2 and all(isinstance(form, HeldCode) for form in forms)
        assert store.memory.size_bytes < 2 * len(T) * SMALL.token_bytes * 0.75
        assert store.memory.size_bytes <= sum(row.size_bytes for row in store.disk.entries())

    def test_a_load_decodes_it_and_reads_no_file(self, store: TieredStore) -> None:
        before = {kv_space: fetch(store, T, quantized(kv_space)) for kv_space in (BASE, ONE)}
        for row in store.disk.entries():
            path = store.disk.extents.path(row.name)
            path.write_bytes(bytes(path.stat().st_size))  # what is read now would be damaged
        for kv_space in (BASE, ONE):
            assert is_same(fetch(store, T, quantized(kv_space)), before[kv_space])
            assert fetch(store, T[:77], quantized(kv_space)).span == Span(0, 77)

    def test_it_is_planned_as_coded_kv_which_has_to_be_decoded(self, store: TieredStore) -> None:
        (piece,) = store.lookup(quantized(ONE), T).pieces
        assert not store.holds(piece)

    def test_what_was_evicted_from_disk_is_not_served_from_memory(self, store: TieredStore) -> None:
        store.disk.remove(store.disk.entries())
        assert store.lookup(quantized(ONE), T).length == 0
        store.maintain()
        assert len(store.memory) == 0


def test_exact_differences_are_held_ready_to_be_copied(tmp_path: Path) -> None:
    settings = StoreSettings("50MB", memory_limit="10MB")
    with TieredStore(tmp_path / "c", settings) as store:
        for kv_space in (BASE, ONE):
            keep(store, T, kv_space)
        assert all(store.memory.holds(row.name) for row in store.disk.entries())
        assert is_same(fetch(store, T, ONE), adapted(T, Span(0, len(T)), ONE))


def test_without_memory_nothing_is_held(tmp_path: Path) -> None:
    settings = replace(StoreSettings("50MB", memory_limit=0), quantized=NEAR_CODER)
    with TieredStore(tmp_path / "c", settings) as store:
        keep(store, T, quantized(BASE))
        fetch(store, T, quantized(BASE))
        store.maintain()
        assert len(store.memory) == 0
