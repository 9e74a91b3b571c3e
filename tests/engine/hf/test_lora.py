"""Adapters on a model, against PEFT itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from rekindle.core.kv import Span
from rekindle.engine.base import Row
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import AdapterRefused, StepRefused
from tests.lora import save_lora
from tests.tiny import FAMILIES, tiny_engine

if TYPE_CHECKING:
    from peft import PeftModel

pytestmark = pytest.mark.thorough

TOKENS = np.random.default_rng(3).integers(3, 250, 40).tolist()
MORE = 6
TARGETS = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h"],
    "starcoder2": ["q_proj", "k_proj", "v_proj", "c_fc", "c_proj"],
}
USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft_of(engine: HfEngine, folder: Path, seed: int = 0, **config: object) -> PeftModel:
    """A PEFT model with random matrices on the engine's model, saved to the folder."""
    from peft import LoraConfig, get_peft_model  # slow to import: where it is used, not where tests are collected

    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": USUAL, **config}
    model = get_peft_model(copy.deepcopy(engine.model), LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return model.eval()


def greedy(engine: HfEngine, adapter: str | None) -> tuple[np.ndarray, list[int]]:
    """Logits of the prompt, and the tokens that follow."""
    with engine.open(len(TOKENS) + MORE, "plain", adapter) as sequence:
        (logits,) = engine.step([Row.following(sequence, TOKENS, logits="all")])
        reply = [int(logits[-1].argmax())]
        while len(reply) < MORE:
            reply.append(int(engine.step([Row.following(sequence, reply[-1:])])[0][0].argmax()))
    return logits, reply


def expected(model: PeftModel) -> tuple[np.ndarray, list[int]]:
    ids = torch.tensor([TOKENS])
    with torch.inference_mode():
        logits = model(ids).logits[0].numpy()
        out = model.generate(input_ids=ids, max_new_tokens=MORE, do_sample=False, eos_token_id=None)
    return logits, out[0, len(TOKENS) :].tolist()


def assert_as_peft(engine: HfEngine, model: PeftModel, adapter: str) -> None:
    own, theirs = greedy(engine, adapter), expected(model)
    assert np.abs(own[0] - theirs[0]).max() <= 1e-4 * np.abs(theirs[0]).max()
    assert own[1] == theirs[1]


QUICK = ("gpt_neox", "llama", "phi3")  # whose layers are called in three ways
SWEEP = [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in sorted(FAMILIES)]


@pytest.mark.parametrize("family", SWEEP)
def test_every_family_answers_as_peft_does(family: str, tmp_path: Path) -> None:
    engine = tiny_engine(family)
    model = peft_of(engine, tmp_path, target_modules=TARGETS.get(family, USUAL))
    plain = greedy(engine, None)[0]
    lora = read_adapter(tmp_path)
    engine.load_adapter(lora)
    assert_as_peft(engine, model, lora.digest)
    np.testing.assert_array_equal(greedy(engine, None)[0], plain)  # without it, no bit changes


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"use_rslora": True, "rank_pattern": {"v_proj": 2, r"layers\.1\.self_attn\.q_proj": 8}},
        {"alpha_pattern": {"k_proj": 1}, "target_modules": r".*\.(k|q)_proj"},
        {"target_modules": "all-linear"},
        {"layers_to_transform": [1, 3], "target_modules": ["v_proj", "down_proj"]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.0\..*"},
    ],
)
def test_options_mean_what_peft_means(config: dict[str, object], tmp_path: Path) -> None:
    engine = tiny_engine("llama")
    model = peft_of(engine, tmp_path, **config)
    lora = read_adapter(tmp_path)
    engine.load_adapter(lora)
    assert_as_peft(engine, model, lora.digest)


