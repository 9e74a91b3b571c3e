"""How fast the link is, and how long a layer takes."""

from __future__ import annotations

import json
import math
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.predictor import mean_error
from rekindle.core.cells import CellGrid
from rekindle.machine import home_folder
from rekindle.remote import latency
from rekindle.remote.latency import (
    MIN_BANDWIDTH,
    Bandwidth,
    LayerTiming,
    Roofline,
    TransferSample,
    cell_seconds,
    recall_bandwidth,
    remember_bandwidth,
)


def measured(*transfers: tuple[int, float, float]) -> Bandwidth:
    bandwidth = Bandwidth()
    for transfer in transfers:
        bandwidth.add(TransferSample(*transfer))
    return bandwidth


def steady(count: int, start: float = 0.0) -> list[tuple[int, float, float]]:
    """1,000 bytes every second, half of which the link works."""
    return [(1000, 0.5, start + n) for n in range(1, count + 1)]


def test_a_link_that_was_never_used_is_unknown() -> None:
    assert Bandwidth().bytes_per_second() is None
    assert Bandwidth().bytes_per_second(TransferSample(0, 3.0, 3.0)) is None


def test_what_was_remembered_counts_until_something_is_measured() -> None:
    link = Bandwidth(500.0)
    assert link.bytes_per_second() == 500.0 and link.measured is None
    assert link.bytes_per_second(TransferSample(1000, 10.0, 10.0)) == 100.0  # it was faster then
    link.add(TransferSample(1000, 0.5, 1.0))
    assert link.bytes_per_second() == link.measured == 2000.0


def test_newer_runs_count_more_and_a_month_later_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    monkeypatch.setattr(latency.time, "time", lambda: now[0])
    assert recall_bandwidth("http://one") is None
    remember_bandwidth("http://one", Bandwidth(5.0))  # nothing was measured
    assert recall_bandwidth("http://one") is None
    remember_bandwidth("http://one", measured(*steady(6)))
    assert recall_bandwidth("http://one") == pytest.approx(2000.0) and recall_bandwidth("http://other") is None
    now[0] += 2 * 24 * 3600
    remember_bandwidth("http://one", measured((1000, 1.0, 1.0)))
    assert recall_bandwidth("http://one") == pytest.approx(1000.0 * 2 ** (0.25 / 1.25))
    now[0] += 31 * 24 * 3600
    assert recall_bandwidth("http://one") is None
    (home_folder() / "links.json").write_text('{"x": 1')
    assert recall_bandwidth("http://one") is None


def test_pauses_do_not_count() -> None:
    assert measured(*steady(6)).bytes_per_second() == pytest.approx(2000.0)


def test_what_comes_side_by_side_counts_once() -> None:
    two = measured((1000, 1.0, 1.0), (1000, 1.0, 1.0))
    assert two.bytes_per_second() == pytest.approx(1900 / 0.9)  # an older one counts a little less
    long = measured((1000, 0.5, 6.0), (9000, 10.0, 10.0))
    assert long.bytes_per_second() == pytest.approx((0.9 * 1000 + 9000) / (0.9 * 0.5 + 9.5))


def test_one_stall_is_left_out_and_a_second_is_not() -> None:
    stalled = measured(*steady(6), (1000, 20.0, 30.0))
    assert stalled.bytes_per_second() == pytest.approx(2000.0)
    stalled.add(TransferSample(1000, 20.0, 51.0))
    now = stalled.bytes_per_second()
    assert now is not None
    assert now < 250.0


def test_a_slow_beginning_is_believed() -> None:
    assert measured((1000, 20.0, 20.0), (1000, 0.5, 21.0)).bytes_per_second() == pytest.approx(1900 / 18.5)


def test_only_the_last_transfers_count() -> None:
    bandwidth = measured(*steady(40))
    for n in range(20):
        bandwidth.add(TransferSample(1000, 0.1, 100.0 + n))
    assert bandwidth.bytes_per_second() == pytest.approx(10_000.0)


