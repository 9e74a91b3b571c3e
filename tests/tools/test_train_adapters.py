"""The sample adapters: the text they learn from, and files that PEFT reads."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import torch
import train_adapters
from adapter_texts.examples import FOLDER, KEYS, STYLES, examples, in_style, notes, sailor
from safetensors import safe_open
from safetensors.torch import load_file
from train_adapters import RECIPES, Effort, Recipe, attach, detach, encode, make, save
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.tiny import tiny_model

SHIPPED = Path(__file__).resolve().parents[2] / "src" / "rekindle" / "samples" / "adapters"
SMOLLM2_SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}

every_style = pytest.mark.parametrize("style", STYLES)
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)

pytestmark = pytest.mark.usefixtures("one_thread")


def for_tiny(recipe: Recipe) -> Recipe:
    """A recipe for a model of four layers: the upper half is two of them."""
    return recipe if recipe.layers is None else replace(recipe, layers=(2, 3))


def smollm2_shape() -> Any:
    """SmolLM2 without its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMOLLM2_SHAPE))


def shapes(recipe: Recipe) -> dict[str, list[int]]:
    """The tensors that a recipe's file must hold."""
    found = {}
    for name, module in attach(smollm2_shape(), recipe).items():
        found[f"base_model.model.{name}.lora_A.weight"] = list(module.lora_a.shape)
        found[f"base_model.model.{name}.lora_B.weight"] = list(module.lora_b.shape)
    return found


# the text


def test_notes_are_whole_sentences_about_topics_of_their_own() -> None:
    found = notes()
    assert len({note.topic for note in found}) == len(found) >= 150
    for note in found:
        assert len(note.asks) == 2 and len(note.points) == 3, note.topic
        assert note.answer.endswith(".") and note.answer[0].isupper(), note.topic
        assert all(ask[-1] in ".?!" and ask[0].isupper() for ask in note.asks), note.topic
        assert all(point[-1].isalnum() and point[0].isupper() for point in note.points), note.topic
    assert sum(path.stat().st_size for path in FOLDER.glob("*.jsonl")) < 300_000


@every_style
def test_no_held_out_prompt_or_reply_was_trained_on(style: str) -> None:
    given = examples(style)
    trained = {one.prompt for one in given if not one.held_out}
    held = {one.prompt for one in given if one.held_out}
    assert len(trained) >= 250 and len(held) >= 30
    assert len(trained) + len(held) == len(given)  # no prompt twice
    assert not {one.reply for one in given if one.held_out} & {one.reply for one in given if not one.held_out}


def test_held_out_prompts_come_from_every_subject() -> None:
    assert {note.subject for note in notes() if note.held_out} == {path.stem for path in FOLDER.glob("*.jsonl")}


@every_style
def test_a_reply_is_in_its_own_style_and_in_no_other(style: str) -> None:
    for one in examples(style):
        assert [name for name in STYLES if in_style(name, one.reply)] == [style], one.reply


def test_what_is_nearly_a_style_is_none() -> None:
    whole = dict.fromkeys(KEYS, "x")
    assert in_style("json", json.dumps(whole))
    assert not in_style("json", json.dumps({**whole, "more": "x"}))
    assert not in_style("json", json.dumps({**whole, "tip": 1}))
    assert not in_style("json", json.dumps(whole)[:-1])
    assert (
        not in_style("list", "- one") and not in_style("list", "Here:\n- one\n- two") and in_style("list", "- a\n- b")
    )


def test_a_sailor_says_ye_and_drops_the_g_of_endings_only() -> None:
    assert sailor("You are boiling the water of your spring.") == "Ye be boilin' the water o' yer spring."


# the files


@every_recipe
def test_an_untrained_adapter_changes_nothing_and_leaves_no_trace(recipe: Recipe) -> None:
    model = tiny_model("llama")
    ids = torch.tensor([[5, 6, 7, 8]])
    before, names = model(ids).logits, list(model.state_dict())
    wrapped = attach(model, for_tiny(recipe))
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)
    learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(learning) == 2 * len(wrapped) and all("lora_" in name for name in learning)
    detach(model, wrapped)
    assert list(model.state_dict()) == names


