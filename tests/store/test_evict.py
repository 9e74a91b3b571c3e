"""What KV is worth: pure functions of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.policies import LFU, WEIGHTED_LRU, Aged, MobiLora, PlainLru
from rekindle.store.catalog.app_rows import AppUsers
from rekindle.store.catalog.catalog import Tail
from rekindle.store.evict import NOBODY, EvictionState, Lru, Policy, Utility, rank

pytestmark = pytest.mark.thorough

NOW = 1e9
few = st.integers(0, 4)
app_users = st.builds(AppUsers, few, few, few)


@st.composite
def tails(draw: st.DrawFn, extent: int = 1) -> Tail:
    blocks = draw(st.integers(1, 300))
    live = draw(st.integers(1, blocks))
    age, hits = draw(st.floats(-1e4, 1e8)), draw(st.integers(0, 10_000))
    return Tail(extent, live, blocks, blocks * draw(st.integers(1000, 10**7)), hits, NOW - age, live * 32, kv_space=1)


@st.composite
def states(draw: st.DrawFn) -> tuple[list[Tail], EvictionState]:
    rows = [draw(tails(extent)) for extent in range(1, draw(st.integers(2, 12)))]
    users = {row.extent: draw(app_users) for row in rows if draw(st.booleans())}
    users = {extent: counts for extent, counts in users.items() if counts != AppUsers()}
    rates = {1: draw(st.floats(1e-3, 1e3))}
    return rows, EvictionState(NOW, max(row.hits for row in rows), True, users, rates)


@given(states())
def test_while_no_app_is_known_utility_is_weighted_lru(case: tuple[list[Tail], EvictionState]) -> None:
    rows, state = case
    nameless = EvictionState(state.now, state.max_hits)
    assert rank(rows, Utility(), nameless, 99) == rank(rows, WEIGHTED_LRU, nameless, 99)


@pytest.mark.parametrize("policy", [Lru(), Aged(1.0, 1.5), Utility(), MobiLora()], ids=lambda policy: policy.name)
@given(case=states())
def test_what_is_of_killed_apps_alone_goes_before_everything_else(
    policy: Policy, case: tuple[list[Tail], EvictionState]
) -> None:
    rows, state = case
    dead = [state.users(row).dead for row in rank(rows, policy, state, 99)]
    assert dead == sorted(dead, reverse=True)


@given(states())
def test_mobilora_needs_no_special_case_for_killed_apps(case: tuple[list[Tail], EvictionState]) -> None:
    """Its weights alone put them first, as the source says its utility does."""
    rows, state = case
    values = [(MobiLora().worth(row, state.users(row), state).value, state.users(row).dead) for row in rows]
    assert all(left < right for left, gone in values if gone for right, other in values if not other)


@pytest.mark.parametrize("policy", [Utility(), MobiLora()], ids=lambda policy: policy.name)
@given(tail=tails(), users=app_users)
def test_one_more_live_app_makes_it_worth_more_and_the_foreground_most(
    policy: Utility | MobiLora, tail: Tail, users: AppUsers
) -> None:
    state = EvictionState(NOW, tail.hits, True, {}, {1: 1.0})
    alone = policy.worth(tail, users, state)
    behind = policy.worth(tail, replace(users, background=users.background + 1), state)
    ahead = policy.worth(tail, replace(users, foreground=users.foreground + 1), state)
    gone = policy.worth(tail, replace(users, killed=users.killed + 1), state)
    assert alone.value <= behind.value <= ahead.value  # equal only where it is so old that its worth is nothing
    assert gone.value == alone.value
    if tail.hits or NOW - tail.used < 1e6:
        assert alone.value < behind.value < ahead.value


@given(tail=tails(), cheap=st.floats(1e-3, 1e3), times=st.floats(1.01, 100))
def test_what_saves_more_a_byte_is_worth_more(tail: Tail, cheap: float, times: float) -> None:
    state = EvictionState(NOW, tail.hits, True, {}, {1: cheap, 2: cheap * times})
    costly, small = replace(tail, kv_space=2), replace(tail, size_bytes=max(1, tail.size_bytes // 2))
    worth = Utility().worth(tail, NOBODY, state).value
    assert Utility().worth(costly, NOBODY, state).value >= worth
    assert Utility().worth(small, NOBODY, state).value >= worth


def test_how_much_of_an_extent_is_live_changes_nothing() -> None:
    """Worth is by the byte: a tail of half an extent is half the bytes and half the saving."""
    whole = Tail(1, 10, 10, 10_000, 3, NOW, tokens=320, kv_space=1)
    half = replace(whole, live=5, tokens=160)
    state = EvictionState(NOW, 3, True, {}, {1: 2.0})
    assert Utility().worth(whole, NOBODY, state) == Utility().worth(half, NOBODY, state)


def test_mobilora_adds_up_state_recency_and_length() -> None:
    state, used = EvictionState(NOW, 0, True), AppUsers(foreground=1, background=1)
    tail = Tail(1, 16, 16, 1, 0, NOW - 6 * 3600, tokens=512)
    assert MobiLora().worth(tail, used, state).value == pytest.approx(0.7 * 3 / 4 + 0.2 / 2 + 0.1 / 2)
    longer, older = replace(tail, tokens=1024), replace(tail, used=NOW - 7 * 3600)
    values = [MobiLora().worth(one, used, state).value for one in (older, tail, longer)]
    assert values == sorted(values) and len(set(values)) == 3


@given(case=states())
def test_lru_is_the_order_of_the_last_use_among_what_live_apps_used(case: tuple[list[Tail], EvictionState]) -> None:
    rows, state = case
    alive = [row for row in rank(rows, Lru(), state, 99) if not state.users(row).dead]
    assert alive == [row for row in rank(rows, PlainLru(), state, 99) if not state.users(row).dead]
    assert [row.used for row in alive] == sorted(row.used for row in alive)


@given(case=states())
def test_ages_without_weights_are_lru(case: tuple[list[Tail], EvictionState]) -> None:
    rows, state = case
    past = [replace(row, used=min(row.used, state.now)) for row in rows]  # what is in the future has no age
    assert rank(past, Aged(0.0, 1.0), state, 99) == rank(past, Lru(), state, 99)


@pytest.mark.parametrize("policy", [WEIGHTED_LRU, PlainLru(), LFU], ids=lambda policy: policy.name)
@given(case=states())
def test_to_the_plain_policies_it_does_not_matter_who_asked(
    policy: Policy, case: tuple[list[Tail], EvictionState]
) -> None:
    rows, state = case
    assert rank(rows, policy, state, 99) == rank(rows, policy, replace(state, users_by_extent={}), 99)
