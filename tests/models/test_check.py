"""Bad model folders: each a clear error before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rekindle.errors import BrokenModel, ModelNotFound, NotAModel
from rekindle.models.hf_folder import check_folder


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def test_a_whole_folder_passes(folder: Path) -> None:
    assert [path.name for path in check_folder(folder)] == ["model.safetensors"]


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no folder"):
        check_folder(tmp_path / "nowhere")


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("hello")
    with pytest.raises(NotAModel, match=r"no config\.json"):
        check_folder(tmp_path)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(NotAModel, match="no weights"):
        check_folder(folder)


def test_weights_only_as_pickle_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(NotAModel, match="pickle"):
        check_folder(folder)


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.01, 0.5, 0.999])
def test_truncated_safetensors(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(BrokenModel, match="Get it again"):
        check_folder(folder)


def test_a_file_that_is_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)
    with pytest.raises(BrokenModel, match="not a safetensors file"):
        check_folder(folder)
    (folder / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"x" * 20)
    with pytest.raises(BrokenModel, match="damaged safetensors header"):
        check_folder(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(BrokenModel, match="model-00002-of-00002"):
        check_folder(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(BrokenModel, match="index"):
        check_folder(folder)


def test_a_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BrokenModel, match="no tokenizer"):
        check_folder(folder)


def test_a_config_that_is_none(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(BrokenModel, match="not JSON"):
        check_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(NotAModel, match="does not describe a model"):
        check_folder(folder)
