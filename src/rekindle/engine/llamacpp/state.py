"""The serialized state of a sequence as KV: the layout of llama.cpp's bytes, and feeds into them.

    magic | sequence                                     4 bytes each, then once for every cache (see below):
    streams = 1 | cells                                  4 bytes each
    position | sequences = 1 | sequence                  4 bytes each, for every cell, in the order of the cells
    transposed | layers                                  4 bytes each
    rotation of keys | of values                         4 bytes each, since ggml 0.26: of quantized numbers, else 0
    type | row bytes | keys [cells, row]                 4, 8 bytes and the rows, for every layer
    type | row bytes | values [cells, row]               the same; but transposed, as without flash attention:
    type | number bytes | numbers | values [row, cells]

A model with a sliding window has two caches: that of the layers that see everything, and that of the layers that see
the window. In `Kv` their layers follow each other in this order.

This format is not guaranteed. `read_layout` therefore accepts only what it understands to the last byte, and the engine
checks at load that exporting and reloading KV makes no difference. Any other state is left opaque.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.kv import Kv, KvLayout, KvType, LayerKv, LayerShape, Span
from rekindle.engine.base import KvFeed
from rekindle.engine.threaded_job import ThreadedJob
from rekindle.errors import Cancelled

Bytes = NDArray[np.uint8]

_HEAD = struct.Struct("<Ii")  # magic, sequence
_CACHE = struct.Struct("<II")  # streams, cells
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_DATA = struct.Struct("<II")  # transposed, layers
_ROTATIONS = struct.Struct("<II")  # of keys, of values
_ROWS = struct.Struct("<iQ")  # type, bytes of a row
_COLUMNS = struct.Struct("<iII")  # type, bytes of a number, numbers of a row
_KV_TYPES: dict[int, KvType] = {0: "float32", 1: "float16", 30: "bfloat16"}  # ggml's number of a type
_MAX_LAYERS = 4096
_MAX_CACHES = 2


HEAD_BYTES = _HEAD.size  # every state begins with it, a partial one too


class UnknownLayout(Exception):
    """Bytes that are not a known state of plain KV."""


@dataclass(frozen=True, slots=True)
class _Half:
    """Keys or values of one layer: ggml's number type, and the bytes of one token."""

    type: int
    row_bytes: int


