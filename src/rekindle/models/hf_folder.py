"""A model folder in Hugging Face form, checked by headers and sizes, in milliseconds, before anything is loaded.

Safetensors files are read without torch: the header is checked against the file before any tensor is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.identity import digest_of_fields
from rekindle.core.kv import Span
from rekindle.errors import BrokenModel, ModelNotFound, NotAModel, UnsupportedModel
from rekindle.models.files import is_file
from rekindle.safe_read import MAX_VALUES, VALUE_BYTES, parse_untrusted_json

_LARGEST_HEADER_BYTES = 16 << 20  # that of 100,000 tensors
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4,
    "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
_MAX_DIMENSIONS = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's type as the format names it, its shape, and its byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    data: Span


def read_tensor_infos(path: Path) -> dict[str, TensorInfo]:
    """The header of a file: its tensors by name. They fill the file without gap or overlap.

    Raises `BrokenModel` for any other file, `OSError` if it cannot be read.
    """
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise BrokenModel(f"{path} is empty or cut off after {size_bytes} bytes. Get it again.")
        start = 8 + int.from_bytes(prefix, "little")
        if start - 8 > min(_LARGEST_HEADER_BYTES, size_bytes - 8):
            raise BrokenModel(f"{path} is not a safetensors file (its header would be {start:,} bytes). Get it again.")
        header = file.read(start - 8)
    try:
        fields = parse_untrusted_json(header, MAX_VALUES + size_bytes // VALUE_BYTES)
        if not isinstance(fields, dict):
            raise ValueError("it is no object")
        fields.pop("__metadata__", None)
        places = {name: _parse_info(about, start) for name, about in fields.items()}
        _check_no_gaps(places, start)
    except ValueError as error:
        raise BrokenModel(f"{path} has a damaged safetensors header ({error}). Get it again.") from error
    end = max((place.data.stop for place in places.values()), default=start)
    if size_bytes != end:
        raise BrokenModel(f"{path} has {size_bytes:,} bytes, its header says {end:,}. Get it again.")
    return places


def _parse_info(about: Any, start: int) -> TensorInfo:
    fields: Any = about if isinstance(about, dict) else {}
    dtype, shape, offsets = (fields.get(name, ()) for name in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError("a tensor has no type, shape or place")
    if len(shape) > _MAX_DIMENSIONS or offsets[0] > offsets[1]:
        raise ValueError("a tensor has a shape or place that cannot be")
    size_bytes = offsets[1] - offsets[0]
    if dtype in _ITEM_BYTES and math.prod(shape) * _ITEM_BYTES[dtype] != size_bytes:
        raise ValueError(f"{dtype} {shape} cannot be {size_bytes:,} bytes")
    return TensorInfo(dtype, tuple(shape), Span(start + offsets[0], start + offsets[1]))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def _check_no_gaps(places: dict[str, TensorInfo], start: int) -> None:
    """Raise `ValueError` unless each tensor begins where another ends: else a small file could claim large tensors."""
    for place in sorted((place.data for place in places.values()), key=lambda data: (data.start, data.stop)):
        if place.start != start:
            raise ValueError("tensors overlap, or leave a gap")
        start = place.stop


_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read_floats(paths: Sequence[Path]) -> dict[str, NDArray[np.float32]]:
    """All float tensors of the files, by name; integer tensors are left out.

    Raises `BrokenModel` for a header that says what cannot be.
    """
    tensors: dict[str, NDArray[np.float32]] = {}
    for path in paths:
        for name, place in read_tensor_infos(path).items():
            if place.dtype in _FLOATS:
                tensors[name] = _read_tensor(path, name, place)
    return tensors


def _read_tensor(path: Path, name: str, place: TensorInfo) -> NDArray[np.float32]:
    kind = np.dtype(_FLOATS[place.dtype])
    count = len(place.data) // kind.itemsize
    raw = np.fromfile(path, kind, count, offset=place.data.start)
    if raw.size != count:
        raise BrokenModel(f"{path} ends inside {name}. Get it again.")
    if place.dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32).reshape(place.shape)
    return raw.astype(np.float32, copy=False).reshape(place.shape)


WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_DIGESTED_FILES = (*TOKENIZER_FILES, "merges.txt", "special_tokens_map.json", "added_tokens.json")
_DIGESTED_IF_THERE = ("tekken.json", "tokenizer.*.json", "tokenizer.model.*", "*.tiktoken", "*.model")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
# `from_pretrained` would load these without being asked. The identity covers everything else that it reads, but for the
# generation config (only the tokens that end a reply are taken from it) and the implementations of attention and of
# experts, which the engine chooses itself. Code of a folder is never run.
_OTHER_WEIGHTS = {
    "adapter_config.json": "holds a LoRA adapter. Move the adapter's two files to a folder of their own and name that "
    "with --adapter",
    "shard-*-of-*.safetensors": f"holds a distributed checkpoint. Save the model as {WEIGHTS}",
}
_OTHER_MODEL_FIELDS = ("transformers_weights", "fusion_config", "configuration_files")
GENERATING = (
    "CausalLM",
    "LMHeadModel",
    "ConditionalGeneration",
)  # parts of architecture names of models that write text
_LARGEST_JSON_BYTES = 24 << 20  # the index of 150,000 tensors is shorter


def check_folder(folder: Path) -> list[Path]:
    """The weight files of a model folder: all weights that loading it reads.

    Raises `ModelNotFound` if there is no folder, `NotAModel` if it is something else, `BrokenModel` if files are
    missing or truncated, and `UnsupportedModel` if transformers would load more than the weight files.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"There is no folder {folder}.")
    config = read_config(folder)
    refuse_other_weights(folder)
    if other := next((name for name in _OTHER_MODEL_FIELDS if config.get(name) is not None), None):
        raise UnsupportedModel(f"{folder / 'config.json'} names other files or kernels ({other}). Remove that field.")
    weights = find_weights(folder)
    for file in weights:
        read_tensor_infos(file)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise BrokenModel(f"{folder} has no tokenizer (tokenizer.json). Copy it from where the model came from.")
    return weights


