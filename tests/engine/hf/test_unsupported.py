"""What the engine cannot drive, or what is broken, gets an error that names it and says what to do."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rekindle.engine.hf.decoder import Decoder
from rekindle.engine.hf.device import choose_placement
from rekindle.engine.hf.engine import HfEngine
from rekindle.errors import BrokenModel, InvalidSetting, ModelError, NotAModel, UnsupportedModel
from rekindle.models.files import ModelFiles
from tests.tiny import byte_tokenizer, tiny_engine, tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def small(family: str, **changes: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **changes})).eval()


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mamba", {"state_size": 4}, "'mamba'.*linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "'lfm2'.*conv"),
        ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "'falcon_h1'.*hybrid"),
        ("gpt_oss", {"num_local_experts": 2}, "'gpt_oss'.*s_aux"),
        ("bloom", {}, "'bloom'.*keep no KV"),
        ("diffllama", {}, "'diffllama'.*more than once"),
    ],
)
def test_a_family_it_cannot_drive_is_named(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words) as raised:
        Decoder(small(family, **changes))
    assert "Use a plain decoder" in str(raised.value)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt2", {"n_inner": 48}, "'gpt2'"),  # reshapes after its layers, so it cannot read some rows only
        ("phimoe", {"num_local_experts": 2, "sliding_window": 16}, "'phimoe'.*sliding window of 16"),
    ],
)
def test_a_family_that_would_go_wrong_later_is_refused_at_load(
    family: str, changes: dict[str, Any], words: str
) -> None:
    model = small(family, **changes)
    with pytest.raises(UnsupportedModel, match=words):
        HfEngine(model, byte_tokenizer(), name=family, placement=choose_placement("cpu", "float32"))


def test_an_encoder_decoder_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "t5"))
    config = AutoConfig.for_model("t5", vocab_size=320, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(folder)
    with pytest.raises(UnsupportedModel, match="'t5'.*encoder-decoder"):
        HfEngine.load(ModelFiles("t5", folder))


def test_an_encoder_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "bert"))
    config = AutoConfig.for_model("bert", **{**SMALL, "architectures": ["BertModel"]})
    config.save_pretrained(folder)
    with pytest.raises(UnsupportedModel, match="BertModel"):
        HfEngine.load(ModelFiles("bert", folder))


def test_an_unknown_family_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "new"))
    (folder / "config.json").write_text(json.dumps({"model_type": "not-yet-invented"}))
    with pytest.raises(UnsupportedModel, match="not-yet-invented"):
        HfEngine.load(ModelFiles("new", folder))


def test_a_model_that_differs_when_driven_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load: an unknown family whose layers do something between them that the loop does not."""
    model = tiny_model("phi")
    own_forward = type(model).forward

    def odd_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own_forward(self, *args, **kwargs)
        return output if self is not model else type(output)(logits=output.logits * 1.5)

    monkeypatch.setattr(type(model), "forward", odd_forward)
    with pytest.raises(UnsupportedModel, match="'phi'.*logits are off by"):
        HfEngine(model, byte_tokenizer(), name="odd", placement=choose_placement("cpu", "float32"))


def test_a_dynamic_rope_past_its_length_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=64)
    engine = HfEngine(model, byte_tokenizer(), name="dynamic", placement=choose_placement("cpu", "float32"))
    assert engine.context_tokens == 64
    with pytest.raises(UnsupportedModel, match="dynamic RoPE"):
        HfEngine(model, byte_tokenizer(), name="dynamic", placement=engine.placement, context_tokens=65)


def test_a_context_beyond_the_models_is_refused() -> None:
    model = tiny_model("llama")
    for wanted in (0, -5, 513):
        with pytest.raises(InvalidSetting, match="1 to 512"):
            HfEngine(
                model, byte_tokenizer(), name="x", placement=choose_placement("cpu", "float32"), context_tokens=wanted
            )


def test_missing_tensors_are_not_made_up(tiny_folder: Path, tmp_path: Path) -> None:
    """transformers would fill them with random numbers and a warning."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "holes"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenModel, match=r"lacks 1 tensor \(model.layers.1.mlp.up_proj.weight\)"):
        HfEngine.load(ModelFiles("holes", folder))


def test_tensors_of_another_shape_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "shape"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(7, 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenModel, match="shape"):
        HfEngine.load(ModelFiles("shape", folder))


def test_a_damaged_tokenizer_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "tok"))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(BrokenModel, match="tokenizer"):
        HfEngine.load(ModelFiles("tok", folder))


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotAModel):
        HfEngine.load(ModelFiles("none", tmp_path))


def test_the_model_itself_stays_as_it_was() -> None:
    """The engine drives a twin; the model it was given still generates by itself."""
    model = tiny_model("llama")
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.inference_mode():
        before = model(ids).logits
    engine = HfEngine(model, byte_tokenizer(), name="x", placement=choose_placement("cpu", "float32"))
    assert engine.model is model and model.config._attn_implementation == "sdpa"
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, before)
    twin_weights = {id(p) for p in engine._decoder._twin.parameters()}
    assert twin_weights <= {id(p) for p in model.parameters()}  # shared, not copied


def test_closing_frees_the_weights() -> None:
    import gc
    import weakref

    from rekindle.engine.hf.cuda_graph import GraphRecorder

    engine = tiny_engine("llama")
    engine._recorder = GraphRecorder(engine._live(), 512)  # as on CUDA
    sequence = engine.open(10, "plain")  # even if somebody still holds one
    weight = weakref.ref(engine.model.lm_head.weight)
    engine.close()
    engine.close()
    gc.collect()
    assert weight() is None
    sequence.close()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_is_never_run_whatever_stands_on_the_standard_input(
    file: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask there whether to run it; a prompt that is piped in may begin with `y`."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    about = json.loads((folder / file).read_text("utf-8"))
    if file == "config.json":
        about |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    else:
        about |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]}}
    (folder / file).write_text(json.dumps(about), "utf-8")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with contextlib.suppress(ModelError):  # the tokenizer is whole without its code
        HfEngine.load(ModelFiles("own", folder))
    assert not (tmp_path / "ran").exists()
