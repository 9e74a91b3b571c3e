"""What a folder says about pooling, as sentence-transformers reads it: `modules.json` and the pooling's config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rekindle.errors import BrokenModel, UnsupportedModel
from rekindle.models.hf_folder import read_json

Pooling = Literal["mean", "cls", "max"]

_STAGES = ("Transformer", "Pooling", "Normalize")
# mean_sqrt_len has the direction of the mean, and all vectors get unit length.
_POOLINGS: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "max": "max", "mean_sqrt_len_tokens": "mean"}
# Others have the names of their flags.
_FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}
_FLAG = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """`token_limit` is None if only the encoder limits it; `lower`: texts are lowercased; the prefixes stand before
    questions and passages, where the model was trained with some (e5: "query: " and "passage: ")."""

    pooling: Pooling = "mean"
    token_limit: int | None = None
    lower: bool = False
    question_prefix: str = ""
    passage_prefix: str = ""


def read_encoder_settings(folder: Path, *, pooled: bool = False) -> EncoderSettings:
    """Read the settings of a folder. Raises `UnsupportedModel` for an unknown stage or pooling, unless the model's own
    output is `pooled` already, and `BrokenModel`."""
    stages = _read_typed(folder / "modules.json", [])
    pooling = "1_Pooling"
    try:
        for stage in stages:
            kind = str(stage["type"]).rpartition(".")[2]
            if kind not in _STAGES and not pooled:
                raise UnsupportedModel(
                    f"{folder} passes its vectors through a stage {kind}, which is not computed here (only "
                    f"{', '.join(_STAGES)}). Use minilm, or another model without it."
                )
            if kind == "Pooling":
                pooling = str(stage["path"])
    except (KeyError, TypeError) as error:
        raise BrokenModel(f"{folder / 'modules.json'} is damaged ({error!r}). Get it again.") from error
    about = _read_typed(folder / "sentence_bert_config.json", {})
    limits = [about.get("max_seq_length"), _read_typed(folder / "tokenizer_config.json", {}).get("model_max_length")]
    prompts = _read_typed(folder / "config_sentence_transformers.json", {}).get("prompts") or {}
    known = [int(limit) for limit in limits if isinstance(limit, (int, float)) and limit > 0]
    return EncoderSettings(
        pooling="mean" if pooled else _pooling_of(folder / pooling / "config.json"),
        token_limit=min(known, default=None),
        lower=bool(about.get("do_lower_case", False)),
        question_prefix=str(prompts.get("query", "")),
        passage_prefix=str(prompts.get("document", prompts.get("passage", ""))),
    )


def _pooling_of(path: Path) -> Pooling:
    config = _read_typed(path, {"pooling_mode": "mean"})
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        modes = [str(mode) for mode in (named if isinstance(named, list) else [named])]
    else:
        flags = [name for name, on in config.items() if name.startswith(_FLAG) and on]
        modes = [_FLAGS.get(name, name.removeprefix(_FLAG)) for name in flags]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UnsupportedModel(
            f"{path} asks for the pooling {' + '.join(modes) or 'of nothing'}; known are mean, cls and max. "
            "Use minilm, or another model with one of them."
        )
    return _POOLINGS[modes[0]]


def _read_typed(path: Path, default: Any) -> Any:
    """The JSON of a file, of the default's type; the default if there is no such file."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return default
    except ValueError as error:
        raise BrokenModel(f"{path} is not JSON ({error}). Get it again.") from error
    if type(value) is not type(default):
        raise BrokenModel(f"{path} should hold a JSON {type(default).__name__}. Get it again.")
    return value
