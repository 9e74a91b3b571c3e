"""Steps of fixed shape: whatever is loaded into them, they compute what any other step computes.

Recording needs CUDA (`test_cuda.py`); here the same passes run one kernel at a time, with plain attention.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rekindle.core.kv import Span
from rekindle.engine.base import Row, StayingFeed
from rekindle.engine.hf.attention import ScoreParams
from rekindle.engine.hf.cuda_graph import GraphRecorder, LookPass, RowShape, StaticPass, _RecordedStep, replayable
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.hooks import AttentionMap
from rekindle.engine.row_checks import check_rows
from rekindle.errors import Cancelled
from tests.engine.contract import Failing, Garbage, Stored
from tests.engine.hf.test_rope_shift import Hanging
from tests.tiny import WINDOW, tiny_engine

TOKENS = np.random.default_rng(4).integers(3, 250, 60).tolist()


class PlainPass(StaticPass):
    """A step of fixed shape with what the kernels promise, written out."""

    def load(self, rows: Any) -> None:
        super().load(rows)
        self.buffers = [row.row.sequence.buffers for row in rows]
        for table, own in zip(self._tables.tolist(), self.buffers, strict=True):
            assert table == [*(half.data_ptr() for half in (*own.keys, *own.values)), own.keys[0].stride(1)]

    def _write(self, row: int, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        count = len(places.unique())  # those that repeat are padding
        self.buffers[row].keys[layer].index_copy_(2, places[:count], key[:, :, :count])
        self.buffers[row].values[layer].index_copy_(2, places[:count], value[:, :, :count])

    def _attend(self, row: int, layer: int, places: Tensor, query: Tensor, scores: ScoreParams) -> Tensor:
        weights, values = self._weights(row, layer, places, query, scores)
        return weights @ values

    def _weights(
        self, row: int, layer: int, places: Tensor, query: Tensor, scores: ScoreParams
    ) -> tuple[Tensor, Tensor]:
        used = int(places[-1]) + 1
        seen = torch.arange(used)[None]
        visible = seen <= places[:, None]
        if scores.window is not None:
            visible &= seen > places[:, None] - scores.window
        own = self.buffers[row]
        times = query.shape[1] // own.keys[layer].shape[1]
        keys, values = (half[layer][:, :, :used].repeat_interleave(times, dim=1) for half in (own.keys, own.values))
        products = query @ keys.transpose(2, 3) * scores.scaling
        return torch.softmax(products.masked_fill(~visible, float("-inf")), dim=-1), values


class PlainLookPass(PlainPass, LookPass):
    """The same, and what the queries attend to."""

    def _attend(self, row: int, layer: int, places: Tensor, query: Tensor, scores: ScoreParams) -> Tensor:
        weights, values = self._weights(row, layer, places, query, scores)
        if layer in self._counted:
            first, stop = self._asked.tolist()
            norms, number = values[0].norm(dim=-1), layer - self._counted.start
            received = (weights[0, :, first:stop].mean(dim=1) * norms).amax(dim=0)
            self._seen[number, : len(received)] = received
            self._norms[number] = 0.0
            self._norms[number, 0] = norms.sum() * self._kv_heads[layer] / len(norms)
        return weights @ values


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt_neox"])
def engine(request: pytest.FixtureRequest) -> HfEngine:
    return tiny_engine(request.param)


def run_static(engine: HfEngine, rows: list[Row]) -> np.ndarray:
    """The rows through a fresh step of fixed shape."""
    decoder = engine._live()
    checked = check_rows(rows, layers=len(engine.layout.layers), vocabulary_size=decoder.vocabulary_size)
    shapes = [replayable(row) for row in checked]
    step = PlainPass(shapes, "plain", engine.layout, decoder.device)
    step.load(checked)
    step.begin()
    return decoder.run(step).numpy()


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 40])
def test_a_static_step_computes_what_any_step_computes(engine: HfEngine, count: int) -> None:
    start = WINDOW + 3
    end = start + count
    with engine.open(120, "plain") as plain, engine.open(120, "plain") as static:
        for sequence in (plain, static):
            engine.step([Row.following(sequence, TOKENS[:start], logits="none")])
        (expected,) = engine.step([Row.following(plain, TOKENS[start:end])])
        got = run_static(engine, [Row.following(static, TOKENS[start:end])])
        np.testing.assert_allclose(got, expected, atol=2e-5)
        static.extend(end)
        for new, old in zip(static.export(Span(0, end)).layers, plain.export(Span(0, end)).layers, strict=True):
            np.testing.assert_allclose(new.keys, old.keys, atol=1e-5)
            np.testing.assert_allclose(new.values, old.values, atol=1e-5)


def test_padding_leaves_no_trace_in_what_follows(engine: HfEngine) -> None:
    with engine.open(120, "plain") as plain, engine.open(120, "plain") as static:
        for sequence in (plain, static):
            engine.step([Row.following(sequence, TOKENS[:20], logits="none")])
        run_static(engine, [Row.following(static, TOKENS[20:23])])  # padded to 16
        static.extend(23)
        engine.step([Row.following(plain, TOKENS[20:23], logits="none")])
        rest = [engine.step([Row.following(s, TOKENS[23:50], logits="all")])[0] for s in (plain, static)]
    np.testing.assert_allclose(rest[0], rest[1], atol=2e-5)


def test_a_step_is_used_again_with_other_tokens(engine: HfEngine) -> None:
    decoder = engine._live()
    sequence = engine.open(120, "plain")
    step: StaticPass | None = None
    for token, length in ((5, 20), (9, 33), (7, 21)):
        sequence.truncate(0)
        engine.step([Row.following(sequence, TOKENS[:length], logits="none")])
        rows = check_rows([Row.following(sequence, [token, token + 1])], layers=4, vocabulary_size=320)
        step = step or PlainPass([replayable(rows[0])], "plain", engine.layout, decoder.device)
        step.load(rows)
        step.begin()
        got = decoder.run(step).numpy()
        (expected,) = engine.step([Row.following(sequence, [token, token + 1])])
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_rows_of_different_lengths_share_a_static_step(engine: HfEngine) -> None:
    sequences = [engine.open(120, "plain") for _ in range(3)]
    starts, counts = (5, 40, 22), (1, 3, 20)
    for sequence, start in zip(sequences, starts, strict=True):
        engine.step([Row.following(sequence, TOKENS[:start], logits="none")])
    rows = [Row.following(s, TOKENS[a : a + n]) for s, a, n in zip(sequences, starts, counts, strict=True)]
    got = run_static(engine, rows)
    expected = np.concatenate(engine.step(rows))
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_what_cannot_be_replayed_is_not() -> None:
    engine = tiny_engine("llama")
    sequence = engine.open(100, "plain")
    engine.step([Row.following(sequence, TOKENS[:20], logits="none")])
    kv = sequence.export(Span(0, 20))

    def shape(row: Row) -> object:
        return replayable(check_rows([row], layers=4, vocabulary_size=320)[0])

    assert shape(Row.following(sequence, [5])) == RowShape(1)
    assert shape(Row.following(sequence, [5] * 9)) == RowShape(16)
    assert shape(Row.following(sequence, [5] * 64)) == RowShape(64)
    assert shape(Row.following(sequence, [5] * 65)) is None
    assert shape(Row.following(sequence, [5] * 9, logits="all")) is None
    assert shape(Row(sequence, [5, 6], [7, 20])) == RowShape(16), "recomputing inside what is there"
    assert shape(look_row(sequence, [5] * 9)) == RowShape(128, look=(3, 1, 3))
    assert shape(look_row(sequence, [5] * 9, layers=None)) is None
    assert shape(look_row(sequence, [5] * 9, queries=Span(20, 25))) is None
    fresh = engine.open(100, "plain")
    assert shape(Row(fresh, [5], [20], feeds=(Stored(kv),))) is None
    assert GraphRecorder.for_decoder(engine._live(), 512) is None, "only CUDA records"


def look_row(sequence: Any, tokens: list[int], layers: range | None = range(1, 3), queries: Span | None = None) -> Row:
    """A row of the next tokens that looks ahead."""
    row = Row.following(sequence, tokens, logits="none")
    asked = queries or Span(int(row.positions[0]), int(row.positions[-1]) + 1)
    return replace(row, until=3, gaze=AttentionMap(asked, lambda _: None, layers))


class Replayed(GraphRecorder):
    """A recorder whose recordings are run one kernel at a time."""

    static_pass, look_pass = PlainPass, PlainLookPass

    def _record(self, step: StaticPass) -> Any:
        recorder = self

        class Graph:
            def replay(self) -> None:
                step.begin()
                recorded.logits.copy_(recorder._decoder.run(step))

        step.begin()
        layers = len(self._decoder.layout.layers) if step.until is None else step.until
        recorded = _RecordedStep(step, [(layers, Graph())], self._decoder.run(step).clone())
        return recorded


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> HfEngine:
    """An engine that replays, and a longrope model whose frequencies change past 40 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 5.0, 7.0],
        "original_max_position_embeddings": 40,
    }
    engine = tiny_engine("phi3", rope_parameters=rope, original_max_position_embeddings=40, sliding_window=None)
    engine._recorder = Replayed(engine._live(), engine.context_tokens)
    return engine


