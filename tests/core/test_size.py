"""Sizes and counts as people read them."""

from __future__ import annotations

from rekindle.core.size import count_of


def test_one_thing_has_no_plural() -> None:
    assert [count_of(n, "passage") for n in (0, 1, 2, 1200)] == [
        "0 passages",
        "1 passage",
        "2 passages",
        "1,200 passages",
    ]
    assert [count_of(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]
