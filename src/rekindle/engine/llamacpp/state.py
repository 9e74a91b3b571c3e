"""The bytes in which llama.cpp hands out the KV of a sequence, and the KV value.

    magic | sequence | streams = 1 | cells               4 bytes each
    position | sequences = 1 | sequence                  4 bytes each, for every cell, in the order of the cells
    transposed | layers                                  4 bytes each
    type | row bytes | keys [cells, row]                 4, 8 bytes and the rows, for every layer
    type | row bytes | values [cells, row]               the same; but transposed, as without flash attention:
    type | number bytes | numbers | values [row, cells]

Nobody promises that this stays so. `read_layout` therefore accepts only what it understands to the last byte, and the
engine checks at load that KV taken out and put back by it makes no difference. Whatever else comes is not taken apart.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.kv import Kv, KvLayout, KvType, LayerKv, LayerShape, Span

Bytes = NDArray[np.uint8]

_START = struct.Struct("<IiII")  # magic, sequence, streams, cells
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_DATA = struct.Struct("<II")  # transposed, layers
_ROWS = struct.Struct("<iQ")  # type, bytes of a row
_COLUMNS = struct.Struct("<iII")  # type, bytes of a number, numbers of a row
_KV_TYPES: dict[int, KvType] = {0: "float32", 1: "float16", 30: "bfloat16"}  # ggml's number of a type
_MOST_LAYERS = 4096


class UnknownLayout(Exception):
    """Bytes that are not the state of a sequence with plain KV, as far as is known."""


@dataclass(frozen=True, slots=True)
class _Half:
    """The keys, or the values, of one layer: ggml's type of the numbers, and the bytes of one token."""

    type: int
    row_bytes: int


