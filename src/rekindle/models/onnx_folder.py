"""A decoder as an ONNX graph with its configuration and tokenizer, in the form of onnxruntime-genai or of the hub.

    genai_config.json  model.onnx  model.onnx.data  tokenizer.json      onnxruntime-genai
    config.json  tokenizer.json  onnx/model.onnx  onnx/model_q4.onnx    the hub, one graph for each precision

What cannot be driven is refused here, in one sentence, before any weight is read.

An encoder, as optimum and sentence-transformers export them: texts in, vectors out.

    config.json  tokenizer.json  1_Pooling/config.json  onnx/model.onnx
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from rekindle.core.kv import KvLayout, KvType, LayerShape
from rekindle.errors import BrokenModel, NotAModel, UnsupportedModel
from rekindle.models.files import is_file
from rekindle.models.hf_folder import read_config, read_json
from rekindle.models.onnx_graph import BFLOAT16, FLOAT, FLOAT16, INT8, UINT8, OnnxGraph, TensorSpec, read_graph

OnnxForm = Literal["onnx", "onnx-fp16", "onnx-int4"]
PRECISIONS: dict[OnnxForm, str] = {"onnx": "fp32", "onnx-fp16": "fp16", "onnx-int4": "int4"}
GENAI_CONFIG = "genai_config.json"
GRAPH = "model.onnx"
_SHARING = "GroupQueryAttention"  # writes new keys behind the old ones, in the same buffer
_KV_TYPES: dict[int, KvType] = {
    FLOAT: "float32", FLOAT16: "float16", BFLOAT16: "bfloat16", INT8: "uint8", UINT8: "uint8"
}  # fmt: skip
_LOGITS_TYPES = (FLOAT, FLOAT16, BFLOAT16)
_INTEGERS = (6, 7)  # 32 and 64 bits
_NAMES = {
    "input_ids": "input_ids",
    "attention_mask": "attention_mask",
    "position_ids": "position_ids",
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
    "logits": "logits",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
}
_MAX_LAYERS = 1024
_MODEL = re.compile(r"model(_\w+)?\.onnx")


@dataclass(frozen=True)
class LayerNames:
    """The tensors of one layer: keys and values that come in, and those that go out."""

    past_key: str
    past_value: str
    present_key: str
    present_value: str


@dataclass(frozen=True)
class OnnxModel:
    """A graph that can be driven.

    shares        its attention appends to the buffer that it reads: past and present may be the same memory
    logits_last   it gives logits of the last token only
    positions     the name of its input for positions; None if it counts by itself
    """

    graph: OnnxGraph
    folder: Path  # of its tokenizer
    layout: KvLayout
    layers: tuple[LayerNames, ...]
    names: dict[str, str]
    positions: str | None
    shares: bool
    logits_last: bool
    vocabulary_size: int
    context_tokens: int
    query_heads: int
    stop_ids: frozenset[int]

    def type_of(self, name: str) -> int:
        """ONNX's number of the type of an input or output."""
        return (self.graph.inputs.get(name) or self.graph.outputs[name]).type


def is_onnx_folder(folder: Path) -> bool:
    """Whether a folder holds a graph, in either form."""
    return any(is_file(folder / name) for name in (GENAI_CONFIG, GRAPH, f"onnx/{GRAPH}"))


def graph_in(folder: Path) -> Path:
    """The graph of a folder. Raises `NotAModel`, and `BrokenModel` for a configuration that names none."""
    if is_file(folder / GENAI_CONFIG):
        named = _decoder(_json(folder / GENAI_CONFIG)).get("filename")
        if not isinstance(named, str) or Path(named).name != named:
            raise BrokenModel(f"{folder / GENAI_CONFIG} names no graph for the decoder. Export the model again.")
        return folder / named
    found = [folder / name for name in (GRAPH, f"onnx/{GRAPH}") if is_file(folder / name)]
    if not found:
        raise NotAModel(f"{folder} has no ONNX graph ({GENAI_CONFIG} or {GRAPH}).")
    return found[0]


