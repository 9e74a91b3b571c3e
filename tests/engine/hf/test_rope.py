"""Length-dependent rope: a context has one regime, however it is cut into steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rekindle.core.kv import Span
from rekindle.engine.base import Row
from rekindle.engine.hf.engine import HfEngine
from rekindle.errors import StepRefused
from rekindle.session.session import Session
from tests.tiny import tiny_engine

SWITCH = 24


@pytest.fixture(scope="module")
def engine() -> HfEngine:
    """A Phi-3 that changes its rotary frequencies past 24 tokens."""
    half = 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [2.0, 3.0, 5.0, 7.0],
        "original_max_position_embeddings": SWITCH,
    }
    return tiny_engine("phi3", rope_parameters=rope, original_max_position_embeddings=SWITCH, sliding_window=None)


def tokens_of(count: int) -> list[int]:
    return np.random.default_rng(3).integers(3, 250, count).tolist()


def own_logits(engine: HfEngine, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return engine.model(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("count", [SWITCH - 1, SWITCH, SWITCH + 1, 40])
def test_pieces_give_what_the_whole_prompt_gives(engine: HfEngine, count: int) -> None:
    tokens = tokens_of(count)
    with engine.open(count, engine.regime(count)) as sequence:
        parts = [
            engine.step([Row.following(sequence, tokens[a:b], logits="all")])[0]
            for a, b in ((0, 9), (9, 20), (20, count))
        ]
    np.testing.assert_allclose(np.concatenate(parts), own_logits(engine, tokens), atol=2e-5)


def test_both_regimes_share_a_step(engine: HfEngine) -> None:
    short, long = tokens_of(10), tokens_of(40)
    sequences = [engine.open(50, engine.regime(len(t))) for t in (short, long)]
    logits = engine.step([Row.following(s, t) for s, t in zip(sequences, (short, long), strict=True)])
    for got, tokens in zip(logits, (short, long), strict=True):
        np.testing.assert_allclose(got[0], own_logits(engine, tokens)[-1], atol=2e-5)


def test_the_same_tokens_have_other_kv_in_the_other_regime(engine: HfEngine) -> None:
    tokens = tokens_of(10)
    keys = []
    for regime in ("short", "long"):
        with engine.open(30, regime) as sequence:
            engine.step([Row.following(sequence, tokens, logits="none")])
            keys.append(sequence.export(Span(0, 10)).layers[0].keys)
    assert np.abs(keys[0] - keys[1]).max() > 1e-2
    assert engine.identity("short") != engine.identity("long")


def test_crossing_is_refused_by_the_engine(engine: HfEngine) -> None:
    with engine.open(40, "short") as sequence:
        engine.step([Row.following(sequence, tokens_of(SWITCH), logits="none")])
        with pytest.raises(StepRefused, match="regime"):
            engine.step([Row.following(sequence, [5])])


def test_a_reply_that_crosses_is_what_the_whole_context_gives(engine: HfEngine) -> None:
    """At the crossing all KV is void and computed again: as if there had never been a cache."""
    tokens = tokens_of(SWITCH - 6)
    expected: list[int] = []
    while len(expected) < 15:
        logits = own_logits(engine, [*tokens, *expected])[-1]
        logits[list(engine.tokenizer.stop_ids)] = -np.inf
        expected.append(int(logits.argmax()))
    reply = Session(engine).generate(tokens, max_tokens=15, min_tokens=15)
    assert list(reply.tokens) == expected


def test_a_plain_rope_has_one_regime() -> None:
    engine = tiny_engine("llama")
    assert engine.regime(1) == engine.regime(500) == "plain"
