"""SET-CACHE, and how deep Cache-Craft loads ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.cache_craft import preload_layers, set_cache
from rekindle.core.chunk import ChunkDigest
from tests.chunks.test_craft import HEAD, OTHER_HEAD, A, B, C, D, by_digest, stored_chain, variant


def test_set_cache_takes_the_longest_stored_beginning_in_any_order() -> None:
    short, long = stored_chain(C, A), stored_chain(B, A, C)
    chosen = set_cache([HEAD, A, C, D, B], by_digest(*short, *long))
    assert chosen == {B: long[0], A: long[1], C: long[2]}


def test_set_cache_ends_where_the_prompt_lacks_a_chunk_of_the_chain() -> None:
    chain = stored_chain(A, B, C)
    assert set_cache([HEAD, C, A], by_digest(*chain)) == {A: chain[0]}


def test_set_cache_ends_where_a_variant_of_the_chain_is_gone() -> None:
    chain = stored_chain(A, B, C)
    assert set_cache([HEAD, A, B, C], by_digest(chain[0], chain[2])) == {A: chain[0]}
    assert set_cache([HEAD, A, B, C], by_digest(*chain[1:])) == {}


def test_set_cache_wants_the_same_head() -> None:
    chain = stored_chain(A, B, head=OTHER_HEAD)
    assert set_cache([HEAD, A, B], by_digest(*chain)) == {}
    assert set_cache([OTHER_HEAD, A, B], by_digest(*chain)) == {A: chain[0], B: chain[1]}


def test_of_two_chains_of_as_many_chunks_set_cache_takes_the_one_with_more_tokens() -> None:
    small, large = stored_chain(A, B, tokens=10), stored_chain(C, D, tokens=11)
    assert set(set_cache([HEAD, A, B, C, D], by_digest(*small, *large))) == {C, D}


def test_set_cache_never_takes_a_chunk_twice_from_one_chain() -> None:
    chain = stored_chain(A, A, B)
    assert set_cache([HEAD, A, A, B], by_digest(*chain)) == {A: chain[0]}


def test_set_cache_takes_the_least_drifted_of_two_variants() -> None:
    drifted, computed = variant(A, [HEAD], drift=0.2), variant(A, [HEAD])
    assert set_cache([HEAD, A], by_digest(drifted, computed)) == {A: computed}


def test_set_cache_of_an_empty_prompt_is_empty() -> None:
    assert set_cache([], {}) == {}


@pytest.mark.parametrize(
    ("layers", "prefill_seconds", "load_seconds", "expected"),
    [
        (5, 1.0, 2.0, 3),  # the published example
        (32, 2.0, 1.0, 1),
        (32, 1.0, 1.0, 1),
        (32, 1.0, 0.0, 1),
        (32, 0.0, 0.0, 1),
        (32, 0.0, 1.0, 32),
        (5, 0.3, 0.4, 2),  # 4 * (1 - 3/4) + 1, which floating point puts above 2
        (1, 0.1, 5.0, 1),
    ],
)
def test_as_many_layers_are_loaded_ahead_as_published(
    layers: int, prefill_seconds: float, load_seconds: float, expected: int
) -> None:
    assert preload_layers(layers, prefill_seconds, load_seconds) == expected


@given(st.integers(1, 100), st.floats(0.0, 10.0), st.floats(1e-3, 10.0))
def test_the_layers_not_loaded_ahead_load_while_the_others_are_computed(
    layers: int, prefill_seconds: float, load_seconds: float
) -> None:
    ahead = preload_layers(layers, prefill_seconds, load_seconds)
    assert 1 <= ahead <= layers
    rest_seconds = (layers - ahead) * load_seconds / layers
    assert rest_seconds <= (layers - 1) * prefill_seconds / layers + 1e-6
    if ahead > 1:  # one layer fewer would make a layer wait
        assert (layers - ahead + 1) * load_seconds > (layers - 1) * prefill_seconds - 1e-6


@given(st.lists(st.permutations([A, B, C, D]), max_size=4), st.permutations([A, B, C, D]), st.integers(0, 4))
def test_what_set_cache_takes_is_a_chain_over_chunks_of_the_prompt(
    stored: list[list[ChunkDigest]], order: list[ChunkDigest], length: int
) -> None:
    prompt = [HEAD, *order[:length]]
    known = by_digest(*(one for chunks in stored for one in stored_chain(*chunks)))
    chosen = list(set_cache(prompt, known).items())
    for k, (digest, one) in enumerate(chosen):
        assert one.digest == digest and digest in prompt
        assert one.before == (HEAD, *(earlier for earlier, _ in chosen[:k]))
    longest = max((_common(chunks, prompt) for chunks in stored), default=0)
    assert len(chosen) == longest


def _common(chunks: list[ChunkDigest], prompt: list[ChunkDigest]) -> int:
    return next((k for k, chunk in enumerate(chunks) if chunk not in prompt), len(chunks))
