"""Steps of fixed shape: whatever is loaded into them, they compute what any other step computes.

Recording needs CUDA (`test_cuda.py`); here the same passes run one kernel at a time, with plain attention.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rekindle.core.kv import Span
from rekindle.engine.base import Row
from rekindle.engine.hf import cuda_graph
from rekindle.engine.hf.attention import ScoreParams
from rekindle.engine.hf.cuda_graph import GraphRecorder, Lengths, StaticPass, _RecordedStep, replayable
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.row_checks import check_rows
from tests.engine.contract import Stored
from tests.tiny import WINDOW, tiny_engine

TOKENS = np.random.default_rng(4).integers(3, 250, 60).tolist()


def plain_attention(query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, scores: ScoreParams) -> Tensor:
    """What the kernel promises, written out."""
    used, count = int(lengths.used), query.shape[0]
    assert lengths.query_edges.tolist() == [0, count] and lengths.key_edges.tolist() == [0, keys.shape[0]]
    own = torch.arange(used - count, used)[:, None]
    seen = torch.arange(used)[None]
    visible = seen <= own
    if scores.window is not None:
        visible &= seen > own - scores.window
    times = query.shape[1] // keys.shape[1]
    k, v = (kept[:used].repeat_interleave(times, dim=1) for kept in (keys, values))
    products = torch.einsum("qhd,khd->hqk", query, k) * scores.scaling
    weights = torch.softmax(products.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt_neox"])
def engine(request: pytest.FixtureRequest) -> HfEngine:
    return tiny_engine(request.param)


def run_static(engine: HfEngine, rows: list[Row]) -> np.ndarray:
    """The rows through a fresh step of fixed shape."""
    decoder = engine._live()
    checked = check_rows(rows, layers=len(engine.layout.layers), vocabulary_size=decoder.vocabulary_size)
    shapes = [replayable(row, engine.context_tokens) for row in checked]
    step = StaticPass(shapes, "plain", plain_attention)
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
        run_static(engine, [Row.following(static, TOKENS[20:23])])  # padded to 16: writes up to position 35
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
        step = step or StaticPass([replayable(rows[0], 512)], "plain", plain_attention)
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

    def shape(row: Row, longest: int = 512) -> object:
        return replayable(check_rows([row], layers=4, vocabulary_size=320)[0], longest)

    assert shape(Row.following(sequence, [5])) == (sequence.buffers, 1, None)
    assert shape(Row.following(sequence, [5] * 9)) == (sequence.buffers, 16, None)
    assert shape(Row.following(sequence, [5] * 64)) == (sequence.buffers, 64, None)
    assert shape(Row.following(sequence, [5] * 65)) is None
    assert shape(Row.following(sequence, [5] * 9, logits="all")) is None
    assert shape(Row(sequence, [5], [7])) is None, "recomputing inside what is there"
    assert shape(Row(sequence, [5, 6], [19, 20])) is None
    fresh = engine.open(100, "plain")
    assert shape(Row(fresh, [5], [20], feeds=(Stored(kv),))) is None
    assert shape(Row.following(sequence, [5] * 9), longest=30) is None, "padding would leave the context"
    assert GraphRecorder.for_decoder(engine._live()) is None, "only CUDA records"


class Replayed(GraphRecorder):
    """A recorder whose recordings are run one kernel at a time."""

    def _record(self, step: StaticPass) -> Any:
        recorder = self

        class Graph:
            def replay(self) -> None:
                step.begin()
                recorded.logits.copy_(recorder._decoder.run(step))

        step.begin()
        recorded = _RecordedStep(step, Graph(), self._decoder.run(step).clone())
        return recorded


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> HfEngine:
    """An engine that replays, and a longrope model whose frequencies change past 40 tokens."""
    monkeypatch.setattr(cuda_graph, "flash_attention", plain_attention)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 5.0, 7.0],
        "original_max_position_embeddings": 40,
    }
    engine = tiny_engine("phi3", rope_parameters=rope, original_max_position_embeddings=40, sliding_window=None)
    engine._recorder = Replayed(engine._live())
    engine._pool.on_drop = engine._recorder.forget
    return engine


def test_padding_never_crosses_into_another_regime(replaying: HfEngine) -> None:
    """Two tokens at position 28 would be padded to 44: past the border the keys of all would be rotated wrongly."""
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


def test_a_step_is_recorded_the_second_time_and_forgotten_with_its_buffers(replaying: HfEngine) -> None:
    recorder = replaying._recorder
    counts = []
    with replaying.open(100, "short") as sequence:
        for token in (5, 6, 7):
            replaying.step([Row.following(sequence, [token])])
            counts.append(len(recorder._steps))
        buffers = sequence.buffers
    assert counts == [0, 1, 1]
    recorder.forget(buffers)
    assert not recorder._steps and not recorder._asked


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
    sequences = [replaying.open(10, "short") for _ in range(12)]
    for first, second in permutations(sequences, 2):
        for sequence in (first, second):
            sequence.truncate(0)
        for _ in range(2):
            replaying.step([Row.following(first, [5]), Row.following(second, [6])])
    assert len(replaying._recorder._steps) <= 16 and len(replaying._recorder._asked) <= 16
