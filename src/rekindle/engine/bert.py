"""The forward pass of BERT and its kin, in numpy: token ids in, one vector a token out. No torch.

Texts are not padded. The tokens of a batch stand in one long row, and all that treats tokens one by one (most of the
work) treats the whole row; only attention looks at the texts, those of equal length together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.engine.activation import ACTIVATIONS, Activation, Floats
from rekindle.errors import BrokenModel, UnsupportedModel

# Families of one layout, and whether their positions are counted from the one after the padding token's id.
FAMILIES: Mapping[str, bool] = MappingProxyType(
    {"bert": False, "roberta": True, "xlm-roberta": True, "camembert": True}
)
_FEED_ROWS = 1024  # tokens whose inner states, the widest of all, are held at once; few large products beat many small
_SCORE_VALUES = 1 << 18  # attention scores held at once
_SAFE_SCORE = 60.0  # sums of exponentials up to this neither overflow nor vanish, and need not be shifted row by row


@dataclass(frozen=True, slots=True)
class Group:
    """Texts of equal length that stand one after the other in the row of a batch."""

    start: int  # row of the first token
    texts: int
    tokens: int  # of each text

    @property
    def rows(self) -> slice:
        """Where they stand."""
        return slice(self.start, self.start + self.texts * self.tokens)


@dataclass(frozen=True, slots=True)
class _Dense:
    weight: Floats  # [inputs, outputs]
    bias: Floats  # [outputs]

    def __call__(self, states: Floats, out: Floats | None = None) -> Floats:
        result: Floats = np.matmul(states, self.weight, out=out)
        result += self.bias
        return result


@dataclass(frozen=True, slots=True)
class _Norm:
    scale: Floats  # [hidden]
    shift: Floats  # [hidden]
    epsilon: float

    def __call__(self, states: Floats) -> None:
        """Normalise rows `[tokens, hidden]` in place."""
        width = states.shape[1]
        states -= (states @ np.full(width, 1 / width, np.float32))[:, None]  # a product adds faster than a sum
        spread = np.einsum("nd,nd->n", states, states) / np.float32(width)
        states *= (1 / np.sqrt(spread + np.float32(self.epsilon)))[:, None]
        states *= self.scale
        states += self.shift


@dataclass(frozen=True, slots=True)
class _Layer:
    queries_keys_values: _Dense  # queries are scaled already
    mix: _Dense
    mix_norm: _Norm
    widen: _Dense
    narrow: _Dense
    feed_norm: _Norm


class Bert:
    """An encoder's weights and what it computes with them. Used from several threads: nothing in it changes."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Floats]) -> None:
        """`tensors` by the names of the model without its head.

        Raises `UnsupportedModel` for what is not computed here and `BrokenModel` for tensors that lack or do not fit.
        """
        shape = _Shape.of(config)
        parts = _Parts(tensors, shape)
        self.dimensions = shape.hidden
        self._heads = shape.heads
        self._activate = shape.activation
        self._words = parts.take("embeddings.word_embeddings.weight", shape.vocabulary, shape.hidden)
        places = parts.take("embeddings.position_embeddings.weight", shape.positions, shape.hidden)
        kinds = parts.take("embeddings.token_type_embeddings.weight", shape.kinds, shape.hidden)
        self._places = places[shape.first_position :] + kinds[0]  # all tokens are of the first kind
        self._norm = parts.norm("embeddings.LayerNorm")
        self._layers = [parts.layer(f"encoder.layer.{index}.") for index in range(shape.layers)]

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return len(self._words)

    @property
    def most_tokens(self) -> int:
        """The longest text for which the model has positions."""
        return len(self._places)

    def states(self, ids: NDArray[np.int64], groups: Sequence[Group], look: Callable[[], None]) -> Floats:
        """The last layer's states `[tokens, hidden]` of the texts whose ids `[tokens]` stand in these groups.

        `look` is called before every layer; what it raises ends the work.
        """
        states: Floats = self._words[ids]  # [tokens, hidden]
        for group in groups:
            texts = states[group.rows].reshape(group.texts, group.tokens, -1)
            texts += self._places[: group.tokens]
        self._norm(states)
        parts = np.empty((len(ids), 3 * self.dimensions), np.float32)
        mixed, result = np.empty_like(states), np.empty_like(states)
        for layer in self._layers:
            look()
            layer.queries_keys_values(states, parts)
            for group in groups:
                self._attend(parts[group.rows], group, mixed[group.rows])
            layer.mix(mixed, result)
            result += states
            layer.mix_norm(result)
            self._feed(layer, result)
            states, result = result, states
        return states

    def _attend(self, parts: Floats, group: Group, out: Floats) -> None:
        """Attention inside each text of a group: `parts` `[tokens, 3 * hidden]`, `out` `[tokens, hidden]`."""
        split = parts.reshape(group.texts, group.tokens, 3, self._heads, -1)
        queries, keys, values = split.transpose(2, 0, 3, 1, 4)  # each [texts, heads, tokens, size]
        target = out.reshape(group.texts, group.tokens, self._heads, -1).transpose(0, 2, 1, 3)
        row = self._heads * group.tokens  # the scores of one query
        some = max(1, _SCORE_VALUES // row)
        texts = max(1, some // group.tokens)
        ones = np.ones(group.tokens, np.float32)
        for text in range(0, group.texts, texts):
            these = slice(text, text + texts)
            turned = keys[these].swapaxes(2, 3)  # [texts, heads, size, tokens]
            if some < group.tokens:  # used more than once: then turning it for good pays
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

    def _feed(self, layer: _Layer, states: Floats) -> None:
        """The second half of a layer, in place."""
        for start in range(0, len(states), _FEED_ROWS):
            some = states[start : start + _FEED_ROWS]
            inner = layer.widen(some)  # [some tokens, intermediate]
            self._activate(inner)
            some += layer.narrow(inner)
            layer.feed_norm(some)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a config says, checked."""

    hidden: int
    inner: int
    heads: int
    layers: int
    vocabulary: int
    positions: int
    kinds: int
    first_position: int
    epsilon: float
    activation: Activation

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Shape:
        family = str(config["model_type"])
        if family not in FAMILIES:
            raise UnsupportedModel(
                f"Embeddings are computed with the families {', '.join(FAMILIES)}; this model is a {family}. "
                "Use minilm, or another model of those."
            )
        _refuse(family, "activation", config.get("hidden_act", "gelu"), ACTIVATIONS)
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
            activation=ACTIVATIONS[config.get("hidden_act", "gelu")],
        )


# What transformers writes into a config, and takes where one is silent.
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


class _Parts:
    """Takes the tensors of a model by name, and turns them into what computes."""

    def __init__(self, tensors: Mapping[str, Floats], shape: _Shape) -> None:
        prefix = next((n.partition("embeddings.")[0] for n in tensors if "embeddings.word_embeddings" in n), "")
        self._tensors = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        self._shape = shape

    def take(self, name: str, *size: int) -> Floats:
        """The tensor of that name, which must have that size."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise BrokenModel(f"The model's weights lack {name}. Get the model again.")
        if tensor.shape != size:
            raise BrokenModel(
                f"{name} has the shape {list(tensor.shape)}, by config.json {list(size)}. Get both again."
            )
        return tensor

    def layer(self, name: str) -> _Layer:
        """One layer; its three projections become one, so that one product serves them all."""
        hidden, inner = self._shape.hidden, self._shape.inner
        scale = np.float32((hidden // self._shape.heads) ** -0.5)
        queries, keys, values = (
            self._dense(f"{name}attention.self.{part}", hidden, hidden) for part in ("query", "key", "value")
        )
        joined = _Dense(
            np.ascontiguousarray(np.concatenate([queries.weight * scale, keys.weight, values.weight], axis=1)),
            np.concatenate([queries.bias * scale, keys.bias, values.bias]),
        )
        return _Layer(
            joined,
            self._dense(f"{name}attention.output.dense", hidden, hidden),
            self.norm(f"{name}attention.output.LayerNorm"),
            self._dense(f"{name}intermediate.dense", hidden, inner),
            self._dense(f"{name}output.dense", inner, hidden),
            self.norm(f"{name}output.LayerNorm"),
        )

    def norm(self, name: str) -> _Norm:
        """A normalisation."""
        hidden = self._shape.hidden
        # Files converted from TensorFlow call the two gamma and beta.
        words = ("weight", "bias") if f"{name}.weight" in self._tensors else ("gamma", "beta")
        scale, shift = (self.take(f"{name}.{word}", hidden) for word in words)
        return _Norm(scale, shift, self._shape.epsilon)

    def _dense(self, name: str, inputs: int, outputs: int) -> _Dense:
        weight = self.take(f"{name}.weight", outputs, inputs)
        return _Dense(np.ascontiguousarray(weight.T), self.take(f"{name}.bias", outputs))