def refuse_other_weights(folder: Path) -> None:
    """Raise `UnsupportedModel` for files beside a model that transformers would load without being asked."""
    for pattern, advice in _OTHER_WEIGHTS.items():
        if other := next(folder.glob(pattern), None):
            raise UnsupportedModel(f"{folder} is a model, but {other.name} beside it {advice}.")


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
            if outside := next((name for name in names if Path(name).is_absolute() or ".." in Path(name).parts), None):
                raise ValueError(f"{outside} is outside of the folder")
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


def tokenizer_digest(folder: Path) -> str:
    """The digest of a folder's tokenizer, without its chat template."""
    fields: list[str | bytes] = ["rekindle/tokenizer/2"]
    for name in _DIGESTED_FILES:
        path = folder / name
        fields += [name, path.read_bytes() if path.is_file() else b""]
    fields += _names_and_bytes(folder, _DIGESTED_IF_THERE)
    config = read_tokenizer_config(folder)
    config.pop("chat_template", None)
    return digest_of_fields(*fields, json.dumps(config, sort_keys=True) if config else "")


def template_digest(folder: Path) -> str:
    """The digest of a folder's chat template."""
    config = read_tokenizer_config(folder)
    inline = json.dumps(config.get("chat_template"), sort_keys=True) if config else ""
    files = [path.read_bytes() if (path := folder / name).is_file() else b"" for name in _TEMPLATE_FILES]
    return digest_of_fields("rekindle/template/1", *files, inline, *_names_and_bytes(folder, (_MORE_TEMPLATES,)))


def _names_and_bytes(folder: Path, patterns: Iterable[str]) -> list[str | bytes]:
    found = sorted({path for pattern in patterns for path in folder.glob(pattern)} - {folder / "tokenizer.model"})
    return [field for path in found for field in (path.name, path.read_bytes())]


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The folder's `tokenizer_config.json`, in which older folders keep the chat template; empty without one."""
    path = folder / "tokenizer_config.json"
    try:
        config = read_json(path)
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise BrokenModel(f"{path} is not JSON ({error}). Get it again.") from error
    return config
