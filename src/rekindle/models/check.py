"""Is this folder a whole model? Told from headers and sizes, in milliseconds, before anything is loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from rekindle.errors import BrokenModel, ModelNotFound, NotAModel

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
GENERATING = ("CausalLM", "LMHeadModel", "ConditionalGeneration")  # parts of the names of models that write text
_LARGEST_HEADER_BYTES = 100 << 20


def check_folder(folder: Path) -> list[Path]:
    """The weight files of a model folder in Hugging Face form.

    Raises `ModelNotFound` for no folder, `NotAModel` for one that holds something else, `BrokenModel` for one with
    missing or truncated files.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"There is no folder {folder}.")
    read_config(folder)
    weights = find_weights(folder)
    for file in weights:
        _check_safetensors(file)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise BrokenModel(f"{folder} has no tokenizer (tokenizer.json). Copy it from where the model came from.")
    return weights


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`."""
    path = folder / "config.json"
    if not path.is_file():
        raise NotAModel(f"{folder} is not a model folder: it has no config.json.")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BrokenModel(f"{path} is not JSON ({error}). Get it again.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise NotAModel(f"{path} does not describe a model (it names no model_type).")
    return config


def find_weights(folder: Path) -> list[Path]:
    """The files that hold the weights, in order."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise BrokenModel(f"{index} is damaged ({error!r}). Get it again.") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise BrokenModel(f"{folder} lacks {len(missing)} of {len(names)} weight files ({missing[0]}). Get them.")
        return [folder / name for name in names]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise NotAModel(
            f"{folder} has its weights only as pickle files, which can run code when opened. "
            "Convert them to safetensors first."
        )
    raise NotAModel(f"{folder} has a config.json but no weights ({WEIGHTS}).")


def _check_safetensors(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise BrokenModel(f"{path} is empty or cut off after {size} bytes. Get it again.")
        (length,) = struct.unpack("<Q", prefix)
        if length > _LARGEST_HEADER_BYTES:
            raise BrokenModel(f"{path} is not a safetensors file (its header would be {length:,} bytes). Get it again.")
        header = file.read(length)
    try:
        tensors = json.loads(header)
        end = max((int(t["data_offsets"][1]) for n, t in tensors.items() if n != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenModel(f"{path} has a damaged safetensors header. Get it again.") from error
    expected = 8 + length + end
    if size != expected:
        raise BrokenModel(f"{path} has {size:,} bytes, its header says {expected:,}. Get it again.")