def choose_graph(names: Iterable[str], form: OnnxForm) -> list[str]:
    """The graphs of a repository that have this precision, those for the CPU if there are any."""
    paths = [PurePosixPath(name) for name in names]
    folders = {path.parent for path in paths if path.name == GENAI_CONFIG}
    graphs = [path for path in paths if path.suffix == ".onnx" and (path.parent in folders or _MODEL.match(path.name))]
    found = [str(path) for path in graphs if has_precision(str(path), form)]
    return [name for name in found if "cpu" in name] or found


def has_precision(name: str, form: OnnxForm) -> bool:
    """By the words that publishers use in names of files and folders."""
    if form == "onnx-int4":
        return re.search(r"int4|q4(?!f16)", name) is not None
    if re.search(r"int\d|q\d|quantized|bnb", name):
        return False
    return ("16" in name) == (form == "onnx-fp16")


def read_onnx_model(path: Path) -> OnnxModel:
    """What a graph takes and gives. Raises `BrokenModel`, `ModelNotFound`, and `UnsupportedModel` for a graph that has
    no cache of keys and values, or another one than this engine knows."""
    about = _Configuration.of(path)
    graph = read_graph(path)
    layers = _layers(graph, about)
    _check_inputs(graph, about, layers)
    logits = graph.outputs.get(about.names["logits"])
    if logits is None or logits.type not in _LOGITS_TYPES or len(logits.shape) != 3:
        raise _unsupported(graph, f"gives no logits of three dimensions as floats ({about.names['logits']})")
    vocabulary = logits.shape[2] or about.number("vocab_size")
    if not vocabulary:
        raise _unsupported(graph, "does not say how many tokens it knows")
    layout = _layout(graph, about, layers)
    positions = about.names["position_ids"]
    return OnnxModel(
        graph=graph,
        folder=about.folder,
        layout=layout,
        layers=layers,
        names=about.names,
        positions=positions if positions in graph.inputs else None,
        shares=all(
            graph.made_by.get(name) == _SHARING for one in layers for name in (one.present_key, one.present_value)
        ),
        logits_last=logits.shape[1] == 1,
        vocabulary_size=vocabulary,
        context_tokens=about.number("context_length", "max_position_embeddings") or 2048,
        query_heads=about.number("num_attention_heads") or layout.layers[0].kv_heads,
        stop_ids=frozenset(i for i in about.stop_ids if 0 <= i < vocabulary),
    )


class _Configuration:
    """What the files beside a graph say of the model."""

    def __init__(self, path: Path, folder: Path, fields: dict[str, Any], names: dict[str, str]) -> None:
        self.path = path
        self.folder = folder
        self._fields = fields
        self.names = names

    @classmethod
    def of(cls, graph: Path) -> _Configuration:
        beside = graph.parent / GENAI_CONFIG
        if is_file(beside):
            about = _json(beside)
            decoder = _decoder(about)
            given = {**_object(decoder.get("inputs")), **_object(decoder.get("outputs"))}
            names = {name: given.get(name, default) for name, default in _NAMES.items()}
            if not all(isinstance(name, str) for name in names.values()):
                raise BrokenModel(f"{beside} has an input or output without a name. Export the model again.")
            return cls(beside, graph.parent, {**_object(about.get("model")), **decoder}, names)
        folders = (graph.parent, graph.parent.parent)
        found = next((folder for folder in folders if is_file(folder / "config.json")), None)
        if found is None:
            raise NotAModel(f"{graph} has neither {GENAI_CONFIG} nor config.json beside it. Get the whole folder.")
        return cls(found / "config.json", found, _json(found / "config.json"), dict(_NAMES))

    def number(self, *names: str) -> int | None:
        """The first of these fields that is a size."""
        for name in names:
            value = self._fields.get(name)
            if type(value) is int and 0 < value < 1 << 31:
                return value
        return None

    @property
    def head_dim(self) -> int | None:
        width, heads = self.number("hidden_size"), self.number("num_attention_heads")
        return self.number("head_size", "head_dim") or (width // heads if width and heads else None)

    @property
    def stop_ids(self) -> list[int]:
        value = self._fields.get("eos_token_id")
        return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]


