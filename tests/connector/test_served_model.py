"""What determines the KV of a vLLM server: the same key as a session's where both compute the same, else another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rekindle.core.kv import LayerShape
from rekindle.engine.hf.engine import HfEngine
from rekindle.errors import UnsupportedModel
from rekindle.models.files import ModelFiles
from rekindle.vllm.served_model import served_layers, served_model


class FullAttentionSpec(SimpleNamespace):
    """By the name of vLLM's."""


class MambaSpec(SimpleNamespace):
    """The same."""


def spec(**changes: Any) -> FullAttentionSpec:
    known = {"num_kv_heads": 2, "head_size": 8, "head_size_v": 8, "dtype": torch.float32, "block_size": 32}
    return FullAttentionSpec(**{**known, "kv_quant_mode": SimpleNamespace(name="NONE"), **changes})


def cache_config(*groups: tuple[Any, list[str]]) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s, layer_names=names) for s, names in groups])


NAMES = [f"model.layers.{number}.self_attn.attn" for number in range(4)]
LAYERS = served_layers(cache_config((spec(), NAMES)))


def server_config(folder: Path, **model: Any) -> Any:
    known = {"quantization": None, "hf_overrides": {}, "dtype": torch.float32, "max_model_len": 512, "revision": None}
    text = AutoConfig.from_pretrained(folder) if folder.is_dir() else None
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**known, "model": str(folder), "hf_text_config": text, **model}),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        speculative_config=None,
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
    )


def test_layers_are_in_the_order_of_the_model_whatever_their_groups() -> None:
    found = served_layers(cache_config((spec(), [NAMES[2], NAMES[0]]), (spec(block_size=64), [NAMES[1], NAMES[3]])))
    assert [layer.name for layer in found.layers] == NAMES
    assert [layer.group for layer in found.layers] == [0, 1, 0, 1]
    assert found.group_tokens == (32, 64)
    assert found.layout.layers == (LayerShape(2, 8, 8),) * 4


@pytest.mark.parametrize(
    "groups",
    [
        [(MambaSpec(block_size=32), NAMES)],
        [(spec(kv_quant_mode=SimpleNamespace(name="FP8_PER_TENSOR")), NAMES)],
        [(spec(dtype=torch.float8_e4m3fn), NAMES)],
        [(spec(), NAMES), (spec(), ["draft.layers.0.attn"])],
        [(spec(), ["attention"])],
    ],
)
def test_what_is_not_keys_and_values_of_every_token_is_refused(groups: Any) -> None:
    with pytest.raises(UnsupportedModel):
        served_layers(cache_config(*groups))


def test_a_server_has_the_key_of_a_session_with_the_same_files(tiny_folder: Path) -> None:
    served = served_model(server_config(tiny_folder), LAYERS)
    engine = HfEngine.load(ModelFiles("tiny", tiny_folder), device="cpu", dtype="float32")
    assert served.identity == engine.identity(engine.regime(1)).digest
    assert served.layout == engine.layout
    engine.close()


@pytest.mark.parametrize(
    "change", [{"quantization": "fp8"}, {"hf_overrides": {"rope_theta": 1.0}}, {"dtype": torch.bfloat16}]
)
def test_what_the_files_do_not_say_gives_another_key(tiny_folder: Path, change: dict[str, Any]) -> None:
    plain = served_model(server_config(tiny_folder), LAYERS)
    assert served_model(server_config(tiny_folder, **change), LAYERS).identity != plain.identity


def test_servers_without_sound_keys_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    dummy, spread, drafts = (server_config(tiny_folder) for _ in range(3))
    dummy.load_config.load_format = "dummy"
    spread.parallel_config.pipeline_parallel_size = 2
    drafts.speculative_config = SimpleNamespace(method="eagle")
    for config in (dummy, spread, drafts, server_config(tmp_path / "not there")):
        with pytest.raises(UnsupportedModel):
            served_model(config, LAYERS)
