"""ONNX Runtime's session of a graph: execution providers, bindings to buffers, runs that can be stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from rekindle.core.kv import LayerKv
from rekindle.engine.onnx.onnx_options import OnnxOptions
from rekindle.engine.threaded_job import ThreadedJob
from rekindle.errors import BrokenModel, Cancelled, InvalidSetting, OutOfMemory, UnsupportedModel
from rekindle.machine import usable_cores
from rekindle.models.onnx_folder import OnnxModel
from rekindle.models.onnx_graph import BFLOAT16, FLOAT16

_SUFFIX = "ExecutionProvider"
_TESTED = ("cpu",)
_NOT_LOCAL = ("azure",)  # sends what it computes elsewhere
_SILENT = 4
_WATCHED_TOKENS = 16  # a run of more is watched, so that it can be stopped
_INTEGERS: dict[int, Any] = {6: np.int32, 7: np.int64}
_LOGITS: dict[int, Any] = {FLOAT16: np.float16, BFLOAT16: np.uint16}

Bound = Sequence[tuple[LayerKv, LayerKv]]  # past and present of each layer, `[batch, kv_heads, tokens, dim]`


def providers() -> dict[str, str]:
    """The execution providers that are installed, by the name that `device` takes; tested or not."""
    names = [name.removesuffix(_SUFFIX).lower() for name in onnxruntime.get_available_providers()]
    return {name: "tested" if name in _TESTED else "untested" for name in names if name not in _NOT_LOCAL}


def choose_provider(device: str) -> str:
    """The provider of a device, by ONNX Runtime's name. Raises `InvalidSetting` if it is not installed."""
    wanted = "cpu" if device == "auto" else device.lower()
    for name in onnxruntime.get_available_providers():
        if name.removesuffix(_SUFFIX).lower() == wanted and wanted not in _NOT_LOCAL:
            return str(name)
    raise InvalidSetting(
        f"device={device!r} is not a provider of this ONNX Runtime. It has: {', '.join(providers())}. Others come with "
        "packages such as onnxruntime-gpu."
    )


def open_session(
    graph: str | bytes,
    name: str,
    threads: int,
    *,
    provider: str = f"CPU{_SUFFIX}",
    arrays: Mapping[str, NDArray[Any]] | None = None,
) -> Any:
    """ONNX Runtime's session of a graph: the path of a file, or a message whose weights are these `arrays`.

    Raises `BrokenModel`, `UnsupportedModel` and `OutOfMemory`, which call it `name`.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = _SILENT
    if arrays is not None:
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays.values()]
        options.add_external_initializers(list(arrays), values)
    used = list(dict.fromkeys((provider, f"CPU{_SUFFIX}")))
    try:
        return onnxruntime.InferenceSession(graph, options, providers=used)
    except Exception as error:  # its errors have no root of their own
        raise _load_error(name, error) from error


def run_graph(run: Callable[[onnxruntime.RunOptions], None], tokens: int, cancelled: Callable[[], bool] | None) -> None:
    """Run a graph over some tokens; one over many is watched, and stopped when it is cancelled. Raises `Cancelled`."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = _SILENT
    if cancelled is None or tokens <= _WATCHED_TOKENS:
        run(options)
        return
    job = ThreadedJob(lambda: run(options))
    if job.done(cancelled):
        return
    options.terminate = True
    with suppress(Exception):  # its errors have no root of their own
        job.done(None)  # stops after the operator that runs: its buffers are in use until then
    raise Cancelled("The request was cancelled.")


class GraphRunner:
    """A loaded graph. One run at a time."""

    def __init__(self, model: OnnxModel, options: OnnxOptions) -> None:
        """Load it. Raises `BrokenModel`, `UnsupportedModel`, `OutOfMemory` and `InvalidSetting`."""
        self._model = model
        self.provider = choose_provider(options.device)
        path = str(model.graph.path)
        self._session = open_session(path, path, options.threads or usable_cores(), provider=self.provider)

    def run(
        self,
        tokens: NDArray[np.int64],
        firsts: Sequence[int],
        kv: Bound,
        out: NDArray[Any],
        cancelled: Callable[[], bool] | None,
    ) -> None:
        """Compute tokens `[batch, count]`, those of a sequence from its position in `firsts` on. Logits go to `out`
        `[batch, count or 1, vocabulary]`, KV to the present of each layer. Raises `Cancelled`."""
        model, names = self._model, self._model.names
        count = tokens.shape[1]
        given = {names["input_ids"]: tokens, names["attention_mask"]: _mask(firsts, count)}
        if model.positions is not None:
            given[model.positions] = np.asarray(firsts)[:, None] + np.arange(count)
        given = {name: np.ascontiguousarray(array, _INTEGERS[model.type_of(name)]) for name, array in given.items()}
        binding = self._session.io_binding()
        for name, array in given.items():
            _bind(binding.bind_input, name, model.type_of(name), array)
        _bind(binding.bind_output, names["logits"], model.type_of(names["logits"]), out)
        for layer, (past, present) in zip(model.layers, kv, strict=True):
            kind = model.type_of(layer.past_key)
            _bind(binding.bind_input, layer.past_key, kind, past.keys)
            _bind(binding.bind_input, layer.past_value, kind, past.values)
            _bind(binding.bind_output, layer.present_key, kind, present.keys)
            _bind(binding.bind_output, layer.present_value, kind, present.values)
        run_graph(lambda how: self._session.run_with_iobinding(binding, how), tokens.size, cancelled)

    def logits_buffer(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """A buffer for logits."""
        return np.empty(shape, _LOGITS.get(self._model.type_of(self._model.names["logits"]), np.float32))


def as_float32(logits: NDArray[Any]) -> NDArray[np.float32]:
    """A copy of logits of any type; bfloat16 comes as raw bits."""
    if logits.dtype == np.uint16:
        return (logits.astype(np.uint32) << 16).view(np.float32)
    return logits.astype(np.float32)


def _mask(firsts: Sequence[int], count: int) -> NDArray[np.int64]:
    """[batch, longest]: ones for the tokens of each sequence, the new ones included."""
    lengths = np.asarray(firsts)[:, None] + count
    return (np.arange(lengths.max()) < lengths).astype(np.int64)


def _bind(bind: Callable[..., None], name: str, kind: int, array: NDArray[Any]) -> None:
    bind(name, "cpu", 0, kind, array.shape, array.ctypes.data)


def _load_error(path: str, error: Exception) -> Exception:
    said = str(error).splitlines()[0]
    if isinstance(error, MemoryError) or "alloc" in said:
        return OutOfMemory(f"{path} does not fit into memory ({said}). Use a smaller model, or --format onnx-int4.")
    if "NOT_IMPLEMENTED" in said or "No Op registered" in said or "not a registered function/op" in said:
        return UnsupportedModel(f"This ONNX Runtime ({onnxruntime.__version__}) cannot compute {path} ({said}).")
    return BrokenModel(f"ONNX Runtime cannot load {path} ({said}). Get it again, or export it again.")