def test_rows_of_different_adapters_share_a_step(tmp_path: Path) -> None:
    engine = tiny_engine("qwen3")
    loras = []
    for seed in range(3):
        peft_of(engine, tmp_path / str(seed), seed, target_modules=USUAL[seed : seed + 3])
        loras.append(read_adapter(tmp_path / str(seed)))
        engine.load_adapter(loras[-1])
    adapters = [None, loras[0].digest, loras[0].digest, loras[1].digest, None, loras[2].digest, loras[0].digest]
    alone = {adapter: greedy(engine, adapter)[0] for adapter in adapters}
    sequences = [engine.open(len(TOKENS) + 1, "plain", adapter) for adapter in adapters]
    together = engine.step([Row.following(sequence, TOKENS, logits="all") for sequence in sequences])
    for adapter, logits in zip(adapters, together, strict=True):
        np.testing.assert_allclose(logits, alone[adapter], atol=1e-4)
    assert len({logits.tobytes() for logits in alone.values()}) == 4
    engine.load_adapter(loras[0])
    engine.unload_adapter(loras[0].digest)
    assert loras[0].digest in engine._decoder.adapters  # type: ignore[union-attr]
    for lora in loras:
        engine.unload_adapter(lora.digest)
    assert not engine._decoder.adapters.names  # type: ignore[union-attr]
    np.testing.assert_array_equal(greedy(engine, None)[0], alone[None])
    with pytest.raises(StepRefused, match="not loaded"):
        engine.step([Row.following(sequences[1], [5])])


@pytest.mark.parametrize(
    ("config", "same"),
    [
        ({"target_modules": ["q_proj", "o_proj", "down_proj"], "layers_to_transform": [2, 3]}, 3),
        ({"target_modules": ["k_proj"], "layers_to_transform": [2]}, 2),
        ({"target_modules": ["v_proj"]}, 0),
        ({"target_modules": ["lm_head"]}, 4),
    ],
)
def test_layers_below_an_adapter_have_the_same_kv_bit_by_bit(
    config: dict[str, object], same: int, tmp_path: Path
) -> None:
    engine = tiny_engine("llama")
    peft_of(engine, tmp_path, **config)
    lora = read_adapter(tmp_path)
    assert engine.check_adapter(lora).same_layers == same
    engine.load_adapter(lora)
    exported = []
    for adapter in (None, lora.digest):
        with engine.open(len(TOKENS), "plain", adapter) as sequence:
            engine.step([Row.following(sequence, TOKENS, logits="none")])
            exported.append(sequence.export(Span(0, len(TOKENS))).layers)
    equal = [
        np.array_equal(a.keys, b.keys) and np.array_equal(a.values, b.values) for a, b in zip(*exported, strict=True)
    ]
    assert equal == [True] * same + [False] * (4 - same)


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    engine = tiny_engine("llama")
    plain = greedy(engine, None)[0]
    wrong = {
        "layer 9": {"model.layers.9.self_attn.q_proj": (np.ones((2, 32), "f4"), np.ones((32, 2), "f4"))},
        "shape": {"model.layers.0.self_attn.q_proj": (np.ones((2, 48), "f4"), np.ones((32, 2), "f4"))},
        "outputs": {"model.layers.0.self_attn.k_proj": (np.ones((2, 32), "f4"), np.ones((32, 2), "f4"))},
    }
    told = {"layer 9": "layers.9.*does not have", "shape": "48 inputs", "outputs": "32 outputs"}
    for name, pairs in wrong.items():
        lora = read_adapter(save_lora(tmp_path / name, pairs, base_model_name_or_path="some/model"))
        with pytest.raises(AdapterRefused, match=told[name] + r".*made for some/model"):
            engine.load_adapter(lora)
        assert lora.digest not in engine._decoder.adapters  # type: ignore[union-attr]
    pairs = {"model.layers.0.self_attn.q_proj": (np.ones((2, 32), "f4"), np.ones((32, 2), "f4"))}
    partly = read_adapter(save_lora(tmp_path / "part", pairs, target_modules=["q_proj"]))
    with pytest.raises(AdapterRefused, match=r"no matrices for model.layers.1.self_attn.q_proj"):
        engine.load_adapter(partly)
    np.testing.assert_array_equal(greedy(engine, None)[0], plain)


def test_a_layer_that_the_model_never_calls_is_refused(tmp_path: Path) -> None:
    engine = tiny_engine("llama")
    idle = torch.nn.Linear(32, 32)
    adapters = engine._decoder.adapters  # type: ignore[union-attr]
    adapters._linears = {**adapters._linears, "model.idle": idle}
    pairs = {"model.idle": (np.ones((2, 32), "f4"), np.ones((32, 2), "f4"))}
    lora = read_adapter(save_lora(tmp_path, pairs))
    with pytest.raises(AdapterRefused, match=r"model\.idle"):
        engine.load_adapter(lora)
    assert lora.digest not in adapters
