"""An encoder as a graph of ONNX Runtime: one from a file, or one made from the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from rekindle.engine.embedding.bert_graph import OUTPUT, BertGraph
from rekindle.engine.embedding.bert_weights import BertWeights
from rekindle.engine.embedding.encoder_settings import Pooling
from rekindle.engine.onnx.graph_runner import open_session, run_graph
from rekindle.errors import UnsupportedModel
from rekindle.machine import usable_cores
from rekindle.models.onnx_encoder import EncoderSpec, OnnxEncoder

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