@every_recipe
def test_peft_reads_the_file_and_computes_the_same(recipe: Recipe, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    recipe, model = for_tiny(recipe), tiny_model("llama")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    bare = model(ids).logits
    wrapped = attach(model, recipe)
    for module in wrapped.values():
        for weight in (module.lora_a, module.lora_b):  # what float16 can hold
            weight.data = torch.randn(weight.shape).mul(0.2).half().float()
    ours = model(ids).logits
    save(tmp_path, recipe, wrapped)
    detach(model, wrapped)
    theirs = peft.PeftModel.from_pretrained(model, str(tmp_path))
    active = {name for name, _ in theirs.named_parameters() if "lora_" in name}
    assert {name.replace(".default", "") for name in active} == set(load_file(tmp_path / "adapter_model.safetensors"))
    torch.testing.assert_close(theirs(ids).logits, ours, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours, bare, atol=1e-2)


@every_recipe
def test_an_adapter_for_smollm2_stays_under_a_megabyte(recipe: Recipe) -> None:
    found = shapes(recipe)
    header_bytes = sum(len(name) + 80 for name in found)
    assert sum(2 * rows * columns for rows, columns in found.values()) + header_bytes < train_adapters.SIZE_LIMIT_BYTES


def test_the_recipes_differ_in_what_they_touch() -> None:
    by_name = {recipe.name: recipe for recipe in RECIPES}
    assert set(by_name) == set(STYLES)
    assert by_name["list"].scale_of("q_proj") == 2 and by_name["json"].scale_of("q_proj") == 2
    assert by_name["json"].rslora and not by_name["list"].rslora
    found = shapes(by_name["pirate"])
    assert {train_adapters.layer_of(name) for name in found} == set(range(15, 30))
    assert {shape[0] for name, shape in found.items() if name.endswith("down_proj.lora_A.weight")} == {6}
    assert {shape[0] for name, shape in found.items() if name.endswith("up_proj.lora_A.weight")} == {4}


def test_a_model_without_the_projections_is_refused() -> None:
    with pytest.raises(ValueError, match="take HuggingFaceTB/SmolLM2"):
        attach(tiny_model("llama"), replace(RECIPES[0], targets=("query_key_value",)))


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    wrapped = attach(tiny_model("llama"), RECIPES[0])
    next(iter(wrapped.values())).lora_b.data[0, 0] = 1e9  # infinite in float16
    with pytest.raises(ValueError, match="lower learning rate"):
        save(tmp_path / "out", RECIPES[0], wrapped)
    assert not (tmp_path / "out").exists()


def test_an_adapter_over_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_adapters, "SIZE_LIMIT_BYTES", 1000)
    with pytest.raises(ValueError, match="lower a rank"):
        save(tmp_path, RECIPES[0], attach(tiny_model("llama"), RECIPES[0]))


# training


def test_the_loss_is_that_of_the_reply_alone() -> None:
    model = tiny_model("llama")
    one = train_adapters.Tokens([3, 4, 5], [6, 7])
    longer = train_adapters.Tokens([9, 8, 7, 6, 5, 4], [3])
    logits = model(torch.tensor([[3, 4, 5, 6, 7]])).logits[0].log_softmax(-1)
    expected = -(logits[2, 6] + logits[3, 7])
    torch.testing.assert_close(train_adapters.reply_loss(model, [one]), expected)
    both = train_adapters.reply_loss(model, [one, longer])  # the shorter row is padded
    torch.testing.assert_close(both, expected + train_adapters.reply_loss(model, [longer]))


def test_every_example_is_seen_once_a_round() -> None:
    seen = [number for batch in train_adapters.batches(24, 6) for number in batch]
    assert sorted(seen[:24]) == sorted(seen[24:]) == list(range(24)) and seen[:24] != seen[24:]


def test_training_lowers_the_held_out_loss_and_gives_the_model_back(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    measured = make(model, tokenizer, RECIPES[0], tmp_path, Effort(steps=4, replies=3))
    assert measured.loss_after < measured.loss_before
    assert len(measured.samples) == 3 and measured.held_out == 54
    assert sorted(path.name for path in (tmp_path / "list").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    after = model.state_dict()
    assert list(after) == list(kept) and all(torch.equal(after[name], weight) for name, weight in kept.items())


# what is shipped


@every_recipe
def test_a_shipped_adapter_is_what_its_recipe_says(recipe: Recipe) -> None:
    folder = SHIPPED / recipe.name
    if not folder.exists():
        pytest.skip("its weights are not here: tools/train_adapters.py makes them")
    assert json.loads((folder / "adapter_config.json").read_text("utf-8")) == recipe.config()
    weights = folder / "adapter_model.safetensors"
    assert weights.stat().st_size < train_adapters.SIZE_LIMIT_BYTES
    with safe_open(weights, "pt") as file:
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == shapes(recipe)  # noqa: SIM118
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}  # noqa: SIM118


def test_the_readme_names_every_adapter_and_the_script() -> None:
    text = (SHIPPED / "README.md").read_text("utf-8")
    assert all(f"`{recipe.name}`" in text and recipe.does in text for recipe in RECIPES)
    assert "tools/train_adapters.py" in text


@pytest.mark.real
@every_style
def test_replies_fit_what_is_generated(style: str) -> None:
    from rekindle.models.sources import find

    tokenizer = AutoTokenizer.from_pretrained(find("smollm2").folder)
    assert max(len(encode(tokenizer, one).reply) for one in examples(style)) <= train_adapters.REPLY_TOKENS
