"""The weights of BERT-like encoders, read from a checkpoint and checked against its config.

The three projections of a layer are merged into one, and queries are scaled already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import BrokenModel, UnsupportedModel

Floats = NDArray[np.float32]

# Families of one layout, and whether their positions start after the padding token's id.
FAMILIES: Mapping[str, bool] = MappingProxyType(
    {"bert": False, "roberta": True, "xlm-roberta": True, "camembert": True}
)
ACTIVATION_NAMES = ("gelu", "relu", "gelu_new", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class Dense:
    weight: Floats  # [inputs, outputs]
    bias: Floats  # [outputs]


@dataclass(frozen=True, slots=True)
class LayerNorm:
    scale: Floats  # [hidden]
    shift: Floats  # [hidden]
    epsilon: float


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    queries_keys_values: Dense
    mix: Dense
    mix_norm: LayerNorm
    widen: Dense
    narrow: Dense
    feed_norm: LayerNorm


@dataclass(frozen=True, slots=True)
class BertWeights:
    """Everything that an encoder computes with."""

    words: Floats  # [vocabulary, hidden]
    places: Floats  # [positions, hidden], the first kind of token included: all tokens are of it
    norm: LayerNorm
    layers: tuple[EncoderLayer, ...]
    heads: int
    activation: str  # one of ACTIVATION_NAMES

    @property
    def dimensions(self) -> int:
        return int(self.words.shape[1])

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return len(self.words)

    @property
    def token_limit(self) -> int:
        """The longest text, by the model's positions."""
        return len(self.places)


def read_bert(config: Mapping[str, Any], tensors: Mapping[str, Floats]) -> BertWeights:
    """`tensors` by the names of the model without its head.

    Raises `UnsupportedModel`, and `BrokenModel` for missing tensors and wrong shapes.
    """
    shape = _BertConfig.of(config)
    parts = _WeightReader(tensors, shape)
    places = parts.take("embeddings.position_embeddings.weight", shape.positions, shape.hidden)
    kinds = parts.take("embeddings.token_type_embeddings.weight", shape.kinds, shape.hidden)
    return BertWeights(
        words=parts.take("embeddings.word_embeddings.weight", shape.vocabulary, shape.hidden),
        places=places[shape.first_position :] + kinds[0],
        norm=parts.norm("embeddings.LayerNorm"),
        layers=tuple(parts.layer(f"encoder.layer.{index}.") for index in range(shape.layers)),
        heads=shape.heads,
        activation=shape.activation,
    )


@dataclass(frozen=True, slots=True)
class _BertConfig:
    """The checked fields of a config."""

    hidden: int
    inner: int
    heads: int
    layers: int
    vocabulary: int
    positions: int
    kinds: int
    first_position: int
    epsilon: float
    activation: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _BertConfig:
        family = str(config["model_type"])
        if family not in FAMILIES:
            raise UnsupportedModel(
                f"Embeddings are computed with the families {', '.join(FAMILIES)}; this model is a {family}. "
                "Use minilm, or its ONNX graph if it has one (./folder/onnx/model.onnx, ORG/NAME/onnx/model.onnx)."
            )
        _refuse(family, "activation", config.get("hidden_act", "gelu"), ACTIVATION_NAMES)
        _refuse(family, "position_embedding_type", config.get("position_embedding_type", "absolute"), ["absolute"])
        _refuse(family, "is_decoder", config.get("is_decoder", False), [False])
        numbers = {name: config.get(name, default) for name, default in _NUMBERS.items()}
        wrong = [name for name, value in numbers.items() if not isinstance(value, int) or value < 0]
        if wrong or not numbers["num_attention_heads"] or numbers["hidden_size"] % numbers["num_attention_heads"]:
            said = ", ".join(f"{name} {numbers[name]!r}" for name in wrong or ("hidden_size", "num_attention_heads"))
            raise BrokenModel(f"The model's config.json makes no sense ({said}). Get it again.")
        return cls(
            hidden=numbers["hidden_size"],
            inner=numbers["intermediate_size"],
            heads=numbers["num_attention_heads"],
            layers=numbers["num_hidden_layers"],
            vocabulary=numbers["vocab_size"],
            positions=numbers["max_position_embeddings"],
            kinds=numbers["type_vocab_size"],
            first_position=numbers["pad_token_id"] + 1 if FAMILIES[family] else 0,
            epsilon=float(config.get("layer_norm_eps", 1e-12)),
            activation=config.get("hidden_act", "gelu"),
        )


# Fields of a config and their defaults in transformers.
_NUMBERS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}


def _refuse(family: str, what: str, value: object, known: Iterable[object]) -> None:
    if value not in known:
        raise UnsupportedModel(
            f"This {family} model has {what} {value!r}; embeddings are computed only with "
            f"{', '.join(map(str, known))}. Use minilm, or another model of that kind."
        )


class _WeightReader:
    """Reads layers from the tensors of a model."""

    def __init__(self, tensors: Mapping[str, Floats], shape: _BertConfig) -> None:
        prefix = next((n.partition("embeddings.")[0] for n in tensors if "embeddings.word_embeddings" in n), "")
        self._tensors = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        self._shape = shape

    def take(self, name: str, *size: int) -> Floats:
        """The tensor of that name and shape. Raises `BrokenModel`."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise BrokenModel(f"The model's weights lack {name}. Get the model again.")
        if tensor.shape != size:
            raise BrokenModel(
                f"{name} has the shape {list(tensor.shape)}, by config.json {list(size)}. Get both again."
            )
        return tensor

    def layer(self, name: str) -> EncoderLayer:
        """One layer, with its three projections merged into one."""
        hidden, inner = self._shape.hidden, self._shape.inner
        scale = np.float32((hidden // self._shape.heads) ** -0.5)
        queries, keys, values = (
            self._dense(f"{name}attention.self.{part}", hidden, hidden) for part in ("query", "key", "value")
        )
        joined = Dense(
            np.ascontiguousarray(np.concatenate([queries.weight * scale, keys.weight, values.weight], axis=1)),
            np.concatenate([queries.bias * scale, keys.bias, values.bias]),
        )
        return EncoderLayer(
            joined,
            self._dense(f"{name}attention.output.dense", hidden, hidden),
            self.norm(f"{name}attention.output.LayerNorm"),
            self._dense(f"{name}intermediate.dense", hidden, inner),
            self._dense(f"{name}output.dense", inner, hidden),
            self.norm(f"{name}output.LayerNorm"),
        )

    def norm(self, name: str) -> LayerNorm:
        hidden = self._shape.hidden
        # Files converted from TensorFlow call the two gamma and beta.
        words = ("weight", "bias") if f"{name}.weight" in self._tensors else ("gamma", "beta")
        scale, shift = (self.take(f"{name}.{word}", hidden) for word in words)
        return LayerNorm(scale, shift, self._shape.epsilon)

    def _dense(self, name: str, inputs: int, outputs: int) -> Dense:
        weight = self.take(f"{name}.weight", outputs, inputs)
        return Dense(np.ascontiguousarray(weight.T), self.take(f"{name}.bias", outputs))
