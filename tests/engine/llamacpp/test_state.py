"""The bytes of a sequence's state: read to the last byte, or not at all."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("xllamacpp")

from rekindle.core.kv import LayerKv, Span
from rekindle.engine.llamacpp.state import StateLayout, UnknownLayout, read_layout

pytestmark = [pytest.mark.llamacpp]

MAGIC = 0xAF143CD8
F32, F16, Q8_0, BF16 = 0, 1, 8, 30
NUMBER_BYTES = {F32: 4, F16: 2, BF16: 2}
CELL_BYTES = 12


@dataclass(frozen=True)
class Half:
    """Keys or values of a layer: a type, and the bytes of each token, `[tokens, bytes]`."""

    kind: int
    rows: np.ndarray


@dataclass(frozen=True)
class Synthetic:
    """A state as llama.cpp would write it, put together independently of the code under test."""

    keys: tuple[Half, ...]
    values: tuple[Half, ...]
    positions: tuple[int, ...]
    transposed: bool = False
    streams: int = 1
    sequences: int = 1
    extension: bytes = b""

    def bytes(self) -> bytes:
        parts = [struct.pack("<IiII", MAGIC, 5, self.streams, len(self.positions))]
        for position in self.positions:
            owners = struct.pack("<i", 5) * self.sequences
            parts.append(struct.pack("<iI", position, self.sequences) + self.extension + owners)
        parts.append(struct.pack("<II", self.transposed, len(self.keys)))
        parts += [struct.pack("<iQ", h.kind, h.rows.shape[1]) + h.rows.tobytes() for h in self.keys]
        for half in self.values:
            if not self.transposed:
                parts.append(struct.pack("<iQ", half.kind, half.rows.shape[1]) + half.rows.tobytes())
                continue
            size = NUMBER_BYTES[half.kind]
            numbers = half.rows.reshape(len(half.rows), -1, size)  # [tokens, numbers, bytes of a number]
            parts.append(struct.pack("<iII", half.kind, size, numbers.shape[1]))
            parts.append(numbers.swapaxes(0, 1).tobytes())
        return b"".join(parts)

    def array(self) -> np.ndarray:
        return np.frombuffer(self.bytes(), np.uint8).copy()

    def pick(self, cells: list[int], positions: list[int]) -> Synthetic:
        """The state of some cells, in that order, at those positions."""
        keys = tuple(Half(h.kind, h.rows[cells]) for h in self.keys)
        values = tuple(Half(h.kind, h.rows[cells]) for h in self.values)
        return replace(self, keys=keys, values=values, positions=tuple(positions))


def synthetic(
    kind: int = F16, cells: int = 5, *, layers: int = 2, transposed: bool = False, seed: int = 0
) -> Synthetic:
    random = np.random.default_rng(seed)

    def half(row_bytes: int) -> Half:
        return Half(kind, random.integers(0, 256, (cells, row_bytes), dtype=np.uint8))

    unit = 34 if kind == Q8_0 else NUMBER_BYTES[kind] * 4
    keys = tuple(half(unit * (1 + layer)) for layer in range(layers))
    values = tuple(half(unit * 2) for _ in range(layers))
    return Synthetic(keys, values, tuple(range(cells)), transposed)


@st.composite
def states(draw: st.DrawFn) -> Synthetic:
    kind = draw(st.sampled_from([F32, F16, BF16, Q8_0]))
    transposed = kind != Q8_0 and draw(st.booleans())
    cells, layers = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    return synthetic(kind, cells, layers=layers, transposed=transposed, seed=draw(st.integers(0, 99)))


def raw(array: np.ndarray) -> np.ndarray:
    """`[1, tokens, dim]` of any type as the bytes of each token."""
    return np.ascontiguousarray(array)[0].view(np.uint8).reshape(array.shape[1], -1)


def fill(layout: StateLayout, span: Span, layers: tuple[LayerKv, ...]) -> np.ndarray:
    """The state of a KV value, written by the code under test."""
    state = np.full(layout.size_bytes(len(span)), 0xEE, np.uint8)
    layout.write(state, span)
    for view, layer in zip(layout.views(state, len(span)), layers, strict=True):
        view.keys[:], view.values[:] = layer.keys, layer.values
    return state


def without_owner(state: bytes | np.ndarray, cells: int) -> bytes:
    """A state with the sequence's number, which llama.cpp does not read, set to nothing."""
    data = bytearray(bytes(state))
    for start in (4, *range(16 + 8, 16 + cells * CELL_BYTES, CELL_BYTES)):
        data[start : start + 4] = bytes(4)
    return bytes(data)


