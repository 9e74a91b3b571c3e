"""The published scores: worked out by hand, and their laws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.chunks.match import match_chunks
from rekindle.chunks.scores import context_change, context_impact, disorder, fix_overhead, overlap
from rekindle.core.chunk import ChunkDigest, ChunkScores, EarlierChunk, PromptLayout, Variant, chunk_digest
from rekindle.core.kv import Span
from rekindle.core.plan import Tier

HEAD, A, B, C, D = (chunk_digest([number]) for number in range(5))
OTHER_HEAD = chunk_digest([99])

masses = st.one_of(st.just(0.0), st.floats(1e-6, 1e4))
digests = st.sampled_from([HEAD, A, B, C, D])


def scores(intra: float = 1.0, *earlier: EarlierChunk) -> ChunkScores:
    return ChunkScores(np.zeros(0, np.float16), np.zeros(0, np.float16), intra, earlier)


def variant(
    digest: ChunkDigest,
    before: Sequence[ChunkDigest],
    masses: Sequence[float] | None = None,
    *,
    tokens: int = 10,
    intra: float = 4.0,
    drift: float = 0.0,
) -> Variant:
    earlier = [EarlierChunk(chunk, 10, 1.0 if masses is None else masses[i]) for i, chunk in enumerate(before)]
    outside = np.full(tokens, 0.5, np.float16)
    return Variant(digest, Span(100, 100 + tokens), replace(scores(intra, *earlier), outside=outside), drift)


@st.composite
def some_variants(draw: st.DrawFn) -> Variant:
    before = draw(st.lists(digests, max_size=6))
    paid = [draw(masses) for _ in before]
    return variant(chunk_digest([7]), before, paid, tokens=draw(st.integers(1, 500)), intra=draw(masses))


# The impact of the context


def test_the_context_impact_is_what_the_formula_gives() -> None:
    # a = 6 / (4 * 3) + 10 / (4 * 5) = 1, b = 8 / 16 = 0.5
    told = scores(8.0, EarlierChunk(HEAD, 3, 6.0), EarlierChunk(A, 5, 10.0))
    assert context_impact(told, 4) == pytest.approx(1 / (1 + math.exp(-2)))


def test_a_chunk_that_nothing_preceded_has_half_the_impact() -> None:
    assert context_impact(scores(3.0), 5) == 0.5
    assert context_impact(scores(0.0), 5) == 0.5


def test_a_chunk_that_looked_only_at_others_has_nearly_the_whole_impact() -> None:
    assert 0.999 < context_impact(scores(0.0, EarlierChunk(HEAD, 3, 1.0)), 5) < 1.0


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, -1.0])
def test_a_mass_that_cannot_be_one_counts_as_none(odd: float) -> None:
    assert context_impact(scores(1.0, EarlierChunk(HEAD, 3, odd)), 5) == 0.5
    assert overlap(variant(C, [HEAD, A], [odd, 1.0]), [A]) == 1.0


def test_an_empty_chunk_or_neighbour_has_a_finite_impact() -> None:
    assert context_impact(scores(0.0, EarlierChunk(HEAD, 0, 0.0)), 0) == 0.5


@given(some_variants())
def test_the_context_impact_is_at_least_half_and_below_one(stored: Variant) -> None:
    assert 0.5 <= context_impact(stored.scores, len(stored.span)) < 1.0


# The prefix


def test_the_overlap_is_the_share_of_the_attention_that_finds_its_chunk_again() -> None:
    stored = variant(D, [HEAD, A, B], [5.0, 3.0, 2.0])
    assert overlap(stored, [HEAD, B, C]) == pytest.approx(0.7)
    assert overlap(stored, []) == 0.0


def test_a_variant_without_a_prefix_fits_everywhere() -> None:
    assert overlap(variant(D, []), [HEAD, A]) == 1.0
    assert overlap(variant(D, [A], [0.0]), [HEAD]) == 1.0


def test_the_disorder_is_the_share_of_turned_pairs() -> None:
    stored = variant(D, [HEAD, A, B, C])
    assert disorder(stored, [HEAD, B, A, C]) == pytest.approx(1 / 6)
    assert disorder(stored, [HEAD, C, B, A]) == pytest.approx(3 / 6)
    assert disorder(stored, [B, chunk_digest([8]), A]) == 1.0


@pytest.mark.parametrize("before", [[], [A], [OTHER_HEAD, A]])
def test_fewer_than_two_shared_chunks_have_no_disorder(before: list[ChunkDigest]) -> None:
    assert disorder(variant(D, [HEAD, A, B]), before) == 0.0


def test_a_chunk_that_stands_twice_counts_where_it_stands_first() -> None:
    stored = variant(D, [HEAD, A, B, A])
    assert disorder(stored, [HEAD, A, B]) == 0.0
    assert disorder(stored, [HEAD, B, A]) == pytest.approx(1 / 3)
    assert disorder(variant(D, [HEAD, A, B]), [HEAD, B, A, B]) == pytest.approx(1 / 3)


@given(some_variants(), st.lists(digests, max_size=6))
def test_overlap_and_disorder_are_shares(stored: Variant, before: list[ChunkDigest]) -> None:
    assert 0.0 <= overlap(stored, before) <= 1.0
    assert 0.0 <= disorder(stored, before) <= 1.0


@given(some_variants(), st.lists(digests, max_size=6), st.lists(digests, max_size=3))
def test_more_chunks_before_it_never_lower_the_overlap(
    stored: Variant, before: list[ChunkDigest], more: list[ChunkDigest]
) -> None:
    assert overlap(stored, [*before, *more]) >= overlap(stored, before)


@given(some_variants(), st.lists(digests, max_size=6), st.randoms())
def test_the_order_changes_the_disorder_only(stored: Variant, before: list[ChunkDigest], random: Random) -> None:
    mixed = list(before)
    random.shuffle(mixed)
    assert overlap(stored, mixed) == overlap(stored, before)


@given(st.permutations([HEAD, A, B, C, D]), st.integers(2, 5))
def test_a_reversed_prefix_is_all_disorder(order: list[ChunkDigest], length: int) -> None:
    before = order[:length]
    assert disorder(variant(chunk_digest([7]), before), before[::-1]) == 1.0


# What selective recompute costs


def test_the_overhead_is_what_the_formula_gives() -> None:
    stored = variant(D, [HEAD, A, B], [2.0, 1.0, 1.0], tokens=10, intra=4.0)
    impact = 1 / (1 + math.exp(-(4.0 / 100) / (4.0 / 100)))
    # B comes before A, and all three are there: one of three pairs is turned.
    assert fix_overhead(stored, [HEAD, B, A], alpha=0.5) == pytest.approx(0.5 * impact * (1 - 2 / 3))
    # A is missing: a quarter of the attention.
    assert fix_overhead(stored, [HEAD, B]) == pytest.approx(impact * 0.25)


@given(some_variants(), st.floats(0.0, 5.0), st.booleans())
def test_the_same_prefix_costs_nothing(stored: Variant, alpha: float, longer: bool) -> None:
    before = [*stored.before, *([OTHER_HEAD] if longer else [])]
    assert overlap(stored, before) == 1.0
    assert disorder(stored, before) == 0.0
    assert fix_overhead(stored, before, alpha) == 0.0


@given(some_variants(), st.lists(digests, max_size=6), st.floats(0.0, 5.0))
def test_the_overhead_is_at_most_alpha(stored: Variant, before: list[ChunkDigest], alpha: float) -> None:
    assert 0.0 <= fix_overhead(stored, before, alpha) <= alpha


# How much of the context has changed


def test_the_change_of_a_context_is_what_is_not_kept() -> None:
    stored = variant(D, [HEAD, A, B], [6.0, 3.0, 1.0])
    # A got 3 of 4 parts of its attention to passages, and is 10 of the 40 tokens of passages before it now.
    assert context_change(stored, [HEAD, A, C], [5, 10, 30]) == pytest.approx(1 - 0.75 * 0.25)
    # Both are there, and one of three pairs is turned.
    assert context_change(stored, [HEAD, B, A], [5, 10, 10]) == pytest.approx(1 / 3)
    assert context_change(stored, [HEAD], [5]) == 1.0  # it depended on passages that are not there
    assert context_change(variant(D, [HEAD]), [HEAD, A], [5, 10]) == 1.0  # and here it will
    assert context_change(stored, [OTHER_HEAD, A, B], [5, 10, 10]) == 1.0
    assert context_change(variant(D, [HEAD, A]), [HEAD, A, A], [5, 10, 10]) == 0.5  # once more


@given(some_variants(), st.lists(digests, max_size=6), st.floats(0.0, 1.0))
def test_the_change_of_a_context_is_a_share_and_none_after_the_same(
    stored: Variant, before: list[ChunkDigest], drift: float
) -> None:
    stored = replace(stored, drift=drift)
    assert context_change(stored, stored.before, [10] * len(stored.before)) == drift
    assert drift - 1e-9 <= context_change(stored, before, [10] * len(before)) <= 1.0


@dataclass(frozen=True)
class Known:
    """A variant on disk."""

    variant: Variant
    id: int = 1
    tier: Tier = "disk"
    size_bytes: int = 0


def best(variants: list[Variant], before: list[ChunkDigest], digest: ChunkDigest = C) -> Variant:
    layout = PromptLayout(10, tuple(Span(10 * k, 10 * k + 10) for k in range(1, len(before) + 1)))
    *_, last = match_chunks(layout, [*before, digest], {digest: [Known(one) for one in variants]})
    assert last.known is not None
    return last.known.variant


def test_the_best_variant_depends_least_on_what_has_changed() -> None:
    poor, good = variant(C, [HEAD, B]), variant(C, [HEAD, A])
    assert best([poor, good], [HEAD, A]) is good
    assert best([poor, good], [HEAD, B]) is poor
    first = variant(C, [HEAD])  # has no overhead, though nothing of what is before it now was
    drifted = variant(C, [HEAD, A, B], drift=0.3)
    assert fix_overhead(first, [HEAD, A, B]) == fix_overhead(drifted, [HEAD, A, B]) == 0
    assert best([first, drifted], [HEAD, A, B]) is drifted


def test_of_equal_variants_the_least_drifted_is_best_then_the_first() -> None:
    drifted, first, second = variant(C, [HEAD, A], drift=0.5), variant(C, [HEAD, A]), variant(C, [HEAD, A])
    assert best([drifted, first, second], [HEAD, A]) is first


# Set-cache


def stored_chain(*chunks: ChunkDigest, head: ChunkDigest = HEAD, tokens: int = 10) -> list[Variant]:
    return [variant(chunk, [head, *chunks[:k]], tokens=tokens) for k, chunk in enumerate(chunks)]


def by_digest(*variants: Variant) -> dict[ChunkDigest, list[Variant]]:
    found: dict[ChunkDigest, list[Variant]] = {}
    for one in variants:
        found.setdefault(one.digest, []).append(one)
    return found


# Layers ahead
