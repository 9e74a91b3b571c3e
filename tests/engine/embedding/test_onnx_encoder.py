"""ONNX graphs that others exported make the vectors of the model that they were made from."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

pytest.importorskip("onnxruntime", reason="graphs are computed by ONNX Runtime")
pytest.importorskip("onnx", reason="torch writes graphs with the package onnx")

import onnx
from onnx import TensorProto, helper

from rekindle.engine.embedding import embedder
from rekindle.engine.embedding.embedder import Embedder
from rekindle.errors import BrokenModel, Cancelled, EngineMissing, ModelError, NotAModel, UnsupportedModel
from rekindle.models import registry
from rekindle.models.pull import pull
from rekindle.models.sources import find
from tests.engine.embedding.tiny_encoders import TEXTS, Make, own, put
from tests.models.ggufs import Hub, leave_home

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_thread")]

INPUTS = {"bert": ("input_ids", "attention_mask", "token_type_ids")}


class States(torch.nn.Module):
    """The part of a model that is exported."""

    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).last_hidden_state
        return states


def export(folder: Path, family: str = "bert") -> Path:
    """Put a graph beside the weights, as optimum does."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    names = INPUTS.get(family, ("input_ids", "attention_mask"))
    (folder / "onnx").mkdir()
    path, ids = folder / "onnx" / "model.onnx", torch.full((2, 7), 5)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            States(model, names),
            tuple(given[name] for name in names),
            str(path),
            input_names=list(names),
            output_names=["last_hidden_state"],
            dynamic_axes={name: {0: "batch", 1: "tokens"} for name in (*names, "last_hidden_state")},
            dynamo=False,
        )
    return path


def load(spec: Path | str) -> Embedder:
    return Embedder.load(pull(str(spec)).files)


@pytest.mark.parametrize(("family", "limit"), [("bert", 40), ("xlm-roberta", 38), ("distilbert", 40)])
def test_an_exported_graph_has_the_vectors_of_its_model(family: str, limit: int, make: Make) -> None:
    sizes = {"dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 4} if family == "distilbert" else {}
    folder = make(family, **sizes)
    made = load(export(folder, family))
    assert (made.name, made.dimensions, made.token_limit) == (folder.name, 24, limit)
    np.testing.assert_allclose(made.embed(TEXTS).vectors, own(folder, TEXTS, limit), atol=1e-5)


@pytest.fixture
def graph(make: Make) -> Path:
    """A graph in a folder without other weights."""
    folder = make()
    path = export(folder)
    (folder / "model.safetensors").rename(folder.with_suffix(".safetensors"))
    return path


def change(path: Path, how: Callable[[Any], None]) -> None:
    model = onnx.load(path)
    how(model.graph)
    onnx.save(model, path)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_the_folder_above_a_graph_says_how_vectors_are_pooled(pooling: str, make: Make) -> None:
    folder = make()
    expected = own(folder, TEXTS, 40, pooling)
    path = export(folder)
    put(folder, "1_Pooling/config.json", {"pooling_mode": pooling})
    put(folder / "onnx", "config.json", json.loads((folder / "config.json").read_text()))  # some have both
    np.testing.assert_allclose(load(path).embed(TEXTS).vectors, expected, atol=1e-5)


def test_a_graph_that_pools_by_itself_is_taken_at_its_word(graph: Path) -> None:
    folder = graph.parents[1]
    put(folder, "modules.json", [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}])
    with pytest.raises(UnsupportedModel, match="Dense"):
        load(folder)

    def pool(graph: Any) -> None:
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "tokens"))
        names = ["last_hidden_state", "tokens"], ["sentence_embedding"]
        graph.node.append(helper.make_node("ReduceMax", *names, keepdims=0))
        graph.output.append(helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["batch", 24]))

    change(graph, pool)
    made = load(folder)
    alone = np.concatenate([made.embed([text]).vectors for text in TEXTS])
    (folder / "modules.json").unlink()
    put(folder, "1_Pooling/config.json", {"pooling_mode": "max"})
    folder.with_suffix(".safetensors").rename(folder / "model.safetensors")
    np.testing.assert_allclose(alone, own(folder, TEXTS, 40, "max"), atol=1e-5)


