"""Traces: what a link carries until when, how it is scaled, and what is no trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stream.traces import BYTES_PER_MEGABIT, MADE, Trace, made_trace, read_trace, read_traces
from rekindle.errors import InvalidSetting

RATES = st.lists(st.one_of(st.just(0.0), st.floats(1.0, 1e6)), min_size=1, max_size=8).filter(any)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    rates = np.array(draw(RATES))
    lengths = np.array(draw(st.lists(st.floats(0.01, 5.0), min_size=len(rates), max_size=len(rates))))
    return Trace("drawn", lengths, rates, draw(st.floats(0.0, 20.0)))


@given(trace=traces(), start=st.floats(0.0, 50.0), size=st.floats(1.0, 1e6))
def test_bytes_are_through_when_the_link_has_carried_them(trace: Trace, start: float, size: float) -> None:
    moment = trace.moment(start, size)
    assert moment >= start
    assert trace.carried(start, moment) == pytest.approx(size, rel=1e-6, abs=0.1)


def test_the_last_byte_before_a_silence_is_not_kept_behind_it() -> None:
    trace = Trace("beats", np.array([0.1, 0.9]), np.array([10.0, 0.0]))
    assert [trace.moment(0.0, size) for size in range(1, 6)] == pytest.approx([0.1, 1.1, 2.1, 3.1, 4.1], abs=1e-6)
    assert trace.moment(0.5, 1.0) == pytest.approx(1.1, abs=1e-6)
    later = Trace("beats", np.array([0.9, 0.1]), np.array([0.0, 10.0]))
    assert [later.moment(0.0, size) for size in range(1, 4)] == pytest.approx([1.0, 2.0, 3.0], abs=1e-6)


@given(trace=traces(), cuts=st.lists(st.floats(0.0, 40.0), min_size=3, max_size=3).map(sorted))
def test_what_is_carried_adds_up(trace: Trace, cuts: list[float]) -> None:
    first, middle, last = cuts
    whole = trace.carried(first, last)
    assert whole == pytest.approx(trace.carried(first, middle) + trace.carried(middle, last), rel=1e-6, abs=1e-3)
    assert trace.carried(first, first + trace.seconds) == pytest.approx(trace.mean_rate * trace.seconds, rel=1e-6)


@given(size=st.floats(1e3, 1e8), local=st.floats(0.1, 30.0), ratio=st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]))
def test_a_scaled_trace_carries_a_context_in_the_time_that_was_chosen(size: float, local: float, ratio: float) -> None:
    for name in MADE:
        scaled = made_trace(name, local * ratio / (1 + ratio), 0).at_ratio(size, local, ratio)
        assert scaled.moment(0.0, size) == pytest.approx(ratio * local, rel=1e-6)


def test_what_changes_is_told_from_what_does_not() -> None:
    change = {name: made_trace(name, 2.0, 0).change(4.0) for name in MADE}
    assert change.pop("constant") == pytest.approx(1.0)
    assert all(times > 2.0 for times in change.values())


def test_a_file_says_megabits_a_second_from_a_moment_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "walk.csv"
    path.write_text("time_s,mbps\n0.00,8.0\n1.00,0.0\n3.00,4.0\n")
    trace = read_trace(path)
    assert trace.name == "walk"
    assert trace.seconds == pytest.approx(4.5)  # the last lasts as long as the middle one of the others
    assert trace.rate_at(0.5) == 8 * BYTES_PER_MEGABIT and trace.rate_at(2.0) == 0
    assert trace.moment(0.0, 8 * BYTES_PER_MEGABIT + 1) > 3.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("time_s,mbps\n0,1\n1,x\n", "line 3"),
        ("time,rate\n0,1\n", "line 2"),
        ("time_s,mbps\n0,0\n1,0\n", "nothing ever"),
        ("time_s,mbps\n0,1\n", "fewer than two"),
        ("time_s,mbps\n1,1\n0,1\n2,1\n", "positive"),
        ("time_s,mbps\n0,1\n1,-1\n", "negative"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(InvalidSetting, match=says):
        read_trace(path)


def test_folders_take_turns_and_dead_traces_are_passed_over(tmp_path: Path) -> None:
    for family in ("a", "b"):
        folder = tmp_path / family
        folder.mkdir()
        for number in range(3):
            folder.joinpath(f"{family}{number}.csv").write_text(f"time_s,mbps\n0,{number}.0\n1,{number}.0\n")
    names = [trace.name for trace in read_traces(tmp_path, 4, seed=1)]
    assert sorted(names) == ["a1", "a2", "b1", "b2"] and {name[0] for name in names[:2]} == {"a", "b"}
    assert names == [trace.name for trace in read_traces(tmp_path, 4, seed=1)]
    with pytest.raises(InvalidSetting, match="not a folder"):
        read_traces(tmp_path / "nowhere", 4, seed=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidSetting, match="no .csv"):
        read_traces(tmp_path / "empty", 4, seed=1)


def test_a_beginning_is_drawn_where_the_link_is_alive() -> None:
    dead_for_long = Trace("mostly dead", np.array([90.0, 10.0]), np.array([0.0, 1e6]))
    for seed in range(10):
        begun = dead_for_long.beginning(4.0, seed)
        assert begun.carried(0.0, 4.0) >= 0.2 * dead_for_long.mean_rate * 4.0
