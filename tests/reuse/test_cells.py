"""Cells, splits and orders refuse what makes no sense."""

from __future__ import annotations

import numpy as np
import pytest

from rekindle.core.cells import Cell, Cells, Progress, Schedule, Split, Streamed, steps
from rekindle.core.kv import Span


def test_chunks_tile_the_context_and_the_last_may_be_shorter() -> None:
    cells = Cells(300, 30)
    assert cells.spans == (Span(0, 128), Span(128, 256), Span(256, 300))
    assert Cells(256, 30).chunks == 2
    assert Cells(1, 1).spans == (Span(0, 1),)


@pytest.mark.parametrize(("tokens", "layers", "chunk"), [(0, 1, 128), (1, 0, 128), (1, 1, 0)])
def test_nothing_cannot_be_cut(tokens: int, layers: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="nothing to cut"):
        Cells(tokens, layers, chunk)


def test_a_chunk_that_is_not_there_has_no_tokens() -> None:
    with pytest.raises(ValueError, match="chunk 3 of 3"):
        Cells(300, 30).span(3)


@pytest.mark.parametrize("computed", [(), (5,), (-1, 2)])
def test_a_split_keeps_within_the_layers(computed: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not a split"):
        Split(4, computed)


def test_a_split_computes_the_lowest_layers() -> None:
    split = Split(3, (3, 1, 0))
    assert split.mask.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert split.computes(Cell(1, 0))
    assert not split.computes(Cell(1, 1))


def test_a_cell_is_streamed_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        Streamed.of(3, [Cell(0, 1), Cell(0, 1)])


def test_an_order_gives_its_cells_back() -> None:
    cells = [Cell(2, 1), Cell(0, 2)]
    order = Streamed.of(3, cells)
    assert list(order) == cells
    assert list(order.without([Cell(2, 1)])) == [Cell(0, 2)]


def test_a_schedule_owns_what_came_what_is_computed_and_what_will_come() -> None:
    progress = Progress((2, 0), frozenset([Cell(1, 0)]), (Cell(1, 2),))
    schedule = Schedule(Split(3, (2, 2)), Streamed.of(3, [Cell(0, 2)]), 1.0)
    assert np.array_equal(schedule.owners(progress), np.ones((2, 3)))
    assert schedule.owners()[1, 2] == 0  # from the start on, nobody would bring it


def test_a_step_that_adds_nothing_is_none() -> None:
    assert steps(Split(4, (4, 2, 0, 3)), Progress((2, 2, 0, 0))) == [(0, 4), (3, 3)]
