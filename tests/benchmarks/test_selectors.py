"""Which tokens are recomputed: how many, which, and in which chunk."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.baselines.selectors import (
    SIGNALS,
    MeasuredStale,
    choose_by,
    choose_heavy,
    choose_published,
    choose_random,
    needs,
    score,
)
from rekindle.chunks.select import (
    LeadingPolicy,
    Positions,
    RecomputePolicy,
    StaleTokens,
    choose_leading,
    choose_top,
    importance,
)
from rekindle.core.chunk import ChunkDigest, ChunkMatch, ChunkScores, Variant
from rekindle.core.kv import Span
from rekindle.errors import InvalidSetting

budgets = st.one_of(st.just(0.0), st.just(1.0), st.sampled_from([0.05, 0.15, 0.2, 0.3, 0.5]), st.floats(0.0, 1.0))
signal_names = st.lists(st.sampled_from(SIGNALS), min_size=1, unique=True)


def stale(sizes: list[int], **signals: list[float]) -> MeasuredStale:
    """Chunks of these sizes, numbered 1, 3, 5 ..., with a few tokens between them."""
    chunk = np.repeat(np.arange(len(sizes)) * 2 + 1, sizes).astype(np.int64)
    place = np.concatenate([np.arange(size) for size in sizes] or [np.zeros(0)]).astype(np.int64)
    total = sum(sizes)
    arrays = {name: np.array(values, np.float32) for name, values in signals.items()}
    plain = {name: np.ones(total, np.float32) for name in ("outside", "received") if name not in arrays}
    return MeasuredStale(np.arange(total) + 4 + chunk * 3, chunk, place, **plain, **arrays)


@st.composite
def some_stale(draw: st.DrawFn) -> StaleTokens:
    sizes = draw(st.lists(st.integers(1, 40), max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    steps = draw(st.sampled_from([2, 1000]))  # few values make many equals
    odd = draw(st.booleans())

    def signal() -> list[float]:
        values = random.integers(0, steps, sum(sizes)).astype(float)
        values[random.random(len(values)) < 0.1 * odd] = random.choice([math.nan, math.inf, -math.inf, -1.0])
        return values.tolist()

    return stale(sizes, outside=signal(), received=signal(), seen=signal(), deviation=signal())


def per_chunk(tokens: StaleTokens, chosen: Positions) -> dict[int, int]:
    """How many were chosen of each chunk."""
    picked = np.isin(tokens.positions, chosen)
    return {int(number): int(picked[tokens.chunk == number].sum()) for number in np.unique(tokens.chunk)}


def of_places(tokens: StaleTokens, number: int, chosen: Positions) -> list[int]:
    """The places of the chosen tokens of a chunk."""
    return tokens.place[np.isin(tokens.positions, chosen) & (tokens.chunk == number)].tolist()


def is_sound(tokens: StaleTokens, chosen: NDArray[np.int64]) -> bool:
    return chosen.dtype == np.int64 and bool((np.diff(chosen) > 0).all() and np.isin(chosen, tokens.positions).all())


# Signals


def test_a_score_is_the_product_of_its_signals() -> None:
    tokens = stale([2, 1], outside=[0.5, 0.25, 1.0], seen=[2.0, 8.0, 3.0])
    assert score(tokens, ["outside", "seen"]).tolist() == [1.0, 2.0, 3.0]
    assert score(tokens, ["outside"]).tolist() == [0.5, 0.25, 1.0]


def test_the_lead_falls_from_five_towards_one_within_each_chunk() -> None:
    lead = score(stale([13, 200]), ["lead"])
    assert lead[0] == lead[13] == 5.0
    assert lead[12] == pytest.approx(1 + 4 / math.e)
    assert lead[-1] == pytest.approx(1.0, abs=1e-5)


@given(some_stale(), signal_names)
def test_a_score_is_never_negative_and_always_a_number(tokens: StaleTokens, names: list[str]) -> None:
    found = score(tokens, names)
    assert found.shape == (len(tokens),)
    assert np.isfinite(found).all() and (found >= 0.0).all()


def test_a_value_that_is_no_number_counts_as_zero() -> None:
    tokens = stale([5], seen=[math.nan, math.inf, -math.inf, -2.0, 1.0])
    assert score(tokens, ["seen"]).tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert choose_by(tokens, ["seen"], 0.2).tolist() == [tokens.positions[4]]


def test_a_product_needs_what_has_to_be_asked_for() -> None:
    assert needs(["outside", "received", "lead"]) == set()
    assert needs(["seen", "lead"]) == {"seen"}
    assert needs(["deviation", "seen"]) == {"seen", "deviation"}


def test_a_signal_that_was_not_given_is_refused_and_may_come_later() -> None:
    tokens = stale([2])
    with pytest.raises(ValueError, match="'seen' was not given"):
        score(tokens, ["seen"])
    later = replace(tokens, seen=np.array([1.0, 2.0], np.float32))
    assert score(later, ["seen"]).tolist() == [1.0, 2.0]


def test_an_unknown_signal_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(InvalidSetting, match="Did you mean 'outside'"):
        score(stale([2]), ["outsid"])
    with pytest.raises(InvalidSetting, match="give one or more of outside"):
        choose_by(stale([2]), [], 0.5)


def test_signals_of_another_length_and_mixed_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="seen of shape"):
        stale([3], seen=[1.0])
    with pytest.raises(ValueError, match="must grow"):
        replace(stale([2]), positions=np.array([5, 4]))


# One budget over all chunks


@given(some_stale(), budgets)
def test_ours_is_the_product_of_what_is_seen_what_was_outside_and_the_lead(tokens: StaleTokens, budget: float) -> None:
    names = ["outside", "seen", "lead"]
    assert np.array_equal(importance(tokens), score(tokens, names))
    assert np.array_equal(
        choose_top(tokens, importance(tokens), round(budget * len(tokens))), choose_by(tokens, names, budget)
    )


def test_ours_needs_the_question() -> None:
    with pytest.raises(ValueError, match="is missing"):
        importance(stale([2]))


def test_the_largest_products_are_chosen_wherever_they_stand() -> None:
    tokens = stale([3, 3], seen=[1, 9, 2, 8, 7, 0], deviation=[1, 1, 1, 1, 0, 1])
    assert choose_by(tokens, ["seen", "deviation"], 0.5).tolist() == tokens.positions[[1, 2, 3]].tolist()


def test_of_equal_products_the_first_are_chosen() -> None:
    tokens = stale([4, 4])
    assert choose_by(tokens, ["outside"], 0.5).tolist() == tokens.positions[:4].tolist()


@given(some_stale(), signal_names, budgets)
def test_a_budget_chooses_exactly_its_share(tokens: StaleTokens, names: list[str], budget: float) -> None:
    chosen = choose_by(tokens, names, budget)
    assert len(chosen) == round(budget * len(tokens))
    assert is_sound(tokens, chosen)


@given(some_stale(), signal_names, budgets)
def test_no_token_left_out_has_a_larger_product_than_a_chosen_one(
    tokens: StaleTokens, names: list[str], budget: float
) -> None:
    picked = np.isin(tokens.positions, choose_by(tokens, names, budget))
    products = score(tokens, names)
    assert products[picked].min(initial=math.inf) >= products[~picked].max(initial=0.0)


@given(some_stale(), signal_names, budgets, budgets)
def test_a_larger_budget_chooses_the_same_tokens_and_more(
    tokens: StaleTokens, names: list[str], one: float, other: float
) -> None:
    fewer, more = (set(choose_by(tokens, names, budget).tolist()) for budget in sorted((one, other)))
    assert fewer <= more


def chunk_of(start: int, size: int, change: float, outside: float) -> ChunkMatch:
    scores = ChunkScores(*(np.full(size, outside, dtype=np.float16),) * 2, 0.0, ())
    variant = Variant(ChunkDigest(bytes(16)), Span(start, start + size), scores)
    known = SimpleNamespace(variant=variant)
    return ChunkMatch(variant.span, variant.digest, known, change=change)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [RecomputePolicy(0.5), LeadingPolicy(0.5)])
def test_a_chunk_whose_context_is_the_same_is_not_recomputed(policy: RecomputePolicy) -> None:
    tokens = replace(stale([6, 4, 10], seen=[0.0] * 20), chunk=np.repeat([0, 1, 2], [6, 4, 10]))
    chunks = [chunk_of(7, 6, 0.0, 0.5), chunk_of(19, 4, 0.2, 0.5), chunk_of(29, 10, 1.0, 0.5)]
    counts = per_chunk(tokens, policy.choose(tokens, chunks))
    assert counts[0] == 0 and counts[1] + counts[2] == 0.5 * 14 == policy.expected_recomputed(chunks)
    assert policy.shares(chunks) == pytest.approx([0.0, 0.2 * 7 / 10.8, 7 / 10.8])


def test_a_chunk_that_depends_on_much_that_has_changed_gets_more_up_to_all_of_it() -> None:
    chunks = [chunk_of(0, 10, 1.0, 0.125), chunk_of(10, 10, 1.0, 0.25), chunk_of(20, 10, 1.0, 0.625)]
    assert RecomputePolicy(0.3).shares(chunks) == pytest.approx([0.1125, 0.225, 0.5625])
    assert RecomputePolicy(0.6).shares(chunks) == pytest.approx([0.8 / 3, 1.6 / 3, 1.0])
    assert RecomputePolicy(0.0).shares(chunks) == [0.0] * 3 and RecomputePolicy(1.0).shares(chunks) == [1.0] * 3


# A budget within each chunk


def test_the_leading_tokens_are_the_first_of_each_chunk() -> None:
    tokens = stale([4, 2])
    assert choose_leading(tokens, 0.5).tolist() == tokens.positions[[0, 1, 4]].tolist()


def test_the_heavy_tokens_are_those_that_got_the_most_attention_in_their_chunk() -> None:
    tokens = stale([4, 2, 2], received=[10, 40, 20, 30, 1, 2, math.inf, 1])
    assert choose_heavy(tokens, 0.5).tolist() == tokens.positions[[1, 3, 5, 7]].tolist()


def test_where_shares_are_no_whole_tokens_the_most_cut_get_one_more() -> None:
    # 0.25 of 3, 5 and 2 is 0.75, 1.25 and 0.5, of ten 2.5, which is rounded to 2.
    tokens = stale([3, 5, 2])
    assert per_chunk(tokens, choose_leading(tokens, 0.25)) == {1: 1, 3: 1, 5: 0}


@given(some_stale(), budgets, st.integers(0, 5))
def test_choosers_within_chunks_respect_the_share_of_each_and_the_total(
    tokens: StaleTokens, budget: float, seed: int
) -> None:
    sizes = {int(number): int((tokens.chunk == number).sum()) for number in np.unique(tokens.chunk)}
    for chosen in (choose_leading(tokens, budget), choose_heavy(tokens, budget), choose_random(tokens, budget, seed)):
        assert is_sound(tokens, chosen)
        assert abs(len(chosen) - budget * len(tokens)) <= 0.5 + 1e-9
        for number, count in per_chunk(tokens, chosen).items():
            assert math.floor(budget * sizes[number]) <= count <= math.ceil(budget * sizes[number])


@given(some_stale(), budgets)
def test_leading_tokens_leave_no_hole(tokens: StaleTokens, budget: float) -> None:
    chosen = choose_leading(tokens, budget)
    for number, count in per_chunk(tokens, chosen).items():
        assert of_places(tokens, number, chosen) == list(range(count))


def test_random_tokens_depend_on_the_seed_alone() -> None:
    tokens = stale([50, 50])
    first = choose_random(tokens, 0.3, seed=1)
    assert first.tolist() == choose_random(tokens, 0.3, seed=1).tolist()
    assert first.tolist() != choose_random(tokens, 0.3, seed=2).tolist()


def test_random_tokens_prefer_no_place() -> None:
    tokens = stale([10])
    drawn = np.concatenate([choose_random(tokens, 0.3, seed) for seed in range(2000)])
    counts = np.bincount(np.searchsorted(tokens.positions, drawn), minlength=10)
    assert counts.min() > 500 and counts.max() < 700  # 600 each, more than four deviations either way


@pytest.mark.parametrize("budget", [-0.1, 1.1, math.nan])
def test_a_budget_that_is_no_share_is_refused(budget: float) -> None:
    tokens = stale([3, 4])
    with pytest.raises(InvalidSetting, match="from 0 to 1"):
        choose_by(tokens, ["outside"], budget)
    with pytest.raises(InvalidSetting, match="from 0 to 1"):
        choose_leading(tokens, budget)


# The published choice


def test_the_published_choice_is_the_overhead_of_each_chunk_rounded_up() -> None:
    tokens = stale([4, 3, 2, 2], outside=[0.1, 0.9, 0.5, 0.7, 0.2, 0.1, 0.3, 1, 1, 1, 1])
    chosen = choose_published(tokens, {1: 0.3, 3: 0.01, 5: 1.7, 7: 0.0})
    assert chosen.tolist() == tokens.positions[[1, 3, 6, 7, 8]].tolist()


def test_an_overhead_that_is_whole_but_for_rounding_is_not_rounded_up() -> None:
    assert 0.07 * 100 > 7
    assert len(choose_published(stale([100]), {1: 0.07})) == 7
    assert len(choose_published(stale([100]), {1: 1e-17})) == 0


def test_a_chunk_whose_overhead_is_no_number_is_computed() -> None:
    assert len(choose_published(stale([5]), {1: math.nan})) == 5


@given(some_stale(), st.lists(st.floats(0.0, 2.0), min_size=6, max_size=6))
def test_the_published_choice_respects_each_chunk(tokens: StaleTokens, overheads: list[float]) -> None:
    by_chunk = {number * 2 + 1: overhead for number, overhead in enumerate(overheads)}
    chosen = choose_published(tokens, by_chunk)
    assert is_sound(tokens, chosen)
    outside = score(tokens, ["outside"])
    picked = np.isin(tokens.positions, chosen)
    for number, count in per_chunk(tokens, chosen).items():
        own = tokens.chunk == number
        assert count == min(math.ceil(by_chunk[number] * own.sum() - 1e-9), own.sum())
        assert outside[own & picked].min(initial=math.inf) >= outside[own & ~picked].max(initial=0.0)


def test_of_no_stale_tokens_none_are_chosen() -> None:
    nothing = stale([])
    assert choose_by(nothing, ["lead"], 1.0).size == 0
    assert choose_leading(nothing, 1.0).size == 0
    assert choose_random(nothing, 1.0, seed=0).size == 0
    assert choose_heavy(nothing, 1.0).size == 0
    assert choose_published(nothing, {}).size == 0
