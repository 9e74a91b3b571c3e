"""LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`. No torch.

An unknown option that changes what an adapter computes is refused by name: an adapter applied only in part would
silently give wrong answers.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

from rekindle.core.adapter import Lora, LoraPair, Matrix
from rekindle.errors import AdapterRefused, ModelError, ModelNotFound
from rekindle.models.files import is_file, is_folder
from rekindle.models.hf_folder import read_floats, read_tensor_infos
from rekindle.safe_read import parse_untrusted_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX, _COPY = "base_model.model.", ".base_layer.weight"
_NAME = re.compile(r"^(?P<layer>.+)\.lora_(?P<half>[AB])(?:\.[^.]+)?\.weight$")
# Options that do not change what is computed from the files.
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
# Initializations that leave the base weights unchanged.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_LARGEST_CONFIG_BYTES = 1 << 20
_MAX_LAYERS = 1 << 16
_LONGEST_NAME = 512
# Patterns of names and dots are cheap to match; others may not be.
_PLAIN_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?", re.ASCII)
_MAX_PATTERNS, _MAX_COMPLEX_PATTERNS, _MAX_MATCHES = 2048, 8, 1 << 20


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
    if not (is_folder(place) or is_file(place)):
        raise ModelNotFound(f"There is no folder {place}. Give the folder that PEFT saved.")
    if not is_file(place / CONFIG):
        raise ModelNotFound(f"{place} is not a LoRA adapter: it has no {CONFIG}. Give the folder that PEFT saved.")
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


def _gguf(path: Path, scale: float) -> Lora:
    if not is_file(path):
        raise ModelNotFound(f"There is no file {path}. Give a folder that PEFT saved, or a .gguf file.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise AdapterRefused(f"{path} is not a GGUF file. Get it again.")
    return Lora({}, source=str(path), file=path, file_scale=scale)


def _config(place: Path) -> dict[str, Any]:
    path = place / CONFIG
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_CONFIG_BYTES + 1)
        if len(data) > _LARGEST_CONFIG_BYTES:
            raise ValueError("it is too large")
        config = parse_untrusted_json(data)
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise AdapterRefused(f"{path} cannot be read ({error}). Get it again.") from None
    _refuse_options(config, place)
    return config


def _refuse_options(config: Mapping[str, Any], place: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterRefused(f"{place} is a {reprlib.repr(kind)} adapter. Only LoRA adapters can be used.")
    if config.get("bias", "none") != "none":
        raise AdapterRefused(f"{place} was trained with bias={reprlib.repr(config['bias'])}, which is not supported.")
    begun = config.get("init_lora_weights", True)
    if begun not in _BEGINNINGS:
        raise AdapterRefused(
            f"{place} was initialised with init_lora_weights={reprlib.repr(begun)}, which changes the model's own "
            "weights, too. Convert it with PEFT: save_pretrained(folder, path_initial_model_for_weight_conversion=...)."
        )
    for name, fits in _SHAPES.items():
        if not fits(config.get(name)):
            raise AdapterRefused(
                f"{place}: its config says {name}={reprlib.repr(config[name])}, which makes no sense. Get it again."
            )
    for pattern in _target_patterns(config):
        _compiled(pattern)
    odd = [name for name, value in config.items() if name not in _HARMLESS | _READ and value not in _off(name)]
    if odd:
        named = ", ".join(f"{name[:40]}={reprlib.repr(config[name])}" for name in sorted(odd)[:8])
        raise AdapterRefused(f"{place} uses {named}, which is not supported: its answers would be wrong.")


def _off(name: str) -> tuple[Any, ...]:
    """The values that turn an option off."""
    return (None, False, [], {}, "") if name != "fan_in_fan_out" else (None, False)


def _tensors(path: Path) -> dict[str, Matrix]:
    try:
        places = read_tensor_infos(path)
        if len(places) > _MAX_LAYERS or any(len(name) > _LONGEST_NAME for name in places):
            raise ValueError("it has more tensors than any adapter, or one without a sensible name")
        tensors = read_floats([path])
        if lost := sorted(set(places) - set(tensors)):
            raise ValueError(f"{lost[0]} is of type {places[lost[0]].dtype[:20]}")
        return tensors
    except (ModelError, OSError, ValueError) as error:
        raise AdapterRefused(f"{path} cannot be read ({error}). Get it again.") from None


def _pairs(tensors: Mapping[str, Matrix], config: Mapping[str, Any], place: Path, scale: float) -> dict[str, LoraPair]:
    halves: dict[str, dict[str, Matrix]] = {}
    for name, tensor in tensors.items():
        found = _NAME.match(name)
        if found is None or tensor.ndim != 2:
            raise AdapterRefused(
                f"{place} has a tensor {name}, which is not a LoRA matrix of a linear layer. Only those are supported."
            )
        halves.setdefault(found["layer"].removeprefix(_PREFIX), {})[found["half"]] = tensor
    if not halves:
        raise AdapterRefused(f"{place} holds no LoRA matrices. Save it again with PEFT.")
    ranks, alphas = _Patterns(config, "rank_pattern", len(halves)), _Patterns(config, "alpha_pattern", len(halves))
    pairs: dict[str, LoraPair] = {}
    for layer, both in halves.items():
        if set(both) != {"A", "B"}:
            missing = "B" if "A" in both else "A"
            raise AdapterRefused(f"{place} has no lora_{missing} for {layer}. Get it again, or save it again.")
        down, up = both["A"], both["B"]
        rank = ranks.of_layer(layer, "r", 8)
        if down.shape[0] != up.shape[1] or down.shape[0] != rank:
            raise AdapterRefused(
                f"{place}: {layer} has matrices {down.shape} and {up.shape}, but its rank is {rank:g}. Get it again."
            )
        alpha = alphas.of_layer(layer, "lora_alpha", 8)
        share = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        pairs[layer] = LoraPair(down, up, share * scale)
    return pairs


class _Patterns:
    """An option with different values for some layers."""

    def __init__(self, config: Mapping[str, Any], name: str, layers: int) -> None:
        """Raises `AdapterRefused` for patterns that are invalid or too expensive."""
        given: Mapping[str, Any] = config.get(name) or {}
        complex_ones = sum(_PLAIN_PATTERN.fullmatch(pattern) is None for pattern in given)
        too_many = len(given) > _MAX_PATTERNS or len(given) * layers > _MAX_MATCHES
        if too_many or complex_ones > _MAX_COMPLEX_PATTERNS:
            raise AdapterRefused(f"Its config has {len(given):,} patterns in {name}, more than are supported.")
        self._config = config
        self._patterns = [(_compiled(rf"(.*\.)?({pattern})"), value) for pattern, value in given.items()]

    def of_layer(self, layer: str, name: str, default: float) -> float:
        """The value for a layer: of the first matching pattern, else the general one."""
        matching = (value for pattern, value in self._patterns if pattern.matches(layer))
        value = next(matching, self._config.get(name, default))
        number = _number(value)
        if number is None or number == 0:
            raise AdapterRefused(
                f"Its config says {name}={reprlib.repr(value)}, which makes no sense. Get the adapter again."
            )
        return number


def _number(value: object) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _compiled(pattern: str) -> NamePattern:
    try:
        return name_pattern(pattern)
    except ValueError as error:
        raise AdapterRefused(f"Its config has a pattern that cannot be read, {pattern[:200]!r}: {error}.") from None


def _target_patterns(config: Mapping[str, Any]) -> Sequence[str]:
    """Patterns of the layers that the adapter should have matrices for; none if unknown."""
    targets = config.get("target_modules")
    if config.get("exclude_modules") or not targets or targets == "all-linear":
        return ()
    if isinstance(targets, str):
        # Some programs write look-ahead, which Rust's regex cannot match.
        looks_around = any(sign in targets for sign in ("(?=", "(?!", "(?<=", "(?<!"))
        return () if looks_around or config.get("layers_to_transform") is not None else (targets,)
    layers = config.get("layers_to_transform")
    numbers = "" if layers is None else "|".join(map(str, layers if isinstance(layers, list) else [layers]))
    middle = rf"(.*\.)?({numbers})\.(.*\.)?" if numbers else r"(.*\.)?"
    return [f"{middle}({'|'.join(map(re.escape, targets))})"]


class NamePattern:
    """A regular expression over whole layer names, matched in linear time by Rust's engine, which comes with pydantic:
    Python's may take exponential time. Raises `ValueError` for invalid and too large patterns, and for back references
    and look-ahead."""

    def __init__(self, pattern: str) -> None:
        try:
            schema = core_schema.str_schema(pattern=rf"\A(?:{pattern})\z", regex_engine="rust-regex", strict=True)
            self._validator = SchemaValidator(schema)
        except SchemaError:
            raise ValueError("it is not a regular expression, or one that takes too long") from None

    def matches(self, name: str) -> bool:
        return self._validator.isinstance_python(name)


@lru_cache(maxsize=64)
def name_pattern(pattern: str) -> NamePattern:
    """A `NamePattern`, compiled once."""
    return NamePattern(pattern)
