"""What the numbers of `python -m benchmarks stream` mean, on runs whose times are known."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import charts
from benchmarks.base import Report
from benchmarks.baselines.predictor import best_model
from benchmarks.stream.costs import LayerTimings
from benchmarks.stream.modes import MODE_SETS, MODES, StreamMode
from benchmarks.stream.report import StreamResults, TraceCase, TracePass, add_rows
from benchmarks.stream.schedules import coarse, compare
from benchmarks.stream.site import StreamRun
from benchmarks.stream.traces import made_trace
from benchmarks.waiting.timeline import LinkCosts
from rekindle.remote.latency import LayerTiming

SKIPPED = StreamMode("stream", "raw")
TIMES = {
    "local": 10.0,
    "plain": 9.0,
    "stream q8": 16.0,
    "stream q5": 10.0,
    "stream q4": 8.0,
    "stream q3": 4.0,
    "stream q2": 3.0,
    "cachegen": 8.0,
    "sparkv": 9.0,
    "fixed": 9.0,
    "fixed-window": 6.5,
    "bidirectional": 7.0,
    "ours q5": 6.0,
    "ours": 6.0,
}
KLS = {"raw": 0.0, "q8": 0.0, "q5": 0.001, "q4": 0.02, "q3": 0.04, "q2": 0.1}  # fmt: skip


def case(name: str = "step down", ratio: float = 1.0, **other: float) -> TraceCase:
    times = {**TIMES, **other}
    runs = {
        mode: StreamRun(mode, times[mode.name], 1000, 0.5, 0.01, 1.0, 0.5, 0.1) for mode in MODES if mode != SKIPPED
    }
    together = ratio * 10.0 / (1 + ratio)
    change = made_trace(name, together, 0).change(together)
    passes = [
        TracePass(
            ratio * 10.0,
            change,
            tuple(runs[mode] for mode in modes if mode in runs),
            {mode.name: 65.0 for mode in modes if mode == SKIPPED},
        )
        for modes in MODE_SETS.values()
    ]
    return TraceCase(name, ratio, passes, MODES, KLS)


def costs(chunks: int = 6, layers: int = 8) -> LinkCosts:
    random = np.random.default_rng(0)
    compute = random.uniform(0.8, 1.2, (chunks, layers)) * 1e-2
    return LinkCosts(compute, compute / 5, np.full((chunks, layers), 1e3), np.full(layers, 2e-3), 1e5)


@cache
def layer_timings() -> LayerTimings:
    samples = tuple(LayerTiming(n, c, 1e-3 + 1e-5 * n + 1e-8 * n * c) for n in (16, 64, 128) for c in (0, 256, 512))
    fitted = best_model(samples)
    return LayerTimings(samples, samples, fitted, fitted)


def found(*cases: TraceCase, quick: bool = False) -> StreamResults:
    schedules = compare(costs(), [1e5], lambda _: None)
    rows = [simulated(tokens, ratio) for tokens in (2048, 8192) for ratio in (1.0, 4.0)]
    return StreamResults(
        cases, layer_timings(), schedules, (), (), (), rows, KLS, 10.0, {"q5": 100}, 640, 24, True, True, True, quick
    )


def simulated(tokens: int, ratio: float) -> dict[str, float]:
    rivals = ("fixed", "bidirectional", "sparkv", "cachegen", "q2", "one_level", "best_single")
    about = {"tokens": tokens, "ratio": ratio, "change": 3.0, "ours_kl": 0.005, "overlap_efficiency": 0.9}
    return {**about, **{f"vs_{name}": 1.5 for name in rivals}}


def test_the_ideal_is_both_lanes_at_full_speed_until_the_question() -> None:
    # Nine and a half seconds each, the question in half a one: at best half of that, and the question.
    assert case().overlap_efficiency() == pytest.approx((0.5 + 4.75) / 6.0)
    assert case().overlap_efficiency("plain") == pytest.approx((0.5 + 1 / (1 / 8.5 + 1 / 9.5)) / 6.0)
    assert case(**{"ours q5": 5.25}).overlap_efficiency() == pytest.approx(1.0)


def test_every_way_is_in_a_set_and_ours_in_all() -> None:
    assert {mode for modes in MODE_SETS.values() for mode in modes} == set(MODES)
    assert all(StreamMode("ours") in modes for modes in MODE_SETS.values())


def test_ways_are_compared_with_ours_of_the_same_pass() -> None:
    slow, fast = case(), case(**{name: seconds / 2 for name, seconds in TIMES.items()})
    both = replace(slow, passes=[slow.passes[0], *fast.passes[1:]])
    assert both.against_ours("fixed") == pytest.approx(1.5) and both.against_ours("sparkv") == pytest.approx(1.5)
    assert both.ttft("fixed") == 9.0 and both.ttft("sparkv") == 4.5


def test_a_single_lane_counts_if_its_quality_is_not_below_ours() -> None:
    assert case().vs_best_single == pytest.approx(9.0 / 6.0)  # computing, not the poorer level that came sooner
    assert case(**{"stream q8": 3.0}).vs_best_single == pytest.approx(0.5)


def test_the_report_has_the_fields_and_keeps_what_changes_apart() -> None:
    report = Report("stream")
    add_rows(
        report, found(case("constant", fixed=6.0, bidirectional=6.0), case("step down"), case("outage", 4.0, ours=5.0))
    )
    fields = report.fields
    assert fields["vs_fixed"] == pytest.approx(1.5) and fields["vs_fixed_changing"] == pytest.approx(1.65)
    assert fields["vs_bidirectional_worst"] == pytest.approx(1.0)
    assert fields["overlap_efficiency"] == pytest.approx(5.25 / 6.0)  # the ratio of 4 is not part of it
    assert fields["worst_vs_best_single"] == pytest.approx(1.5)
    assert 1.0 - 1e-6 <= fields["greedy_vs_exact"] <= 1.05 and fields["exact_ms"] > 0 and fields["schedule_ms"] > 0
    rows = {(row["trace"], row["mode"]): row for row in fields["rows"]}
    assert len(rows) == 3 * len(MODES)
    assert rows["constant", "stream raw"]["ttft_s"] is None and "65.0 s" in rows["constant", "stream raw"]["reason"]
    assert rows["constant", "ours"]["ttft_s"] == 6.0 and rows["constant", "ours"]["kl"] == 0.01
    assert len(report.rows) == 3 * len(MODES) + 11 + 4 + 2 * 3  # of rivals, and of two simulated lengths


def test_what_was_not_measured_is_null_with_a_reason() -> None:
    report = Report("stream")
    add_rows(report, found(case("constant"), quick=True))
    assert report.fields["vs_fixed_changing"] is None and "no trace" in report.fields["changing_reason"]
    assert "quick" in report.fields["vs_fixed_window_reason"]


def test_a_plot_can_be_drawn() -> None:
    pytest.importorskip("matplotlib.figure")
    report = Report("stream")
    add_rows(report, found(case("constant", 0.5), case("step down", 2.0)))
    result = report.as_json()
    times, gain = charts.draw([(panel, result) for panel in charts.panels_of(result)]).axes
    shown = {line.get_label(): list(line.get_ydata()) for line in times.lines}
    assert shown["ours"] == [0.6, 0.6] and shown["stream q5"] == [1.0, 1.0] and "stream q4" not in shown
    assert not gain.patches  # not measured


@given(depths=st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_layers_taken_together_cost_what_they_cost_apart(depths: list[int]) -> None:
    fine = costs(4, 8)
    rough = coarse(fine, 4, 4)
    assert rough.compute_seconds.sum() == pytest.approx(fine.compute_seconds.sum())
    assert rough.size_bytes.sum() == fine.size_bytes.sum()
    for chunk, depth in enumerate(depths):
        assert rough.depth_seconds[chunk, depth] == pytest.approx(fine.depth_seconds[chunk, 2 * depth])