@given(states())
def test_kv_is_read_and_written_to_the_last_byte(state: Synthetic) -> None:
    cells = len(state.positions)
    layout = read_layout(state.array(), cells)
    kv = layout.parse(state.array(), Span(0, cells))
    for layer, keys, values in zip(kv.layers, state.keys, state.values, strict=True):
        np.testing.assert_array_equal(raw(layer.keys), keys.rows)
        np.testing.assert_array_equal(raw(layer.values), values.rows)
        assert layer.keys.flags.c_contiguous and layer.values.flags.c_contiguous, "each head in one piece"
    again = fill(layout, kv.span, kv.layers)
    assert without_owner(again, cells) == without_owner(state.bytes(), cells)
    assert kv.layout.token_bytes == sum(h.rows.shape[1] for h in (*state.keys, *state.values))


@given(states(), st.data())
def test_cells_out_of_order_are_put_in_order(state: Synthetic, data: st.DataObject) -> None:
    """Cells are where there was room: a part of a context, at any positions, comes in any order."""
    cells = len(state.positions)
    layout = read_layout(state.array(), cells)
    order = data.draw(st.permutations(range(cells)))
    start = data.draw(st.integers(0, 1000))
    mixed = state.pick(order, [start + place for place in order])
    kv = layout.parse(mixed.array(), Span(start, start + cells))
    for layer, keys, values in zip(kv.layers, state.keys, state.values, strict=True):
        np.testing.assert_array_equal(raw(layer.keys), keys.rows)
        np.testing.assert_array_equal(raw(layer.values), values.rows)


@given(states(), st.integers(1, 9), st.integers(0, 1000))
def test_a_layout_holds_for_any_number_of_cells(state: Synthetic, count: int, start: int) -> None:
    layout = read_layout(state.array(), len(state.positions))
    cells = [place % len(state.positions) for place in range(count)]
    other = state.pick(cells, list(range(start, start + count)))
    assert layout.size_bytes(count) == len(other.bytes())
    kv = layout.parse(other.array(), Span(start, start + count))
    assert without_owner(fill(layout, kv.span, kv.layers), count) == without_owner(other.bytes(), count)


