"""The published policies, in a store: they keep its limits, and put first what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.core.scope import AppRef
from rekindle.store.disk import Machine
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, keep
from tests.store import test_evict_apps, test_limits
from tests.store.test_evict_apps import ask, opened
from tests.store.test_limits import LOG_BYTES, Clock, prompt

NAMES = ["weighted-lru", "lfu", "mobilora"]


pytestmark = pytest.mark.usefixtures("published_policies")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize("policy", ["weighted-lru", "mobilora"])
def test_what_was_not_used_for_longest_goes_first(tmp_path: Path, clock: Clock, policy: str) -> None:
    test_limits.test_what_was_not_used_for_longest_goes_first(tmp_path, clock, policy)


@pytest.mark.parametrize("policy", NAMES)
def test_limits_hold_at_every_moment_whoever_asks_and_dies(tmp_path: Path, clock: Clock, policy: str) -> None:
    test_evict_apps.test_limits_hold_at_every_moment_whoever_asks_and_dies(tmp_path, clock, policy)


def test_under_pressure_killed_apps_go_first_then_the_background(tmp_path: Path, clock: Clock) -> None:
    test_evict_apps.test_under_pressure_killed_apps_go_first_then_the_background(tmp_path, clock, "mobilora")


def test_tails_go_before_heads_whoever_they_belong_to(tmp_path: Path, clock: Clock) -> None:
    test_evict_apps.test_tails_go_before_heads_whoever_they_belong_to(tmp_path, clock, "mobilora")


def test_lfu_keeps_what_is_used_often_and_lru_what_was_used_last(tmp_path: Path, clock: Clock) -> None:
    left = {}
    for policy in ("lfu", "lru"):
        settings = StoreSettings(disk_limit="50MB", memory_limit=0, policy=policy)
        with TieredStore(tmp_path / policy, settings, Machine(clock=clock)) as store:
            for number in range(2):
                keep(store, prompt(number))
            for number in (0, 0, 0, 1):
                clock.now += 10
                store.record_use(store.lookup(KV_SPACE, prompt(number)))
            store.maintain()
            size = store.disk.entries()[0].size_bytes
            store.disk.room.prune(2 * size + store.disk.database.size_bytes() - 1)
            left[policy] = test_limits.known(store, 2)
    assert left == {"lfu": [0], "lru": [1]}


def test_mobilora_refuses_what_is_worth_less_than_all_that_could_go(tmp_path: Path, clock: Clock) -> None:
    """Algorithm 1: the newcomer is one of those that the one of least utility is chosen from."""
    outcomes = {}
    for policy in ("utility", "mobilora"):
        with opened(tmp_path / policy, clock, policy, LOG_BYTES + 1_000_000) as store:
            number = 0
            while not store.disk.room.evicted_bytes["new"] and number < 60:
                ask(store, prompt(number), AppRef("local", "notes", "foreground"))
                number += 1
            before = test_evict_apps.known(store, *map(prompt, range(number)))
            first = keep(store, prompt(100, 2560), app=AppRef("local", "mail", "background"))
            stayed = before == test_evict_apps.known(store, *map(prompt, range(number)))
            second = keep(store, prompt(101, 2560), app=AppRef("local", "notes", "foreground"))
            outcomes[policy] = (first.outcome, stayed, second.outcome)
    assert outcomes == {"utility": ("kept", False, "kept"), "mobilora": ("refused", True, "kept")}
