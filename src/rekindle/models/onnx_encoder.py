"""An encoder as an ONNX graph, as optimum and sentence-transformers export them: texts in, vectors out.

config.json  tokenizer.json  1_Pooling/config.json  onnx/model.onnx
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import BrokenModel, NotAModel, UnsupportedModel
from rekindle.models.files import is_file
from rekindle.models.hf_folder import read_config
from rekindle.models.onnx_folder import GENAI_CONFIG
from rekindle.models.onnx_graph import OnnxGraph, TensorSpec, read_graph

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_POOLED = "sentence_embedding"
_OUTPUTS = (_POOLED, "last_hidden_state", "token_embeddings")  # by preference
_INTEGERS = (6, 7)  # 32 and 64 bits
_AFTER_PADDING = ("roberta", "camembert", "mpnet")  # families, by part of their names, whose positions start there
_DEFAULT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """What a graph gives and takes: the name of its output, token ids below `vocabulary_size`, `token_limit` of them.

    pooled   the output is one vector a text, else one a token
    """

    output: str
    vocabulary_size: int
    token_limit: int
    pooled: bool = False
    padding_id: int = 0


@dataclass(frozen=True)
class OnnxEncoder:
    """A graph that makes vectors of texts; `folder` has its configuration and tokenizer."""

    graph: OnnxGraph
    folder: Path
    spec: EncoderSpec


def is_encoder(graph: OnnxGraph) -> bool:
    """Whether a graph makes vectors of texts, by the names of what it takes and gives."""
    outputs = graph.outputs.keys()
    return (
        "logits" not in outputs and not outputs.isdisjoint(_OUTPUTS) and not is_file(graph.path.parent / GENAI_CONFIG)
    )


def read_encoder(path: Path) -> OnnxEncoder:
    """What a graph takes and gives. Raises `BrokenModel`, `ModelNotFound`, `NotAModel`, and `UnsupportedModel` for one
    that takes anything but tokens."""
    graph = read_graph(path)
    if not is_encoder(graph):
        raise NotAModel(f"{path} makes no vectors of texts: it gives {', '.join(graph.outputs)}. Use minilm.")
    folder = encoder_folder(path)
    config = read_config(folder)
    shifted = any(part in str(config["model_type"]) for part in _AFTER_PADDING)
    known = INPUTS[:3] if shifted else INPUTS  # where positions start is the graph's own affair then
    unknown = [name for name, spec in graph.inputs.items() if name not in known or not _is_rows(spec)]
    if unknown or "input_ids" not in graph.inputs:
        raise UnsupportedModel(
            f"{path} takes {', '.join(unknown) or 'no input_ids'}, which is not known here (only {', '.join(known)}, "
            "as rows of whole numbers). Use minilm, or another model."
        )
    size, padding = _number(config, "vocab_size"), _number(config, "pad_token_id") or 0
    if not size or padding >= size:
        raise BrokenModel(f"{folder / 'config.json'} does not say how many tokens the model knows. Get it again.")
    output = next(name for name in _OUTPUTS if name in graph.outputs)
    positions = (_number(config, "max_position_embeddings") or _DEFAULT_TOKENS) - (padding + 1 if shifted else 0)
    return OnnxEncoder(graph, folder, EncoderSpec(output, size, positions, output == _POOLED, padding))


def encoder_folder(path: Path) -> Path:
    """The folder with the configuration of a graph: its own, or the one above. Of a folder `onnx` the one above comes
    first, because it says how vectors are pooled."""
    folders = (path.parent, path.parent.parent)
    ordered = reversed(folders) if path.parent.name == "onnx" else folders
    for folder in ordered:
        if is_file(folder / "config.json") and is_file(folder / "tokenizer.json"):
            return folder
    raise NotAModel(f"{path} has no config.json and tokenizer.json beside it. Get the whole folder.")


def _is_rows(spec: TensorSpec) -> bool:
    return spec.type in _INTEGERS and len(spec.shape) == 2


def _number(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if type(value) is int and 0 <= value < 1 << 31 else None
