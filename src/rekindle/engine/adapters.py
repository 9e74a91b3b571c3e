"""LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`. No torch.

An option that changes what an adapter computes and is not known here is refused by its name: an adapter that is
applied in part would answer wrongly without anyone noticing.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.core.adapter import Lora, LoraPair, Matrix
from rekindle.engine.tensors import read_floats
from rekindle.errors import AdapterRefused, ModelError, ModelNotFound

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX, _COPY = "base_model.model.", ".base_layer.weight"
_NAME = re.compile(r"^(?P<layer>.+)\.lora_(?P<half>[AB])(?:\.[^.]+)?\.weight$")
# What may stand in a config without changing what is computed from the files.
_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "inference_mode",
        "layers_pattern",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
# Ways to begin that leave the weights of the model alone.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_LARGEST_CONFIG_BYTES = 1 << 20


def _all(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(item, kind) for item in value)


_SHAPES: Mapping[str, Callable[[Any], bool]] = {
    "target_modules": lambda value: value is None or isinstance(value, str) or _all(str)(value),
    "layers_to_transform": lambda value: value is None or isinstance(value, int) or _all(int)(value),
    "rank_pattern": lambda value: value is None or isinstance(value, dict),
    "alpha_pattern": lambda value: value is None or isinstance(value, dict),
}


def read_adapter(folder: str | Path, scale: float = 1.0) -> Lora:
    """The adapter in a folder, or in a .gguf file for llama.cpp; `scale` comes on top of its own.

    Raises `ModelNotFound`, `AdapterRefused`.
    """
    place = Path(folder).expanduser()
    if not math.isfinite(scale):
        raise AdapterRefused(f"A scale of {scale} makes no sense for an adapter. Use a number such as 1 or 0.5.")
    if place.suffix.lower() == ".gguf":
        return _gguf(place, scale)
    place = place.parent if place.name in (CONFIG, WEIGHTS) else place
    if not _is_file(place / CONFIG):
        raise ModelNotFound(f"{place} is no LoRA adapter: it has no {CONFIG}. Give the folder that PEFT saved.")
    config = _config(place)
    for old in ("adapter_model.bin", "adapter_model.pt"):
        if not (place / WEIGHTS).is_file() and (place / old).is_file():
            raise AdapterRefused(
                f"{place} has its weights in {old}, which can run code when it is read. Save it again with PEFT: "
                "model.save_pretrained(folder, safe_serialization=True)."
            )
    if not (place / WEIGHTS).is_file():
        raise AdapterRefused(f"{place} has no {WEIGHTS}. Get it again, or save it again with PEFT.")
    tensors = _tensors(place / WEIGHTS)
    copies = {name: tensors.pop(name) for name in [*tensors] if name.endswith(_COPY)}
    pairs = _pairs(tensors, config, place, scale)
    targets = tuple(_target_patterns(config))
    own = {name.removeprefix(_PREFIX).removesuffix(_COPY): tensor for name, tensor in copies.items()}
    return Lora(pairs, str(config.get("base_model_name_or_path") or ""), str(place), targets, copies=own)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no path at all: too long, with a NUL in it
        return False


def _gguf(path: Path, scale: float) -> Lora:
    if not _is_file(path):
        raise ModelNotFound(f"There is no file {path}. Give a folder that PEFT saved, or a .gguf file.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise AdapterRefused(f"{path} is no GGUF file. Get it again.")
    return Lora({}, source=str(path), file=path, file_scale=scale)


def _config(place: Path) -> dict[str, Any]:
    path = place / CONFIG
    try:
        if path.stat().st_size > _LARGEST_CONFIG_BYTES:
            raise ValueError("it is too large")
        config = json.loads(path.read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterRefused(f"{path} cannot be read ({error}). Get it again.") from None
    _refuse_options(config, place)
    return config


def _refuse_options(config: Mapping[str, Any], place: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterRefused(f"{place} is a {kind!r} adapter. Only LoRA adapters can be used.")
    if config.get("bias", "none") != "none":
        raise AdapterRefused(f"{place} was trained with bias={config['bias']!r}, which is not supported.")
    begun = config.get("init_lora_weights", True)
    if begun not in _BEGINNINGS:
        raise AdapterRefused(
            f"{place} was begun with init_lora_weights={begun!r}, which changes the model's own weights too. Convert "
            "it with PEFT: save_pretrained(folder, path_initial_model_for_weight_conversion=...)."
        )
    for name, fits in _SHAPES.items():
        if not fits(config.get(name)):
            raise AdapterRefused(
                f"{place}: its config says {name}={config[name]!r}, which makes no sense. Get it again."
            )
    for pattern in _target_patterns(config):
        _matches(pattern, "")
    odd = [name for name, value in config.items() if name not in _HARMLESS | _READ and value not in _off(name)]
    if odd:
        told = ", ".join(f"{name}={config[name]!r}" for name in sorted(odd))
        raise AdapterRefused(f"{place} uses {told}, which is not supported: its answers would be wrong.")


def _off(name: str) -> tuple[Any, ...]:
    """The values with which an option does nothing."""
    return (None, False, [], {}, "") if name != "fan_in_fan_out" else (None, False)


def _tensors(path: Path) -> dict[str, Matrix]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = read_floats([path])
        if lost := sorted(set(header) - set(tensors)):
            raise ValueError(f"{lost[0]} is of type {header[lost[0]]['dtype']}")
        return tensors
    except (ModelError, OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, MemoryError) as error:
        raise AdapterRefused(f"{path} cannot be read ({error}). Get it again.") from None


def _pairs(tensors: Mapping[str, Matrix], config: Mapping[str, Any], place: Path, scale: float) -> dict[str, LoraPair]:
    halves: dict[str, dict[str, Matrix]] = {}
    for name, tensor in tensors.items():
        found = _NAME.match(name)
        if found is None or tensor.ndim != 2:
            raise AdapterRefused(
                f"{place} has a tensor {name}, which is no LoRA matrix of a linear layer. Only those are supported."
            )
        halves.setdefault(found["layer"].removeprefix(_PREFIX), {})[found["half"]] = tensor
    if not halves:
        raise AdapterRefused(f"{place} holds no LoRA matrices. Save it again with PEFT.")
    pairs: dict[str, LoraPair] = {}
    for layer, both in halves.items():
        if set(both) != {"A", "B"}:
            missing = "B" if "A" in both else "A"
            raise AdapterRefused(f"{place} has no lora_{missing} for {layer}. Get it again, or save it again.")
        down, up = both["A"], both["B"]
        rank = _of_layer(config, layer, "rank_pattern", "r", 8)
        if down.shape[0] != up.shape[1] or down.shape[0] != rank:
            raise AdapterRefused(
                f"{place}: {layer} has matrices {down.shape} and {up.shape}, but its rank is {rank:g}. Get it again."
            )
        alpha = _of_layer(config, layer, "alpha_pattern", "lora_alpha", 8)
        share = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        pairs[layer] = LoraPair(down, up, share * scale)
    return pairs


def _of_layer(config: Mapping[str, Any], layer: str, patterns: str, name: str, default: float) -> float:
    """An option that may be another one for some layers."""
    value = config.get(name, default)
    for pattern, other in (config.get(patterns) or {}).items():
        if _matches(rf"(.*\.)?({pattern})$", layer):
            value = other
            break
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value == 0:
        raise AdapterRefused(f"Its config says {name}={value!r}, which makes no sense. Get the adapter again.")
    return float(value)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise AdapterRefused(f"Its config has a pattern that cannot be read, {pattern!r}: {error}.") from None


def _target_patterns(config: Mapping[str, Any]) -> Sequence[str]:
    """Patterns of the names of all layers that the adapter should have matrices for; none if that cannot be told."""
    targets = config.get("target_modules")
    if config.get("exclude_modules") or not targets or targets == "all-linear":
        return ()
    if isinstance(targets, str):
        return (targets,) if config.get("layers_to_transform") is None else ()
    layers = config.get("layers_to_transform")
    numbers = "" if layers is None else "|".join(map(str, layers if isinstance(layers, list) else [layers]))
    middle = rf"(.*\.)?({numbers})\.(.*\.)?" if numbers else r"(.*\.)?"
    return [middle + re.escape(target) for target in targets]
