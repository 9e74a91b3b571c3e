"""Which level slices come at: the smallest within the KL budget, by the bandwidth of the moment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.core.cells import Cell, CellGrid
from rekindle.remote.client import Origin, PublishedPrefix
from rekindle.remote.ladder import LevelLadder, LevelLimit, PricedLevel
from rekindle.remote.signing import SigningKey
from rekindle.remote.transfer_queue import OriginSlices
from tests.remote.places import MODEL, TOKENS, fetch_all, lying, publish, synthetic

CELLS = CellGrid(10 * 128, 4)
LEVELS = {"raw": (0.0, 3200), "q8": (0.0001, 800), "q4": (0.004, 400), "q3": (0.02, 300)}


def priced(name: str, kl: float, size: int) -> PricedLevel:
    return PricedLevel(name, kl, math.inf if name == "raw" else float(name[1:]), np.full((10, 4), size))


def ladder(budget: float, levels: Mapping[str, tuple[float, int]] = LEVELS) -> LevelLadder:
    return LevelLadder([priced(name, *one) for name, one in levels.items()], CELLS, budget, compute_seconds=1.0)


def backwards() -> list[Cell]:
    return sorted(CELLS, reverse=True)


@pytest.mark.parametrize(("budget", "level"), [(0.0, "raw"), (0.0001, "q8"), (0.0199, "q4"), (0.02, "q3"), (1.0, "q3")])
def test_while_the_bandwidth_is_unknown_all_may_come_at_the_smallest_level_within_the_budget(
    budget: float, level: str
) -> None:
    assert ladder(budget).level.name == level


def test_a_slow_link_brings_smaller_levels_than_a_fast_one() -> None:
    chosen = []
    for bytes_per_second in (1e9, 16_000, 4_000):  # all comes, half, a quarter
        one = ladder(0.0125)
        one.adapt(backwards(), bytes_per_second)
        chosen.append(one.level.name)
    assert chosen == ["q4", "q4", "q3"]


def test_a_slow_machine_counts_as_a_fast_link() -> None:
    one = ladder(0.0125)
    one.adapt(backwards(), 4_000)
    assert one.level.name == "q3"
    one.adapt(backwards(), 4_000, pace=10.0)  # more will come before computing meets it
    assert one.level.name == "q4"


def test_the_level_changes_on_the_way_with_the_link() -> None:
    one, left = ladder(0.0125), backwards()
    one.adapt(left, 4_000)
    one.take(left[:8])
    one.adapt(left[8:], 1e9)
    assert one.level.name in ("q8", "q4")
    one.take(left[8:])
    assert one.slices(left) == {one.level.name: 32, "q3": 8}
    assert one.kl(left) <= 0.0125


@given(
    st.floats(0.0001, 0.05),
    st.lists(st.tuples(st.integers(1, 12), st.floats(1.0, 1e9)), min_size=1, max_size=30),
)
def test_whatever_the_link_does_the_budget_holds(budget: float, requests: list[tuple[int, float]]) -> None:
    """As long as no request asks for more than an eighth of what is left."""
    one, left = ladder(budget), backwards()
    for count, bytes_per_second in [*requests, *[(12, 1e9)] * 80]:
        if not left:
            break
        one.adapt(left, bytes_per_second)
        taken, left = left[: max(1, min(count, len(left) // 8))], left[max(1, min(count, len(left) // 8)) :]
        one.take(taken)
    assert not left and one.kl(CELLS) <= budget * (1 + 1e-9)


def test_the_end_of_a_context_weighs_more_than_its_share_and_all_of_it_one() -> None:
    one = ladder(1.0, {"q3": LEVELS["q3"]})
    one.take(CELLS)
    assert one.kl(CELLS) == pytest.approx(0.02)
    last = [cell for cell in CELLS if cell.chunk == 9]
    assert one.kl(last) == pytest.approx(0.02 * math.sqrt(0.1))


@pytest.fixture
def found(tmp_path: Path) -> Iterator[PublishedPrefix]:
    """A context in levels of which one was not measured."""
    kls = {"q8": 0.001, "q5": 0.004, "q4": 0.003, "q3": 0.02}
    key = SigningKey.new()
    publish(tmp_path, key, "q2", synthetic())
    publish(tmp_path, key, "raw,q8,q5,q4,q3", replace(synthetic(), measure=lambda _: kls))
    with lying(tmp_path) as server:
        origin = Origin(server.url, [key.public])
        prefix = origin.find(TOKENS, MODEL)
        assert prefix is not None
        yield prefix
        origin.close()


def names(limit: LevelLimit, found: PublishedPrefix) -> list[str]:
    return [level.name for level in limit.levels(found)]


def test_levels_are_those_that_were_measured_each_smaller_than_the_better_ones(found: PublishedPrefix) -> None:
    assert names(LevelLimit(0.01), found) == ["raw", "q8", "q4", "q3"]  # q5 is larger than q4 and worse
    assert LevelLimit(0.01).smallest(found) == "q4" and LevelLimit(0.0).smallest(found) == "raw"
    assert names(LevelLimit(), found) == ["raw"] and LevelLimit().smallest(found) == "raw"


def test_what_this_machine_measured_counts_in_place_of_what_was_published(found: PublishedPrefix) -> None:
    assert names(LevelLimit(0.01, {"q2": 0.009}), found) == ["raw", "q2"]


def test_without_unquantized_kv_the_best_level_must_be_within_the_budget(found: PublishedPrefix) -> None:
    other = replace(found, model=replace(MODEL, exact="cc" * 16))
    assert names(LevelLimit(0.002), other) == ["q8", "q4", "q3"] and names(LevelLimit(0.0005), other) == []
    assert LevelLimit(0.0005).why_none(other) == "budget" and LevelLimit().why_none(other) == "dtype"


def test_a_level_that_was_published_without_its_kl_gets_it_when_it_is_published_again(tmp_path: Path) -> None:
    key = SigningKey.new()
    (before,) = publish(tmp_path, key, "q4").levels
    (after,) = publish(tmp_path, key, "q4", replace(synthetic(), measure=lambda _: {"q4": 0.5})).levels
    assert (before.kl, after.kl, after.new) == (None, 0.5, False)
    (kept,) = publish(tmp_path, key, "q4", replace(synthetic(), measure=lambda _: {"q4": 0.7})).levels
    assert kept.kl == 0.5


def test_slices_of_several_levels_come_to_one_prompt(tmp_path: Path) -> None:
    key = SigningKey.new()
    publish(tmp_path, key, "raw,q4")
    with lying(tmp_path) as server:
        origin = Origin(server.url, [key.public])
        prefix = origin.find(TOKENS, MODEL)
        assert prefix is not None
        cells = list(prefix.cells)
        levels = [PricedLevel(name, 0.0, 4.0, prefix.sizes(name)) for name in ("raw", "q4")]
        source = OriginSlices(origin, prefix, LevelLadder(levels, prefix.cells, 1.0, 1.0))
        exact, coded = (fetch_all(origin, prefix, level.name) for level in levels)
        came = {}
        for level, some in zip(levels, (cells[::2], cells[1::2]), strict=True):
            source.ladder.level = level
            assert source.sizes is level.sizes
            came |= dict(source.carry(some))
        origin.close()
    assert source.ladder.slices(cells) == {"raw": len(cells[::2]), "q4": len(cells[1::2])}
    assert all(np.array_equal(came[cell].keys, exact[cell].keys) for cell in cells[::2])
    assert all(np.array_equal(came[cell].keys, coded[cell].keys) for cell in cells[1::2])