def _layers(graph: OnnxGraph, about: _Configuration) -> tuple[LayerNames, ...]:
    patterns = [about.names[f"{time}_{half}_names"] for time in ("past", "present") for half in ("key", "value")]
    layers = tuple(
        LayerNames(*(pattern.replace("%d", str(layer)) for pattern in patterns))
        for layer in range(_MAX_LAYERS)
        if patterns[0].replace("%d", str(layer)) in graph.inputs
    )
    if not layers:
        first = patterns[0].replace("%d", "0")
        raise _unsupported(graph, f"takes no keys and values of earlier tokens ({first}): it was exported without them")
    for one in layers:
        for name, known in ((one.past_value, graph.inputs), (one.present_key, graph.outputs),
                            (one.present_value, graph.outputs)):  # fmt: skip
            if name not in known:
                raise _unsupported(graph, f"has {one.past_key}, but no {name} that belongs to it")
    return layers


def _check_inputs(graph: OnnxGraph, about: _Configuration, layers: Sequence[LayerNames]) -> None:
    whole = {about.names[name] for name in ("input_ids", "attention_mask", "position_ids")}
    missing = {about.names["input_ids"], about.names["attention_mask"]} - graph.inputs.keys()
    if missing:
        raise _unsupported(graph, f"has no input {min(missing)}")
    known = whole | {name for one in layers for name in (one.past_key, one.past_value)}
    unknown = graph.inputs.keys() - known
    if unknown:
        raise _unsupported(graph, f"needs an input that is not known here ({min(unknown)})")
    for name in whole & graph.inputs.keys():
        if not _is_rows(graph.inputs[name]):
            raise _unsupported(graph, f"takes {name} in another form than rows of whole numbers")
    if "If" in graph.operators:
        raise _unsupported(graph, "computes long contexts in another way than short ones (an operator If)")


def _layout(graph: OnnxGraph, about: _Configuration, layers: Sequence[LayerNames]) -> KvLayout:
    types = set[int]()
    shapes = []
    for one in layers:
        halves = []
        for past, present in ((one.past_key, one.present_key), (one.past_value, one.present_value)):
            before, after = graph.inputs[past], graph.outputs[present]
            types |= {before.type, after.type}
            for name, spec in ((past, before), (present, after)):
                if len(spec.shape) != 4:
                    raise _unsupported(graph, f"has {name} with {len(spec.shape)} dimensions in place of four")
            halves.append(_half(graph, about, before, after))
        (heads, key_dim), (same, value_dim) = halves
        if heads != same:
            raise _unsupported(graph, f"has {heads} heads in {one.past_key} and {same} in {one.past_value}")
        shapes.append(LayerShape(heads, key_dim, value_dim))
    kinds = {_KV_TYPES.get(kind) for kind in types}
    kind = kinds.pop()
    if kind is None or kinds or len(types) > 1:
        raise _unsupported(graph, f"keeps keys and values in numbers that are not known here (types {sorted(types)})")
    return KvLayout(kind, tuple(shapes))


def _half(graph: OnnxGraph, about: _Configuration, before: TensorSpec, after: TensorSpec) -> tuple[int, int]:
    """The heads of keys or values, and their size."""
    heads = before.shape[1] or after.shape[1] or about.number("num_key_value_heads", "num_attention_heads")
    size = before.shape[3] or after.shape[3] or about.head_dim
    if not heads or not size:
        raise _unsupported(graph, "does not say how large its keys and values are")
    return heads, size


def _unsupported(graph: OnnxGraph, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{graph.path} {why}. Export the model with: rekindle pull NAME --format onnx, or use engine='hf'."
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return _object(read_json(path))
    except (ValueError, OSError) as error:
        raise BrokenModel(f"{path} is not JSON ({error}). Get it again.") from error


def _decoder(about: dict[str, Any]) -> dict[str, Any]:
    return _object(_object(about.get("model")).get("decoder"))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_POOLED = "sentence_embedding"
_OUTPUTS = (_POOLED, "last_hidden_state", "token_embeddings")  # by preference
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
