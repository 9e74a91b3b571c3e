"""An encoder as a graph of ONNX Runtime: one from a file, or one made in memory from the weights of a checkpoint.

For that nothing is exported and no file is written: the graph names its weights, and ONNX Runtime gets them as arrays.
An ONNX file is a protobuf message; the few fields that are needed are written here, so that the package onnx is not.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from rekindle.engine.embedding.bert import BertWeights, Dense, EncoderLayer, Floats, LayerNorm
from rekindle.engine.embedding.encoder_settings import Pooling
from rekindle.engine.onnx.graph_runner import open_session, run_graph
from rekindle.errors import UnsupportedModel
from rekindle.machine import usable_cores
from rekindle.models.onnx_folder import EncoderSpec, OnnxEncoder

_PADDED = 1.1  # tokens that are computed for each that is asked for: padding costs more than another run
_INTEGERS: dict[str, Any] = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}


class GraphEncoder:
    """An encoder on the CPU. Thread-safe."""

    def __init__(self, session: Any, spec: EncoderSpec, name: str) -> None:
        """Raises `UnsupportedModel` for a graph that cannot be computed."""
        self.vocabulary_size = spec.vocabulary_size
        self.token_limit = spec.token_limit
        self._session = session
        self._spec = spec
        self._types = {one.name: _INTEGERS[one.type] for one in session.get_inputs()}
        try:
            found = self._run(np.zeros((1, 1), np.int64), np.ones((1, 1), bool), None)
        except Exception as error:  # its errors have no root of their own
            raise UnsupportedModel(f"{name} cannot be computed ({str(error).splitlines()[0]}). Use minilm.") from error
        self.dimensions = int(found.shape[-1])

    @classmethod
    def of_weights(cls, weights: BertWeights) -> GraphEncoder:
        """Raises as `open_session` does."""
        graph, name = BertGraph(weights), "the encoder's graph"
        session = open_session(graph.model, name, usable_cores(), arrays=graph.arrays)
        return cls(session, EncoderSpec(OUTPUT, weights.vocabulary_size, weights.token_limit), name)

    @classmethod
    def of_file(cls, encoder: OnnxEncoder) -> GraphEncoder:
        """Raises as `open_session` does."""
        path = str(encoder.graph.path)
        return cls(open_session(path, path, usable_cores()), encoder.spec, path)

    def pooled(
        self, prompts: Sequence[NDArray[np.int32]], pooling: Pooling, cancelled: Callable[[], bool] | None
    ) -> NDArray[np.float32]:
        """The pooled states `[prompts, dimensions]` of prompts in order of length. Raises `Cancelled`."""
        found, start = [], 0
        for stop in _stops([len(prompt) for prompt in prompts]):
            found.append(self._pooled(prompts[start:stop], pooling, cancelled))
            start = stop
        return np.concatenate(found)

    def _pooled(
        self, prompts: Sequence[NDArray[np.int32]], pooling: Pooling, cancelled: Callable[[], bool] | None
    ) -> NDArray[np.float32]:
        """Of prompts in one run, the shorter ones padded."""
        lengths = np.array([len(prompt) for prompt in prompts])
        mask = np.arange(lengths.max()) < lengths[:, None]  # [prompts, tokens]
        ids = np.full(mask.shape, self._spec.padding_id, np.int64)
        ids[mask] = np.concatenate(prompts)
        states = self._run(ids, mask, cancelled).astype(np.float32, copy=False)  # [prompts, tokens, dimensions]
        if self._spec.pooled:
            return states
        found: NDArray[np.float32]
        if pooling == "cls":
            found = states[:, 0]
        elif pooling == "max":
            found = np.where(mask[..., None], states, -np.inf).max(axis=1)
        else:
            shares = (mask / lengths[:, None]).astype(np.float32)
            found = (shares[:, None] @ states)[:, 0]
        return found

    def _run(
        self, ids: NDArray[np.int64], mask: NDArray[np.bool_], cancelled: Callable[[], bool] | None
    ) -> NDArray[Any]:
        known = {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": np.zeros_like(ids),
            "position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape),
        }
        given = {name: np.ascontiguousarray(known[name], kind) for name, kind in self._types.items()}
        found: list[NDArray[Any]] = []

        def run(options: onnxruntime.RunOptions) -> None:
            found.extend(self._session.run([self._spec.output], given, options))

        run_graph(run, ids.size, cancelled)
        return found[0]


def _stops(lengths: Sequence[int]) -> Iterator[int]:
    """Where runs end, of prompts whose lengths rise: few tokens of a run are padding."""
    start = tokens = 0
    for place, length in enumerate(lengths):
        if (place + 1 - start) * length > _PADDED * (tokens + length):
            yield place
            start, tokens = place, 0
        tokens += length
    yield len(lengths)


_FLOAT, _INT32, _INT64 = 1, 6, 7  # numbers of ONNX's types
_MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
_OPSETS = {"": 17, _MICROSOFT: 1}
_IR_VERSION = 8
_HIDDEN = -3e38  # added to the scores of padding; by default it is -10,000, which scores of odd models reach
_GELUS = {"gelu": "BiasGelu", "gelu_new": "FastGelu", "gelu_pytorch_tanh": "FastGelu"}

INPUTS = ("input_ids", "attention_mask", "position_ids")
OUTPUT = "last_hidden_state"


class BertGraph:
    """The graph of an encoder: its message without weights, and the weights by name."""

    def __init__(self, weights: BertWeights) -> None:
        self.arrays: dict[str, Floats] = {}
        self._nodes: list[bytes] = []
        lengths = self._add("ReduceSum", ["attention_mask", "token_axis"], keepdims=0)
        lengths = self._add("Cast", [lengths], to=_INT32)
        words = self._add("Gather", [self._weight("words", weights.words), "input_ids"])
        places = self._add("Gather", [self._weight("places", weights.places), "position_ids"])
        states = self._add("Add", [words, places])
        scale, shift = self._norm_weights("first", weights.norm)
        states = self._add("LayerNormalization", [states, scale, shift], epsilon=weights.norm.epsilon)
        for number, layer in enumerate(weights.layers):
            states = self._layer(f"{number}", layer, weights, states, lengths)
        self._add("Identity", [states], output=OUTPUT)
        graph = [_field(1, node) for node in self._nodes] + [_field(2, b"encoder")]
        graph += [_field(5, _outside(name, array)) for name, array in self.arrays.items()]
        graph.append(_field(5, _tensor("token_axis", _INT64, [1], _field(9, struct.pack("<q", 1)))))
        graph += [_field(11, _value(name, _INT64, 2)) for name in INPUTS] + [_field(12, _value(OUTPUT, _FLOAT, 3))]
        opsets = [_field(8, _field(1, name.encode()) + _field(2, version)) for name, version in _OPSETS.items()]
        self.model = b"".join([_field(1, _IR_VERSION), *opsets, _field(7, b"".join(graph))])

    def _layer(self, name: str, layer: EncoderLayer, weights: BertWeights, states: str, lengths: str) -> str:
        joined = self._dense_weights(f"{name}.queries_keys_values", layer.queries_keys_values)
        mixed = self._add(
            "Attention",
            [states, *joined, lengths],
            domain=_MICROSOFT,
            num_heads=weights.heads,
            scale=1.0,
            mask_filter_value=_HIDDEN,
        )
        states = self._close(f"{name}.mix", layer.mix, layer.mix_norm, mixed, states)
        weight, bias = self._dense_weights(f"{name}.widen", layer.widen)
        inner = self._add("MatMul", [states, weight])
        if weights.activation == "relu":
            inner = self._add("Relu", [self._add("Add", [inner, bias])])
        else:
            inner = self._add(_GELUS[weights.activation], [inner, bias], domain=_MICROSOFT)
        return self._close(f"{name}.narrow", layer.narrow, layer.feed_norm, inner, states)

    def _close(self, name: str, dense: Dense, norm: LayerNorm, inner: str, before: str) -> str:
        """Project back, add the states before, normalise."""
        weight, bias = self._dense_weights(name, dense)
        scale, shift = self._norm_weights(name, norm)
        inputs = [self._add("MatMul", [inner, weight]), before, scale, shift, bias]
        return self._add("SkipLayerNormalization", inputs, domain=_MICROSOFT, epsilon=norm.epsilon)

    def _dense_weights(self, name: str, dense: Dense) -> tuple[str, str]:
        return self._weight(f"{name}.weight", dense.weight), self._weight(f"{name}.bias", dense.bias)

    def _norm_weights(self, name: str, norm: LayerNorm) -> tuple[str, str]:
        return self._weight(f"{name}.scale", norm.scale), self._weight(f"{name}.shift", norm.shift)

    def _weight(self, name: str, array: Floats) -> str:
        self.arrays[name] = array
        return name

    def _add(
        self, operator: str, inputs: Sequence[str], *, domain: str = "", output: str = "", **attributes: int | float
    ) -> str:
        """Add a node; returns the name of its output."""
        output = output or f"{len(self._nodes)}.{operator}"
        parts = [_field(1, name.encode()) for name in inputs] + [_field(2, output.encode())]
        parts += [_field(4, operator.encode()), _field(7, domain.encode())]
        parts += [_field(5, _attribute(name, value)) for name, value in attributes.items()]
        self._nodes.append(b"".join(parts))
        return output


def _attribute(name: str, value: int | float) -> bytes:
    if isinstance(value, float):
        return _field(1, name.encode()) + _key(2, 5) + struct.pack("<f", value) + _field(20, 1)
    return _field(1, name.encode()) + _field(3, value) + _field(20, 2)


def _value(name: str, kind: int, dimensions: int) -> bytes:
    """An input or output of any size."""
    sizes = [_field(1, _field(2, f"{name}.{axis}".encode())) for axis in range(dimensions)]
    tensor = _field(1, kind) + _field(2, b"".join(sizes))
    return _field(1, name.encode()) + _field(2, _field(1, tensor))


def _outside(name: str, array: Floats) -> bytes:
    """A tensor whose numbers are not in the message."""
    place = _field(13, _field(1, b"location") + _field(2, b"memory"))
    return _tensor(name, _FLOAT, array.shape, place + _field(14, 1))


def _tensor(name: str, kind: int, shape: Sequence[int], data: bytes) -> bytes:
    return b"".join(_field(1, size) for size in shape) + _field(2, kind) + _field(8, name.encode()) + data


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _key(number, 0) + _varint(value)
    return _key(number, 2) + _varint(len(value)) + value


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
