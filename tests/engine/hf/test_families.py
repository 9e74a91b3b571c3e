"""Every promised family, driven layer by layer, gives what the model itself gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rekindle.core.kv import Span
from rekindle.engine.base import Row
from rekindle.engine.hf.decoder import TESTED_FAMILIES
from rekindle.engine.hf.engine import HfEngine
from tests.engine.contract import Garbage, Stored
from tests.tiny import FAMILIES, OTHERS, VOCABULARY, WINDOW, tiny_engine

pytestmark = pytest.mark.thorough

PROMPT = 3 * WINDOW - 5  # well past the sliding window
NEW = WINDOW + 9  # decoding past it too


def prompt_of(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY - 1, count).tolist()


def own_logits(engine: HfEngine, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return engine.model(torch.tensor([tokens])).logits[0].numpy()


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def engine(request: pytest.FixtureRequest) -> HfEngine:
    return tiny_engine(request.param)


def test_the_promised_families_are_the_tested_ones() -> None:
    assert set(FAMILIES) == TESTED_FAMILIES


def test_a_prompt_past_the_window_has_the_models_own_logits(engine: HfEngine) -> None:
    tokens = prompt_of(PROMPT)
    with engine.open(PROMPT, "plain") as sequence:
        (logits,) = engine.step([Row.following(sequence, tokens, logits="all")])
    assert_close(logits, own_logits(engine, tokens))


def test_greedy_decoding_past_the_window_equals_generate(engine: HfEngine) -> None:
    tokens = prompt_of(PROMPT)
    with torch.inference_mode():
        generated = engine.model.generate(
            torch.tensor([tokens]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
    expected = generated[0, PROMPT:].tolist()
    got: list[int] = []
    with engine.open(PROMPT + NEW, "plain") as sequence:
        row = Row.following(sequence, tokens)
        while True:
            got.append(int(engine.step([row])[0][0].argmax()))
            if len(got) == NEW:
                break
            row = Row.following(sequence, got[-1:])
    assert got == expected


def test_pieces_of_any_size_give_the_same_logits(engine: HfEngine) -> None:
    tokens = prompt_of(PROMPT)
    parts = []
    with engine.open(PROMPT, "plain") as sequence:
        for start, stop in ((0, 1), (1, 12), (12, 13), (13, 31), (31, PROMPT)):
            parts += engine.step([Row.following(sequence, tokens[start:stop], logits="all")])
    assert_close(np.concatenate(parts), own_logits(engine, tokens))


def test_scattered_garbage_inside_the_window_is_recomputed_exactly(engine: HfEngine) -> None:
    tokens = prompt_of(PROMPT)
    layers = len(engine.layout.layers)
    with engine.open(PROMPT, "plain") as first:
        engine.step([Row.following(first, tokens, logits="none")])
        kv = first.export(Span(0, PROMPT))
    broken = [PROMPT - 12, PROMPT - 11, PROMPT - 6, PROMPT - 3]
    feeds = (Stored(kv, Span(0, PROMPT - 1)), *(Garbage(Span(p, p + 1), layers) for p in broken))
    chosen = [*broken, PROMPT - 1]
    with engine.open(PROMPT, "plain") as second:
        (logits,) = engine.step([Row(second, [tokens[p] for p in chosen], chosen, logits="all", feeds=feeds)])
    assert_close(logits, own_logits(engine, tokens)[chosen])


def test_a_scattered_recompute_only_sees_what_stands_there(engine: HfEngine) -> None:
    """Positions recomputed over right KV give the same logits and leave the same KV as the whole prompt did."""
    tokens = prompt_of(PROMPT)
    chosen = [0, 3, 4, 17, 18, 29, PROMPT - 1]
    with engine.open(PROMPT, "plain") as sequence:
        engine.step([Row.following(sequence, tokens, logits="none")])
        before = sequence.export(Span(0, PROMPT))
        (logits,) = engine.step([Row(sequence, [tokens[p] for p in chosen], chosen, logits="all")])
        after = sequence.export(Span(0, PROMPT))
    assert_close(logits, own_logits(engine, tokens)[chosen])
    for old, new in zip(before.layers, after.layers, strict=True):
        np.testing.assert_allclose(new.keys, old.keys, atol=1e-5)
        np.testing.assert_allclose(new.values, old.values, atol=1e-5)


def test_fed_kv_stands_in_for_computing_it(engine: HfEngine) -> None:
    tokens = prompt_of(PROMPT)
    with engine.open(PROMPT, "plain") as first:
        engine.step([Row.following(first, tokens, logits="none")])
        kv = first.export(Span(0, PROMPT))
    cut = PROMPT - 7
    feed = Stored(kv, Span(0, cut))
    with engine.open(PROMPT, "plain") as second:
        row = Row(second, tokens[cut:], range(cut, PROMPT), logits="all", feeds=(feed,))
        (logits,) = engine.step([row])
        assert second.length == PROMPT
    assert feed.filled == list(range(len(engine.layout.layers)))
    assert_close(logits, own_logits(engine, tokens)[cut:])


def test_rows_of_different_lengths_share_a_step(engine: HfEngine) -> None:
    prompts = [prompt_of(n, seed=n) for n in (1, 7, PROMPT, 22)]
    sequences = [engine.open(PROMPT + 1, "plain") for _ in prompts]
    logits = engine.step([Row.following(s, p) for s, p in zip(sequences, prompts, strict=True)])
    following = [int(row[0].argmax()) for row in logits]
    again = engine.step([Row.following(s, [t]) for s, t in zip(sequences, following, strict=True)])
    for prompt, token, first, second in zip(prompts, following, logits, again, strict=True):
        assert_close(first[0], own_logits(engine, prompt)[-1])
        assert_close(second[0], own_logits(engine, [*prompt, token])[-1])
    for sequence in sequences:
        sequence.close()


@pytest.mark.parametrize("family", sorted(OTHERS))
def test_other_families_pass_the_check_at_load(family: str) -> None:
    engine = tiny_engine(family)
    tokens = prompt_of(PROMPT)
    with engine.open(PROMPT, "plain") as sequence:
        (logits,) = engine.step([Row.following(sequence, tokens, logits="all")])
    assert_close(logits, own_logits(engine, tokens))
