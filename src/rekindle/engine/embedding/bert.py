"""The forward pass of BERT-like encoders in numpy: token ids in, one vector per token out. No torch.

Texts are not padded. The tokens of a batch are one long row, and everything that works token by token (most of the
work) works on the whole row; only attention sees texts, those of equal length together.

Its weights are read from a checkpoint and checked against its config. The three projections of a layer are merged into
one, and queries are scaled already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.engine.embedding.encoder_settings import Pooling
from rekindle.engine.threaded_job import stop_if
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


Activation = Callable[[Floats], None]  # in place, over contiguous values

_PIECE_VALUES = 1 << 16  # passed over many times: small enough for the CPU's cache
# numpy has no erf. x times the normal distribution F(x) is x / (1 + exp(-z(x))) with z = log(F / (1 - F)), an odd
# function that a polynomial follows closely. These are the coefficients of -z(x) / x in powers of x * x, the lowest
# first: a minimax fit, F within 4e-8. The highest has the sign that makes F end at 0 and 1 however large x is.
_NORMAL = (
    -1.595769807,
    -0.07266613614,
    6.492191617e-5,
    1.10797083e-4,
    -7.973823824e-6,
    2.687463146e-7,
    -3.646817669e-9,
)
_SLOPE = -2.0 * (2.0 / np.pi) ** 0.5
_TANH = (_SLOPE, _SLOPE * 0.044715)  # the older approximation, which some models were trained with


def relu(values: Floats) -> None:
    """max(x, 0)"""
    np.maximum(values, 0, out=values)


def gelu(values: Floats) -> None:
    """x times the normal distribution at x, within 1e-6."""
    _apply_gate(values, _NORMAL)


def gelu_tanh(values: Floats) -> None:
    """The tanh approximation of `gelu`."""
    _apply_gate(values, _TANH)


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"gelu": gelu, "relu": relu, "gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh}  # those of ACTIVATION_NAMES
)


def _apply_gate(values: Floats, coefficients: tuple[float, ...]) -> None:
    """Divide by 1 + exp(x * p(x * x)), with the polynomial p."""
    flat = values.reshape(-1)
    length = min(len(flat), _PIECE_VALUES)
    squares, sums = np.empty(length, np.float32), np.empty(length, np.float32)
    *lower, lowest = (np.float32(value) for value in reversed(coefficients[:-1]))
    highest = np.float32(coefficients[-1])
    with np.errstate(over="ignore"):  # an infinite divisor is the right one
        for start in range(0, len(flat), _PIECE_VALUES):
            piece = flat[start : start + _PIECE_VALUES]
            square, total = squares[: len(piece)], sums[: len(piece)]
            np.multiply(piece, piece, out=square)
            np.multiply(square, highest, out=total)
            for value in lower:
                total += value
                total *= square
            total += lowest
            total *= piece
            np.exp(total, out=total)
            total += np.float32(1)
            piece /= total


_FEED_ROWS = 1024  # tokens whose inner states, the widest, are in memory at once
_SCORE_VALUES = 1 << 18  # attention scores in memory at once
_SAFE_SCORE = 60.0  # up to this, exponentials neither overflow nor vanish, and the maximum need not be subtracted


@dataclass(frozen=True, slots=True)
class EqualLengthTexts:
    """Consecutive texts of equal length in the row of a batch."""

    start: int  # row of the first token
    texts: int
    tokens: int  # of each text

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.texts * self.tokens)


def _project(dense: Dense, states: Floats, out: Floats | None = None) -> Floats:
    result: Floats = np.matmul(states, dense.weight, out=out)
    result += dense.bias
    return result


def _normalise(norm: LayerNorm, states: Floats) -> None:
    """Normalise rows `[tokens, hidden]` in place."""
    width = states.shape[1]
    states -= (states @ np.full(width, 1 / width, np.float32))[:, None]  # a product is faster than a sum
    spread = np.einsum("nd,nd->n", states, states) / np.float32(width)
    states *= (1 / np.sqrt(spread + np.float32(norm.epsilon)))[:, None]
    states *= norm.scale
    states += norm.shift


class NumpyEncoder:
    """An encoder in numpy. Immutable, so thread-safe."""

    def __init__(self, weights: BertWeights) -> None:
        self.dimensions = weights.dimensions
        self.vocabulary_size = weights.vocabulary_size
        self.token_limit = weights.token_limit
        self._weights = weights
        self._activate = ACTIVATIONS[weights.activation]

    def pooled(
        self, prompts: Sequence[NDArray[np.int32]], pooling: Pooling, cancelled: Callable[[], bool] | None
    ) -> Floats:
        """The pooled states `[prompts, dimensions]` of prompts in order of length. Raises `Cancelled`, before any
        layer."""
        groups, start = [], 0
        for tokens, same in groupby(prompts, key=len):
            group = EqualLengthTexts(start, len(list(same)), tokens)
            groups.append(group)
            start = group.rows.stop
        states = self._states(np.concatenate(prompts), groups, cancelled)  # [tokens, dimensions]
        found = []
        for group in groups:
            texts = states[group.rows].reshape(group.texts, group.tokens, self.dimensions)
            if pooling == "cls":
                found.append(texts[:, 0])
            else:
                found.append(texts.mean(axis=1) if pooling == "mean" else texts.max(axis=1))
        return np.concatenate(found)

    def _states(
        self, ids: NDArray[np.int32], groups: Sequence[EqualLengthTexts], cancelled: Callable[[], bool] | None
    ) -> Floats:
        """The last layer's states `[tokens, hidden]` of the texts whose ids `[tokens]` stand in these groups."""
        weights = self._weights
        states: Floats = weights.words[ids]  # [tokens, hidden]
        for group in groups:
            texts = states[group.rows].reshape(group.texts, group.tokens, -1)
            texts += weights.places[: group.tokens]
        _normalise(weights.norm, states)
        parts = np.empty((len(ids), 3 * self.dimensions), np.float32)
        mixed, result = np.empty_like(states), np.empty_like(states)
        for layer in weights.layers:
            stop_if(cancelled)
            _project(layer.queries_keys_values, states, parts)
            for group in groups:
                self._attend(parts[group.rows], group, mixed[group.rows])
            _project(layer.mix, mixed, result)
            result += states
            _normalise(layer.mix_norm, result)
            self._feed(layer, result)
            states, result = result, states
        return states

    def _attend(self, parts: Floats, group: EqualLengthTexts, out: Floats) -> None:
        """Attention inside each text of a group: `parts` `[tokens, 3 * hidden]`, `out` `[tokens, hidden]`."""
        heads = self._weights.heads
        split = parts.reshape(group.texts, group.tokens, 3, heads, -1)
        queries, keys, values = split.transpose(2, 0, 3, 1, 4)  # each [texts, heads, tokens, size]
        target = out.reshape(group.texts, group.tokens, heads, -1).transpose(0, 2, 1, 3)
        row = heads * group.tokens  # the scores of one query
        some = max(1, _SCORE_VALUES // row)
        texts = max(1, some // group.tokens)
        ones = np.ones(group.tokens, np.float32)
        for text in range(0, group.texts, texts):
            these = slice(text, text + texts)
            turned = keys[these].swapaxes(2, 3)  # [texts, heads, size, tokens]
            if some < group.tokens:  # used more than once: then copying it pays
                turned = np.ascontiguousarray(turned)
            for first in range(0, group.tokens, some):
                asked = queries[these, :, first : first + some]
                scores = asked @ turned  # [texts, heads, some, tokens]
                if max(scores.max(), -scores.min()) > _SAFE_SCORE:
                    scores -= scores.max(axis=3, keepdims=True)
                np.exp(scores, out=scores)
                sums = scores @ ones  # [texts, heads, some]
                found = scores @ values[these]  # [texts, heads, some, size]
                np.divide(found, sums[..., None], out=target[these, :, first : first + some])

    def _feed(self, layer: EncoderLayer, states: Floats) -> None:
        """The second half of a layer, in place."""
        for start in range(0, len(states), _FEED_ROWS):
            some = states[start : start + _FEED_ROWS]
            inner = _project(layer.widen, some)  # [some tokens, intermediate]
            self._activate(inner)
            some += _project(layer.narrow, inner)
            _normalise(layer.feed_norm, some)
