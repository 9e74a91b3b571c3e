"""A model folder in Hugging Face form, checked by headers and sizes, in milliseconds, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rekindle.errors import BrokenModel, ModelNotFound, NotAModel
from rekindle.models.files import is_file
from rekindle.models.safetensors import read_tensor_infos
from rekindle.safe_read import MAX_VALUES, VALUE_BYTES, parse_untrusted_json

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
GENERATING = (
    "CausalLM",
    "LMHeadModel",
    "ConditionalGeneration",
)  # parts of architecture names of models that write text
_LARGEST_JSON_BYTES = 24 << 20  # the index of 150,000 tensors is shorter


def check_folder(folder: Path) -> list[Path]:
    """The weight files of a model folder.

    Raises `ModelNotFound` if there is no folder, `NotAModel` if it is something else, `BrokenModel` if files are
    missing or truncated.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"There is no folder {folder}.")
    read_config(folder)
    weights = find_weights(folder)
    for file in weights:
        read_tensor_infos(file)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise BrokenModel(f"{folder} has no tokenizer (tokenizer.json). Copy it from where the model came from.")
    return weights


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`."""
    path = folder / "config.json"
    if not path.is_file():
        raise NotAModel(f"{folder} is not a model folder: it has no config.json.")
    try:
        config = read_json(path)
    except ValueError as error:
        raise BrokenModel(f"{path} is not JSON ({error}). Get it again.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise NotAModel(f"{path} does not describe a model (it names no model_type).")
    return config


def find_weights(folder: Path) -> list[Path]:
    """The weight files, in order."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a name that is no text")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BrokenModel(f"{index} is damaged ({error!r}). Get it again.") from error
        missing = [name for name in names if not is_file(folder / name)]
        if missing:
            raise BrokenModel(f"{folder} lacks {len(missing)} of {len(names)} weight files ({missing[0]}). Get them.")
        return [folder / name for name in names]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise NotAModel(
            f"{folder} has its weights only as pickle files, which can run code when opened. "
            "Convert them to safetensors first."
        )
    raise NotAModel(f"{folder} has a config.json but no weights ({WEIGHTS}).")


def read_json(path: Path) -> Any:
    """Parse an untrusted JSON file. Raises `ValueError` if it is not JSON or too large, and `OSError`."""
    with path.open("rb") as file:
        data = file.read(_LARGEST_JSON_BYTES + 1)
    if len(data) > _LARGEST_JSON_BYTES:
        raise ValueError(f"it is larger than {_LARGEST_JSON_BYTES:,} bytes")
    return parse_untrusted_json(data, MAX_VALUES + len(data) // VALUE_BYTES)