def test_padding_never_crosses_into_another_regime(replaying: HfEngine) -> None:
    """Past 40 tokens the keys of all would be rotated wrongly."""
    expected: list[np.ndarray] = []
    for recorder in (None, replaying._recorder):
        replaying._recorder = recorder
        for turn in range(3):
            with replaying.open(40, "short") as sequence:
                replaying.step([Row.following(sequence, TOKENS[:20], logits="none")])
                steps = []
                for start in range(20, 40, 2):  # copied: on a CPU the logits are those of the recording itself
                    steps += [
                        row.copy() for row in replaying.step([Row.following(sequence, TOKENS[start : start + 2])])
                    ]
            if recorder is None and turn == 0:
                expected = steps
            for got, wanted in zip(steps, expected, strict=True):
                np.testing.assert_allclose(got, wanted, atol=3e-5)
    assert replaying._recorder._steps, "nothing was replayed"


def test_a_step_is_recorded_the_second_time_and_serves_every_context(replaying: HfEngine) -> None:
    recorder = replaying._recorder
    counts = []
    for tokens in (100, 100, 500):
        with replaying.open(tokens, "short") as sequence:
            replaying.step([Row.following(sequence, [5])])
            counts.append(len(recorder._steps))
    assert counts == [0, 1, 1]


