"""Whatever `from_pretrained` finds in a model's folder is refused, has no effect, or is part of the identity."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rekindle.core.identity import Identity
from rekindle.engine.base import Row
from rekindle.engine.hf import checkpoint
from rekindle.engine.hf.engine import HfEngine
from rekindle.errors import BrokenModel, ModelError, UnsupportedModel
from rekindle.models.files import ModelFiles

TOKENS = list(range(5, 45))
Change = Callable[[Path], object]


def give_adapter(folder: Path) -> None:
    torch.manual_seed(7)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), LoraConfig(target_modules=["q_proj", "v_proj"])
    )
    for name, tensor in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(tensor)
    model.save_pretrained(folder)


def give_distributed_checkpoint(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "shard-00000-model-00001-of-00001.safetensors")


def changes(file: str, **fields: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        known = json.loads(path.read_text("utf-8")) if path.exists() else {}
        path.write_text(json.dumps(known | fields), "utf-8")

    return change


def writes(file: str, text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text, "utf-8")

    return change


def name_other_weights(folder: Path) -> None:
    save_file(
        {name: tensor * 2 for name, tensor in load_file(folder / "model.safetensors").items()}, folder / "b.safetensors"
    )
    changes("config.json", transformers_weights="b.safetensors")(folder)


def name_files_outside(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    index = {"weight_map": dict.fromkeys(load_file(outside), "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def kv_and_identity(folder: Path) -> tuple[np.ndarray, Identity]:
    engine = HfEngine.load(ModelFiles(folder.name, folder), device="cpu")
    sequence = engine.open(len(TOKENS), engine.regime(len(TOKENS)))
    (logits,) = engine.step([Row.following(sequence, TOKENS)])
    found = np.array(logits), engine.identity("plain")
    sequence.close()
    engine.close()
    return found


REFUSED: dict[str, tuple[Change, type[ModelError], str]] = {
    "adapter": (give_adapter, UnsupportedModel, "--adapter"),
    "distributed checkpoint": (give_distributed_checkpoint, UnsupportedModel, "distributed"),
    "other weights": (name_other_weights, UnsupportedModel, "transformers_weights"),
    "other config": (changes("config.json", configuration_files=["config.4.0.0.json"]), UnsupportedModel, "config"),
    "fused kernels": (changes("config.json", fusion_config={"x": True}), UnsupportedModel, "fusion_config"),
    "weights outside": (name_files_outside, BrokenModel, "outside"),
    "code of the folder": (
        changes("config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "evil.Model"}),
        UnsupportedModel,
        "cannot be loaded",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_would_load_more_than_its_weights_is_refused(name: str, folder: Path) -> None:
    change, error, words = REFUSED[name]
    change(folder)
    with pytest.raises(error, match=words):
        HfEngine.load(ModelFiles("m", folder), device="cpu")


def test_an_adapter_beside_a_gguf_is_not_converted_into_the_model(folder: Path) -> None:
    (folder.parent / "adapter_config.json").write_text("{}")
    (folder.parent / "m.gguf").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="--adapter"):
        checkpoint.convert_gguf(folder.parent / "m.gguf", folder.parent / "converted")


NO_EFFECT: dict[str, Change] = {
    "attention to download": changes("config.json", attn_implementation="nobody/attention"),
    "attention by its own name": changes("config.json", _attn_implementation="flash_attention_2"),
    "experts": changes("config.json", experts_implementation="nobody/experts"),
    "generation config": writes("generation_config.json", '{"temperature": 0.1, "eos_token_id": 3, "max_length": 7}'),
    "pickled weights": writes("pytorch_model.bin", "not loaded"),
    "notes of the tool that wrote it": changes("config.json", use_cache=False, transformers_version="1"),
}


@pytest.mark.parametrize("name", NO_EFFECT)
def test_what_is_ignored_changes_neither_numbers_nor_identity(name: str, tiny_folder: Path, folder: Path) -> None:
    NO_EFFECT[name](folder)
    logits, identity = kv_and_identity(folder)
    expected, plain = kv_and_identity(tiny_folder)
    assert np.array_equal(logits, expected)
    assert identity == plain


IN_THE_IDENTITY: dict[str, tuple[Change, str]] = {
    "known code": (changes("config.json", auto_map={"AutoModelForCausalLM": "evil.Model"}), "config"),
    "any field of the config": (changes("config.json", something=3), "config"),
    "another template": (writes("additional_chat_templates/tool_use.jinja", "{{ messages }}"), "template"),
    "another vocabulary": (writes("tekken.json", "{}"), "tokenizer"),
    "a newer tokenizer": (
        lambda folder: (
            shutil.copy(folder / "tokenizer.json", folder / "tokenizer.4.0.0.json"),
            changes("tokenizer_config.json", fast_tokenizer_files=["tokenizer.4.0.0.json"])(folder),
        ),
        "tokenizer",
    ),
}


@pytest.mark.parametrize("name", IN_THE_IDENTITY)
def test_what_is_read_is_part_of_the_identity(name: str, tiny_folder: Path, folder: Path) -> None:
    change, field = IN_THE_IDENTITY[name]
    change(folder)
    (_, identity), (_, plain) = kv_and_identity(folder), kv_and_identity(tiny_folder)
    assert getattr(identity, field) != getattr(plain, field)


def test_a_newer_tokenizer_counts_by_its_contents(folder: Path) -> None:
    IN_THE_IDENTITY["a newer tokenizer"][0](folder)
    _, before = kv_and_identity(folder)
    path = folder / "tokenizer.4.0.0.json"
    path.write_text(path.read_text("utf-8").replace("<|stop|>", "<|halt|>"), "utf-8")
    assert kv_and_identity(folder)[1].tokenizer != before.tokenizer
