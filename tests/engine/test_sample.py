"""Sampling: each setting does what it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.core.request import Sampling
from rekindle.engine.sample import Sampler
from rekindle.errors import InvalidSampling

LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], dtype=np.float32))
logits_lists = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=30)


def drawn(sampling: Sampling, count: int = 2000, logits: np.ndarray = LOGITS) -> Counter[int]:
    sampler = Sampler(sampling, ())
    return Counter(sampler.draw(logits) for _ in range(count))


@given(logits_lists)
def test_greedy_takes_the_most_likely(values: list[float]) -> None:
    logits = np.array(values, dtype=np.float32)
    assert Sampler(Sampling(), ()).draw(logits) == int(logits.argmax())


def test_frequencies_follow_the_probabilities() -> None:
    counts = drawn(Sampling(temperature=1.0, seed=1), 20_000)
    for token, chance in enumerate(np.exp(LOGITS)):
        assert abs(counts[token] / 20_000 - chance) < 0.02


def test_temperature_sharpens_and_flattens() -> None:
    sharp = drawn(Sampling(temperature=0.2, seed=1))[0]
    flat = drawn(Sampling(temperature=5.0, seed=1))[0]
    assert sharp > 1500 > 700 > flat


def test_top_k_keeps_the_k_most_likely() -> None:
    assert set(drawn(Sampling(temperature=2.0, top_k=2, seed=1))) == {0, 1}
    assert set(drawn(Sampling(temperature=2.0, top_k=99, seed=1))) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_holds_the_share() -> None:
    assert set(drawn(Sampling(temperature=1.0, top_p=0.39, seed=1))) == {0}
    assert set(drawn(Sampling(temperature=1.0, top_p=0.41, seed=1))) == {0, 1}
    assert set(drawn(Sampling(temperature=1.0, top_p=0.8, seed=1))) == {0, 1, 2}


def test_min_p_drops_what_is_far_less_likely() -> None:
    assert set(drawn(Sampling(temperature=1.0, min_p=0.3, seed=1))) == {0, 1, 2}
    assert set(drawn(Sampling(temperature=1.0, min_p=1.0, seed=1))) == {0}


def test_the_same_seed_draws_the_same() -> None:
    def first(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), ())
        return [sampler.draw(LOGITS) for _ in range(30)]

    assert first(7) == first(7) != first(8)
    assert first(None) != first(None)


def test_a_repetition_penalty_counts_the_prompt_and_the_reply() -> None:
    logits = np.array([2.0, 1.5, -1.0, -1.2], dtype=np.float32)
    sampler = Sampler(Sampling(repetition_penalty=2.0), [0])
    assert sampler.draw(logits) == 1  # 0 was in the prompt: 2.0 / 2
    assert sampler.draw(logits) == 0  # now 1 is penalized too: 0.75
    assert logits.tolist() == [2.0, 1.5, -1.0, np.float32(-1.2)]  # the caller's logits stay


@given(
    logits_lists,
    st.floats(0.01, 10),
    st.integers(1, 40) | st.none(),
    st.floats(0.001, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 2**32),
)
def test_any_setting_draws_a_token_of_the_vocabulary(
    values: list[float], temperature: float, top_k: int | None, top_p: float, min_p: float, seed: int
) -> None:
    sampling = Sampling(temperature, top_k, top_p, min_p, 1.1, seed)
    assert 0 <= Sampler(sampling, [0]).draw(np.array(values, dtype=np.float32)) < len(values)


def test_tokens_ruled_out_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf], dtype=np.float32)
    assert set(drawn(Sampling(temperature=100.0, seed=1), 200, logits)) == {1}


def test_the_smallest_temperature_is_greedy() -> None:
    assert set(drawn(Sampling(temperature=5e-324, seed=1), 50)) == {0}


@pytest.mark.parametrize("bias", [{-1: 1.0}, {1.5: 1.0}, {1: 101.0}, {1: float("nan")}, {1: "much"}, 7, ["ab", 3]])
def test_a_bias_that_is_none_is_refused(bias: Any) -> None:
    with pytest.raises(InvalidSampling, match="logit_bias"):
        Sampling(logit_bias=bias)


def test_the_same_bias_has_one_form() -> None:
    assert Sampling(logit_bias={7: 1, 3: -2.0}) == Sampling(logit_bias=[[3, -2], [7, 1.0]])  # type: ignore[arg-type]
    assert Sampling(logit_bias={7: 1}).biased and not Sampling().biased  # type: ignore[arg-type]
