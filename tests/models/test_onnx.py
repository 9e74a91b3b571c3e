"""ONNX graphs: found in place and on the hub; what cannot be driven is refused in one sentence before it is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="the tiny graphs of tests are written with the package onnx")

import onnx
from onnx import TensorProto, helper

from rekindle.errors import BrokenModel, ModelError, ModelNotFound, NotAModel, UnsupportedModel
from rekindle.models import registry
from rekindle.models.files import ModelFiles
from rekindle.models.onnx_folder import choose_graph, read_onnx_model
from rekindle.models.onnx_graph import read_graph
from rekindle.models.pull import obtain, pull
from rekindle.models.sources import OnnxSource, find, parse, with_graph
from tests.models.ggufs import Hub
from tests.parity.engines import onnx_folder
from tests.tiny_onnx import KV_HEADS, LAYERS, save

FORMS = ("onnx", "onnx-fp16", "onnx-int4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that may be changed."""
    return Path(shutil.copytree(onnx_folder(), tmp_path / "tiny"))


def test_a_graph_says_what_it_takes_and_gives(folder: Path) -> None:
    model = read_onnx_model(folder / "model.onnx")
    assert len(model.layers) == LAYERS and model.layout.layers[0].kv_heads == KV_HEADS
    assert (model.layout.dtype, model.shares, model.positions, model.logits_last) == ("float32", True, None, False)
    assert (model.context_tokens, model.vocabulary_size, model.stop_ids) == (512, 320, {256, 258})
    assert model.graph.weights == (folder / "model.onnx", folder / "model.onnx.data")
    loaded = onnx.load(folder / "model.onnx")
    numbers = [tensor for tensor in loaded.graph.initializer if tensor.data_type == TensorProto.FLOAT]
    assert model.graph.parameters == sum(onnx.numpy_helper.to_array(tensor).size for tensor in numbers)
    assert model.graph.operators == {node.op_type for node in loaded.graph.node}


def test_a_graph_that_copies_its_kv_is_known_as_one() -> None:
    model = read_onnx_model(onnx_folder(attention="packed", dtype="float16") / "model.onnx")
    assert (model.layout.dtype, model.shares, model.positions) == ("float16", False, "position_ids")


def without_past(graph: Any) -> None:
    del graph.input[2:]


def under_other_names(graph: Any) -> None:
    for value in graph.input:
        value.name = value.name.replace("past_key_values", "cache")


def without_a_value(graph: Any) -> None:
    del graph.input[3]


def without_the_present(graph: Any) -> None:
    del graph.output[1]


def of_rank_three(graph: Any) -> None:
    del graph.input[2].type.tensor_type.shape.dim[0]


def of_whole_numbers(graph: Any) -> None:
    for value in (*graph.input[2:], *graph.output[1:]):
        value.type.tensor_type.elem_type = TensorProto.INT64


def of_two_types(graph: Any) -> None:
    graph.input[4].type.tensor_type.elem_type = TensorProto.FLOAT16


def with_other_heads(graph: Any) -> None:
    for value in (graph.input[3], graph.output[2]):
        value.type.tensor_type.shape.dim[1].dim_value = 7


def with_a_switch(graph: Any) -> None:
    graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))


def without_logits(graph: Any) -> None:
    del graph.output[0]


def with_floating_tokens(graph: Any) -> None:
    graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT


def without_a_mask(graph: Any) -> None:
    del graph.input[1]


def with_a_branch(graph: Any) -> None:
    one = helper.make_graph([], "one", [], [])
    graph.node.append(helper.make_node("If", ["last"], ["either"], then_branch=one, else_branch=one))


