"""Adapters in llama.cpp, against models that have them merged into their weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xllamacpp")

from rekindle.core.adapter import Lora, LoraPair
from rekindle.engine.base import Row
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.llamacpp.lora import _gguf_bytes
from rekindle.engine.llamacpp.options import LlamaOptions
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import AdapterRefused, StepRefused
from rekindle.models.files import ModelFiles
from tests.tiny_gguf import DIM, HEADS, INNER, KV_HEADS, write_llama

TOKENS = np.random.default_rng(3).integers(3, 250, 40).tolist()
HIDDEN = HEADS * DIM
RANDOM = np.random.default_rng(1)


def pair(outputs: int, inputs: int, scale: float = 0.7) -> LoraPair:
    down, up = RANDOM.normal(0, 0.3, (3, inputs)), RANDOM.normal(0, 0.3, (outputs, 3))
    return LoraPair(down.astype(np.float32), up.astype(np.float32), scale)


def lora() -> Lora:
    shapes = {
        "model.layers.0.self_attn.q_proj": (HIDDEN, HIDDEN),
        "model.layers.1.self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
        "model.layers.1.self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
        "model.layers.2.self_attn.o_proj": (HIDDEN, HIDDEN),
        "model.layers.3.mlp.gate_proj": (INNER, HIDDEN),
        "model.layers.3.mlp.down_proj": (HIDDEN, INNER),
    }
    return Lora({name: pair(*shape) for name, shape in shapes.items()}, source="made up")


def merged(path: Path, adapter: Lora, out: Path) -> Path:
    """The model with the adapter in its weights; their rows in the order of the file, worked out one by one."""
    import gguf

    short = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    short |= {"gate_proj": "ffn_gate", "down_proj": "ffn_down"}
    changes = {}
    for name, matrices in adapter.pairs.items():
        _, _, layer, _, kind = name.split(".")
        change = matrices.scale * matrices.up @ matrices.down
        if kind in ("q_proj", "k_proj"):
            ordered = np.empty_like(change)
            for head in range(len(change) // DIM):
                for number in range(DIM):  # of two halves, the file has one of each in turn
                    half, place = divmod(number, DIM // 2)
                    ordered[head * DIM + 2 * place + half] = change[head * DIM + number]
            change = ordered
        changes[f"blk.{layer}.{short[kind]}.weight"] = change
    data = bytearray(path.read_bytes())
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name in changes:
            whole = tensor.data.astype(np.float32) + changes.pop(tensor.name).astype(np.float32)
            data[tensor.data_offset : tensor.data_offset + whole.nbytes] = whole.tobytes()
    assert not changes
    out.write_bytes(data)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gguf")
    write_llama(place / "plain.gguf")
    return place


def engine_of(path: Path) -> LlamaCppEngine:
    return LlamaCppEngine(ModelFiles("tiny", path.parent, path), LlamaOptions(kv_type="f32"))


def logits(engine: LlamaCppEngine, adapter: str | None = None) -> np.ndarray:
    sequence = engine.open(len(TOKENS), engine.regime(len(TOKENS)), adapter)
    try:
        return engine.step([Row.following(sequence, TOKENS, logits="all")])[0]
    finally:
        sequence.close()


def test_a_converted_adapter_does_what_merged_weights_do(folder: Path) -> None:
    adapter = lora()
    reference = engine_of(merged(folder / "plain.gguf", adapter, folder / "merged.gguf"))
    engine = engine_of(folder / "plain.gguf")
    plain = logits(engine)
    assert engine.check_adapter(adapter).memory_bytes == adapter.size_bytes
    with pytest.raises(StepRefused, match="not loaded"):
        logits(engine, adapter.digest)
    engine.load_adapter(adapter)
    assert engine.check_adapter(adapter).memory_bytes == adapter.size_bytes  # stays loaded
    expected = logits(reference)
    got = logits(engine, adapter.digest)
    assert np.abs(got - expected).max() <= 1e-3 * np.abs(expected).max()
    assert np.abs(expected - plain).max() > 0.1 * np.abs(expected).max()  # it does something
    np.testing.assert_array_equal(logits(engine), plain)
    sequences = [engine.open(50, engine.regime(50), a) for a in (adapter.digest, None, adapter.digest)]
    together = engine.step([Row.following(sequence, TOKENS, logits="all") for sequence in sequences])
    for found, wanted in zip(together, (expected, plain, expected), strict=True):
        assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()
    engine.load_adapter(adapter)
    engine.unload_adapter(adapter.digest)
    assert np.isfinite(engine.step([Row.following(sequences[0], [5])])[0]).all()  # loaded twice, unloaded once
    engine.unload_adapter(adapter.digest)
    with pytest.raises(StepRefused, match="not loaded"):
        engine.step([Row.following(sequences[0], [5])])
    (after,) = engine.step([Row.following(sequences[1], [5])])
    assert np.isfinite(after).all()
    engine.close()
    reference.close()


def test_a_gguf_adapter_is_used_as_it_is(folder: Path) -> None:
    matrices = pair(KV_HEADS * DIM, HIDDEN, 1.0)
    path = folder / "own.gguf"
    names = {"blk.1.attn_v.weight.lora_a": matrices.down, "blk.1.attn_v.weight.lora_b": matrices.up}
    path.write_bytes(_gguf_bytes("llama", names))
    engine = engine_of(folder / "plain.gguf")
    own, half = read_adapter(path), read_adapter(path, 0.5)
    assert own.digest != half.digest
    name = "model.layers.1.self_attn.v_proj"
    for given, scale in ((own, 1.0), (half, 0.5)):
        same = Lora({name: LoraPair(matrices.down, matrices.up, scale)}, source="the same from PEFT")
        engine.load_adapter(given)
        engine.load_adapter(same)
        np.testing.assert_allclose(logits(engine, given.digest), logits(engine, same.digest), rtol=1e-4, atol=1e-4)
    engine.close()


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    engine = engine_of(folder / "plain.gguf")
    for name, told in (("model.layers.9.self_attn.q_proj", "does not put"), ("model.embed_tokens", "not known")):
        with pytest.raises(AdapterRefused, match=told):
            engine.load_adapter(Lora({name: pair(HIDDEN, HIDDEN)}, source="made up"))
    with pytest.raises(AdapterRefused, match="does not put"):
        engine.load_adapter(Lora({"model.layers.0.self_attn.v_proj": pair(HIDDEN, 2 * HIDDEN)}, source="made up"))
    (folder / "text.gguf").write_text("hello")
    with pytest.raises(AdapterRefused, match="not a GGUF"):
        read_adapter(folder / "text.gguf")
    engine.close()


def test_an_adapter_with_a_part_missing_or_changed_on_disk_is_refused(folder: Path) -> None:
    engine = engine_of(folder / "plain.gguf")
    name = "model.layers.0.self_attn.v_proj"
    partly = Lora({name: pair(KV_HEADS * DIM, HIDDEN)}, source="made up", targets=(r"(.*\.)?v_proj",))
    with pytest.raises(AdapterRefused, match=r"layers\.1\.self_attn\.v_proj"):
        engine.load_adapter(partly)
    path = folder / "changing.gguf"
    matrices = pair(KV_HEADS * DIM, HIDDEN, 1.0)
    names = {"blk.1.attn_v.weight.lora_a": matrices.down, "blk.1.attn_v.weight.lora_b": matrices.up}
    path.write_bytes(_gguf_bytes("llama", names))
    given = read_adapter(path)
    assert given.digest
    path.write_bytes(_gguf_bytes("llama", {key: 2 * value for key, value in names.items()}))
    with pytest.raises(AdapterRefused, match="changed"):
        engine.load_adapter(given)
    engine.close()
