"""Cancelling: a computation or a load that nobody wants any more ends, and everything is as it was before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xllamacpp")

from rekindle.core.kv import LayerKv, Span
from rekindle.engine.base import Row
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.llamacpp.options import LlamaOptions
from rekindle.errors import Cancelled, StepRefused
from tests.engine.contract import Failing, Garbage, Stored
from tests.engine.llamacpp.conftest import Load
from tests.tiny_gguf import files_of, write_llama
from tests.tiny_hybrids import OPAQUE

pytestmark = [pytest.mark.llamacpp]

LONG = 4000  # tokens: some seconds of one slow core
TOKENS = np.random.default_rng(5).integers(3, 250, LONG).tolist()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppEngine]:
    path = write_llama(tmp_path_factory.mktemp("slow") / "slow.gguf", context=LONG + 100)
    engine = LlamaCppEngine(files_of(path), LlamaOptions(threads=1, device="cpu"))
    yield engine
    engine.close()


class Turning:
    """Says yes from the `after`-th question on, and knows what the process had worked until then."""

    def __init__(self, after: int) -> None:
        self.after, self.asked = after, 0
        self.worked_seconds: float | None = None

    def __call__(self) -> bool:
        self.asked += 1
        if self.asked < self.after:
            return False
        if self.worked_seconds is None:
            self.worked_seconds = time.process_time()
        return True


def test_a_long_prefill_ends_soon_after_it_was_cancelled(slow: LlamaCppEngine) -> None:
    sequence = slow.open(LONG + 50, slow.regime(LONG))
    never = Turning(10**9)
    started = time.process_time()
    (whole,) = slow.step([Row.following(sequence, TOKENS)], never)
    full_seconds = time.process_time() - started
    assert never.asked > 10, "it is looked at while it computes"
    sequence.truncate(20)
    kept = sequence.export(Span(0, 20))

    turning = Turning(6)  # the first question comes before it begins, the others while it computes
    with pytest.raises(Cancelled):
        slow.step([Row.following(sequence, TOKENS[20:])], turning)
    assert turning.worked_seconds is not None
    assert time.process_time() - turning.worked_seconds < full_seconds / 3, "work, not time: others may be busy here"

    assert sequence.length == 20
    for now, before in zip(sequence.export(Span(0, 20)).layers, kept.layers, strict=True):
        np.testing.assert_array_equal(now.keys, before.keys)
        np.testing.assert_array_equal(now.values, before.values)
    (again,) = slow.step([Row.following(sequence, TOKENS[20:])])
    np.testing.assert_allclose(again, whole, atol=2e-2)
    sequence.close()


def test_what_was_cancelled_before_it_began_computes_nothing(slow: LlamaCppEngine) -> None:
    sequence = slow.open(LONG, slow.regime(LONG))
    started = time.process_time()
    with pytest.raises(Cancelled):
        slow.step([Row.following(sequence, TOKENS)], lambda: True)
    assert time.process_time() - started < 0.5 and sequence.length == 0
    sequence.close()


def test_a_cancelled_step_of_several_sequences_leaves_all_as_they_were(slow: LlamaCppEngine) -> None:
    rows = []
    for count in (3, 30):
        sequence = slow.open(1500, slow.regime(LONG))
        slow.step([Row.following(sequence, TOKENS[:count])])
        rows.append(Row.following(sequence, TOKENS[count:1400]))
    turning = Turning(4)
    with pytest.raises(Cancelled):
        slow.step(rows, turning)
    assert [row.sequence.length for row in rows] == [3, 30]
    for row, count in zip(rows, (3, 30), strict=True):
        (got,) = slow.step([Row.following(row.sequence, TOKENS[count:50])])
        fresh = slow.open(50, slow.regime(50))
        (expected,) = slow.step([Row.following(fresh, TOKENS[:50])])
        np.testing.assert_allclose(got, expected, atol=2e-2)
        fresh.close()
        row.sequence.close()


def test_the_next_step_is_not_cancelled_by_the_last_ones_wish(slow: LlamaCppEngine) -> None:
    sequence = slow.open(LONG, slow.regime(LONG))
    for _ in range(3):
        with pytest.raises(Cancelled):
            slow.step([Row.following(sequence, TOKENS)], Turning(3))
        (logits,) = slow.step([Row.following(sequence, TOKENS[:100])], lambda: False)
        assert np.isfinite(logits).all() and sequence.length == 100
        sequence.truncate(0)
    sequence.close()


def test_the_wish_of_one_thread_does_not_end_the_step_of_another(slow: LlamaCppEngine) -> None:
    first, second = slow.open(1500, slow.regime(LONG)), slow.open(1500, slow.regime(LONG))
    (expected,) = slow.step([Row.following(second, TOKENS[:1500])])
    second.truncate(0)
    outcomes: dict[str, object] = {}

    def cancelled() -> None:
        try:
            slow.step([Row.following(first, TOKENS[:1500])], Turning(3))
        except Cancelled as error:
            outcomes["cancelled"] = error

    def wanted() -> None:
        (outcomes["wanted"],) = slow.step([Row.following(second, TOKENS[:1500])], lambda: False)

    threads = [threading.Thread(target=cancelled), threading.Thread(target=wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "cancelled" in outcomes and first.length == 0 and second.length == 1500
    np.testing.assert_allclose(outcomes["wanted"], expected, atol=2e-2)
    first.close()
    second.close()


def test_watching_threads_do_not_outlive_their_step(slow: LlamaCppEngine) -> None:
    sequence = slow.open(100, slow.regime(LONG))
    before = threading.active_count()
    for _ in range(20):
        slow.step([Row.following(sequence, TOKENS[:50])], lambda: False)
        sequence.truncate(0)
    assert threading.active_count() == before
    sequence.close()


class Hanging(Stored):
    """A feed whose source does not answer until it is let go."""

    began: threading.Event
    released: threading.Event
    ended: threading.Event

    def fill(self, layer: int, out: LayerKv) -> None:
        self.began.set()
        self.released.wait(60)
        super().fill(layer, out)
        if layer == self.layers[-1]:
            self.ended.set()


def hanging(engine: LlamaCppEngine, count: int) -> Hanging:
    sequence = engine.open(count, engine.regime(count))
    engine.step([Row.following(sequence, TOKENS[:count])])
    feed = Hanging(sequence.export(Span(0, count)))
    feed.began, feed.released, feed.ended = threading.Event(), threading.Event(), threading.Event()
    sequence.close()
    return feed


def test_a_feed_that_hangs_is_left_behind(engine: LlamaCppEngine) -> None:
    feed = hanging(engine, 40)
    sequence = engine.open(100, engine.regime(100))
    with pytest.raises(Cancelled):
        engine.step([Row(sequence, TOKENS[40:60], range(40, 60), feeds=(feed,))], feed.began.is_set)
    assert sequence.length == 0 and not feed.ended.is_set()

    (cold,) = engine.step([Row.following(sequence, TOKENS[:60])])  # the engine goes on while it still hangs
    sequence.truncate(0)
    sound = Stored(feed.kv)
    (warm,) = engine.step([Row(sequence, TOKENS[40:60], range(40, 60), feeds=(sound,))])
    np.testing.assert_allclose(warm, cold, atol=1e-2)

    feed.kv = garbage_like(feed)
    feed.released.set()  # what it writes now goes nowhere
    assert feed.ended.wait(30)
    sequence.truncate(0)
    (after,) = engine.step([Row(sequence, TOKENS[40:60], range(40, 60), feeds=(Stored(sound.kv),))])
    np.testing.assert_array_equal(after, warm)
    sequence.close()


def garbage_like(feed: Stored):
    from dataclasses import replace

    layers = tuple(LayerKv(np.full_like(x.keys, 7), np.full_like(x.values, 3)) for x in feed.kv.layers)
    return replace(feed.kv, layers=layers)


def test_a_late_writer_does_not_spoil_a_step_that_runs_meanwhile(engine: LlamaCppEngine) -> None:
    """The bytes of the one that was left behind are its own: the next request brings its KV elsewhere."""
    feed = hanging(engine, 40)
    sequence = engine.open(100, engine.regime(100))
    with pytest.raises(Cancelled):
        engine.step([Row(sequence, TOKENS[40:60], range(40, 60), feeds=(feed,))], feed.began.is_set)
    sound = feed.kv
    feed.kv = garbage_like(feed)

    class Racing(Stored):
        def fill(self, layer: int, out: LayerKv) -> None:
            super().fill(layer, out)
            if layer == self.layers[0]:
                feed.released.set()
                assert feed.ended.wait(30)

    (got,) = engine.step([Row(sequence, TOKENS[40:60], range(40, 60), feeds=(Racing(sound),))])
    sequence.truncate(0)
    (expected,) = engine.step([Row(sequence, TOKENS[40:60], range(40, 60), feeds=(Stored(sound),))])
    np.testing.assert_array_equal(got, expected)
    sequence.close()


def test_a_feed_that_fails_leaves_the_sequence_as_it_was(engine: LlamaCppEngine) -> None:
    layers = len(engine.layout.layers)
    sequence = engine.open(100, engine.regime(100))
    (expected,) = engine.step([Row.following(sequence, TOKENS[:60])])
    sequence.truncate(10)
    for broken in range(layers):
        with pytest.raises(OSError, match="the disk is gone"):
            feeds = (Failing(Span(10, 40), layers, broken),)
            engine.step([Row(sequence, TOKENS[40:60], range(40, 60), feeds=feeds)])
        assert sequence.length == 10
    (got,) = engine.step([Row.following(sequence, TOKENS[10:60])])
    np.testing.assert_allclose(got, expected, atol=1e-2)
    sequence.close()


@pytest.mark.parametrize("architecture", OPAQUE)
def test_a_cancelled_step_of_an_opaque_model_leaves_nothing(architecture: str, tmp_path: Path, load: Load) -> None:
    """It has no spans: what was present goes too, and the sequence can be filled anew."""
    write, _ = OPAQUE[architecture]
    engine = load(write(tmp_path / "opaque.gguf", context=LONG), swa_full=False)
    sequence = engine.open(LONG, engine.regime(LONG))
    (expected,) = engine.step([Row.following(sequence, TOKENS[:30])])
    snapshot = sequence.snapshot()
    kv = sequence.export(Span(0, 30)) if engine.capabilities.split else None
    with pytest.raises(Cancelled):
        engine.step([Row.following(sequence, TOKENS[30:])], Turning(3))
    assert sequence.length == 0
    (again,) = engine.step([Row.following(sequence, TOKENS[:30])])
    np.testing.assert_array_equal(again, expected)
    sequence.truncate(0)
    sequence.restore(snapshot, 30, kv)
    engine.step([Row.following(sequence, TOKENS[30:40])])
    assert sequence.length == 40


def test_feeds_are_refused_by_opaque_models(opaque_files: dict[str, Path], load: Load) -> None:
    engine = load(opaque_files["lfm2"])
    sequence = engine.open(50, engine.regime(50))
    with pytest.raises(StepRefused, match="snapshot"):
        engine.step([Row(sequence, TOKENS[4:6], range(4, 6), feeds=(Garbage(Span(0, 4), len(engine.layout.layers)),))])
    assert sequence.length == 0