def test_short_steps_are_recorded_before_the_first_request(replaying: HfEngine) -> None:
    with replaying.open(40, "short") as sequence:
        replaying._recorder.warm(sequence)
        assert sequence.length == 0
    looks = [(RowShape(n, look=(3, 0, 3)),) for n in (128, 192, 256, 512)]
    assert [rows for _, rows in replaying._recorder._steps] == [*((RowShape(n),) for n in (1, 16, 32, 64)), *looks]


@pytest.mark.parametrize("fed", [True, False])
def test_a_replayed_look_sees_what_a_computed_one_sees(replaying: HfEngine, fed: bool) -> None:
    """Behind KV that is present, or loaded for it; with tokens anywhere, which later rows adopt."""
    recorder, at = replaying._recorder, [7, 8, *range(20, 36)]
    with replaying.open(40, "short") as first:
        replaying.step([Row.following(first, TOKENS[:36], logits="none")])
        kv = first.export(Span(0, 20))
    seen: list[np.ndarray] = []
    for turn in range(4):
        replaying._recorder = recorder if turn else None
        with replaying.open(40, "short") as sequence:
            if not fed:
                replaying.step([Row.following(sequence, TOKENS[:20], logits="none")])
            gaze = AttentionMap(Span(24, 36), seen.append, range(1, 3))
            tokens, feeds = [TOKENS[position] for position in at], (Stored(kv),) if fed else ()
            (nothing,) = replaying.step([Row(sequence, tokens, at, "none", feeds, gaze=gaze, until=3)])
            assert len(nothing) == 0 and sequence.length == (0 if fed else 20)
            stays = (StayingFeed(Span(0, 20), range(4)),) if fed else ()
            (logits,) = replaying.step([Row(sequence, tokens, at, feeds=stays)])
            assert np.isfinite(logits).all() and sequence.length == 36
    assert any(shape.look for _, rows in recorder._steps for shape in rows), "nothing was replayed"
    for again in seen[1:]:
        np.testing.assert_allclose(again, seen[0], rtol=1e-4, atol=1e-6)