REFUSED: dict[Callable[[Any], None], str] = {
    without_past: r"takes no keys and values of earlier tokens \(past_key_values.0.key\)",
    under_other_names: r"takes no keys and values of earlier tokens",
    without_a_value: r"has past_key_values.0.key, but no past_key_values.0.value",
    without_the_present: r"but no present.0.key",
    of_rank_three: r"past_key_values.0.key with 3 dimensions",
    of_whole_numbers: r"numbers that are not known here \(types \[7\]\)",
    of_two_types: r"types \[1, 10\]",
    with_other_heads: r"has 2 heads in past_key_values.0.key and 7 in",
    with_a_switch: r"needs an input that is not known here \(use_cache_branch\)",
    without_logits: r"gives no logits",
    with_floating_tokens: r"takes input_ids in another form",
    without_a_mask: r"has no input attention_mask",
    with_a_branch: r"an operator If",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_graph_that_cannot_be_driven_is_one_sentence(change: Callable[[Any], None], folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    change(model.graph)
    (folder / "model.onnx.data").unlink()
    save(model, folder)
    with pytest.raises(UnsupportedModel, match=REFUSED[change]) as raised:
        find(str(folder))
    assert str(raised.value).count(". ") == 1 and "rekindle pull NAME --format onnx" in str(raised.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(1 << 17))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model.onnx.data", Path.unlink, "has its weights in model.onnx.data, which is not beside it"),
        ("model.onnx.data", cut, "it is cut off"),
        ("model.onnx.data", grow, "it belongs to another graph"),
        ("model.onnx", cut, "is not an ONNX graph, or is damaged"),
        ("model.onnx", lambda path: path.write_bytes(b""), "is not an ONNX graph, or is damaged"),
        ("model.onnx", lambda path: path.write_bytes(b"GGUF" * 99), "is not an ONNX graph, or is damaged"),
        ("model.onnx", Path.unlink, "There is no file"),
        ("genai_config.json", lambda path: path.write_text("{"), "is not JSON"),
        ("genai_config.json", lambda path: path.write_text("[]"), "names no graph"),
        ("genai_config.json", lambda path: path.write_text('{"model": {"decoder": {"filename": "../x"}}}'), "names no"),
    ],
)
def test_damaged_files_are_one_sentence(name: str, change: Callable[[Path], Any], words: str, folder: Path) -> None:
    change(folder / name)
    with pytest.raises((BrokenModel, ModelNotFound), match=words):
        find(str(folder))


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "a/../../x", "C:\\x", "..\\x"])
def test_weights_outside_the_folder_are_refused(location: str, folder: Path) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BrokenModel, match="outside its folder"):
        read_graph(folder / "model.onnx")


def test_a_tensor_whose_size_is_not_that_of_its_shape_is_refused(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    tensor.dims[0] *= 2
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BrokenModel, match="does not say where its"):
        read_graph(folder / "model.onnx")


def test_a_folder_and_a_file_are_used_in_place(folder: Path) -> None:
    graph = folder / "model.onnx"
    assert parse(str(folder)) == parse(str(graph)) == OnnxSource(graph)
    assert find(str(folder)) == find(str(graph)) == ModelFiles("tiny", folder, onnx=graph)
    entry = pull(str(folder))
    assert entry.in_place and entry.files.onnx == graph and find("tiny") == entry.files
    assert all(find("tiny", form=form).onnx == graph for form in FORMS)  # type: ignore[arg-type]
    registry.remove("tiny")
    assert graph.is_file() and registry.entries() == []


def test_a_folder_in_both_forms_is_one_of_hugging_face(folder: Path, tiny_folder: Path) -> None:
    shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
    assert find(str(folder)).onnx is None


def test_what_was_exported_is_found_and_goes_with_the_model(tiny_folder: Path) -> None:
    entry = pull(str(tiny_folder))
    assert find("tiny", form="onnx-int4").onnx is None
    made = registry.exported_folder(entry.files, "onnx-int4")
    made.mkdir(parents=True)
    (made / "model.onnx").touch()
    assert find("tiny", form="onnx-int4").onnx == find(str(tiny_folder), form="onnx-int4").onnx == made / "model.onnx"
    assert find("tiny", form="onnx").onnx is None and find("tiny").onnx is None
    changed = Path(shutil.copytree(tiny_folder, made.parent / "changed"))
    assert with_graph(ModelFiles("tiny", changed), "onnx-int4").onnx is None
    registry.remove("tiny")
    assert not made.exists() and (tiny_folder / "config.json").is_file()


def publish(hub: Hub, place: Path, *graphs: str) -> None:
    """A repository as on the hub: its graphs in folders, the rest above them."""
    for graph in graphs:
        (place / graph).parent.mkdir(parents=True, exist_ok=True)
        model = onnx.load(onnx_folder() / "model.onnx")
        data = f"{Path(graph).name}_data"
        onnx.save_model(model, place / graph, save_as_external_data=True, location=data, size_threshold=256)
    shutil.copy(onnx_folder() / "tokenizer.json", place)
    (place / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 256}))
    hub.source = place
    hub.publish("org/name", *(str(path.relative_to(place)) for path in sorted(place.rglob("*")) if path.is_file()))


