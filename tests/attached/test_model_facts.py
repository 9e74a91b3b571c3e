"""What `attach` measures of a model: once, and never taken for another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rekindle.attached import model_facts
from rekindle.attached.model_facts import ModelFacts
from rekindle.engine.hf.decoder import Decoder
from rekindle.errors import UnsupportedModel
from rekindle.machine import home_folder
from tests.tiny import tiny_model

MEMO = "attached.json"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[PreTrainedModel]:
    """Every model that was measured, and a folder of its own for what is remembered."""
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))
    models: list[PreTrainedModel] = []

    def count(model: PreTrainedModel) -> model_facts.Fingerprint:
        models.append(model)
        return fingerprint_of(model)

    fingerprint_of = model_facts.fingerprint_of
    monkeypatch.setattr(model_facts, "fingerprint_of", count)
    return models


def test_the_same_model_is_measured_once(measured: list[PreTrainedModel]) -> None:
    model = tiny_model("llama")
    first, again = ModelFacts(model), ModelFacts(tiny_model("llama"))
    assert len(measured) == 1
    assert first.identity("plain") == again.identity("plain") and first.layout == again.layout
    assert first.layout == Decoder(model).layout and first.family == "llama"
    assert first.rope.regimes == Decoder(model).rope.regimes


@pytest.mark.parametrize("place", [0, 17, -1])
def test_one_number_makes_another_model(measured: list[PreTrainedModel], place: int) -> None:
    model, other = tiny_model("llama"), tiny_model("llama")
    weight = other.model.layers[1].mlp.up_proj.weight
    weight.data.view(-1)[place] += 1e-3
    identities = {ModelFacts(one).identity("plain").weights for one in (model, other, model, other)}
    assert len(identities) == len(measured) == 2


def test_another_type_or_config_makes_another_model(measured: list[PreTrainedModel]) -> None:
    model = tiny_model("llama")
    before = ModelFacts(model)
    half = ModelFacts(tiny_model("llama").to(torch.bfloat16))
    assert half.layout.dtype == "bfloat16" and before.layout.dtype == "float32"
    model.config.rms_norm_eps *= 2
    assert ModelFacts(model).identity("plain") != before.identity("plain")
    assert len(measured) == 3


@pytest.mark.parametrize("harm", ["", "[]", "{", "values", "seed"])
def test_a_damaged_memo_is_measured_again(measured: list[PreTrainedModel], harm: str) -> None:
    before = ModelFacts(tiny_model("llama"))
    path = home_folder() / MEMO
    if harm in ("values", "seed"):
        content = json.loads(path.read_text())
        for name in content:
            if (name == "seed") == (harm == "seed"):
                content[name] = {"fingerprint": {"weights": 7}, "layout": None}
        path.write_text(json.dumps(content))
    else:
        path.write_text(harm)
    after = ModelFacts(tiny_model("llama"))
    assert len(measured) == 2 and after.identity("plain") == before.identity("plain")


def test_a_folder_that_cannot_be_written_costs_only_time(measured: list[PreTrainedModel], tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file in its place")
    facts = [ModelFacts(tiny_model("llama")) for _ in range(2)]
    assert len(measured) == 2 and facts[0].identity("plain") == facts[1].identity("plain")


def test_a_refusal_is_not_remembered(measured: list[PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedModel("no")

    with monkeypatch.context() as patch:
        patch.setattr(model_facts, "refuse_untested", refuse)
        for _ in range(2):
            with pytest.raises(UnsupportedModel):
                ModelFacts(tiny_model("llama"))
    ModelFacts(tiny_model("llama"))
    assert len(measured) == 3


def test_the_seed_is_of_this_machine_alone(measured: list[PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for home in ("one", "two"):
        monkeypatch.setenv("REKINDLE_HOME", str(home_folder().with_name(home)))
        ModelFacts(tiny_model("llama"))
        path = home_folder() / MEMO
        assert path.stat().st_mode & 0o077 == 0
        names.append(set(json.loads(path.read_text())) - {"seed"})
    assert len(measured) == 2 and not names[0] & names[1]