def test_a_link_that_dies_has_no_bandwidth_before_long() -> None:
    bandwidth = measured(*steady(8))
    assert bandwidth.bytes_per_second(TransferSample(0, 1.0, 9.0)) == pytest.approx(2000.0)
    fading = [
        bandwidth.bytes_per_second(TransferSample(0, seconds, 8 + seconds)) or 0.0 for seconds in (3.0, 30.0, 3000.0)
    ]
    assert fading == sorted(fading, reverse=True)
    assert fading[-1] < 2.0
    for n in range(16):
        bandwidth.add(TransferSample(0, 5.0, 100.0 + 5 * n))
    assert bandwidth.bytes_per_second() == MIN_BANDWIDTH


def test_a_slow_transfer_under_way_counts_for_what_it_has_brought() -> None:
    assert measured(*steady(8)).bytes_per_second(TransferSample(60_000, 100.0, 108.0)) == pytest.approx(600.0)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(1e-6, 1e3), st.floats(0, 1e5)), max_size=30))
def test_a_bandwidth_is_always_a_positive_number(transfers: list[tuple[int, float, float]]) -> None:
    rate = measured(*transfers).bytes_per_second()
    assert rate is None if not transfers else rate is not None and MIN_BANDWIDTH <= rate < math.inf


def lawful(tokens: int, context: int) -> float:
    return 2e-4 + 3e-6 * tokens + 4e-9 * tokens * (context + tokens / 2)


def samples(count: int, noise: float = 0.0, seed: int = 1, bend: float = 0.0) -> list[LayerTiming]:
    """Layers that take what `lawful` says, or more of it where the context leaves the cache."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens, context = int(random.integers(1, 257)), int(random.integers(0, 8000))
        seconds = lawful(tokens, context) * math.exp(random.normal(0.0, noise)) if noise else 0.0
        seconds = seconds or lawful(tokens, context)
        made.append(LayerTiming(tokens, context, seconds * (1 + bend * (context > 4000))))
    return made


def test_a_roofline_finds_what_made_the_samples() -> None:
    fitted = Roofline.fit(samples(40))
    assert (fitted.fixed, fitted.per_token, fitted.per_pair) == pytest.approx((2e-4, 3e-6, 4e-9), rel=1e-6)
    assert mean_error(fitted, samples(40, seed=2)) < 1e-6


def test_a_roofline_is_never_negative() -> None:
    falling = [LayerTiming(tokens, 0, 1.0 / tokens) for tokens in range(1, 40)]
    fitted = Roofline.fit(falling)
    assert min(fitted.fixed, fitted.per_token, fitted.per_pair) >= 0.0
    assert fitted.fixed > 0.0


def test_projections_do_not_depend_on_the_context() -> None:
    fitted = Roofline.fit([LayerTiming(n, c, 1e-4 + 1e-6 * n) for n in (16, 64, 128) for c in (0, 1000, 5000)])
    assert fitted.predict(128, 0) == pytest.approx(fitted.predict(128, 100_000))


def test_noise_leaves_a_roofline_near_the_truth() -> None:
    assert mean_error(Roofline.fit(samples(200, noise=0.05)), samples(50, seed=3)) < 0.03


def test_a_roofline_is_remembered_as_plain_values() -> None:
    fitted = Roofline.fit(samples(20))
    assert Roofline.recalled(json.loads(json.dumps(astuple(fitted)))) == fitted


@pytest.mark.parametrize("junk", [None, [], {}, 7, [1, 2], [1, -2, 3], [1, "nan", 3], [1, 2, math.inf], "abc"])
def test_what_is_no_roofline_is_not_remembered(junk: object) -> None:
    assert Roofline.recalled(junk) is None


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError):
        Roofline.fit([])


def test_later_chunks_take_longer() -> None:
    model, cells = Roofline(1e-4, 1e-6, 1e-9), CellGrid(300, 4)
    seconds = cell_seconds(model, cells)
    assert seconds.shape == (3, 4)
    assert seconds[1, 2] == model.predict(128, 128)
    assert seconds[2, 0] == model.predict(44, 256)
