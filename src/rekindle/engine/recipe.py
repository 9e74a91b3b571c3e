"""How a folder wants sentences made into vectors, beside what its encoder computes.

Read as sentence-transformers reads it: `modules.json` names what follows the encoder, the pooling's own `config.json`
says how a text's vector comes of those of its tokens. Both may lack: then it is their mean.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rekindle.errors import BrokenModel, UnsupportedModel

Pooling = Literal["mean", "cls"]

_STAGES = ("Transformer", "Pooling", "Normalize")
# A sum divided by the root of the length has the direction of the mean, and all vectors get unit length.
_POOLINGS: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "mean_sqrt_len_tokens": "mean"}
_FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}  # others are called as their flags
_FLAG = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class Recipe:
    """`most_tokens` is None where the folder names no limit but the encoder's own; `lower` asks for small letters."""

    pooling: Pooling = "mean"
    most_tokens: int | None = None
    lower: bool = False


def read_recipe(folder: Path) -> Recipe:
    """The recipe of a folder. Raises `UnsupportedModel` for a stage or pooling not known here, and `BrokenModel`."""
    stages = _read(folder / "modules.json", [])
    pooling = "1_Pooling"
    try:
        for stage in stages:
            kind = str(stage["type"]).rpartition(".")[2]
            if kind not in _STAGES:
                raise UnsupportedModel(
                    f"{folder} passes its vectors through a stage {kind}, which is not computed here (only "
                    f"{', '.join(_STAGES)}). Use minilm, or another model without it."
                )
            if kind == "Pooling":
                pooling = str(stage["path"])
    except (KeyError, TypeError) as error:
        raise BrokenModel(f"{folder / 'modules.json'} is damaged ({error!r}). Get it again.") from error
    about = _read(folder / "sentence_bert_config.json", {})
    limits = [about.get("max_seq_length"), _read(folder / "tokenizer_config.json", {}).get("model_max_length")]
    known = [int(limit) for limit in limits if isinstance(limit, (int, float)) and limit > 0]
    return Recipe(
        pooling=_pooling_of(folder / pooling / "config.json"),
        most_tokens=min(known, default=None),
        lower=bool(about.get("do_lower_case", False)),
    )


def _pooling_of(path: Path) -> Pooling:
    config = _read(path, {"pooling_mode": "mean"})
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        modes = [str(mode) for mode in (named if isinstance(named, list) else [named])]
    else:
        flags = [name for name, on in config.items() if name.startswith(_FLAG) and on]
        modes = [_FLAGS.get(name, name.removeprefix(_FLAG)) for name in flags]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UnsupportedModel(
            f"{path} asks for the pooling {' + '.join(modes) or 'of nothing'}; known are mean and cls. "
            "Use minilm, or another model with one of them."
        )
    return _POOLINGS[modes[0]]


def _read(path: Path, default: Any) -> Any:
    """What the file holds, of the default's type; the default if there is no such file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return default
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BrokenModel(f"{path} is not JSON ({error}). Get it again.") from error
    if type(value) is not type(default):
        raise BrokenModel(f"{path} should hold a JSON {type(default).__name__}. Get it again.")
    return value