@dataclass(frozen=True)
class StateLayout:
    """How the state of any number of cells is laid out."""

    magic: int
    transposed: bool
    keys: tuple[_Half, ...]
    values: tuple[_Half, ...]

    @cached_property
    def kv(self) -> KvLayout:
        """The layout of the KV value: one head, as wide as all heads of a layer, which stand side by side."""
        types = {half.type for half in (*self.keys, *self.values)}
        dtype = _KV_TYPES.get(types.pop(), "uint8") if len(types) == 1 else "uint8"
        layers = tuple(LayerShape(1, k.row_bytes, v.row_bytes) for k, v in zip(self.keys, self.values, strict=True))
        itemsize = KvLayout(dtype, layers).numpy_dtype.itemsize
        return KvLayout(dtype, tuple(LayerShape(1, s.key_dim // itemsize, s.value_dim // itemsize) for s in layers))

    def size_bytes(self, cells: int) -> int:
        """How long the state of so many cells is."""
        rows = sum(half.row_bytes for half in (*self.keys, *self.values))
        headers = _ROWS.size * (len(self.keys) + len(self.values))
        return _START.size + cells * _CELL.itemsize + _DATA.size + headers + cells * rows

    def write(self, state: Bytes, span: Span) -> None:
        """Make `state` that of the positions of `span`, but for the KV."""
        cells = len(span)
        _START.pack_into(state.data, 0, self.magic, 0, 1, cells)
        about = state[_START.size : _START.size + cells * _CELL.itemsize].view(_CELL)
        about["position"] = np.arange(span.start, span.stop)
        about["sequences"], about["sequence"] = 1, 0
        _DATA.pack_into(state.data, _START.size + about.nbytes, self.transposed, len(self.keys))
        for half, start in zip((*self.keys, *self.values), self._starts(cells), strict=True):
            _ROWS.pack_into(state.data, start, half.type, half.row_bytes)
        if self.transposed:
            for half, start in zip(self.values, self._starts(cells)[len(self.keys) :], strict=True):
                size = self.kv.numpy_dtype.itemsize
                _COLUMNS.pack_into(state.data, start, half.type, size, half.row_bytes // size)

    def positions(self, state: Bytes) -> NDArray[np.int32]:
        """The positions of the cells, in the order of the cells."""
        _, _, _, cells = _START.unpack_from(state.data)
        positions: NDArray[np.int32] = state[_START.size : _START.size + cells * _CELL.itemsize].view(_CELL)["position"]
        return positions

    def views(self, state: Bytes, cells: int) -> list[LayerKv]:
        """The KV of each layer as it stands in the state: keys `[1, cells, dim]`; values too, transposed or not."""
        starts = self._starts(cells)
        arrays = []
        for half, start in zip((*self.keys, *self.values), starts, strict=True):
            begin = start + _ROWS.size
            arrays.append(state[begin : begin + cells * half.row_bytes].view(self.kv.numpy_dtype))
        layers = []
        for shape, keys, values in zip(self.kv.layers, arrays, arrays[len(self.keys) :], strict=False):
            across = values.reshape(1, shape.value_dim, cells).swapaxes(1, 2) if self.transposed else values
            layers.append(LayerKv(keys.reshape(1, cells, shape.key_dim), across.reshape(1, cells, shape.value_dim)))
        return layers

    def parse(self, state: Bytes, span: Span) -> Kv:
        """The KV of `span` from its state. Raises `UnknownLayout` if it is another's."""
        if len(state) != self.size_bytes(len(span)):
            raise UnknownLayout(f"{len(state)} bytes for {len(span)} cells")
        positions = self.positions(state)
        order = None if np.array_equal(positions, np.arange(span.start, span.stop)) else np.argsort(positions)
        if order is not None and not np.array_equal(positions[order], np.arange(span.start, span.stop)):
            raise UnknownLayout(f"positions {positions.min()} to {positions.max()} in place of {span}")
        layers = (LayerKv(_in(order, v.keys), _in(order, v.values)) for v in self.views(state, len(span)))
        return Kv(span, self.kv, tuple(layers))

    def _starts(self, cells: int) -> list[int]:
        """Where keys and then values of each layer begin, with their type."""
        start = _START.size + cells * _CELL.itemsize + _DATA.size
        starts = []
        for half in (*self.keys, *self.values):
            starts.append(start)
            start += _ROWS.size + cells * half.row_bytes
        return starts


def read_layout(state: Bytes, cells: int) -> StateLayout:
    """The layout of a state of so many cells, at positions from 0 on. Raises `UnknownLayout`."""
    try:
        magic, _, streams, found = _START.unpack_from(state.data)
        start = _START.size + cells * _CELL.itemsize
        about = state[_START.size : start].view(_CELL)
        if (streams, found) != (1, cells) or (about["sequences"] != 1).any():
            raise UnknownLayout(f"{streams} streams, {found} cells")
        transposed, layers = _DATA.unpack_from(state.data, start)
        if transposed not in (0, 1) or not 0 < layers <= _MOST_LAYERS:
            raise UnknownLayout(f"{layers} layers, transposed {transposed}")
        start += _DATA.size
        keys, start = _read_rows(state, start, layers, cells)
        values, start = (_read_columns if transposed else _read_rows)(state, start, layers, cells)
    except (struct.error, ValueError) as error:
        raise UnknownLayout(str(error)) from error
    layout = StateLayout(magic, bool(transposed), keys, values)
    types = {half.type for half in (*keys, *values)}
    size = layout.kv.numpy_dtype.itemsize
    if (transposed and len(types) > 1) or any(half.row_bytes % size for half in (*keys, *values)):
        raise UnknownLayout(f"numbers of types {sorted(types)} that cannot be told apart")
    if start != len(state) or layout.size_bytes(cells) != start:
        raise UnknownLayout(f"{len(state)} bytes in place of {start}")
    return layout


def _read_rows(state: Bytes, start: int, layers: int, cells: int) -> tuple[tuple[_Half, ...], int]:
    halves = []
    for _ in range(layers):
        kind, row_bytes = _ROWS.unpack_from(state.data, start)
        start += _ROWS.size + cells * row_bytes
        halves.append(_checked(kind, row_bytes, start, len(state)))
    return tuple(halves), start


def _read_columns(state: Bytes, start: int, layers: int, cells: int) -> tuple[tuple[_Half, ...], int]:
    halves = []
    for _ in range(layers):
        kind, size, numbers = _COLUMNS.unpack_from(state.data, start)
        if kind not in _KV_TYPES:
            raise UnknownLayout(f"transposed values of type {kind}")
        start += _COLUMNS.size + cells * size * numbers
        halves.append(_checked(kind, size * numbers, start, len(state)))
    return tuple(halves), start


def _checked(kind: int, row_bytes: int, stop: int, length: int) -> _Half:
    if row_bytes == 0 or stop > length:
        raise UnknownLayout(f"a row of {row_bytes} bytes of type {kind}")
    return _Half(kind, row_bytes)


def _in(order: NDArray[Any] | None, array: NDArray[Any]) -> NDArray[Any]:
    """The tokens in order, each head contiguous; a copy, because a view would hold on to the whole state."""
    return np.array(array if order is None else array[:, order], order="C")
