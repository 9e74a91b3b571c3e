"""The forward pass of BERT-like encoders in numpy: token ids in, one vector per token out. No torch.

Texts are not padded. The tokens of a batch are one long row, and everything that works token by token (most of the
work) works on the whole row; only attention sees texts, those of equal length together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from rekindle.engine.embedding.bert_weights import BertWeights, Dense, EncoderLayer, Floats, LayerNorm
from rekindle.engine.embedding.encoder_settings import Pooling
from rekindle.engine.threaded_job import stop_if

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