def test_a_short_question_behind_loaded_kv_is_replayed(replaying: HfEngine) -> None:
    with replaying.open(40, "short") as first:
        replaying.step([Row.following(first, TOKENS[:20], logits="none")])
        kv = first.export(Span(0, 20))
        (expected,) = replaying.step([Row.following(first, TOKENS[20:23])])
        expected = expected.copy()
    for turn in range(3):
        with replaying.open(40, "short") as second:
            row = Row(second, TOKENS[20:23], [20, 21, 22], feeds=(Stored(kv),))
            (got,) = replaying.step([row])
            assert second.length == 23
            np.testing.assert_allclose(got, expected, atol=3e-5)
            for new, old in zip(second.export(Span(0, 20)).layers, kv.layers, strict=True):
                np.testing.assert_array_equal(new.keys, old.keys)
        assert len(replaying._recorder._steps) == 1, turn


def test_a_short_question_behind_kv_that_is_lost_leaves_nothing(replaying: HfEngine) -> None:
    with replaying.open(40, "short") as sequence:
        for feeds in (
            (Failing(Span(0, 20), 4, broken=2),),
            (Garbage(Span(0, 10), 4), Failing(Span(10, 20), 4, broken=0)),
        ):
            with pytest.raises(OSError, match="disk is gone"):
                replaying.step([Row(sequence, TOKENS[20:23], [20, 21, 22], feeds=feeds)])
            assert sequence.length == 0
        with pytest.raises(Cancelled):
            row = Row(sequence, TOKENS[20:23], [20, 21, 22], feeds=(Hanging(Span(0, 20), 4),))
            replaying.step([row], row.feeds[0].begun.is_set)
        row.feeds[0].release.set()
        assert sequence.length == 0
        (got,) = replaying.step([Row.following(sequence, TOKENS[:9])])
        assert np.isfinite(got).all()


def test_what_cannot_be_recorded_is_computed_as_ever(replaying: HfEngine, caplog: pytest.LogCaptureFixture) -> None:
    def broken(step: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    replaying._recorder._record = broken
    with replaying.open(100, "short") as sequence:
        logits = [replaying.step([Row.following(sequence, [5])])[0] for _ in range(4)]
    assert all(np.isfinite(row).all() for row in logits)
    assert sum("will not be replayed" in message for message in caplog.messages) == 1


@pytest.mark.thorough
def test_recorded_steps_do_not_pile_up(replaying: HfEngine) -> None:
    sequences = [replaying.open(70, "short") for _ in range(4)]
    for counts in combinations_with_replacement((1, 9, 17, 33), 4):  # 35 steps: one serves rows in any order
        for _ in range(5):
            for sequence in sequences:
                sequence.truncate(0)
            rows = [Row.following(s, [5] * n) for s, n in zip(sequences, counts, strict=True)]
            replaying.step(rows)
    assert len(replaying._recorder._steps) == 32 and len(replaying._recorder._asked) <= 32
