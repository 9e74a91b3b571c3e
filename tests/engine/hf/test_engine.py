"""The Hugging Face engine: loading, identity, number types, buffers."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rekindle.core.kv import Span
from rekindle.engine.base import Row
from rekindle.engine.hf.device import choose_placement
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.hf.sequence import BufferPool
from rekindle.errors import Closed, StepRefused
from rekindle.models.files import ModelFiles
from tests.engine.contract import Stored
from tests.tiny import byte_tokenizer, tiny_engine, tiny_model

TOKENS = list(range(5, 45))


def load(folder: Path, **options: str) -> HfEngine:
    return HfEngine.load(ModelFiles(folder.name, folder), device="cpu", **options)


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


def test_a_loaded_model_gives_its_own_logits(tiny_folder: Path) -> None:
    engine = load(tiny_folder)
    with engine.open(40, "plain") as sequence:
        (logits,) = engine.step([Row.following(sequence, TOKENS, logits="all")])
    with torch.inference_mode():
        expected = engine.model(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert engine.context_tokens == 512 and engine.tokenizer.stop_ids == {256}


def test_one_changed_weight_changes_the_identity(tiny_folder: Path, tmp_path: Path) -> None:
    same, other = (copy_of(tiny_folder, tmp_path / name) for name in ("same", "other"))
    tensors = load_file(other / "model.safetensors")
    weight = tensors["model.layers.2.self_attn.k_proj.weight"]
    weight[3, 5] += 1e-3
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    identity = load(tiny_folder).identity("plain")
    assert load(same).identity("plain") == identity
    changed = load(other).identity("plain")
    assert changed.weights != identity.weights and changed.digest != identity.digest
    assert (changed.config, changed.tokenizer) == (identity.config, identity.tokenizer)


@pytest.mark.parametrize(
    ("file", "old", "new", "field"),
    [
        ("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05', "config"),
        ("tokenizer.json", '"<|stop|>"', '"<|halt|>"', "tokenizer"),
        ("chat_template.jinja", "assistant", "model", "template"),
    ],
)
def test_a_changed_config_tokenizer_or_template_changes_the_identity(
    tiny_folder: Path, tmp_path: Path, file: str, old: str, new: str, field: str
) -> None:
    other = copy_of(tiny_folder, tmp_path / "other")
    text = (other / file).read_text("utf-8")
    assert old in text
    (other / file).write_text(text.replace(old, new), "utf-8")
    before, after = load(tiny_folder).identity("plain"), load(other).identity("plain")
    assert getattr(before, field) != getattr(after, field)


def test_number_type_and_regime_are_part_of_the_identity(tiny_folder: Path) -> None:
    single, half = load(tiny_folder), load(tiny_folder, dtype="bfloat16")
    assert single.identity("plain").weights == half.identity("plain").weights
    assert single.identity("plain") != half.identity("plain")
    assert single.identity("plain") != single.identity("long")


def test_a_model_in_memory_has_an_identity_by_its_tensors() -> None:
    first, same, other = (tiny_engine("llama", seed=seed) for seed in (1, 1, 2))
    assert first.identity("plain") == same.identity("plain") != other.identity("plain")
    with torch.no_grad():
        same.model.model.norm.weight[0] += 1e-3
    again = HfEngine(same.model, byte_tokenizer(), name="x", placement=same.placement)
    assert again.identity("plain") != first.identity("plain")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_kv_travels_raw_and_comes_back_to_the_bit(dtype: str) -> None:
    model = tiny_model("llama").to(getattr(torch, dtype))
    engine = HfEngine(model, byte_tokenizer(), name="half", placement=choose_placement("cpu", dtype))
    assert engine.layout.dtype == dtype and engine.layout.numpy_dtype.itemsize == 2
    with engine.open(40, "plain") as sequence:
        engine.step([Row.following(sequence, TOKENS, logits="none")])
        kv = sequence.export(Span(0, 40))
    assert kv.layers[0].keys.dtype == (np.uint16 if dtype == "bfloat16" else np.float16)
    with engine.open(40, "plain") as sequence:
        row = Row(sequence, TOKENS[-1:], [39], feeds=(Stored(kv, Span(0, 39)),))
        (logits,) = engine.step([row])
        again = sequence.export(Span(0, 39))
    for old, new in zip(kv.layers, again.layers, strict=True):
        np.testing.assert_array_equal(old.keys[:, :39].view(np.uint16), new.keys.view(np.uint16))
        np.testing.assert_array_equal(old.values[:, :39].view(np.uint16), new.values.view(np.uint16))
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0, -1].float().numpy()
    assert np.abs(logits[0] - expected).max() <= 0.05 * np.abs(expected).max()


def test_the_layout_says_how_large_kv_is() -> None:
    engine = tiny_engine("llama")
    assert engine.layout.token_bytes == 4 * 2 * 2 * 8 * 4  # layers, keys and values, heads, dim, bytes
    with engine.open(10, "plain") as sequence:
        engine.step([Row.following(sequence, TOKENS[:10], logits="none")])
        kv = sequence.export(Span(0, 10))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in kv.layers)
    assert held == 10 * engine.layout.token_bytes


def test_buffers_are_used_again() -> None:
    engine = tiny_engine("llama")
    pool = BufferPool(engine.layout, torch.device("cpu"))
    first = pool.take(100)
    assert first.capacity == 256
    pool.give(first)
    assert pool.take(200) is first
    assert pool.take(200) is not first
    pool.give(first)
    assert pool.take(257).capacity == 512, "too small ones are not taken"
    large = pool.take(2000)
    pool.give(large)
    assert pool.take(10) is first, "far too large ones are kept for who needs them"
    assert pool.take(10) is not large


def test_a_reused_buffer_shows_nothing_of_its_past() -> None:
    engine = tiny_engine("llama")
    with engine.open(40, "plain") as sequence:
        (fresh,) = engine.step([Row.following(sequence, TOKENS)])
    with engine.open(60, "plain") as sequence:
        engine.step([Row.following(sequence, TOKENS[::-1], logits="none")])
    with engine.open(40, "plain") as sequence:
        assert sequence.length == 0
        (again,) = engine.step([Row.following(sequence, TOKENS)])
    np.testing.assert_array_equal(fresh, again)


def test_sequences_of_another_engine_are_refused() -> None:
    from rekindle.engine.fake import FakeEngine

    hf, twin = tiny_engine("llama"), tiny_engine("llama", seed=1)
    fake, sibling = FakeEngine(), FakeEngine(seed=1)
    for engine, other in ((hf, fake), (fake, hf), (hf, twin), (fake, sibling)):
        with pytest.raises(StepRefused, match="another engine"):
            engine.step([Row.following(other.open(5, "plain"), [5])])


def test_a_closed_engine_says_so() -> None:
    engine = tiny_engine("llama")
    sequence = engine.open(5, "plain")
    engine.close()
    for use in (
        lambda: engine.step([Row.following(sequence, [5])]),
        lambda: engine.open(5, "plain"),
        lambda: engine.identity("plain"),
    ):
        with pytest.raises(Closed):
            use()


def test_memory_that_nobody_uses_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.engine.hf import sequence as module

    engine = tiny_engine("llama")
    pool = BufferPool(engine.layout, torch.device("cpu"))
    idle = pool.take(100)
    unused = weakref.ref(idle)
    pool.give(idle)
    del idle
    real, tries = module.Buffers, []

    def scarce(*arguments: object) -> object:
        tries.append(arguments)
        if unused() is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(module, "Buffers", scarce)
    assert pool.take(5000).capacity == 5120
    assert len(tries) == 2


def test_buffers_given_back_late_are_not_kept() -> None:
    engine = tiny_engine("llama")
    sequence = engine.open(10, "plain")
    pool = sequence.pool
    engine.close()
    sequence.close()
    assert pool._free == []


def test_a_model_too_large_for_the_device_says_so(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.engine.hf import checkpoint
    from rekindle.errors import OutOfMemory

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(checkpoint.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(OutOfMemory, match="does not fit into the memory of cpu"):
        load(tiny_folder)


def test_stop_tokens_outside_the_vocabulary_are_left_out(tiny_folder: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_folder, tmp_path / "odd")
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 5000]}')
    assert load(folder).tokenizer.stop_ids == {256}


def test_every_file_a_tokenizer_can_have_counts(tiny_folder: Path, tmp_path: Path) -> None:
    before = load(tiny_folder).identity("plain")
    for name in ("merges.txt", "vocab.json", "special_tokens_map.json"):
        folder = copy_of(tiny_folder, tmp_path / name)
        (folder / name).write_text("{}")
        assert load(folder).identity("plain").tokenizer != before.tokenizer, name


def test_closing_a_sequence_from_many_threads_gives_its_buffers_back_once() -> None:
    import threading

    engine = tiny_engine("llama")
    engine._pool._free.clear()
    for _ in range(50):
        sequence = engine.open(10, "plain")
        threads = [threading.Thread(target=sequence.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(engine._pool._free) == len({id(b) for b in engine._pool._free}) == 1