@pytest.mark.parametrize(
    "kind, transposed, dtype",
    [(F32, False, "float32"), (F32, True, "float32"), (F16, False, "float16"), (F16, True, "float16"),
     (BF16, True, "bfloat16"), (Q8_0, False, "uint8")],
)  # fmt: skip
def test_numbers_keep_their_type(kind: int, transposed: bool, dtype: str) -> None:
    state = synthetic(kind, transposed=transposed)
    layout = read_layout(state.array(), 5)
    assert layout.kv.dtype == dtype and layout.transposed == transposed
    size = layout.kv.numpy_dtype.itemsize
    dims = [(h.rows.shape[1] // size, v.rows.shape[1] // size) for h, v in zip(state.keys, state.values, strict=True)]
    assert [(s.kv_heads, s.key_dim, s.value_dim) for s in layout.kv.layers] == [(1, k, v) for k, v in dims]


def test_keys_and_values_of_different_types_are_bytes() -> None:
    state = replace(synthetic(Q8_0), values=synthetic(F16).values)
    layout = read_layout(state.array(), 5)
    assert layout.kv.dtype == "uint8"
    kv = layout.parse(state.array(), Span(0, 5))
    assert without_owner(fill(layout, kv.span, kv.layers), 5) == without_owner(state.bytes(), 5)


def test_transposed_values_of_another_type_than_the_keys_are_not_taken_apart() -> None:
    """Their numbers cannot be told from the KV value's type: they would be turned byte by byte."""
    state = replace(synthetic(F32), values=synthetic(F16).values, transposed=True)
    with pytest.raises(UnknownLayout):
        read_layout(state.array(), 5)


@pytest.mark.parametrize("transposed", [False, True])
def test_every_truncation_is_refused(transposed: bool) -> None:
    state = synthetic(cells=3, layers=1, transposed=transposed).array()
    for length in range(len(state)):
        with pytest.raises(UnknownLayout):
            read_layout(state[:length], 3)


@given(states(), st.binary(min_size=1, max_size=40))
def test_bytes_behind_the_end_are_refused(state: Synthetic, more: bytes) -> None:
    cells = len(state.positions)
    longer = np.frombuffer(state.bytes() + more, np.uint8)
    with pytest.raises(UnknownLayout):
        read_layout(longer, cells)
    with pytest.raises(UnknownLayout):
        read_layout(state.array(), cells).parse(longer, Span(0, cells))


def damaged(at: int, form: str, value: int, **how: Any) -> np.ndarray:
    """A state with one number of its headers replaced."""
    state = synthetic(cells=3, **how).array()
    struct.pack_into(form, state.data, at, value)
    return state


DATA = 16 + 3 * CELL_BYTES  # where "transposed" stands, in a state of three cells
WRONG = {
    "several streams": replace(synthetic(cells=3), streams=2).array(),
    "no stream": replace(synthetic(cells=3), streams=0).array(),
    "another number of cells": synthetic(cells=4).array(),
    "no cell": synthetic(cells=0).array(),
    "cells with an extension": replace(synthetic(cells=3), extension=bytes(8)).array(),
    "cells with an extension of ones": replace(synthetic(cells=3), extension=b"\1\0\0\0" * 2).array(),
    "cells of two sequences": replace(synthetic(cells=3), sequences=2).array(),
    "cells of no sequence": replace(synthetic(cells=3), sequences=0).array(),
    "no layer": synthetic(cells=3, layers=0).array(),
    "more layers than there are": damaged(DATA + 4, "<I", 3),
    "fewer layers than there are": damaged(DATA + 4, "<I", 1),
    "absurdly many layers": damaged(DATA + 4, "<I", 1 << 31),
    "neither transposed nor not": damaged(DATA, "<I", 2),
    "not transposed, though it is": damaged(DATA, "<I", 0, transposed=True),
    "transposed, though it is not": damaged(DATA, "<I", 1),
    "rows of no bytes": damaged(DATA + 12, "<Q", 0),
    "rows of more bytes than there are": damaged(DATA + 12, "<Q", 1 << 20),
    "rows of absurdly many bytes": damaged(DATA + 12, "<Q", (1 << 64) - 1),
    "nothing": np.empty(0, np.uint8),
    "noise": np.random.default_rng(3).integers(0, 256, 500, dtype=np.uint8),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_bytes_are_refused(name: str) -> None:
    with pytest.raises(UnknownLayout):
        read_layout(WRONG[name], 3)


def test_rows_that_end_inside_a_number_are_refused() -> None:
    odd = tuple(Half(F32, np.zeros((3, 6), np.uint8)) for _ in range(2))
    with pytest.raises(UnknownLayout):
        read_layout(Synthetic(odd, odd, (0, 1, 2)).array(), 3)


def test_transposed_values_of_a_quantized_type_are_refused() -> None:
    state = replace(synthetic(F16, cells=3, transposed=True)).array()
    layout = read_layout(state, 3)
    values = layout.size_bytes(3) - sum(12 + 3 * half.row_bytes for half in layout.caches[0].values)
    struct.pack_into("<i", state.data, values, Q8_0)
    with pytest.raises(UnknownLayout, match="transposed"):
        read_layout(state, 3)


@given(st.binary(max_size=200), st.integers(1, 5))
def test_whatever_comes_is_a_layout_or_refused(data: bytes, cells: int) -> None:
    try:
        layout = read_layout(np.frombuffer(data, np.uint8), cells)
    except UnknownLayout:
        return
    assert layout.size_bytes(cells) == len(data)


@given(states(), st.data())
def test_a_changed_header_is_refused_or_means_the_same_bytes(state: Synthetic, data: st.DataObject) -> None:
    cells = len(state.positions)
    changed = state.array()
    place = data.draw(st.integers(8, min(len(changed), 16 + cells * CELL_BYTES + 32) - 1))
    changed[place] ^= data.draw(st.integers(1, 255))
    try:
        layout = read_layout(changed, cells)
        layout.parse(changed, Span(0, cells))
    except UnknownLayout:
        return
    assert layout.size_bytes(cells) == len(changed)


@pytest.mark.parametrize("positions", [(0, 1, 3), (1, 2, 3), (0, 0, 1), (2, 1, 1), (-1, 0, 1)])
def test_positions_that_are_not_the_span_are_refused(positions: tuple[int, ...]) -> None:
    state = synthetic(cells=3)
    layout = read_layout(state.array(), 3)
    with pytest.raises(UnknownLayout, match="positions|cells"):
        layout.parse(replace(state, positions=positions).array(), Span(0, 3))


def test_a_state_of_another_number_of_cells_is_refused() -> None:
    layout = read_layout(synthetic(cells=3).array(), 3)
    for cells in (1, 2, 4):
        with pytest.raises(UnknownLayout, match="cells"):
            layout.parse(synthetic(cells=cells).array(), Span(0, 3))
