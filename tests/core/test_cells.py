"""Cells, splits and orders refuse what makes no sense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.core.cells import Cell, CellGrid, Progress, Split, TransferOrder, steps
from rekindle.core.kv import Span


def test_chunks_tile_the_context_and_the_last_may_be_shorter() -> None:
    cells = CellGrid(300, 30)
    assert cells.spans == (Span(0, 128), Span(128, 256), Span(256, 300))
    assert CellGrid(256, 30).chunks == 2
    assert CellGrid(1, 1).spans == (Span(0, 1),)


@pytest.mark.parametrize(("tokens", "layers", "chunk"), [(0, 1, 128), (1, 0, 128), (1, 1, 0)])
def test_nothing_cannot_be_cut(tokens: int, layers: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="nothing to cut"):
        CellGrid(tokens, layers, chunk)


@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 300))
def test_chunks_tile_any_context(tokens: int, layers: int, chunk: int) -> None:
    spans = CellGrid(tokens, layers, chunk).spans
    assert [position for span in spans for position in range(span.start, span.stop)] == list(range(tokens))
    assert all(len(span) == chunk for span in spans[:-1])


def test_a_chunk_that_is_not_there_has_no_tokens() -> None:
    with pytest.raises(ValueError, match="chunk 3 of 3"):
        CellGrid(300, 30).span(3)


@pytest.mark.parametrize("computed", [(), (5,), (-1, 2)])
def test_a_split_keeps_within_the_layers(computed: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not a split"):
        Split(4, computed)


def test_a_cell_is_streamed_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        TransferOrder(3, (1, 1))


def test_an_order_gives_its_cells_back() -> None:
    assert list(TransferOrder(3, (7, 2))) == [Cell(2, 1), Cell(0, 2)]


def test_a_step_that_adds_nothing_is_none() -> None:
    assert steps(Split(4, (4, 2, 0, 3)), Progress((2, 2, 0, 0))) == [(0, 4), (3, 3)]
