"""The graph of an ONNX file, read without the onnx package: inputs and outputs, operators, and files of weights.

A file is a protobuf message. Only the fields that matter here are read; tensors are skipped, not loaded. Large tensors
are external data: files beside the graph, each tensor with the range of bytes that it takes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rekindle.errors import BrokenModel, ModelNotFound
from rekindle.models.files import is_file

FLOAT, UINT8, INT8, FLOAT16, BFLOAT16 = 1, 2, 3, 10, 16  # numbers of ONNX's types
_BITS = {
    1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 16: 16, 17: 8, 18: 8, 19: 8,
    20: 8, 21: 4, 22: 4,
}  # fmt: skip
_WEIGHTS = {FLOAT: 1, FLOAT16: 1, BFLOAT16: 1, INT8: 1, UINT8: 2, 21: 1, 22: 1}  # UINT8: two of four bits each
_MAX_DEPTH = 8  # of graphs inside nodes
_MAX_DIMENSIONS = 32
_PADDING_BYTES = 64 << 10  # how far writers align tensors

Value = int | memoryview


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output: ONNX's number of its type, and its shape, None where the size is not fixed."""

    type: int
    shape: tuple[int | None, ...]


@dataclass
class OnnxGraph:
    """A graph.

    made_by      the operator that computes a tensor, by the tensor's name
    operators    all operators, also of graphs inside nodes
    parameters   number of weights
    data         the files of its external data
    """

    path: Path
    inputs: dict[str, TensorSpec] = field(default_factory=dict)
    outputs: dict[str, TensorSpec] = field(default_factory=dict)
    made_by: dict[str, str] = field(default_factory=dict)
    operators: set[str] = field(default_factory=set)
    parameters: int = 0
    data: tuple[Path, ...] = ()

    @property
    def weights(self) -> tuple[Path, ...]:
        """All files of the model, the graph first."""
        return (self.path, *self.data)


def read_graph(path: Path) -> OnnxGraph:
    """Read a graph and check its external data. Raises `ModelNotFound` and `BrokenModel`."""
    if not is_file(path):
        raise ModelNotFound(f"There is no file {path}.")
    graph = OnnxGraph(path)
    ends: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        _Reader(graph, ends).model(whole)
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path} is not an ONNX graph, or is damaged ({error}). Get it again.") from error
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read ({error}). Get it again.") from error
    graph.data = tuple(_check_data(path, location, end) for location, end in sorted(ends.items()))
    return graph


def _check_data(graph: Path, location: str, end: int) -> Path:
    """The file of external data, which the graph says has `end` bytes."""
    relative = PurePosixPath(location.replace("\\", "/"))
    if relative.is_absolute() or ".." in relative.parts or ":" in location:
        raise BrokenModel(f"{graph} takes weights from {location!r}, outside its folder, which is refused.")
    path = graph.parent / relative
    if not is_file(path):
        raise BrokenModel(f"{graph} has its weights in {location}, which is not beside it. Get that file too.")
    size = path.stat().st_size
    if size < end:
        raise BrokenModel(f"{path} has {size:,} bytes, and {graph.name} needs {end:,}: it is cut off. Get it again.")
    if size > end + _PADDING_BYTES:
        raise BrokenModel(f"{path} has {size:,} bytes, {graph.name} declares {end:,}: it belongs to another graph.")
    return path


