"""Laws of the engine, under any cut, any feed and any scatter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.core.kv import Kv, Span
from rekindle.engine.base import Row
from tests.engine.contract import Garbage, Stored
from tests.parity.engines import KINDS, is_installed, make

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 16  # of the tiny model with sliding layers
LENGTH = 2 * WINDOW + 7
TOKENS = np.random.default_rng(11).integers(3, 250, LENGTH).tolist()

# "sliding" is a model of transformers with sliding and full layers and two rotary embeddings.
BEHIND = ("llamacpp", "llamacpp-f32", "llamacpp-sliding", "onnx", "onnx-packed")
KIND = {"fake": "fake", "sliding": "hf", **{name: name for name in BEHIND}}


def each(*names: str) -> pytest.MarkDecorator:
    found = [name for name in names if is_installed(KIND[name])]
    marked = [pytest.param(n, marks=[pytest.mark.llamacpp] if n.startswith("llamacpp") else []) for n in found]
    return pytest.mark.parametrize("name", marked)


every = each(*KIND)
scattered = each("fake", "sliding")


@pytest.fixture(scope="module", autouse=True)
def engines_closed() -> Any:
    yield
    for name in made:
        engine_of(name).close()
    made.clear()
    engine_of.cache_clear()
    whole.cache_clear()


made: list[str] = []


@cache
def engine_of(name: str) -> Any:
    made.append(name)
    if name != "sliding":
        return make(name)
    from tests.tiny import tiny_engine

    return tiny_engine("gemma3_text")


@cache
def whole(name: str) -> tuple[np.ndarray, Kv]:
    engine = engine_of(name)
    sequence = engine.open(LENGTH, "plain")
    (logits,) = engine.step([Row.following(sequence, TOKENS, logits="all")])
    kv = sequence.export(Span(0, LENGTH))
    sequence.close()
    return logits, kv


def same(name: str, got: np.ndarray, expected: np.ndarray) -> bool:
    if name == "fake":
        return np.array_equal(got, expected)
    return np.allclose(got, expected, atol=KINDS[KIND[name]].tolerance * max(1.0, float(np.abs(expected).max())))


def lawful(examples: int) -> Callable[[Any], Any]:
    return settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture])


@every
@lawful(25)
@given(st.sets(st.integers(1, LENGTH - 1), max_size=6))
def test_how_a_prompt_is_cut_does_not_matter(name: str, cuts: set[int]) -> None:
    engine, (logits, kv) = engine_of(name), whole(name)
    edges = [0, *sorted(cuts), LENGTH]
    sequence = engine.open(LENGTH, "plain")
    parts = [engine.step([Row.following(sequence, TOKENS[a:b], logits="all")])[0] for a, b in pairwise(edges)]
    assert same(name, np.concatenate(parts), logits)
    exported = sequence.export(Span(0, LENGTH))
    assert all(same(name, a.keys, b.keys) for a, b in zip(exported.layers, kv.layers, strict=True))
    sequence.close()


@every
@lawful(25)
@given(st.integers(0, LENGTH - 2), st.sets(st.integers(1, LENGTH - 2), max_size=4), st.integers(0, LENGTH))
def test_whatever_is_fed_behind_whatever_is_present_is_as_if_computed(
    name: str, kept: int, cuts: set[int], forgotten: int
) -> None:
    """In any number of feeds; also after a part was forgotten again."""
    engine, (logits, kv) = engine_of(name), whole(name)
    sequence = engine.open(LENGTH, "plain")
    if kept:
        engine.step([Row.following(sequence, TOKENS[:kept], logits="none")])
        sequence.truncate(kept - min(kept, forgotten))
        kept = sequence.length
    edges = [kept, *sorted(cut for cut in cuts if cut > kept)]
    feeds = tuple(Stored(kv, Span(a, b)) for a, b in pairwise(edges))
    (got,) = engine.step([Row(sequence, TOKENS[edges[-1] :], range(edges[-1], LENGTH), "all", feeds)])
    assert same(name, got, logits[edges[-1] :])
    exported = sequence.export(Span(0, LENGTH))
    assert all(same(name, a.values, b.values) for a, b in zip(exported.layers, kv.layers, strict=True))
    sequence.close()


@scattered
@lawful(25)
@given(st.sets(st.integers(0, LENGTH - 2)), st.sets(st.integers(0, LENGTH - 2), max_size=4))
def test_recomputing_broken_positions_repairs_them_whatever_else_is_recomputed(
    name: str, extra: set[int], broken: set[int]
) -> None:
    """Fed KV with holes of garbage; the holes and any other positions are recomputed: all is as computed whole."""
    engine, (logits, kv) = engine_of(name), whole(name)
    layers = len(engine.layout.layers)
    feeds = (Stored(kv, Span(0, LENGTH - 1)), *(Garbage(Span(p, p + 1), layers) for p in sorted(broken)))
    chosen = sorted(extra | broken | {LENGTH - 1})
    sequence = engine.open(LENGTH, "plain")
    (got,) = engine.step([Row(sequence, [TOKENS[p] for p in chosen], chosen, logits="all", feeds=feeds)])
    assert same(name, got, logits[chosen])
    exported = sequence.export(Span(0, LENGTH))
    assert all(same(name, a.values, b.values) for a, b in zip(exported.layers, kv.layers, strict=True))
    sequence.close()


@every
@lawful(20)
@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=5))
def test_rows_in_one_step_do_not_see_each_other(name: str, lengths: list[int]) -> None:
    engine, (logits, _) = engine_of(name), whole(name)
    sequences = [engine.open(LENGTH, "plain") for _ in lengths]
    rows = [Row.following(s, TOKENS[:n], logits="all") for s, n in zip(sequences, lengths, strict=True)]
    for got, length in zip(engine.step(rows), lengths, strict=True):
        assert same(name, got, logits[:length])
    for sequence in sequences:
        sequence.close()
