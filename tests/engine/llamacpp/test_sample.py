"""Sampling with llama.cpp's own samplers: the same tokens as it draws itself, and each setting does what it says."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("xllamacpp")

from rekindle.core.request import Sampling
from rekindle.engine.llamacpp.c_api import llama
from rekindle.engine.llamacpp.engine import ChainSampler, LlamaCppEngine
from tests.engine.llamacpp.oracle import PlainLlama, more
from tests.tiny_gguf import VOCABULARY

pytestmark = [pytest.mark.llamacpp]

LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], dtype=np.float32))
PROMPT = np.random.default_rng(3).integers(3, 250, 24).tolist()
logits_lists = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=30)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Iterator[PlainLlama]:
    """The same file, with a context of its own."""
    model = PlainLlama(tiny, context_tokens=256)
    yield model
    model.close()


def by_hand(sampling: Sampling, seed: int) -> Any:
    """The chain that the settings mean."""
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    steps = []
    if sampling.repetition_penalty != 1.0:
        steps.append(llama.llama_sampler_init_penalties(VOCABULARY, 512, sampling.repetition_penalty, 0.0, 0.0))
    if sampling.temperature == 0.0:
        steps.append(llama.llama_sampler_init_greedy())
    else:
        if sampling.top_k is not None:
            steps.append(llama.llama_sampler_init_top_k(sampling.top_k))
        steps.append(llama.llama_sampler_init_top_p(sampling.top_p, 1))
        steps.append(llama.llama_sampler_init_min_p(sampling.min_p, 1))
        steps.append(llama.llama_sampler_init_temp(sampling.temperature))
        steps.append(llama.llama_sampler_init_dist(seed))
    for step in steps:
        llama.llama_sampler_chain_add(chain, step)
    return chain


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(repetition_penalty=1.7),
        Sampling(temperature=1.0, seed=7),
        Sampling(temperature=0.7, seed=8, top_k=5),
        Sampling(temperature=1.3, seed=9, top_p=0.8),
        Sampling(temperature=2.0, seed=10, min_p=0.2),
        Sampling(temperature=1.1, seed=11, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.3),
        Sampling(temperature=1.0, seed=12, repetition_penalty=0.8),
    ],
    ids=str,
)
def test_tokens_are_those_that_llamacpp_draws_itself(
    sampling: Sampling, model: PlainLlama, engine: LlamaCppEngine
) -> None:
    chain = by_hand(sampling, sampling.seed or 0)
    ours = engine.sampler(sampling, PROMPT)
    for token in PROMPT:
        llama.llama_sampler_accept(chain, token)
    model.reset()
    logits = model.eval(PROMPT)[-1]
    try:
        for _ in range(60):
            expected = more().llama_sampler_sample(chain, model.context, -1)
            assert ours.draw(logits) == expected
            (logits,) = model.eval([expected])
    finally:
        llama.llama_sampler_free(chain)


def drawn(sampling: Sampling, count: int = 2000, logits: np.ndarray = LOGITS) -> Counter[int]:
    sampler = ChainSampler(sampling, (), len(logits))
    return Counter(sampler.draw(logits) for _ in range(count))


@given(logits_lists)
def test_greedy_takes_the_most_likely(values: list[float]) -> None:
    logits = np.array(values, dtype=np.float32)
    assert ChainSampler(Sampling(), (), len(logits)).draw(logits) == int(logits.argmax())
    unused = ChainSampler(Sampling(repetition_penalty=1.5), (), len(logits))
    assert logits[unused.draw(logits)] == logits.max(), "a penalty for what was not seen changes nothing"


def test_frequencies_follow_the_probabilities() -> None:
    counts = drawn(Sampling(temperature=1.0, seed=1), 20_000)
    for token, chance in enumerate(np.exp(LOGITS)):
        assert abs(counts[token] / 20_000 - chance) < 0.02


def test_temperature_sharpens_and_flattens() -> None:
    sharp = drawn(Sampling(temperature=0.2, seed=1))[0]
    flat = drawn(Sampling(temperature=5.0, seed=1))[0]
    assert sharp > 1500 > 700 > flat


def test_top_k_keeps_the_k_most_likely() -> None:
    assert set(drawn(Sampling(temperature=2.0, top_k=1, seed=1))) == {0}
    assert set(drawn(Sampling(temperature=2.0, top_k=2, seed=1))) == {0, 1}
    for many in (5, 99, 2**31 - 1, 2**40):
        assert set(drawn(Sampling(temperature=2.0, top_k=many, seed=1))) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_holds_the_share() -> None:
    assert set(drawn(Sampling(temperature=1.0, top_p=1e-6, seed=1))) == {0}
    assert set(drawn(Sampling(temperature=1.0, top_p=0.39, seed=1))) == {0}
    assert set(drawn(Sampling(temperature=1.0, top_p=0.41, seed=1))) == {0, 1}
    assert set(drawn(Sampling(temperature=1.0, top_p=0.8, seed=1))) == {0, 1, 2}
    assert set(drawn(Sampling(temperature=1.0, top_p=1.0, seed=1))) == {0, 1, 2, 3, 4}


def test_min_p_drops_what_is_far_less_likely() -> None:
    assert set(drawn(Sampling(temperature=1.0, min_p=0.3, seed=1))) == {0, 1, 2}
    assert set(drawn(Sampling(temperature=1.0, min_p=0.7, seed=1))) == {0, 1}
    assert set(drawn(Sampling(temperature=1.0, min_p=1.0, seed=1))) == {0}


def test_cuts_work_together() -> None:
    assert set(drawn(Sampling(temperature=3.0, top_k=4, top_p=0.8, min_p=0.6, seed=1))) == {0, 1}


def test_within_what_is_left_the_probabilities_hold() -> None:
    counts = drawn(Sampling(temperature=1.0, top_k=2, seed=4), 20_000)
    assert abs(counts[0] / 20_000 - 4 / 7) < 0.02


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 2, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_the_same_seed_draws_the_same(seed: int) -> None:
    assert first(seed) == first(seed)
    assert first(seed) != first(seed ^ 5)


def test_no_seed_draws_anew() -> None:
    assert first(None) != first(None)


def test_large_seeds_differ_in_their_upper_bits() -> None:
    assert first(3 << 32) != first(5 << 32) != first(0)


def first(seed: int | None) -> list[int]:
    sampler = ChainSampler(Sampling(temperature=1.0, seed=seed), (), len(LOGITS))
    return [sampler.draw(LOGITS) for _ in range(40)]


def test_a_repetition_penalty_counts_the_prompt_and_the_reply() -> None:
    logits = np.array([2.0, 1.5, -1.0, -1.2], dtype=np.float32)
    sampler = ChainSampler(Sampling(repetition_penalty=2.0), [0], 4)
    assert sampler.draw(logits) == 1  # 0 was in the prompt: 2.0 / 2
    assert sampler.draw(logits) == 0  # now 1 is penalized too: 0.75
    assert logits.tolist() == [2.0, 1.5, -1.0, np.float32(-1.2)], "the caller's logits stay"


def test_a_repetition_penalty_counts_every_token_of_a_long_prompt(engine: LlamaCppEngine) -> None:
    logits = np.zeros(VOCABULARY, np.float32)
    logits[[5, 9]] = 2.0, 1.9
    prompt = [5] + [8] * (engine.context_tokens - 2)
    assert engine.sampler(Sampling(), prompt).draw(logits) == 5
    assert engine.sampler(Sampling(repetition_penalty=1.5), prompt).draw(logits) == 9


def test_a_penalty_is_the_same_however_often_a_token_was_seen() -> None:
    logits = np.array([3.0, 1.4, 1.6], dtype=np.float32)
    assert ChainSampler(Sampling(repetition_penalty=2.0), [0], 3).draw(logits) == 2  # 3.0 / 2 < 1.6
    assert ChainSampler(Sampling(repetition_penalty=2.0), [0, 0, 0, 2], 3).draw(logits) == 0  # 1.5 > 1.4 > 0.8


@given(
    logits_lists,
    st.floats(0.01, 10),
    st.integers(1, 40) | st.none(),
    st.floats(0.001, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 2**64 - 1) | st.none(),
)
def test_any_setting_draws_a_token_of_the_vocabulary(
    values: list[float], temperature: float, top_k: int | None, top_p: float, min_p: float, seed: int | None
) -> None:
    sampling = Sampling(temperature, top_k, top_p, min_p, 1.1, seed)
    assert 0 <= ChainSampler(sampling, [0], len(values)).draw(np.array(values, dtype=np.float32)) < len(values)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-38, 1e-44, 1e-50, 1e-300, 100.0])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    counts = drawn(Sampling(temperature=temperature, seed=1), 50, np.array([-3.0, 20.0, 19.0, -40.0], np.float32))
    assert set(counts) == {1} if temperature < 1 else set(counts) <= {0, 1, 2, 3}


def test_tokens_ruled_out_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf], dtype=np.float32)
    for sampling in (
        Sampling(temperature=100.0, seed=1),
        Sampling(temperature=100.0, seed=1, top_p=0.5),
        Sampling(temperature=100.0, seed=1, min_p=0.1),
        Sampling(temperature=100.0, seed=1, top_k=3, repetition_penalty=1.5),
        Sampling(repetition_penalty=1.5),
    ):
        assert set(drawn(sampling, 200, logits)) == {1}


def test_samplers_give_their_memory_back() -> None:
    logits = np.zeros(1000, np.float32)
    process = psutil.Process()

    def some() -> None:
        for _ in range(300):
            sampler = ChainSampler(Sampling(temperature=1.0, top_k=5, repetition_penalty=1.1), range(100), 1000)
            sampler.draw(logits)
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    some()
    before = process.memory_info().rss
    for _ in range(4):
        some()
    assert process.memory_info().rss - before < 8 << 20
