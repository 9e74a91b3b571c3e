"""Recompute `leading`: KV of another context is appended where it is needed, its keys turned by the distance.

In layer 0 keys and values depend only on a token and its position, so there appended KV must be what computing gives.
Further up they also depend on what stood before: recomputing its leading tokens corrects that, the more the better.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.engine.base import Row
from tests.faults.folders import REPOSITORY
from tests.parity.engines import KINDS, assert_same, each, make, params
from tests.parity.sessions import tokens_of

BASE = 10000.0
appending = pytest.mark.parametrize("kind", params("llamacpp", "llamacpp-f32", "llamacpp-flash"), scope="module")


@pytest.fixture(scope="module")
def engine(kind: str) -> Iterator[Any]:
    made: Any = make(kind)
    assert made.capabilities.recompute == "leading"
    yield made
    made.close()


def compute(engine: Any, tokens: list[int], capacity: int = 200) -> Any:
    sequence = engine.open(capacity, engine.regime(capacity))
    engine.step([Row.following(sequence, tokens, logits="none")])
    return sequence


def kv_of(engine: Any, tokens: list[int], span: Span) -> Kv:
    sequence = compute(engine, tokens)
    kv: Kv = sequence.export(span)
    sequence.close()
    return kv


def part(kv: Kv, start: int) -> Kv:
    """The KV without its first `start` tokens."""
    layers = (LayerKv(layer.keys[:, start:], layer.values[:, start:]) for layer in kv.layers)
    return Kv(Span(kv.span.start + start, kv.span.stop), kv.layout, tuple(layers))


def turned(keys: np.ndarray, distance: int) -> np.ndarray:
    """Keys `[1, tokens, dim]` rotated to stand `distance` further on: pairs of neighbours turn together."""
    pairs = keys.astype(np.float64).reshape(*keys.shape[:-1], -1, 2)  # [1, tokens, dim / 2, 2]
    count = pairs.shape[-2]
    turns = np.exp(1j * distance * BASE ** (-np.arange(count) / count))  # [dim / 2]
    complexes = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
    return np.stack([complexes.real, complexes.imag], axis=-1).reshape(keys.shape)


def assert_exactly(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(got, expected)


@appending
def test_kv_appended_where_it_was_computed_is_as_if_computed(kind: str, engine: Any) -> None:
    tokens, following = tokens_of(60, seed=1), tokens_of(9, seed=2)
    source = compute(engine, tokens[:20])
    engine.step([Row.following(source, tokens[20:], logits="none")])
    kv = source.export(Span(0, 60))
    (expected,) = engine.step([Row.following(source, following, logits="all")])
    source.close()
    target = compute(engine, tokens[:20])
    target.append(part(kv, 20))
    assert target.length == 60
    for ours, theirs in zip(target.export(Span(0, 60)).layers, kv.layers, strict=True):
        assert_exactly(ours.keys, theirs.keys)
        assert_exactly(ours.values, theirs.values)
    (got,) = engine.step([Row.following(target, following, logits="all")])
    assert_same(kind, got, expected)
    target.close()


@appending
@pytest.mark.parametrize("place", [1, 20, 31, 140])
@pytest.mark.parametrize("looked", [False, True])
def test_moved_keys_are_turned_by_the_distance_and_values_stay(
    kind: str, engine: Any, place: int, looked: bool
) -> None:
    """Whether they are looked at before anything is computed with them, or after."""
    kv = kv_of(engine, tokens_of(60, seed=1), Span(20, 60))
    target = compute(engine, tokens_of(place, seed=3))
    before = target.export(Span(0, place))
    target.append(kv)
    if not looked:
        engine.step([Row.following(target, [5], logits="none")])
    moved = target.export(Span(place, place + 40))
    for ours, theirs in zip(moved.layers, kv.layers, strict=True):
        assert_same(kind, ours.keys, turned(theirs.keys, place - 20))
        assert_exactly(ours.values, theirs.values)
    for ours, theirs in zip(target.export(Span(0, place)).layers, before.layers, strict=True):
        assert_exactly(ours.keys, theirs.keys)
        assert_exactly(ours.values, theirs.values)
    target.close()


@appending
def test_turning_means_something(kind: str, engine: Any) -> None:
    """The law above would be empty if keys that are turned were as they were."""
    kv = kv_of(engine, tokens_of(60, seed=1), Span(20, 60))
    off = np.abs(turned(kv.layers[0].keys, 1) - kv.layers[0].keys).max()
    assert off > 10 * KINDS[kind].tolerance * np.abs(kv.layers[0].keys).max()


@appending
def test_in_layer_0_moved_kv_is_what_computing_there_gives(kind: str, engine: Any) -> None:
    chunk = tokens_of(40, seed=4)
    kv = kv_of(engine, [*tokens_of(20, seed=5), *chunk], Span(20, 60))
    for place in (1, 9, 20, 77, 150):
        head = tokens_of(place, seed=6)
        target = compute(engine, head)
        target.append(kv)
        moved = target.export(Span(place, place + 40))
        target.close()
        computed = kv_of(engine, [*head, *chunk], Span(place, place + 40))
        assert_same(kind, moved.layers[0].keys, computed.layers[0].keys)
        assert_same(kind, moved.layers[0].values, computed.layers[0].values)
        if place != 20:
            assert np.abs(moved.layers[2].values - computed.layers[2].values).max() > 0.05, "further up, it is not"


@appending
def test_what_is_moved_leaves_others_alone(kind: str, engine: Any) -> None:
    """The sequence it came from, those beside it, and what was appended before."""
    tokens = tokens_of(60, seed=7)
    source, beside = compute(engine, tokens), compute(engine, tokens_of(33, seed=8))
    kv, other = source.export(Span(0, 60)), beside.export(Span(0, 33))
    target = compute(engine, tokens_of(5, seed=9))
    target.append(part(kv, 50))
    target.append(part(kv, 40))
    first = target.export(Span(5, 35))
    target.append(part(kv, 30))
    engine.step([Row.following(target, [4, 5, 6]), Row.following(beside, [7])])
    for sequence, known in ((source, kv), (beside, other)):
        for ours, theirs in zip(sequence.export(known.span).layers, known.layers, strict=True):
            assert_exactly(ours.keys, theirs.keys)
            assert_exactly(ours.values, theirs.values)
    for ours, theirs in zip(target.export(Span(5, 35)).layers, first.layers, strict=True):
        assert_exactly(ours.keys, theirs.keys)
    target.truncate(20)
    assert target.length == 20
    (got,) = engine.step([Row.following(target, [4, 5, 6])])
    assert np.isfinite(got).all()
    for sequence in (source, beside, target):
        sequence.close()


@appending
def test_wherever_and_in_whatever_order_kv_is_appended_it_is_turned_right(kind: str, engine: Any) -> None:
    kv = kv_of(engine, tokens_of(60, seed=1), Span(0, 60))

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(st.integers(0, 59), st.integers(1, 30), st.booleans()), min_size=1, max_size=4))
    def holds(pieces: list[tuple[int, int, bool]]) -> None:
        target = engine.open(200, "plain")
        for start, count, looked in pieces:
            stop, place = min(60, start + count), target.length
            layers = (LayerKv(layer.keys[:, start:stop], layer.values[:, start:stop]) for layer in kv.layers)
            target.append(Kv(Span(start, stop), kv.layout, tuple(layers)))
            if looked:
                moved = target.export(Span(place, target.length))
                for ours, theirs in zip(moved.layers, kv.layers, strict=True):
                    assert_same(kind, ours.keys, turned(theirs.keys[:, start:stop], place - start))
                    assert_exactly(ours.values, theirs.values[:, start:stop])
        target.close()

    holds()


@appending
def test_the_more_tokens_lead_the_less_the_answers_differ(kind: str, engine: Any) -> None:
    """Kullback-Leibler divergence from computing everything, for a chunk that was computed behind another text."""
    count, differ = 32, {0: 0.0, 8: 0.0, 16: 0.0, 24: 0.0, 32: 0.0}
    for seed in range(8):
        before, other = tokens_of(20, seed=seed), tokens_of(31, seed=100 + seed)
        chunk, question = tokens_of(count, seed=200 + seed), tokens_of(6, seed=300 + seed)
        kv = kv_of(engine, [*before, *chunk], Span(20, 20 + count))
        whole = compute(engine, [*other, *chunk])
        (expected,) = engine.step([Row.following(whole, question, logits="all")])
        whole.close()
        for leading in differ:
            target = compute(engine, [*other, *chunk[:leading]])
            if leading < count:
                target.append(part(kv, leading))
            (got,) = engine.step([Row.following(target, question, logits="all")])
            differ[leading] += divergence(expected, got) / 8
            target.close()
    shrinking = list(differ.values())
    assert all(later < 0.9 * earlier for earlier, later in pairwise(shrinking)), differ
    assert shrinking[-1] < 1e-3 < 0.1 < shrinking[0]


def divergence(expected: np.ndarray, got: np.ndarray) -> float:
    p, q = (np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True)) for x in (expected, got))
    p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
    return float((p * np.log(p / q)).sum(axis=1).mean())


@each("llamacpp")
def test_moved_kv_can_be_exported_though_no_cell_is_left(kind: str) -> None:
    engine: Any = make(kind, kv_tokens=512, context_tokens=768)
    size = engine._cells.size
    kv = kv_of(engine, tokens_of(60, seed=1), Span(0, 60))
    target = compute(engine, tokens_of(size - 60, seed=2), size)
    target.append(kv)
    assert target.length == size
    for ours, theirs in zip(target.export(Span(size - 60, size)).layers, kv.layers, strict=True):
        assert_same(kind, ours.keys, turned(theirs.keys, size - 60))
    engine.close()


PROGRAM = """
import sys
from rekindle.core.kv import Span
from rekindle.engine.base import Row
from rekindle.errors import StepRefused
from tests.parity.engines import make
from tests.parity.sessions import tokens_of
engine = make("llamacpp", kv_type=sys.argv[1], dim=int(sys.argv[2]))
source, target = engine.open(100, "plain"), engine.open(100, "plain")
engine.step([Row.following(source, tokens_of(30)), Row.following(target, tokens_of(9, seed=1))])
kv = source.export(Span(10, 30))
try:
    target.append(kv)
    engine.step([Row.following(target, [5, 6, 7])])
    print("leading", engine.capabilities.recompute)
except StepRefused:
    print("refused", engine.capabilities.recompute)
"""


@each("llamacpp")
@pytest.mark.exhaustive
@pytest.mark.parametrize(("kv_type", "dim"), [("q8_0", 32), ("q8_0", 64), ("q4_0", 64), ("bf16", 64)])
def test_other_numbers_are_moved_or_refused_and_the_process_lives(kind: str, kv_type: str, dim: int) -> None:
    program = [sys.executable, "-c", PROGRAM, kv_type, str(dim)]
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.split() in (["leading", "leading"], ["refused", "none"])
