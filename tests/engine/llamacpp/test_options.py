"""How a GGUF model is run: what makes no sense is refused with a sentence, the rest gives the same answers."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xllamacpp")

from rekindle import Session
from rekindle.cache.inflight import MemoryGate
from rekindle.core.kv import Span
from rekindle.engine.base import Row
from rekindle.engine.llamacpp.c_api import llama
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.llamacpp.options import KV_TYPES, MAX_SEQUENCES, LlamaOptions
from rekindle.errors import InvalidSetting, OutOfMemory, StepRefused
from tests.engine.contract import Stored
from tests.engine.llamacpp.alone import alone
from tests.engine.llamacpp.conftest import Load
from tests.tiny_gguf import CONTEXT, KV_HEADS, write_llama
from tests.tiny_gguf import DIM as HEAD_DIM

pytestmark = [pytest.mark.llamacpp]

TOKENS = np.random.default_rng(5).integers(3, 250, 300).tolist()


def logits_of(engine: LlamaCppEngine, tokens: list[int] = TOKENS) -> np.ndarray:
    sequence = engine.open(len(tokens), engine.regime(len(tokens)))
    (logits,) = engine.step([Row.following(sequence, tokens, logits="all")])
    sequence.close()
    return logits


def assert_near(got: np.ndarray, expected: np.ndarray, share: float = 2e-2) -> None:
    """But for the rounding of half floats, which some kernels for ARM also add up."""
    assert np.abs(got - expected).max() <= share * np.abs(expected).max()


@pytest.fixture(scope="module")
def reference(engine: LlamaCppEngine) -> np.ndarray:
    return logits_of(engine)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"kv_type": "f61"}, "kv_type='f61' is unknown.*f16"),
        ({"kv_type": "int4"}, "kv_type='int4' is unknown"),
        ({"kv_type": ""}, "kv_type='' is unknown"),
        ({"threads": 0}, "threads=0 makes no sense. Use 1 or more"),
        ({"threads": -1}, "threads=-1 makes no sense"),
        ({"batch_tokens": 0}, "batch_tokens=0 makes no sense"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens=0 makes no sense"),
        ({"kv_tokens": 0}, "kv_tokens=0 makes no sense"),
        ({"sequences": 0}, "sequences=0 makes no sense"),
        ({"kv_type": "q8_0", "flash_attention": "off"}, "needs flash attention"),
        ({"gpu_layers": -1}, "gpu_layers=-1 makes no sense"),
        ({"device": "cpu", "gpu_layers": 3}, "contradicts gpu_layers=3"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_with_a_sentence(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        LlamaOptions(**wrong)


@pytest.mark.parametrize("name", ["threads", "batch_tokens", "micro_batch_tokens", "kv_tokens"])
def test_numbers_that_llamacpp_cannot_hold_are_refused(name: str) -> None:
    """Else they wrap around: 2**32 + 256 would be 256."""
    with pytest.raises(InvalidSetting, match=name):
        LlamaOptions(**{name: 2**32 + 256})


@pytest.mark.parametrize("context", [0, -1, CONTEXT + 1, 10**9])
def test_a_context_out_of_range_is_refused_with_the_range(context: int, tiny: Path, load: Load) -> None:
    with pytest.raises(InvalidSetting, match=f"--context {context} is out of range: this model takes 1 to {CONTEXT}"):
        load(tiny, context_tokens=context)


def test_more_sequences_than_llamacpp_takes_are_refused_by_name(tiny: Path, load: Load) -> None:
    engine = load(tiny, sequences=MAX_SEQUENCES)
    assert engine.capabilities.spans
    parameters = llama.llama_context_default_params()
    parameters.n_seq_max = MAX_SEQUENCES + 2  # with the spare one
    assert not llama.llama_init_from_model(engine.loaded_model.pointer, parameters)
    with pytest.raises(InvalidSetting, match="sequences"):
        load(tiny, sequences=MAX_SEQUENCES + 1)


@pytest.mark.skipif(llama.llama_supports_gpu_offload(), reason="this build has a GPU")
@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_a_gpu_that_is_not_there_is_refused(device: str, tiny: Path, load: Load) -> None:
    with pytest.raises(InvalidSetting, match="has no GPU. Use device='cpu'"):
        load(tiny, device=device)
    assert load(tiny, device="auto").device == "cpu"


@pytest.mark.parametrize("context", [1, 7, 100, CONTEXT])
def test_a_context_is_exactly_as_long_as_asked(context: int, tiny: Path, load: Load) -> None:
    engine = load(tiny, context_tokens=context)
    assert engine.context_tokens == context
    sequence = engine.open(context, engine.regime(context))
    engine.step([Row.following(sequence, TOKENS[:1] * context)])
    with pytest.raises(StepRefused, match="beyond the sequence's capacity"):
        engine.step([Row.following(sequence, [1])])
    with pytest.raises(StepRefused, match="does not fit the context"):
        sequence.reserve(context + 1)
    with pytest.raises(StepRefused, match="does not fit the context"):
        engine.open(context + 1, engine.regime(context))


def test_a_context_is_as_long_as_the_model_and_half_of_the_free_memory_allow(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_llama(tmp_path / "long.gguf", context=1 << 20)
    monkeypatch.setattr("rekindle.engine.llamacpp.engine.free_memory", lambda: 64 << 20)
    some, without_scores = load(path).context_tokens, load(path, flash_attention="on").context_tokens
    assert 512 < some < without_scores < 1 << 20, "without flash attention, scores take memory, too"
    assert load(path, kv_type="q8_0", flash_attention="on").context_tokens > without_scores
    assert load(path, context_tokens=9000).context_tokens == 9000
    assert load(write_llama(tmp_path / "short.gguf", context=2048)).context_tokens == 2048


def test_a_context_that_cannot_be_made_is_halved_unless_somebody_chose_it(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_llama(tmp_path / "long.gguf", context=1 << 16)
    monkeypatch.setattr("rekindle.engine.llamacpp.engine.free_memory", lambda: 8 << 30)
    make = llama.llama_init_from_model

    def scarce(model: Any, parameters: Any) -> Any:
        return make(model, parameters) if parameters.n_ctx < 10_000 else None

    monkeypatch.setattr(llama, "llama_init_from_model", scarce)
    assert load(path).context_tokens == 1 << 12
    with pytest.raises(OutOfMemory, match="shorter context"):
        load(path, context_tokens=1 << 15)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_every_kv_type_works_and_is_named(kv_type: str, tiny: Path, load: Load, reference: np.ndarray) -> None:
    engine = load(tiny, kv_type=kv_type)
    got = logits_of(engine)
    if kv_type in ("f16", "f32"):
        assert_near(got, reference)
    assert np.corrcoef(got.ravel(), reference.ravel())[0, 1] > 0.8, "random weights do not like few bits"
    assert engine.identity(engine.regime(1)).dtype == kv_type
    bits = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5}[kv_type]
    assert engine.layout.token_bytes == 4 * 2 * KV_HEADS * HEAD_DIM * bits / 8


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_kv_of_every_type_goes_out_and_in(kv_type: str, tiny: Path, load: Load) -> None:
    engine = load(tiny, kv_type=kv_type)
    first = engine.open(120, engine.regime(120))
    engine.step([Row.following(first, TOKENS[:100])])
    kv = first.export(Span(0, 100))
    (expected,) = engine.step([Row.following(first, TOKENS[100:120])])
    second = engine.open(120, engine.regime(120))
    (got,) = engine.step([Row(second, TOKENS[100:120], range(100, 120), feeds=(Stored(kv),))])
    assert_near(got, expected, 1e-5)
    for new, old in zip(second.export(Span(0, 100)).layers, kv.layers, strict=True):
        np.testing.assert_array_equal(new.keys, old.keys)
        np.testing.assert_array_equal(new.values, old.values)


@pytest.mark.parametrize("flash", ["on", "off", "auto"])
def test_flash_attention_gives_the_same_but_for_rounding(
    flash: str, tiny: Path, load: Load, reference: np.ndarray
) -> None:
    engine = load(tiny, flash_attention=flash)
    assert engine.flash_attention == ("off" if flash == "auto" else flash), "on a CPU it is slower"
    assert_near(logits_of(engine), reference)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same(threads: int, tiny: Path, load: Load, reference: np.ndarray) -> None:
    engine = load(tiny, threads=threads)
    assert engine.threads == threads
    assert_near(logits_of(engine), reference)


def test_as_many_threads_as_cores_unless_told(tiny: Path, load: Load) -> None:
    assert 1 <= load(tiny, threads=None).threads <= (os.cpu_count() or 1)


@pytest.mark.parametrize("batch, micro", [(65, 512), (100, 7), (300, 13), (2048, 1), (10**6, 10**6)])
def test_batch_sizes_change_nothing_but_rounding(
    batch: int, micro: int, tiny: Path, load: Load, reference: np.ndarray
) -> None:
    engine = load(tiny, batch_tokens=batch, micro_batch_tokens=micro)
    assert engine.prefill_tokens <= batch
    assert_near(logits_of(engine), reference)
    many = [engine.open(50, engine.regime(50)) for _ in range(3)]
    rows = engine.step([Row.following(s, TOKENS[: 20 + i], logits="all") for i, s in enumerate(many)])
    for i, got in enumerate(rows):
        assert_near(got, reference[: 20 + i])


@pytest.mark.parametrize("batch, micro", [(1, 1), (16, 7), (64, 64)])
def test_small_batches_change_nothing_either(
    batch: int, micro: int, tiny: Path, reference: np.ndarray, tmp_path: Path
) -> None:
    """In a process of its own: llama.cpp ends the process for batches smaller than its number of sequences."""
    code = f"""
        engine = load({str(tiny)!r}, batch_tokens={batch}, micro_batch_tokens={micro})
        assert engine.prefill_tokens <= {batch}
        sequence = engine.open(300, engine.regime(300))
        parts = [{TOKENS[:100]}, {TOKENS[100:]}]
        rows = [engine.step([Row.following(sequence, part, logits="all")])[0] for part in parts]
        np.save(out, np.concatenate(rows))
    """
    alone(code, out=tmp_path / "logits.npy")
    assert_near(np.load(tmp_path / "logits.npy"), reference)


def test_a_buffer_smaller_than_the_context_is_as_large_as_the_context(tiny: Path, load: Load) -> None:
    engine = load(tiny, kv_tokens=1)
    assert engine.open(CONTEXT, engine.regime(CONTEXT)).capacity == CONTEXT


def test_cells_that_are_used_up_are_a_sentence_and_come_back(tiny: Path, load: Load) -> None:
    engine = load(tiny, context_tokens=256, kv_tokens=512)
    regime = engine.regime(256)
    first, second = engine.open(256, regime), engine.open(200, regime)
    with pytest.raises(OutOfMemory, match="has 56 of 512 tokens left, 57 are wanted.*kv_tokens"):
        engine.open(57, regime)
    third = engine.open(56, regime)
    with pytest.raises(OutOfMemory, match="has 0 of 512 tokens left, 1 are wanted"):
        second.reserve(201)
    assert second.capacity == 200
    for sequence in (first, second, third):  # what was promised is there
        engine.step([Row.following(sequence, TOKENS[: sequence.capacity])])
    second.close()
    second.close()
    third.reserve(256)
    with pytest.raises(OutOfMemory):
        third_more = engine.open(1, regime)
        assert third_more is None
    first.close()
    fourth = engine.open(256, regime)
    (got,) = engine.step([Row.following(fourth, TOKENS[:256])])
    fourth.truncate(0)
    (again,) = engine.step([Row.following(fourth, TOKENS[:256])])
    assert_near(got, again)
    assert third.length == 56


def test_a_full_buffer_still_hands_out_kv_that_was_moved(tiny: Path, load: Load) -> None:
    """Keys that wait to be turned are turned by computing a token, for which there is no room here."""
    exported = []
    for kv_tokens in (256, 512):
        engine = load(tiny, context_tokens=256, kv_tokens=kv_tokens)
        first = engine.open(20, engine.regime(20))
        engine.step([Row.following(first, TOKENS[:20])])
        kv = first.export(Span(10, 20))
        first.close()
        full = engine.open(256, engine.regime(256))
        engine.step([Row.following(full, TOKENS[:246])])
        full.append(kv)
        exported.append(full.export(Span(0, 256)))
    for ours, theirs in zip(*(kv.layers for kv in exported), strict=True):
        np.testing.assert_allclose(ours.keys, theirs.keys, atol=1e-2)
        np.testing.assert_array_equal(ours.values, theirs.values)


def test_sequences_that_are_used_up_are_a_sentence_and_come_back(tiny: Path, load: Load) -> None:
    engine = load(tiny, sequences=2)
    regime = engine.regime(8)
    first, second = engine.open(8, regime), engine.open(8, regime)
    with pytest.raises(OutOfMemory, match="All sequences are in use.*`sequences`"):
        engine.open(8, regime)
    first.close()
    for _ in range(5):
        engine.open(8, regime).close()
    second.close()


def test_requests_wait_for_each_others_room(tiny: Path, tmp_path: Path) -> None:
    """Each wants most of the buffer: one after the other gets it, and none is refused."""
    prompts = [f"{number}. Every morning the keeper wrote down the wind." for number in range(5)]
    how: dict[str, Any] = {"engine": "llamacpp", "threads": 1, "context": 256, "kv_tokens": 256}

    def ask(session: Session, prompt: str) -> str:
        return session.generate(prompt, max_tokens=120, min_tokens=120).text

    with Session(str(tiny), cache="off", **how) as session:
        expected = [ask(session, prompt) for prompt in prompts]
    with Session(str(tiny), cache=str(tmp_path / "cache"), **how) as session, ThreadPoolExecutor(5) as threads:
        for _ in range(2):
            assert list(threads.map(lambda prompt: ask(session, prompt), prompts)) == expected


def test_who_waits_for_room_counts_also_the_one_who_just_got_it() -> None:
    """Between getting room and counting as running another one may look: that is no reason to give up."""
    free, got, looked = [1], threading.Event(), threading.Event()
    room = MemoryGate(lambda: None)

    def get() -> int:
        if not free:
            if got.is_set():
                looked.set()
            raise OutOfMemory("full")
        free.pop()
        got.set()
        looked.wait(1)  # the other one looks before this one has returned
        return 1

    def take() -> int:
        room.enter()
        return room.take(get, lambda: False)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(take)
        assert got.wait(10)
        second = threads.submit(take)
        assert first.result(10) == 1
        free.append(1)
        room.leave()
        assert second.result(10) == 1


def test_a_refused_sequence_takes_nothing(tiny: Path, load: Load) -> None:
    engine = load(tiny, context_tokens=256, kv_tokens=256, sequences=2)
    regime = engine.regime(8)
    for _ in range(10):
        held = engine.open(200, regime)
        with pytest.raises(OutOfMemory):
            engine.open(57, regime)
        with pytest.raises(StepRefused, match="regime"):
            engine.open(1, "other")
        held.close()
    assert engine.open(256, regime).capacity == 256


def test_kv_of_different_numbers_is_not_interchangeable(tiny: Path, load: Load) -> None:
    digests = {load(tiny, kv_type=kind).identity("plain").digest for kind in KV_TYPES}
    assert len(digests) == len(KV_TYPES)
    same = {load(tiny, flash_attention=flash, batch_tokens=n).identity("plain").digest
            for flash, n in (("on", 99), ("off", 99), ("auto", 200))}  # fmt: skip
    assert len(same) == 1, "plain KV is the same value, however it lies in memory"


def test_longrope_is_another_regime_in_a_larger_buffer(tmp_path: Path, load: Load) -> None:
    path = write_llama(tmp_path / "scaled.gguf", context=4096, switch=512)
    short, long = load(path, context_tokens=256), load(path, context_tokens=1024)
    assert (short.regime(10), long.regime(10), long.regime(1000)) == ("short", "long", "long")
    assert short.identity("short").digest != long.identity("long").digest