def test_small_whole_numbers_are_given_where_a_graph_takes_them(graph: Path) -> None:
    expected = load(graph).embed(TEXTS).vectors

    def narrow(graph: Any) -> None:
        for value in graph.input:
            value.type.tensor_type.elem_type = TensorProto.INT32
        names = [value.name for value in graph.input]
        for node in graph.node:
            for place, name in enumerate(node.input):
                if name in names:
                    node.input[place] = f"{name}.wide"
        for name in reversed(names):
            graph.node.insert(0, helper.make_node("Cast", [name], [f"{name}.wide"], to=TensorProto.INT64))

    change(graph, narrow)
    np.testing.assert_allclose(load(graph).embed(TEXTS).vectors, expected, atol=1e-6)


def test_it_is_recorded_as_an_embedder_and_writes_no_text(graph: Path) -> None:
    entry = pull(str(graph.parents[1]))
    assert (entry.kind, entry.files.onnx, entry.in_place) == ("embedder", graph, True)
    for spec in (str(graph.parents[1]), str(graph), entry.name):
        with pytest.raises(NotAModel, match="computes embeddings"):
            find(spec)
    registry.remove(entry.name)
    assert graph.is_file()


def test_a_graph_of_the_hub_comes_with_its_pooling(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_home(tmp_path / "user", monkeypatch)
    folder = make()
    expected = own(folder, TEXTS, 40, "cls")
    export(folder)
    put(folder, "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    hub = Hub(folder)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot)
    monkeypatch.setattr("huggingface_hub.model_info", hub.info)
    hub.publish("o/encoder", *(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
    made = load("o/encoder/onnx/model.onnx")
    np.testing.assert_allclose(made.embed(TEXTS).vectors, expected, atol=1e-5)
    assert not list(Path(pull("o/encoder/onnx/model.onnx").files.folder).glob("*.safetensors"))


def test_the_digest_follows_the_graph(graph: Path) -> None:
    before = load(graph).digest

    def double(graph: Any) -> None:
        weights = graph.initializer[0]
        weights.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weights) * 2, weights.name))

    change(graph, double)
    assert load(graph).digest != before


def test_a_cancelled_call_stops_the_graph(graph: Path) -> None:
    made = load(graph)
    with pytest.raises(Cancelled):
        made.embed(TEXTS * 50, cancelled=iter([False] * 3 + [True]).__next__)
    assert made.embed(TEXTS).vectors.shape == (len(TEXTS), 24)


def with_pixels(graph: Any) -> None:
    graph.input.append(helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, [1, 3, 8, 8]))


def with_floating_tokens(graph: Any) -> None:
    graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT


def under_another_name(graph: Any) -> None:
    graph.node.append(helper.make_node("Identity", ["last_hidden_state"], ["scores"]))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", "tokens", 24]))


@pytest.mark.parametrize(
    ("how", "words"),
    [(with_pixels, "pixel_values"), (with_floating_tokens, "input_ids"), (under_another_name, "no keys and values")],
)
def test_what_is_no_encoder_is_refused_by_name(how: Callable[[Any], None], words: str, graph: Path) -> None:
    change(graph, how)
    with pytest.raises(UnsupportedModel, match=words):
        load(graph)


@pytest.mark.parametrize(
    ("name", "error"), [("config.json", NotAModel), ("tokenizer.json", NotAModel), ("onnx/model.onnx", ModelError)]
)
def test_a_missing_file_is_named(name: str, error: type[Exception], graph: Path) -> None:
    (graph.parents[1] / name).unlink()
    with pytest.raises(error):
        load(graph)


def test_a_config_without_the_number_of_tokens_is_refused(graph: Path) -> None:
    put(graph.parents[1], "config.json", {"model_type": "bert"})
    with pytest.raises(BrokenModel, match="how many tokens"):
        load(graph)


def test_without_onnx_runtime_it_says_what_to_install(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = pull(str(graph)).files
    monkeypatch.setattr(embedder, "runtime_installed", lambda: False)
    with pytest.raises(EngineMissing, match=r"rekindle-llm\[onnx\]"):
        Embedder.load(files)