def test_a_graph_of_the_hub_is_fetched_with_what_belongs_to_it(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path / "hub", "onnx/model.onnx", "onnx/model_q4.onnx", "onnx/model_q4f16.onnx")
    files = obtain("org/name", form="onnx-int4")
    assert files.name == "org/name/onnx/model_q4.onnx" and files.onnx is not None
    assert sorted(hub.asked[1:]) == ["config.json", "onnx/model_q4.onnx", "onnx/model_q4.onnx_data", "tokenizer.json"]
    before = len(hub.asked)
    assert obtain("org/name", form="onnx-int4") == obtain("org/name/onnx/model_q4.onnx") == files
    assert len(hub.asked) == before, "it is here"
    assert read_onnx_model(files.onnx).folder == files.folder.parent, "its tokenizer is above it"
    assert obtain("org/name", form="onnx").name == "org/name/onnx/model.onnx"
    assert pull("org/name/onnx/model_q4f16.onnx").kind == "decoder"


def test_several_graphs_are_named(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path / "hub", "a-int4/model.onnx", "b-int4/model.onnx")
    with pytest.raises(NotAModel, match="Name one: org/name/a-int4/model.onnx, org/name/b-int4/model.onnx"):
        pull("org/name", form="onnx-int4")
    with pytest.raises(ModelNotFound, match="has no graph x.onnx. It has: a-int4/model.onnx, b-int4/model.onnx"):
        pull("org/name/x.onnx")


def test_a_graph_is_fetched_beside_what_came_in_another_form(hub: Hub, tiny_folder: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(tiny_folder, tmp_path / "hub"))
    hub.source = place
    hub.publish("org/name", *(path.name for path in tiny_folder.iterdir()))
    assert pull("org/name").files.onnx is None
    publish(hub, place, "onnx/model_q4.onnx")
    entry = pull("org/name", form="onnx-int4")
    assert entry.name == "org/name/onnx/model_q4.onnx" and find("org/name").onnx is None
    asked = len(hub.asked)
    assert pull("org/name", form="onnx-int4") == entry and len(hub.asked) == asked


def test_removing_a_model_keeps_what_has_a_similar_name(tiny_folder: Path) -> None:
    own = Path(shutil.copytree(tiny_folder, registry.models_folder() / "mine"))
    beside = Path(shutil.copytree(tiny_folder, registry.models_folder() / "mine-onnx"))
    pull(str(own))
    registry.remove("mine")
    assert own.is_dir() and beside.is_dir()


def test_a_repository_without_a_graph_comes_in_hugging_face_form(hub: Hub, tiny_folder: Path) -> None:
    hub.publish("org/name", *(path.name for path in tiny_folder.iterdir()))
    files = obtain("org/name", form="onnx")
    assert files.onnx is None and files.converted


def test_a_graph_is_chosen_by_its_precision() -> None:
    names = ["onnx/model.onnx", "onnx/model_fp16.onnx", "onnx/model_q4.onnx", "onnx/model_q4f16.onnx", "x/vision.onnx"]
    assert [choose_graph(names, form) for form in FORMS] == [[names[0]], [names[1]], [names[2]]]  # type: ignore[arg-type]
    several = ["cpu-int4/model.onnx", "cuda-int4/model.onnx", "cuda-fp16/model.onnx"]
    assert choose_graph(several, "onnx-int4") == several[:1] and choose_graph(several, "onnx-fp16") == several[2:]
    assert choose_graph(several, "onnx") == []
    own = ["a/genai_config.json", "a/phi-cpu-int4.onnx", "b/phi-cpu-int4.onnx", "onnx/decoder_model_merged.onnx"]
    assert choose_graph(own, "onnx-int4") == own[1:2] and choose_graph(own, "onnx") == []


def test_a_graph_without_configuration_or_tokenizer_is_a_sentence(folder: Path) -> None:
    (folder / "genai_config.json").unlink()
    with pytest.raises(ModelError, match="neither genai_config.json nor config.json"):
        find(str(folder))
