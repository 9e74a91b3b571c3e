"""QKV reuse as published: known rows are not projected, and nothing else changes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.baselines.qkv_engine import Qkv, QkvReuse
from rekindle.core.kv import Kv, Span
from rekindle.engine.base import Row
from rekindle.engine.hf.device import choose_placement
from rekindle.engine.hf.engine import HfEngine
from rekindle.errors import StepRefused, UnsupportedModel
from tests.tiny import FAMILIES, OTHERS, VOCABULARY, WINDOW, byte_tokenizer, tiny_engine, tiny_model

PROMPT = 3 * WINDOW - 5  # past the sliding window
KNOWN = 2 * WINDOW + 1
NEW = 12
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")

pytestmark = pytest.mark.usefixtures("one_thread")


def tokens_of(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY - 1, count).tolist()


TOKENS = tokens_of(PROMPT)


@pytest.fixture(scope="module", params=sorted({**FAMILIES, **OTHERS}))
def engine(request: pytest.FixtureRequest) -> HfEngine:
    return tiny_engine(request.param)


@pytest.fixture(scope="module")
def llama() -> HfEngine:
    return tiny_engine("llama")


@contextmanager
def counted(engine: HfEngine) -> Iterator[Counter[str]]:
    """How many rows go through each linear layer."""
    rows: Counter[str] = Counter()

    def count(name: str, module: nn.Linear) -> torch.utils.hooks.RemovableHandle:
        def note(_: nn.Module, given: tuple[torch.Tensor, ...], __: torch.Tensor) -> None:
            rows[name] += given[0].shape[-2]

        return module.register_forward_hook(note)

    handles = [count(name, module) for name, module in engine.linears.items()]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def plain(engine: HfEngine, tokens: list[int]) -> tuple[np.ndarray, Kv]:
    with engine.open(len(tokens), "plain") as sequence:
        (logits,) = engine.step([Row.following(sequence, tokens)])
        return logits, sequence.export(Span(0, len(tokens)))


def reused(engine: HfEngine, tokens: list[int], known: Qkv | None) -> tuple[np.ndarray, Kv, Qkv]:
    with engine.open(len(tokens), "plain") as sequence:
        logits, qkv = QkvReuse(engine).prefill(sequence, tokens, known)
        assert sequence.length == len(tokens)
        return logits, sequence.export(Span(0, len(tokens))), qkv


def recorded(engine: HfEngine, tokens: list[int]) -> Qkv:
    return reused(engine, tokens, None)[2]


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def assert_same_kv(got: Kv, expected: Kv) -> None:
    for one, other in zip(got.layers, expected.layers, strict=True):
        assert_close(one.keys, other.keys)
        assert_close(one.values, other.values)


def greedy(engine: HfEngine, tokens: list[int], known: Qkv | None, *, spliced: bool) -> list[int]:
    found: list[int] = []
    with engine.open(len(tokens) + NEW, "plain") as sequence:
        if spliced:
            logits, _ = QkvReuse(engine).prefill(sequence, tokens, known)
        else:
            (logits,) = engine.step([Row.following(sequence, tokens)])
        while True:
            found.append(int(logits[-1].argmax()))
            if len(found) == NEW:
                return found
            (logits,) = engine.step([Row.following(sequence, found[-1:])])


def test_recording_changes_nothing(engine: HfEngine) -> None:
    expected, kv = plain(engine, TOKENS)
    logits, found, qkv = reused(engine, TOKENS, None)
    np.testing.assert_array_equal(logits, expected)
    for one, other in zip(found.layers, kv.layers, strict=True):
        np.testing.assert_array_equal(one.keys, other.keys)
        np.testing.assert_array_equal(one.values, other.values)
    assert qkv.tokens == PROMPT
    assert len(qkv.layers) == len(engine.layout.layers)


@pytest.mark.parametrize("length", [1, KNOWN, PROMPT - 1, PROMPT])
def test_a_known_prefix_gives_the_logits_and_the_kv_of_plain_computing(engine: HfEngine, length: int) -> None:
    known = recorded(engine, [*TOKENS[:length], *tokens_of(5, seed=2)]).slice(0, length)
    expected, kv = plain(engine, TOKENS)
    logits, found, qkv = reused(engine, TOKENS, known)
    assert_close(logits, expected)
    assert_same_kv(found, kv)
    for one, other in zip(qkv.layers, recorded(engine, TOKENS).layers, strict=True):
        for a, b in zip(one, other, strict=True):
            assert_close(a.numpy(), b.numpy())


def test_decoding_goes_on_as_ever(engine: HfEngine) -> None:
    known = recorded(engine, TOKENS).slice(0, KNOWN)
    assert greedy(engine, TOKENS, known, spliced=True) == greedy(engine, TOKENS, None, spliced=False)


def test_only_projections_are_spared_and_only_of_known_tokens(engine: HfEngine) -> None:
    known = recorded(engine, TOKENS).slice(0, KNOWN)
    with counted(engine) as usual:
        plain(engine, TOKENS)
    with counted(engine) as spared:
        reused(engine, TOKENS, known)
    for name, rows in usual.items():
        # The experts of a mixture see the tokens that were routed to them: in all as many as before.
        projects = name.rpartition(".")[2] in PROJECTIONS
        assert spared[name] == rows - (KNOWN if projects else 0), name
    assert sum(name.rpartition(".")[2] in PROJECTIONS for name in usual) in (4, 12)  # fused or not, of 4 layers


def test_what_is_known_is_what_counts(llama: HfEngine) -> None:
    """QKV of other tokens gives other logits: the stored rows are used, not computed again in secret."""
    wrong = recorded(llama, tokens_of(KNOWN, seed=3))
    expected, _ = plain(llama, TOKENS)
    assert np.abs(reused(llama, TOKENS, wrong)[0] - expected).max() > 1e-2 * np.abs(expected).max()


def test_what_was_spliced_can_be_known_in_turn(llama: HfEngine) -> None:
    short = recorded(llama, TOKENS[:10])
    longer = reused(llama, TOKENS[:30], short)[2]
    logits, kv, _ = reused(llama, TOKENS, Qkv.concat([longer.slice(0, 7), longer.slice(7, 30)]))
    expected, own = plain(llama, TOKENS)
    assert_close(logits, expected)
    assert_same_kv(kv, own)


def test_what_a_model_clamps_in_place_is_clamped_once() -> None:
    engine = tiny_engine("olmo", clip_qkv=0.5)
    qkv = recorded(engine, TOKENS)
    assert max(float(rows.abs().max()) for layer in qkv.layers for rows in layer) == 0.5
    logits, kv, _ = reused(engine, TOKENS, qkv.slice(0, KNOWN))
    expected, own = plain(engine, TOKENS)
    assert_close(logits, expected)
    assert_same_kv(kv, own)


def test_brain_floats_come_back_as_they_were() -> None:
    model = tiny_model("qwen2").to(torch.bfloat16)
    engine = HfEngine(model, byte_tokenizer(), name="brain", placement=choose_placement("cpu", "bfloat16"))
    qkv = recorded(engine, TOKENS)
    assert {rows.dtype for layer in qkv.layers for rows in layer} == {torch.bfloat16}
    logits, _, again = reused(engine, TOKENS, qkv.slice(0, KNOWN))
    expected, _ = plain(engine, TOKENS)
    assert np.abs(logits - expected).max() <= 0.05 * np.abs(expected).max()
    for one, other in zip(again.layers[0], qkv.layers[0], strict=True):
        assert torch.equal(one[:KNOWN], other[:KNOWN])


def test_wrong_lengths_and_other_models_are_refused(llama: HfEngine) -> None:
    qkv = recorded(llama, TOKENS)
    wider = recorded(tiny_engine("llama", head_dim=16), TOKENS)
    shallow = Qkv(qkv.layers[:-1])
    uneven = Qkv(((*qkv.layers[0][:2], qkv.layers[0][2][:-1]), *qkv.layers[1:]))
    other_type = Qkv(tuple(tuple(rows.double() for rows in layer) for layer in qkv.layers))
    reuse = QkvReuse(llama)
    with llama.open(PROMPT, "plain") as sequence:
        for known in (wider, shallow, uneven, other_type, Qkv.concat([qkv, qkv.slice(0, 1)])):
            with pytest.raises(StepRefused):
                reuse.prefill(sequence, TOKENS, known)
        assert sequence.length == 0
        logits, _ = reuse.prefill(sequence, TOKENS, qkv)
        with pytest.raises(StepRefused, match="empty"):
            reuse.prefill(sequence, TOKENS, None)
    assert_close(logits, plain(llama, TOKENS)[0])


def test_parts_that_are_none_are_refused(llama: HfEngine) -> None:
    qkv = recorded(llama, TOKENS)
    for start, stop in ((-1, 2), (3, 2), (0, PROMPT + 1)):
        with pytest.raises(ValueError):
            qkv.slice(start, stop)
    with pytest.raises(ValueError):
        Qkv.concat([])
    with pytest.raises(ValueError):
        Qkv.concat([qkv, Qkv(qkv.layers[:-1])])
    assert qkv.slice(0, 10).nbytes == 10 * qkv.nbytes // PROMPT


def test_a_step_that_fails_leaves_no_trace(llama: HfEngine) -> None:
    qkv = recorded(llama, TOKENS)
    with llama.open(PROMPT, "plain") as sequence:
        with pytest.raises(StepRefused, match="vocabulary"):
            QkvReuse(llama).prefill(sequence, [*TOKENS[:-1], VOCABULARY], qkv.slice(0, KNOWN))
        assert sequence.length == 0
    before = plain(llama, TOKENS)[0]
    with counted(llama) as rows:
        np.testing.assert_array_equal(plain(llama, TOKENS)[0], before)
    assert rows["model.layers.0.self_attn.k_proj"] == PROMPT


def test_steps_of_other_threads_pass_by(llama: HfEngine) -> None:
    expected, _ = plain(llama, TOKENS)
    others: list[np.ndarray] = []
    known = recorded(llama, TOKENS).slice(0, KNOWN)
    with QkvReuse(llama)._spliced(known):
        thread = threading.Thread(target=lambda: others.append(plain(llama, TOKENS)[0]))
        thread.start()
        thread.join()
    np.testing.assert_array_equal(others[0], expected)


def test_a_model_without_such_projections_is_refused(llama: HfEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    linears = {name: module for name, module in llama.linears.items() if "layers.2.self_attn.v_proj" not in name}
    monkeypatch.setattr(HfEngine, "linears", linears)
    with pytest.raises(UnsupportedModel):
        QkvReuse(llama)
