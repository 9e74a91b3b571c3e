"""Reading LoRA files: what they say is done, and what is not understood is refused by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rekindle.engine.lora_files import CONFIG, WEIGHTS, read_adapter
from rekindle.errors import AdapterRefused, ModelNotFound
from tests.lora import fake_pairs, save_lora


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_lora(tmp_path / "lora", fake_pairs(0))


def change(folder: Path, **config: Any) -> Path:
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def test_a_renamed_folder_is_the_same_adapter_and_a_changed_one_is_not(folder: Path, tmp_path: Path) -> None:
    first = read_adapter(folder)
    moved = shutil.copytree(folder, tmp_path / "another name")
    assert read_adapter(moved).digest == first.digest
    assert read_adapter(folder / WEIGHTS).digest == first.digest
    change(moved, base_model_name_or_path="somebody/else", lora_dropout=0.3, inference_mode=False)
    assert read_adapter(moved).digest == first.digest
    tensors = load_file(moved / WEIGHTS)
    name = next(iter(tensors))
    tensors[name].flat[0] = np.nextafter(tensors[name].flat[0], np.float32(9))
    save_file(tensors, moved / WEIGHTS)
    assert read_adapter(moved).digest != first.digest


def test_another_scale_is_another_adapter(folder: Path, tmp_path: Path) -> None:
    own = read_adapter(folder)
    assert read_adapter(folder, 0.5).digest != own.digest
    doubled = change(shutil.copytree(folder, tmp_path / "doubled"), lora_alpha=4)
    assert read_adapter(doubled).digest != own.digest
    assert read_adapter(doubled, 0.5).digest == own.digest  # which does the same


def test_half_precision_is_read_as_what_it_is(folder: Path, tmp_path: Path) -> None:
    halves = {name: tensor.astype(np.float16) for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(halves, folder / WEIGHTS)
    pair = read_adapter(folder).pairs["layers.1.k"]
    np.testing.assert_array_equal(pair.down, halves["base_model.model.layers.1.k.lora_A.weight"].astype(np.float32))


def test_ranks_and_scales_of_single_layers(tmp_path: Path) -> None:
    pairs = {**fake_pairs(1, ("layers.0.q", "layers.1.q")), **fake_pairs(2, ("layers.2.q",), rank=4)}
    folder = save_lora(
        tmp_path, pairs, lora_alpha=8, rank_pattern={"layers.2.q": 4}, alpha_pattern={r"1\.q": 2, "^layers.0.q": 3}
    )
    scales = {name: pair.scale for name, pair in read_adapter(folder).pairs.items()}
    assert scales == {"layers.0.q": 1.5, "layers.1.q": 1.0, "layers.2.q": 2.0}
    change(folder, use_rslora=True)
    assert read_adapter(folder).pairs["layers.2.q"].scale == pytest.approx(4.0)
    assert read_adapter(folder).pairs["layers.1.q"].scale == pytest.approx(2 / 2**0.5)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": None}, "None"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"something_new": 0.5}, "something_new"),
        ({"r": 3}, "rank is 3"),
        ({"r": 0}, "r=0"),
        ({"lora_alpha": "a lot"}, "lora_alpha"),
        ({"rank_pattern": {"(": 2}}, "pattern"),
        ({"rank_pattern": ["q"]}, "rank_pattern"),
        ({"target_modules": 5}, "target_modules"),
        ({"target_modules": "q_proj("}, "pattern"),
        ({"layers_to_transform": "all"}, "layers_to_transform"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(folder: Path, config: dict[str, Any], told: str) -> None:
    with pytest.raises(AdapterRefused, match=told):
        read_adapter(change(folder, **config))


def test_what_does_nothing_is_no_reason_to_refuse(folder: Path) -> None:
    own = read_adapter(folder).digest
    off = {
        "use_dora": False,
        "modules_to_save": None,
        "loftq_config": {},
        "layer_replication": [],
        "something_new": None,
    }
    assert read_adapter(change(folder, **off, init_lora_weights="gaussian")).digest == own
    assert read_adapter(change(folder, target_modules=r"^(?!.*visual).*q_proj$")).digest == own


def test_files_that_are_missing_or_damaged(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="There is no folder"):
        read_adapter(tmp_path / "nowhere")
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if "lora_B" in name)
    lone = {other: tensor for other, tensor in tensors.items() if other != name}
    save_file(lone, folder / WEIGHTS)
    with pytest.raises(AdapterRefused, match="no lora_B"):
        read_adapter(folder)
    save_file({**tensors, "base_model.model.embed.lora_embedding_A": tensors[name]}, folder / WEIGHTS)
    with pytest.raises(AdapterRefused, match="lora_embedding_A"):
        read_adapter(folder)
    whole_numbers = {"base_model.model.layers.0.q.lora_A.weight": np.ones((2, 32), np.int32)}
    save_file({**tensors, **whole_numbers}, folder / WEIGHTS)
    with pytest.raises(AdapterRefused, match="of type I32"):
        read_adapter(folder)
    save_file(tensors, folder / WEIGHTS)
    whole = (folder / WEIGHTS).read_bytes()
    for cut in (0, 4, 40, len(whole) - 8):
        (folder / WEIGHTS).write_bytes(whole[:cut])
        with pytest.raises(AdapterRefused, match="cannot be read|no LoRA"):
            read_adapter(folder)
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterRefused, match="can run code"):
        read_adapter(folder)
    (folder / CONFIG).write_text("[]")
    with pytest.raises(AdapterRefused, match="no object"):
        read_adapter(folder)
