"""What is done with idle time: the rules, with given values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.idle.prepare import choose_strategy, first_passages, passages_to_read
from rekindle.idle.sources import rotate
from rekindle.idle.worker import IdleConditions, blocked_by


@pytest.mark.parametrize(("threshold", "strategy"), [(0.95, "prefill"), (0.9, "prefill"), (0.89, "answer")])
def test_as_published_questions_are_answered_below_the_cutoff_only(threshold: float, strategy: str) -> None:
    assert choose_strategy("direct", threshold, 0.9, "percache") == strategy
    assert choose_strategy("verified", threshold, 0.9, "percache") == strategy
    assert choose_strategy("direct", threshold, 0.9) == strategy


@pytest.mark.parametrize("threshold", [0.0, 0.9, 1.0])
def test_a_draft_is_of_use_whatever_the_threshold(threshold: float) -> None:
    assert choose_strategy("verified", threshold, 0.9) == "answer"


def test_no_question_is_foreseen_where_none_may_be_kept() -> None:
    assert choose_strategy("off", 0.5, 0.9) is choose_strategy("off", 0.5, 0.9, "percache") is None


def test_nothing_is_done_on_battery_unless_that_is_allowed() -> None:
    assert "battery" in str(blocked_by(IdleConditions(), 0.0, False))
    assert blocked_by(IdleConditions(on_battery=True), 0.0, False) is None
    assert blocked_by(IdleConditions(), 0.0, True) is None
    assert blocked_by(IdleConditions(), 0.0, None) is None  # no battery: it has mains


def test_nothing_is_done_while_others_work() -> None:
    assert "60%" in str(blocked_by(IdleConditions(max_load=0.5), 0.6, None))
    assert blocked_by(IdleConditions(max_load=0.5), 0.49, None) is None
    assert blocked_by(IdleConditions(max_load=0.5), None, None) is None  # nobody knows


@given(st.sets(st.integers(0, 100)), st.integers(0, 100), st.integers(1, 7))
def test_a_round_trip_meets_every_document_once(ids: set[int], after: int, step: int) -> None:
    met: list[int] = []
    while len(met) < len(ids):
        some = rotate(ids, after)[:step]
        met += some
        after = some[-1]
    assert set(met[: len(ids)]) == ids


def test_passages_that_were_used_come_first_then_foreseen_ones_then_the_rest() -> None:
    assert first_passages([4, 2], [3, 5, 5, 2], [1, 2, 3, 4, 5]) == [4, 2, 5, 3, 1]
    assert first_passages([9, 1], [8], [1, 2]) == [1, 2]  # what is gone is left out


def test_of_what_nobody_asked_only_the_first_passages_are_read() -> None:
    assert passages_to_read(asked=True) is None and passages_to_read(asked=False) == 2
    assert passages_to_read(asked=False, rule="percache") is None
