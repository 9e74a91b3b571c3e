"""What KV is worth: pure functions of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.policies import LFU, WEIGHTED_LRU, MobiLora
from rekindle.store.catalog.app_rows import Crowd
from rekindle.store.catalog.catalog import Tail
from rekindle.store.evict.policy import NOBODY, Lru, Policy, Scene, Utility, rank

pytestmark = pytest.mark.thorough

NOW = 1e9
few = st.integers(0, 4)
crowds = st.builds(Crowd, few, few, few)


@st.composite
def tails(draw: st.DrawFn, extent: int = 1) -> Tail:
    blocks = draw(st.integers(1, 300))
    live = draw(st.integers(1, blocks))
    age, hits = draw(st.floats(-1e4, 1e8)), draw(st.integers(0, 10_000))
    return Tail(extent, live, blocks, blocks * draw(st.integers(1000, 10**7)), hits, NOW - age, live * 32, kv_space=1)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Tail], Scene]:
    rows = [draw(tails(extent)) for extent in range(1, draw(st.integers(2, 12)))]
    users = {row.extent: draw(crowds) for row in rows if draw(st.booleans())}
    users = {extent: crowd for extent, crowd in users.items() if crowd != Crowd()}
    rates = {1: draw(st.floats(1e-3, 1e3))}
    return rows, Scene(NOW, max(row.hits for row in rows), True, users, rates)


@given(scenes())
def test_while_no_app_is_known_utility_is_weighted_lru(case: tuple[list[Tail], Scene]) -> None:
    rows, scene = case
    nameless = Scene(scene.now, scene.most_hits)
    assert rank(rows, Utility(), nameless, 99) == rank(rows, WEIGHTED_LRU, nameless, 99)


@pytest.mark.parametrize("policy", [Utility(), MobiLora()], ids=lambda policy: policy.name)
@given(case=scenes())
def test_what_is_of_killed_apps_alone_goes_before_everything_else(
    policy: Utility | MobiLora, case: tuple[list[Tail], Scene]
) -> None:
    rows, scene = case
    dead = [scene.crowd(row).dead for row in rank(rows, policy, scene, 99)]
    assert dead == sorted(dead, reverse=True)


@given(scenes())
def test_mobilora_needs_no_special_case_for_killed_apps(case: tuple[list[Tail], Scene]) -> None:
    """Its weights alone put them first, as the source says its utility does."""
    rows, scene = case
    values = [(MobiLora().worth(row, scene.crowd(row), scene).value, scene.crowd(row).dead) for row in rows]
    assert all(left < right for left, gone in values if gone for right, other in values if not other)


@pytest.mark.parametrize("policy", [Utility(), MobiLora()], ids=lambda policy: policy.name)
@given(tail=tails(), crowd=crowds)
def test_one_more_live_app_makes_it_worth_more_and_the_foreground_most(
    policy: Utility | MobiLora, tail: Tail, crowd: Crowd
) -> None:
    scene = Scene(NOW, tail.hits, True, {}, {1: 1.0})
    alone = policy.worth(tail, crowd, scene)
    behind = policy.worth(tail, replace(crowd, background=crowd.background + 1), scene)
    ahead = policy.worth(tail, replace(crowd, foreground=crowd.foreground + 1), scene)
    gone = policy.worth(tail, replace(crowd, killed=crowd.killed + 1), scene)
    assert alone.value <= behind.value <= ahead.value  # equal only where it is so old that its worth is nothing
    assert gone.value == alone.value
    if tail.hits or NOW - tail.used < 1e6:
        assert alone.value < behind.value < ahead.value


@given(tail=tails(), cheap=st.floats(1e-3, 1e3), times=st.floats(1.01, 100))
def test_what_saves_more_a_byte_is_worth_more(tail: Tail, cheap: float, times: float) -> None:
    scene = Scene(NOW, tail.hits, True, {}, {1: cheap, 2: cheap * times})
    costly, small = replace(tail, kv_space=2), replace(tail, size_bytes=max(1, tail.size_bytes // 2))
    worth = Utility().worth(tail, NOBODY, scene).value
    assert Utility().worth(costly, NOBODY, scene).value >= worth
    assert Utility().worth(small, NOBODY, scene).value >= worth


def test_how_much_of_an_extent_is_live_changes_nothing() -> None:
    """Worth is by the byte: a tail of half an extent is half the bytes and half the saving."""
    whole = Tail(1, 10, 10, 10_000, 3, NOW, tokens=320, kv_space=1)
    half = replace(whole, live=5, tokens=160)
    scene = Scene(NOW, 3, True, {}, {1: 2.0})
    assert Utility().worth(whole, NOBODY, scene) == Utility().worth(half, NOBODY, scene)


def test_mobilora_adds_up_state_recency_and_length() -> None:
    scene, used = Scene(NOW, 0, True), Crowd(foreground=1, background=1)
    tail = Tail(1, 16, 16, 1, 0, NOW - 6 * 3600, tokens=512)
    assert MobiLora().worth(tail, used, scene).value == pytest.approx(0.7 * 3 / 4 + 0.2 / 2 + 0.1 / 2)
    longer, older = replace(tail, tokens=1024), replace(tail, used=NOW - 7 * 3600)
    values = [MobiLora().worth(one, used, scene).value for one in (older, tail, longer)]
    assert values == sorted(values) and len(set(values)) == 3


@pytest.mark.parametrize("policy", [WEIGHTED_LRU, Lru(), LFU], ids=lambda policy: policy.name)
@given(case=scenes())
def test_to_the_plain_policies_it_does_not_matter_who_asked(policy: Policy, case: tuple[list[Tail], Scene]) -> None:
    rows, scene = case
    assert rank(rows, policy, scene, 99) == rank(rows, policy, replace(scene, crowds={}), 99)