@dataclass(frozen=True)
class _CacheLayout:
    """The layout of one cache of a state, for any number of cells."""

    transposed: bool
    keys: tuple[_Half, ...]
    values: tuple[_Half, ...]
    rotations: tuple[int, int] | None = None  # None before ggml 0.26

    @property
    def halves(self) -> tuple[_Half, ...]:
        """Keys, then values, as they follow each other."""
        return (*self.keys, *self.values)

    def size_bytes(self, cells: int) -> int:
        """Bytes of that many cells."""
        return self._first(cells) + sum(_ROWS.size + cells * half.row_bytes for half in self.halves)

    def write(self, cache: Bytes, span: Span, itemsize: int) -> None:
        """Write the headers of the positions of `span`; the KV is left as it is."""
        cells = len(span)
        _CACHE.pack_into(cache.data, 0, 1, cells)
        about = self._about(cache, cells)
        about["position"] = np.arange(span.start, span.stop)
        about["sequences"], about["sequence"] = 1, 0
        _DATA.pack_into(cache.data, _CACHE.size + about.nbytes, self.transposed, len(self.keys))
        if self.rotations is not None:
            _ROTATIONS.pack_into(cache.data, self._first(cells) - _ROTATIONS.size, *self.rotations)
        for place, (half, start) in enumerate(zip(self.halves, self._starts(cells), strict=True)):
            if self.transposed and place >= len(self.keys):
                _COLUMNS.pack_into(cache.data, start, half.type, itemsize, half.row_bytes // itemsize)
            else:
                _ROWS.pack_into(cache.data, start, half.type, half.row_bytes)

    def positions(self, cache: Bytes, cells: int) -> NDArray[np.int32]:
        """The positions of the cells, in the order of the cells."""
        positions: NDArray[np.int32] = self._about(cache, cells)["position"]
        return positions

    def views(self, cache: Bytes, cells: int, dtype: np.dtype[Any]) -> list[LayerKv]:
        """Views of each layer's KV: keys and values `[1, cells, dim]`, transposed or not."""
        arrays = []
        for place, (half, start) in enumerate(zip(self.halves, self._starts(cells), strict=True)):
            begin, dim = start + _ROWS.size, half.row_bytes // dtype.itemsize
            numbers = cache[begin : begin + cells * half.row_bytes].view(dtype)
            across = self.transposed and place >= len(self.keys)
            arrays.append(numbers.reshape(1, dim, cells).swapaxes(1, 2) if across else numbers.reshape(1, cells, dim))
        return [LayerKv(*pair) for pair in zip(arrays, arrays[len(self.keys) :], strict=False)]

    def _about(self, cache: Bytes, cells: int) -> NDArray[Any]:
        return cache[_CACHE.size : _CACHE.size + cells * _CELL.itemsize].view(_CELL)

    def _first(self, cells: int) -> int:
        """Offset of the first layer."""
        rotations = 0 if self.rotations is None else _ROTATIONS.size
        return _CACHE.size + cells * _CELL.itemsize + _DATA.size + rotations

    def _starts(self, cells: int) -> list[int]:
        """Offsets of the keys, then the values, of each layer, with their headers."""
        sizes = (_ROWS.size + cells * half.row_bytes for half in self.halves)
        return list(accumulate(sizes, initial=self._first(cells)))[:-1]


@dataclass(frozen=True)
class StateLayout:
    """The layout of the state of any number of tokens, which are all in every cache."""

    magic: int
    caches: tuple[_CacheLayout, ...]

    @cached_property
    def kv(self) -> KvLayout:
        """The layout as KV: one head as wide as all heads of a layer, which are side by side."""
        pairs = [pair for cache in self.caches for pair in zip(cache.keys, cache.values, strict=True)]
        types = {half.type for pair in pairs for half in pair}
        dtype = _KV_TYPES.get(types.pop(), "uint8") if len(types) == 1 else "uint8"
        size = KvLayout(dtype, ()).numpy_dtype.itemsize
        shapes = (LayerShape(1, keys.row_bytes // size, values.row_bytes // size) for keys, values in pairs)
        return KvLayout(dtype, tuple(shapes))

    @property
    def transposed(self) -> bool:
        """Whether values are."""
        return self.caches[0].transposed

    @property
    def rotations(self) -> list[tuple[int, int]]:
        """By how much keys and values of each cache were rotated before they were quantized, if they were."""
        return [cache.rotations for cache in self.caches if cache.rotations is not None and any(cache.rotations)]

    def size_bytes(self, cells: int) -> int:
        """Bytes of the state of that many tokens."""
        return _HEAD.size + sum(cache.size_bytes(cells) for cache in self.caches)

    def write(self, state: Bytes, span: Span) -> None:
        """Write the headers of the positions of `span`; the KV is left as it is."""
        _HEAD.pack_into(state.data, 0, self.magic, 0)
        for cache, part in self._parts(state, len(span)):
            cache.write(part, span, self.kv.numpy_dtype.itemsize)

    def views(self, state: Bytes, cells: int) -> list[LayerKv]:
        """Views of each layer's KV in the state: keys and values `[1, cells, dim]`, transposed or not."""
        dtype = self.kv.numpy_dtype
        return [view for cache, part in self._parts(state, cells) for view in cache.views(part, cells, dtype)]

    def join(self, kv: Kv, partial: Bytes) -> Bytes:
        """The state of a split model: that of attention layers with this KV, then a partial one."""
        cells = len(kv.span)
        state = np.empty(self.size_bytes(cells) + len(partial) - HEAD_BYTES, np.uint8)
        base = state[: self.size_bytes(cells)]
        self.write(base, kv.span)
        for view, layer in zip(self.views(base, cells), kv.layers, strict=True):
            view.keys[:], view.values[:] = layer.keys, layer.values
        state[len(base) :] = partial[HEAD_BYTES:]
        return state

    def parse(self, state: Bytes, span: Span) -> Kv:
        """The KV of `span` from its state. Raises `UnknownLayout` for another state."""
        cells, dtype = len(span), self.kv.numpy_dtype
        if len(state) != self.size_bytes(cells):
            raise UnknownLayout(f"{len(state)} bytes for {cells} cells")
        layers: list[LayerKv] = []
        for cache, part in self._parts(state, cells):
            order = _order_of(cache.positions(part, cells), span)
            layers += (LayerKv(_in(order, v.keys), _in(order, v.values)) for v in cache.views(part, cells, dtype))
        return Kv(span, self.kv, tuple(layers))

    def _parts(self, state: Bytes, cells: int) -> Iterator[tuple[_CacheLayout, Bytes]]:
        start = _HEAD.size
        for cache in self.caches:
            stop = start + cache.size_bytes(cells)
            yield cache, state[start:stop]
            start = stop


def _order_of(positions: NDArray[np.int32], span: Span) -> NDArray[Any] | None:
    """The order in which cells are tokens of `span`; None for their own. Raises `UnknownLayout` for other tokens."""
    expected = np.arange(span.start, span.stop)
    if np.array_equal(positions, expected):
        return None
    order = np.argsort(positions)
    if not np.array_equal(positions[order], expected):
        raise UnknownLayout(f"positions {positions.min()} to {positions.max()} in place of {span}")
    return order


def read_layout(state: Bytes, cells: int) -> StateLayout:
    """The layout of a state of that many cells at positions from 0 on. Raises `UnknownLayout`."""
    try:
        return _read_layout(state, cells, rotated=True)
    except UnknownLayout:
        return _read_layout(state, cells, rotated=False)


def _read_layout(state: Bytes, cells: int, *, rotated: bool) -> StateLayout:
    caches: list[_CacheLayout] = []
    try:
        magic, _ = _HEAD.unpack_from(state.data)
        start = _HEAD.size
        while start < len(state) and len(caches) < _MAX_CACHES:
            cache, start = _read_cache(state, start, cells, rotated=rotated)
            caches.append(cache)
    except (struct.error, ValueError) as error:
        raise UnknownLayout(str(error)) from error
    layout = StateLayout(magic, tuple(caches))
    halves = [half for cache in caches for half in cache.halves]
    if not halves or start != len(state) or layout.size_bytes(cells) != start:
        raise UnknownLayout(f"{len(state)} bytes in place of {start}")
    types, size = {half.type for half in halves}, layout.kv.numpy_dtype.itemsize
    mixed = (layout.transposed and len(types) > 1) or len({cache.transposed for cache in caches}) > 1
    if mixed or any(half.row_bytes % size for half in halves):
        raise UnknownLayout(f"numbers of types {sorted(types)}, mixed in a way that cannot be read")
    return layout


def _read_cache(state: Bytes, start: int, cells: int, *, rotated: bool) -> tuple[_CacheLayout, int]:
    """The cache that begins at an offset, and where it ends."""
    rotations = None
    streams, found = _CACHE.unpack_from(state.data, start)
    start += _CACHE.size
    about = state[start : start + cells * _CELL.itemsize].view(_CELL)
    if (streams, found) != (1, cells) or (about["sequences"] != 1).any():
        raise UnknownLayout(f"{streams} streams, {found} cells")
    start += cells * _CELL.itemsize
    transposed, layers = _DATA.unpack_from(state.data, start)
    if transposed not in (0, 1) or not 0 < layers <= _MAX_LAYERS:
        raise UnknownLayout(f"{layers} layers, transposed {transposed}")
    start += _DATA.size
    if rotated:
        rotations = _ROTATIONS.unpack_from(state.data, start)
        start += _ROTATIONS.size
    keys, start = _read_rows(state, start, layers, cells)
    values, start = (_read_columns if transposed else _read_rows)(state, start, layers, cells)
    return _CacheLayout(bool(transposed), keys, values, rotations), start


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
    """The tokens in order, each head contiguous; a copy, because a view would keep the whole state alive."""
    return np.array(array if order is None else array[:, order], order="C")


_KEPT_BYTES = 256 << 20
_WARM_BYTES = 48 << 20
_BESIDE_BYTES = 128 << 10  # of a layer's values: fewer are transposed before another thread would start


class Staging:
    """Builds the state of a span from feeds, layer by layer. One at a time.

    A thread does it, so that a cancelled step does not wait for a hanging read. The buffer is reused for the next
    request, whose pages are then warm; an abandoned thread keeps its own.
    """

    def __init__(self, layout: StateLayout, context_tokens: int) -> None:
        self._layout = layout
        self._state, self._across = _ReusableBytes(), _ReusableBytes()
        # So that the first request does not pay for page faults.
        warm_bytes = min(_WARM_BYTES, layout.size_bytes(context_tokens))
        self._state.take(warm_bytes).fill(0)
        if layout.transposed:
            self._across.take(warm_bytes // 2).fill(0)

    def close(self) -> None:
        """Free the buffers."""
        self._state, self._across = _ReusableBytes(), _ReusableBytes()

    def bring(self, feeds: Sequence[KvFeed], span: Span, cancelled: Callable[[], bool] | None) -> Bytes:
        """The state of `span`, which the feeds cover. Raises what a feed raised, or `Cancelled`."""
        state = self._state.take(self._layout.size_bytes(len(span)))
        self._layout.write(state, span)
        fill = self._fill_across if self._layout.transposed else self._fill
        if not ThreadedJob(lambda: fill(state, feeds, span)).done(cancelled):
            self._state, self._across = _ReusableBytes(), _ReusableBytes()  # the thread may still write to these
            raise Cancelled("The request was cancelled.")
        return state

    def _fill(self, state: Bytes, feeds: Sequence[KvFeed], span: Span) -> None:
        for layer, out in enumerate(self._layout.views(state, len(span))):
            _fill_layer(feeds, span, layer, out)

    def _fill_across(self, state: Bytes, feeds: Sequence[KvFeed], span: Span) -> None:
        """For transposed values: feeds fill them untransposed, and a thread transposes them during the next layer."""
        dtype, shapes = self._layout.kv.numpy_dtype, self._layout.kv.layers
        sizes = np.cumsum([0, *(len(span) * shape.value_dim * dtype.itemsize for shape in shapes)])
        values = self._across.take(int(sizes[-1]))
        with ThreadPoolExecutor(1, thread_name_prefix="rekindle-transpose") as turning:
            turned = []
            for layer, out in enumerate(self._layout.views(state, len(span))):
                upright = values[sizes[layer] : sizes[layer + 1]].view(dtype).reshape(out.values.shape)
                _fill_layer(feeds, span, layer, LayerKv(out.keys, upright))
                if upright.nbytes < _BESIDE_BYTES:
                    np.copyto(out.values, upright)
                else:
                    turned.append(turning.submit(np.copyto, out.values, upright))
            for done in turned:
                done.result()


def _fill_layer(feeds: Sequence[KvFeed], span: Span, layer: int, out: LayerKv) -> None:
    for feed in feeds:
        if layer in feed.layers:
            start, stop = feed.span.start - span.start, feed.span.stop - span.start
            feed.fill(layer, out.window(start, stop))


class _ReusableBytes:
    """A buffer that is reused, unless it is very large."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, np.uint8)

    def take(self, size_bytes: int) -> Bytes:
        """`size_bytes` of uninitialized memory."""
        if size_bytes > _KEPT_BYTES:
            return np.empty(size_bytes, np.uint8)
        if size_bytes > len(self._bytes):
            self._bytes = np.empty(size_bytes, np.uint8)
        return self._bytes[:size_bytes]
