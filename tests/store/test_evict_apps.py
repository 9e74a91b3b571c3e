"""Eviction that knows the apps: whose KV goes, whose stays, and when; on real folders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.base import folder_bytes
from rekindle.apps import list_apps
from rekindle.core.scope import AppRef, AppState
from rekindle.store import disk_space
from rekindle.store.catalog import app_rows
from rekindle.store.catalog.app_rows import AppUsers
from rekindle.store.check import check
from rekindle.store.disk import CATALOG, Machine
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, keep, load
from tests.store.test_limits import LOG_BYTES, Clock, prompt

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("crowded")]

MAIL, NOTES, CHAT = (AppRef("local", name) for name in ("mail", "notes", "chat"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[TieredStore]:
    with opened(tmp_path / "c", clock) as store:
        yield store


def opened(
    folder: Path, clock: Clock, policy: str = "utility", limit: str | int = "50MB", killed_ttl: float | None = 60.0
) -> TieredStore:
    settings = StoreSettings(disk_limit=limit, memory_limit=0, policy=policy, killed_ttl_seconds=killed_ttl)
    return TieredStore(folder, settings, Machine(clock=clock))


def say(store: TieredStore, app_ref: AppRef, state: AppState) -> None:
    with store.disk.database.writing() as connection:
        app_rows.set_state(connection, app_ref.scope, app_ref.name, state, store.disk.clock(), store.disk.room.allows)


def ask(store: TieredStore, tokens: list[int], app_ref: AppRef | None) -> None:
    """What a request does: keep what is new, then note whose it was."""
    keep(store, tokens, app=app_ref)
    store.record_request(KV_SPACE, tokens, app_ref)
    store.maintain()


def prune_one(store: TieredStore) -> None:
    size = sum(row.size_bytes for row in store.disk.entries()) + store.disk.database.size_bytes()
    store.disk.room.prune(size - 1)


def known(store: TieredStore, *prompts: list[int]) -> list[int]:
    return [store.lookup(KV_SPACE, tokens).length for tokens in prompts]


def test_under_pressure_killed_apps_go_first_then_the_background(
    tmp_path: Path, clock: Clock, policy: str = "utility"
) -> None:
    with opened(tmp_path / "c", clock, policy, killed_ttl=None) as store:
        for number, app_ref in enumerate((NOTES, MAIL, CHAT)):
            ask(store, prompt(number), app_ref)
            clock.now += 1
        say(store, NOTES, "foreground")
        say(store, MAIL, "background")
        say(store, CHAT, "killed")  # although it asked last
        left = []
        for _ in range(3):
            prune_one(store)
            left.append(known(store, prompt(0), prompt(1), prompt(2)))
        assert left == [[640, 640, 0], [640, 0, 0], [0, 0, 0]]


def test_a_prefix_that_a_live_app_shares_stays_until_nothing_of_killed_apps_is_left(
    tmp_path: Path, clock: Clock, policy: str = "utility"
) -> None:
    with opened(tmp_path / "c", clock, policy, killed_ttl=None) as store:
        system = prompt(0, 160)
        ask(store, system + prompt(1, 480), MAIL)  # one extent: the prefix and what only mail asked
        ask(store, system + prompt(2, 480), NOTES)
        say(store, MAIL, "killed")
        say(store, NOTES, "background")
        prune_one(store)
        assert known(store, system + prompt(1, 480), system + prompt(2, 480)) == [160, 640]
        assert check(store.disk).problems == ()


def test_private_kv_of_a_killed_app_goes_soon_and_what_others_use_stays(store: TieredStore, clock: Clock) -> None:
    system = prompt(0, 320)
    ask(store, system + prompt(1, 320), MAIL)
    ask(store, system + prompt(2, 320), NOTES)
    ask(store, prompt(3), MAIL)
    ask(store, prompt(3) + prompt(4), MAIL)
    say(store, MAIL, "killed")
    clock.now += 59
    store.maintain()
    assert known(store, system + prompt(1, 320), prompt(3) + prompt(4)) == [640, 1280]
    clock.now += 2
    store.maintain()
    assert known(store, system + prompt(1, 320), prompt(3) + prompt(4)) == [320, 0]
    assert load(store, system + prompt(2, 320)) == 640
    assert check(store.disk).problems == ()


def test_from_a_half_empty_folder_nothing_of_killed_apps_is_deleted(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_space, "ROOMY_SHARE", 0.5)
    with opened(tmp_path / "c", clock, limit="50MB") as store:
        ask(store, prompt(0), MAIL)
        ask(store, prompt(1), MAIL)
        say(store, MAIL, "killed")
        clock.now += 3600
        store.maintain()
        assert known(store, prompt(0), prompt(1)) == [640, 640]
        with store.disk.database.scanning() as connection:
            used = store.disk.room.used_bytes(connection)
        share = (used - 1000) / store.disk.room.limit_bytes(used)  # a little more than that is taken: one is enough
        monkeypatch.setattr(disk_space, "ROOMY_SHARE", share)
        store.maintain()
        assert sorted(known(store, prompt(0), prompt(1))) == [0, 640]


def test_it_goes_when_the_next_process_opens_the_folder(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path / "c", clock) as store:
        ask(store, prompt(0), MAIL)
        say(store, MAIL, "killed")
    clock.now += 61
    with opened(tmp_path / "c", clock) as store:
        assert store.disk.entries() == [] and list((tmp_path / "c" / "extents").iterdir()) == []


def test_with_none_it_goes_only_when_room_is_needed(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path / "c", clock, killed_ttl=None) as store:
        ask(store, prompt(0), MAIL)
        say(store, MAIL, "killed")
        clock.now += 1e6
        store.maintain()
        assert known(store, prompt(0)) == [640]


def test_an_app_that_asks_again_is_alive_and_its_kv_stays(store: TieredStore, clock: Clock) -> None:
    ask(store, prompt(0), MAIL)
    say(store, MAIL, "killed")
    clock.now += 50
    ask(store, prompt(1), MAIL)
    clock.now += 1000
    store.maintain()
    assert known(store, prompt(0), prompt(1)) == [640, 640]
    with store.disk.database.reading() as connection:
        (row,) = app_rows.apps(connection)
    assert (row.name, row.state, row.requests) == ("mail", "foreground", 2)


@pytest.mark.parametrize("first", [True, False])
def test_what_somebody_without_a_name_uses_is_nobodys_private_kv(store: TieredStore, clock: Clock, first: bool) -> None:
    for app_ref in (None, MAIL) if first else (MAIL, None):
        ask(store, prompt(0), app_ref)
    say(store, MAIL, "killed")
    clock.now += 1000
    store.maintain()
    assert known(store, prompt(0)) == [640]


def test_pinned_kv_of_a_killed_app_stays(store: TieredStore, clock: Clock) -> None:
    ask(store, prompt(0), MAIL)
    ask(store, prompt(0) + prompt(1), MAIL)
    store.disk.pin([max(store.disk.entries(), key=lambda row: row.depth)])
    say(store, MAIL, "killed")
    clock.now += 1000
    store.maintain()
    store.disk.room.prune(0)
    assert load(store, prompt(0) + prompt(1)) == 1280


def test_who_used_what_outlives_a_rewriting(store: TieredStore, clock: Clock) -> None:
    system = prompt(0, 320)
    ask(store, system + prompt(1, 2000), MAIL)
    ask(store, system, NOTES)
    say(store, MAIL, "killed")
    clock.now += 1000
    (before,) = store.disk.entries()
    store.maintain()  # cuts what was private, and writes the rest anew
    (after,) = store.disk.entries()
    assert after.name != before.name and after.live == 10
    with store.disk.database.reading() as connection:
        assert app_rows.users_by_extent(connection, whole=True) == {after.id: AppUsers(foreground=1, killed=1)}
    say(store, NOTES, "killed")
    clock.now += 1000
    store.maintain()
    assert store.disk.entries() == []
    with store.disk.database.reading() as connection:
        assert connection.execute("SELECT count(*) FROM app_uses").fetchone() == (0,)


@pytest.mark.parametrize("policy", ["utility", "lru"])
def test_limits_hold_at_every_moment_whoever_asks_and_dies(tmp_path: Path, clock: Clock, policy: str) -> None:
    chance, limit = random.Random(policy), LOG_BYTES + 700_000
    app_refs = [None, *(AppRef("local", f"app-{number}") for number in range(40))]
    kept = 0
    with opened(tmp_path / "c", clock, policy, limit) as store:
        for step in range(80):
            clock.now += chance.choice([0, 1, 100])
            app_ref = chance.choice(app_refs)
            tokens = prompt(chance.randrange(6), 192) + prompt(chance.randrange(10, 40), chance.choice([100, 500]))
            kept += keep(store, tokens, app=app_ref).outcome == "kept"
            assert folder_bytes(tmp_path / "c") <= limit
            store.record_request(KV_SPACE, tokens, app_ref)
            store.record_use(store.lookup(KV_SPACE, tokens), 3.0)
            if app_ref is not None:
                say(store, app_ref, chance.choice(["foreground", "background", "killed"]))
            if step % 4 == 0:
                store.maintain()
            assert folder_bytes(tmp_path / "c") <= limit
        assert check(store.disk).problems == ()
        assert kept > 10 and store.counts.write_failures == 0


def test_tails_go_before_heads_whoever_they_belong_to(tmp_path: Path, clock: Clock, policy: str = "utility") -> None:
    with opened(tmp_path / "c", clock, policy, killed_ttl=None) as store:
        system = prompt(0, 320)
        for number, app_ref in enumerate((MAIL, NOTES, CHAT, None), start=1):
            ask(store, system + prompt(number, 320), app_ref)
        say(store, MAIL, "killed")  # who kept the head
        while store.disk.entries():
            prune_one(store)
            assert check(store.disk).problems == ()
            if store.disk.entries():
                assert load(store, system) == 320


def test_users_of_an_extent_are_bounded_and_none_that_lives_is_forgotten(
    store: TieredStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_rows, "MAX_USERS", 4)
    app_refs = [AppRef("local", f"app-{number}") for number in range(9)]
    for app_ref in app_refs:
        clock.now += 1
        ask(store, prompt(0), app_ref)
    with store.disk.database.reading() as connection:
        (count,) = connection.execute("SELECT count(*) FROM app_uses").fetchone()
    assert count <= 5  # those, and the one that stands for all who lost their names
    for app_ref in app_refs[1:]:
        say(store, app_ref, "killed")
    clock.now += 1000
    store.maintain()
    assert known(store, prompt(0)) == [640]  # the first one lives, and its name was the first to be lost


@pytest.mark.parametrize("full", ["rows", "disk"])
def test_what_is_forgotten_for_want_of_room_loses_its_name_and_not_its_protection(
    store: TieredStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """Live apps use what mail kept, long ago; others come, and mail is killed."""
    ask(store, prompt(0), MAIL)
    ask(store, prompt(0), NOTES)
    ask(store, prompt(1), None)
    ask(store, prompt(1), MAIL)  # with a row for whoever gave no name
    if full == "rows":
        monkeypatch.setattr(app_rows, "MAX_ROWS", 4)
    else:
        monkeypatch.setattr(store.disk.room, "allows", lambda *_: False)
    for number in range(2, 6):
        clock.now += 1
        say(store, MAIL, "killed")
        ask(store, prompt(number), NOTES)
    clock.now += 1000
    store.maintain()
    assert known(store, prompt(0), prompt(1)) == [640, 640]
    with store.disk.database.reading() as connection:
        (count,) = connection.execute("SELECT count(*) FROM app_uses").fetchone()
    assert 0 < count <= 4


def test_an_extent_whose_user_finds_no_room_has_none(
    store: TieredStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(store, prompt(0), MAIL)
    ask(store, prompt(1), NOTES)  # so that it is known
    store.disk.remove([row for row in store.disk.entries() if row.id == max(r.id for r in store.disk.entries())])
    monkeypatch.setattr(store.disk.room, "allows", lambda *_: False)
    ask(store, prompt(0), NOTES)
    say(store, MAIL, "killed")
    clock.now += 1000
    store.maintain()
    assert known(store, prompt(0)) == [640]


def test_what_is_noted_late_does_not_undo_what_was_said_since(store: TieredStore, clock: Clock) -> None:
    def state() -> tuple[str, float, int]:
        with store.disk.database.reading() as connection:
            (row,) = app_rows.apps(connection)
        return row.state, row.since - began, row.requests

    began = clock.now
    clock.now += 5
    ask(store, prompt(0), replace(MAIL, at=began))
    assert state() == ("foreground", 0, 1)
    say(store, MAIL, "killed")
    ask(store, prompt(1), replace(MAIL, state="foreground", at=began + 5))  # killed in the same moment
    assert state() == ("killed", 5, 2)
    clock.now += 5
    ask(store, prompt(2), replace(MAIL, at=began + 6))
    assert state() == ("foreground", 6, 3)
    say(store, MAIL, "background")
    ask(store, prompt(3), replace(MAIL, state="foreground", at=began + 9))
    assert state() == ("background", 10, 4)


def test_an_app_is_alive_again_where_a_clock_was_put_right_since_it_was_killed(
    store: TieredStore, clock: Clock
) -> None:
    ask(store, prompt(0), MAIL)
    say(store, MAIL, "killed")
    clock.now -= 1000
    ask(store, prompt(1), replace(MAIL, at=clock.now))
    with store.disk.database.reading() as connection:
        assert [row.state for row in app_rows.apps(connection)] == ["foreground"]


def test_apps_are_bounded_and_what_a_forgotten_one_used_is_nobodys(
    store: TieredStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_rows, "MAX_APPS", 3)
    for number in range(5):
        clock.now += 1
        ask(store, prompt(number), AppRef("local", f"app-{number}"))
    with store.disk.database.reading() as connection:
        assert [row.name for row in app_rows.apps(connection)] == ["app-2", "app-3", "app-4"]
        users_by_extent = app_rows.users_by_extent(connection, whole=True).values()
    assert sorted((users.foreground, users.background) for users in users_by_extent) == [(0, 1)] * 2 + [(1, 0)] * 3


def test_apps_of_two_tenants_have_nothing_to_do_with_each_other(store: TieredStore, clock: Clock) -> None:
    ask(store, prompt(0), MAIL)
    say(store, AppRef("somebody else", "mail"), "killed")
    clock.now += 1000
    store.maintain()
    assert known(store, prompt(0)) == [640]


def test_apps_of_two_salts_have_nothing_to_do_with_each_other(store: TieredStore, clock: Clock) -> None:
    ask(store, prompt(0), MAIL)
    say(store, AppRef("local", "mail", salt="a salt"), "killed")
    clock.now += 1000
    store.maintain()
    assert known(store, prompt(0)) == [640]
    assert [(app.name, app.state) for app in list_apps(store.disk, MAIL.scope)] == [("mail", "foreground")]
    assert len({app.salt_digest for app in list_apps(store.disk)}) == 2
    assert not any(b"a salt" in path.read_bytes() for path in store.disk.folder.glob(f"{CATALOG}*"))
