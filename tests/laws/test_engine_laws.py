"""Laws of the engine, under any cut, any feed and any scatter."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.core.kv import Span
from rekindle.engine.base import Row
from rekindle.engine.fake import FakeEngine
from tests.engine.contract import Garbage, Stored
from tests.tiny import WINDOW, tiny_engine

FAKE = FakeEngine()
TINY = tiny_engine("gemma3_text")  # sliding and full layers, two rotary embeddings
LENGTH = 2 * WINDOW + 7
TOKENS = np.random.default_rng(11).integers(3, 250, LENGTH).tolist()


def whole(engine):
    sequence = engine.open(LENGTH, "plain")
    (logits,) = engine.step([Row.following(sequence, TOKENS, logits="all")])
    kv = sequence.export(Span(0, LENGTH))
    sequence.close()
    return logits, kv


EXPECTED = {id(engine): whole(engine) for engine in (FAKE, TINY)}
engines = st.sampled_from([FAKE, TINY])


def same(engine, got: np.ndarray, expected: np.ndarray) -> bool:
    if engine is FAKE:
        return np.array_equal(got, expected)
    return np.allclose(got, expected, atol=2e-5)


@settings(max_examples=40)
@given(engines, st.sets(st.integers(1, LENGTH - 1), max_size=6))
def test_how_a_prompt_is_cut_does_not_matter(engine, cuts: set[int]) -> None:
    logits, kv = EXPECTED[id(engine)]
    edges = [0, *sorted(cuts), LENGTH]
    sequence = engine.open(LENGTH, "plain")
    parts = [engine.step([Row.following(sequence, TOKENS[a:b], logits="all")])[0] for a, b in pairwise(edges)]
    assert same(engine, np.concatenate(parts), logits)
    exported = sequence.export(Span(0, LENGTH))
    assert all(same(engine, a.keys, b.keys) for a, b in zip(exported.layers, kv.layers, strict=True))
    sequence.close()


@settings(max_examples=40)
@given(engines, st.sets(st.integers(0, LENGTH - 2)), st.sets(st.integers(0, LENGTH - 2), max_size=4))
def test_whatever_is_recomputed_whatever_is_broken_is_mended(engine, extra: set[int], broken: set[int]) -> None:
    """Fed KV with holes of garbage; the holes and any other positions are recomputed: all is as computed whole."""
    logits, kv = EXPECTED[id(engine)]
    layers = len(engine.layout.layers)
    feeds = (Stored(kv, Span(0, LENGTH - 1)), *(Garbage(Span(p, p + 1), layers) for p in sorted(broken)))
    chosen = sorted(extra | broken | {LENGTH - 1})
    sequence = engine.open(LENGTH, "plain")
    (got,) = engine.step([Row(sequence, [TOKENS[p] for p in chosen], chosen, logits="all", feeds=feeds)])
    assert same(engine, got, logits[chosen])
    exported = sequence.export(Span(0, LENGTH))
    assert all(same(engine, a.values, b.values) for a, b in zip(exported.layers, kv.layers, strict=True))
    sequence.close()


@settings(max_examples=30)
@given(engines, st.lists(st.integers(1, LENGTH), min_size=1, max_size=5))
def test_rows_in_one_step_do_not_see_each_other(engine, lengths: list[int]) -> None:
    logits, _ = EXPECTED[id(engine)]
    sequences = [engine.open(LENGTH, "plain") for _ in lengths]
    rows = [Row.following(s, TOKENS[:n], logits="all") for s, n in zip(sequences, lengths, strict=True)]
    for got, length in zip(engine.step(rows), lengths, strict=True):
        assert same(engine, got, logits[:length])
    for sequence in sequences:
        sequence.close()
