"""A sequence with spans: KV out, in, behind and turned, also while others compute."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xllamacpp")

from rekindle.core.kv import Kv, Span
from rekindle.engine.base import Row
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.llamacpp.sequence import LlamaSequence
from rekindle.errors import StepRefused
from tests.engine.contract import Stored
from tests.engine.llamacpp.conftest import Load

pytestmark = [pytest.mark.llamacpp]

TOKENS = np.random.default_rng(5).integers(3, 250, 400).tolist()


def computed(engine: LlamaCppEngine, tokens: list[int], capacity: int | None = None) -> LlamaSequence:
    sequence = engine.open(capacity or len(tokens), engine.regime(1))
    engine.step([Row.following(sequence, tokens, logits="none")])
    return sequence


def assert_same_kv(got: Kv, expected: Kv, tolerance: float = 0.0) -> None:
    for new, old in zip(got.layers, expected.layers, strict=True):
        np.testing.assert_allclose(new.keys.astype(np.float32), old.keys.astype(np.float32), atol=tolerance)
        np.testing.assert_allclose(new.values.astype(np.float32), old.values.astype(np.float32), atol=tolerance)


@pytest.mark.parametrize("flash", ["on", "off"])
@pytest.mark.parametrize("span", [Span(0, 40), Span(0, 1), Span(39, 40), Span(7, 33)])
def test_any_span_comes_out_as_a_part_of_the_whole(span: Span, flash: str, tiny: Path, load: Load) -> None:
    engine = load(tiny, flash_attention=flash)
    sequence = computed(engine, TOKENS[:40])
    whole, part = sequence.export(Span(0, 40)), sequence.export(span)
    assert part.span == span and part.layout == engine.layout
    for ours, theirs in zip(part.layers, whole.layers, strict=True):
        np.testing.assert_array_equal(ours.keys, theirs.keys[:, span.start : span.stop])
        np.testing.assert_array_equal(ours.values, theirs.values[:, span.start : span.stop])


def test_a_span_of_nothing_is_nothing(engine: LlamaCppEngine) -> None:
    sequence = computed(engine, TOKENS[:10])
    for place in (0, 5, 10):
        kv = sequence.export(Span(place, place))
        assert len(kv.span) == 0 and all(layer.keys.shape[1] == layer.values.shape[1] == 0 for layer in kv.layers)
    sequence.close()


def test_kv_that_was_cut_into_spans_and_put_together_is_the_same(engine: LlamaCppEngine) -> None:
    first = computed(engine, TOKENS[:60])
    whole = first.export(Span(0, 50))
    second = engine.open(60, engine.regime(1))
    feeds = tuple(Stored(first.export(Span(a, b))) for a, b in ((0, 7), (7, 8), (8, 40), (40, 50)))
    (got,) = engine.step([Row(second, TOKENS[50:60], range(50, 60), feeds=feeds)])
    assert_same_kv(second.export(Span(0, 50)), whole)
    first.truncate(50)
    (expected,) = engine.step([Row.following(first, TOKENS[50:60])])
    np.testing.assert_allclose(got, expected, atol=1e-2)
    first.close()
    second.close()


def test_cells_that_lie_scattered_come_out_in_order(tiny: Path, load: Load) -> None:
    """Sequences that grow in turns, one of which goes, leave holes that the next one fills."""
    engine = load(tiny, context_tokens=256, kv_tokens=256)
    first, second = engine.open(60, engine.regime(1)), engine.open(60, engine.regime(1))
    for start in range(0, 60, 5):
        engine.step([Row.following(s, TOKENS[start : start + 5], logits="none") for s in (first, second)])
    expected = second.export(Span(0, 60))
    first.close()
    filler = computed(engine, TOKENS[100:150], 200 - 64)
    assert_same_kv(second.export(Span(0, 60)), expected)
    alone = load(tiny)
    assert_same_kv(filler.export(Span(3, 47)), computed(alone, TOKENS[100:150]).export(Span(3, 47)), 1e-2)


def test_kv_that_is_put_behind_stands_where_it_is_put(tiny: Path, load: Load) -> None:
    """One layer deep, keys depend on a token and its position only: there the turn can be checked exactly."""
    engine = load(tiny, kv_type="f32")
    source = computed(engine, TOKENS[:50])
    moved = source.export(Span(10, 30))
    target = computed(engine, TOKENS[100:105], 60)
    target.append(moved)
    assert target.length == 25
    expected = computed(engine, [*TOKENS[100:105], *TOKENS[10:30]]).export(Span(5, 25))
    got = target.export(Span(5, 25))
    np.testing.assert_allclose(got.layers[0].keys, expected.layers[0].keys, atol=1e-4)
    np.testing.assert_allclose(got.layers[0].values, expected.layers[0].values, atol=1e-4)
    (logits,) = engine.step([Row.following(target, TOKENS[200:203])])
    assert np.isfinite(logits).all() and target.length == 28


def test_kv_that_is_put_where_it_was_is_the_same(engine: LlamaCppEngine) -> None:
    source = computed(engine, TOKENS[:50])
    target = computed(engine, TOKENS[:20], 60)
    target.append(source.export(Span(20, 45)))
    assert_same_kv(target.export(Span(0, 45)), source.export(Span(0, 45)), 1e-2)
    source.truncate(45)
    (expected,) = engine.step([Row.following(source, TOKENS[45:50])])
    (got,) = engine.step([Row.following(target, TOKENS[45:50])])
    np.testing.assert_allclose(got, expected, atol=2e-2)
    target.truncate(30)
    (after,) = engine.step([Row.following(target, TOKENS[30:50])])
    np.testing.assert_allclose(after, expected, atol=2e-2)
    source.close()
    target.close()


def test_kv_that_does_not_belong_behind_is_refused(tiny: Path, engine: LlamaCppEngine, load: Load) -> None:
    source = computed(engine, TOKENS[:30])
    kv = source.export(Span(0, 20))
    target = computed(engine, TOKENS[:5], 20)
    with pytest.raises(StepRefused, match="beyond the sequence's capacity"):
        target.append(kv)
    other = computed(load(tiny, kv_type="f32"), TOKENS[:5]).export(Span(0, 5))
    with pytest.raises(StepRefused, match="another model, or of another type"):
        target.append(other)
    assert target.length == 5
    for sequence in (source, target):
        sequence.close()


def test_kv_comes_out_while_a_step_appends_behind_it(engine: LlamaCppEngine) -> None:
    sequence = computed(engine, TOKENS[:100], 400)
    expected = sequence.export(Span(10, 90))
    wrong: list[BaseException] = []
    done = threading.Event()

    def export() -> None:
        try:
            while not done.is_set():
                assert_same_kv(sequence.export(Span(10, 90)), expected)
        except BaseException as error:  # noqa: BLE001  (it is looked at below)
            wrong.append(error)

    threads = [threading.Thread(target=export) for _ in range(2)]
    for thread in threads:
        thread.start()
    for start in range(100, 300, 10):
        engine.step([Row.following(sequence, TOKENS[start : start + 10])])
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong and sequence.length == 300
    sequence.close()


def test_threads_that_step_at_once_are_served_one_after_the_other(engine: LlamaCppEngine) -> None:
    expected = {}
    for start in (0, 50, 100, 150):
        sequence = computed(engine, TOKENS[start : start + 40])
        expected[start] = sequence.export(Span(0, 40))
        sequence.close()
    wrong: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for _ in range(15):
                sequence = computed(engine, TOKENS[start : start + 40])
                assert_same_kv(sequence.export(Span(0, 40)), expected[start], 2e-2)
                sequence.close()
        except BaseException as error:  # noqa: BLE001  (it is looked at below)
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