class _Reader:
    """Collects what a graph says. Raises `ValueError` for a message that cannot be."""

    def __init__(self, graph: OnnxGraph, ends: dict[str, int]) -> None:
        self._graph = graph
        self._ends = ends  # of the last tensor in each file of external data
        self._initialized: set[str] = set()

    def model(self, data: memoryview) -> None:
        graphs = [_bytes(value) for number, value in _fields(data) if number == 7]
        if len(graphs) != 1:
            raise ValueError("it holds no graph")
        self._nodes(graphs[0], 0)
        for number, value in _fields(graphs[0]):
            if number in (11, 12):
                name, spec = _value_info(_bytes(value))
                (self._graph.inputs if number == 11 else self._graph.outputs)[name] = spec
        for name in self._initialized & self._graph.inputs.keys():  # old files list weights among the inputs
            del self._graph.inputs[name]

    def _nodes(self, data: memoryview, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError("graphs inside graphs, too deep")
        for number, value in _fields(data):
            if number == 1:
                self._node(_bytes(value), depth)
            elif number == 5:
                self._tensor(_bytes(value))

    def _node(self, data: memoryview, depth: int) -> None:
        outputs, operator = [], ""
        for number, value in _fields(data):
            if number == 2:
                outputs.append(_text(value))
            elif number == 4:
                operator = _text(value)
            elif number == 5:
                for inner, part in _fields(_bytes(value)):
                    if inner in (5, 10):
                        self._tensor(_bytes(part))
                    elif inner in (6, 11):
                        self._nodes(_bytes(part), depth + 1)
        self._graph.operators.add(operator)
        if depth == 0:
            self._graph.made_by.update(dict.fromkeys(outputs, operator))

    def _tensor(self, data: memoryview) -> None:
        shape: list[int] = []
        kind, name, external = 0, "", {}
        for number, value in _fields(data):
            if number == 1:
                shape += [value] if isinstance(value, int) else _varints(value)
            elif number == 2:
                kind = _int(value)
            elif number == 8:
                name = _text(value)
            elif number == 13:
                entry = dict(_fields(_bytes(value)))
                external[_text(entry.get(1, memoryview(b"")))] = _text(entry.get(2, memoryview(b"")))
        if len(shape) > _MAX_DIMENSIONS or any(size >= 1 << 63 for size in shape):
            raise ValueError(f"the tensor {name[:80]!r} has a shape that cannot be")
        self._initialized.add(name)
        count = math.prod(shape)
        self._graph.parameters += count * _WEIGHTS.get(kind, 0)
        if external:
            self._external(name, external, None if kind not in _BITS else -(-count * _BITS[kind] // 8))

    def _external(self, name: str, about: dict[str, str], size: int | None) -> None:
        location, offset = about.get("location", ""), int(about.get("offset", "0"))
        length = int(about["length"]) if "length" in about else size
        if not location or length is None or offset < 0 or (size is not None and length != size):
            raise ValueError(f"the tensor {name[:80]!r} does not say where its {size} bytes are")
        self._ends[location] = max(self._ends.get(location, 0), offset + length)


def _value_info(data: memoryview) -> tuple[str, TensorSpec]:
    name, kind, shape = "", 0, list[int | None]()
    for number, value in _fields(data):
        if number == 1:
            name = _text(value)
        elif number == 2:
            for tensor in (part for inner, part in _fields(_bytes(value)) if inner == 1):
                for inner, part in _fields(_bytes(tensor)):
                    if inner == 1:
                        kind = _int(part)
                    elif inner == 2:
                        shape = [_size(_bytes(dim)) for place, dim in _fields(_bytes(part)) if place == 1]
    return name, TensorSpec(kind, tuple(shape))


def _size(data: memoryview) -> int | None:
    return next((_int(value) for number, value in _fields(data) if number == 1), None)


def _fields(data: memoryview) -> Iterator[tuple[int, Value]]:
    """The fields of a message: their numbers, and an integer or bytes each."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError("a field of an unknown kind")
        size, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if size > end - at:
            raise ValueError("a field ends after its message")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number that does not end")


def _varints(data: memoryview) -> list[int]:
    values, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        values.append(value)
    return values


def _bytes(value: Value) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number where a message should be")
    return value


def _int(value: Value) -> int:
    if not isinstance(value, int):
        raise ValueError("a message where a number should be")
    return value


def _text(value: Value) -> str:
    return bytes(_bytes(value)).decode("utf-8")
