"""Algorithm 1: the chunks that the question looks at."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.focus import Focus, cut
from rekindle.errors import InvalidSetting

some_masses = st.integers(3, 8).flatmap(lambda k: st.lists(st.floats(0.0, 100.0), min_size=k, max_size=k))


def test_the_cut_is_what_the_algorithm_gives() -> None:
    # Sorted 10, 8, 4, 2, 0: gaps .2 .4 .2 .2, entropy terms .322 .367 .322 .322. Rises: .367 .322 .322, so i* is 1.
    assert cut(np.array([2.0, 8.0, 0.0, 10.0, 4.0])) == {3}
    # Sorted 10, 9.9, 1, .9, .8: gaps .011 .967 .011 .011. Rises: .032 .049 .049, so i* is 2.
    assert cut(np.array([0.9, 10.0, 1.0, 0.8, 9.9])) == {1, 4}


def test_masses_are_summed_over_layers_before_the_cut() -> None:
    first, second = [0.0, 100.0, 0.0, 0.0], [10.0, 0.0, 1.0, 2.0]
    focus = Focus(4, window=2)
    assert focus.add(first) is None
    assert focus.add(second) == {1}
    assert cut(np.array(second)) == {0}


def test_a_set_settles_after_as_many_equal_layers_as_the_window() -> None:
    focus = Focus(4, window=3)
    layer = [10.0, 1.0, 0.9, 0.8]
    assert [focus.add(layer) for _ in range(3)] == [None, None, frozenset({0})]


def test_another_set_in_between_starts_the_count_anew() -> None:
    focus = Focus(4, window=2)
    first, second = [10.0, 1.0, 0.9, 0.8], [0.0, 100.0, 0.0, 0.0]
    assert [focus.add(layer) for layer in (first, second, second)] == [None, None, frozenset({1})]


def test_a_settled_set_stays_whatever_comes() -> None:
    focus = Focus(4, window=1)
    settled = focus.add([10.0, 1.0, 0.9, 0.8])
    assert settled == {0}
    assert focus.add([0.0, 1e6, 0.0, 0.0]) == settled


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_fewer_than_three_chunks_never_focus(chunks: int) -> None:
    focus = Focus(chunks, window=1)
    assert all(focus.add(np.arange(chunks, dtype=np.float32)) is None for _ in range(5))


@pytest.mark.parametrize("mass", [0.0, 0.1, 3.0])
def test_equal_masses_never_focus(mass: float) -> None:
    focus = Focus(5, window=1)
    assert all(focus.add([mass] * 5) is None for _ in range(20))


def test_masses_that_only_rounding_makes_unequal_never_focus() -> None:
    masses = np.array([0.1, 0.3, 0.2]) + np.array([0.2, 0.1, 0.3]) + np.array([0.3, 0.2, 0.1])
    assert len(set(masses.tolist())) > 1
    assert cut(masses) is None


def test_a_mass_that_is_no_number_counts_as_none() -> None:
    sound, odd = Focus(4, window=1), Focus(4, window=1)
    assert odd.add([math.nan, 9.0, 1.0, -math.inf]) == sound.add([0.0, 9.0, 1.0, 0.0]) is not None


def test_of_equal_chunks_and_equal_rises_the_first_count() -> None:
    assert cut(np.array([5.0, 5.0, 0.0, 0.0])) == {0}
    # Gaps of a quarter each, which floating point makes unequal.
    assert cut(np.array([4.4, 3.3, 2.2, 1.1, 0.0])) == {0}


def test_a_window_below_one_and_a_wrong_number_of_masses_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="1 or more"):
        Focus(4, window=0)
    with pytest.raises(ValueError, match="4 chunks"):
        Focus(4).add([1.0, 2.0])


@given(some_masses)
def test_the_cut_takes_the_largest_and_leaves_at_least_two(masses: list[float]) -> None:
    focused = cut(np.array(masses))
    if focused is None:
        assert max(masses) - min(masses) <= 1e-11 * max(masses)
        return
    left = set(range(len(masses))) - focused
    assert len(focused) >= 1 and len(left) >= 2
    assert min(masses[i] for i in focused) >= max(masses[i] for i in left)


@given(st.integers(0, 1000))
def test_of_equal_chunks_the_first_are_focused(seed: int) -> None:
    masses = np.random.default_rng(seed).integers(0, 3, 40).astype(np.float64)
    focused = cut(masses)
    assert focused is not None
    least = min(masses[i] for i in focused)
    equals = np.flatnonzero(masses == least).tolist()
    assert [i for i in equals if i in focused] == equals[: sum(i in focused for i in equals)]


@given(st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4), max_size=12), st.integers(1, 4))
def test_it_settles_exactly_when_the_last_sets_of_the_window_are_one(layers: list[list[int]], window: int) -> None:
    focus = Focus(4, window)
    sets: list[frozenset[int] | None] = []
    expected: frozenset[int] | None = None
    for number, layer in enumerate(layers, start=1):
        sets.append(cut(np.array(layers[:number], dtype=np.float64).sum(axis=0)))
        if expected is None and number >= window and len(set(sets[-window:])) == 1:
            expected = sets[-1]
        assert focus.add(layer) == expected


def test_read_at_the_gap_the_cut_focuses_one_chunk_more() -> None:
    masses = np.array([0.9, 10.0, 1.0, 0.8, 9.9])
    assert cut(masses, at_gap=True) == {1, 2, 4} and cut(masses) == {1, 4}
    early, late = Focus(5, window=1), Focus(5, window=1, at_gap=True)
    assert late.add(masses) == (early.add(masses) or set()) | {2}
