"""How fast the link is, and how long a layer takes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.core.cells import Cells
from rekindle.reuse.latency import (
    LEAST_BANDWIDTH,
    Bandwidth,
    Mlp,
    Roofline,
    Sample,
    Transfer,
    best_model,
    cell_seconds,
    model_from,
)


def measured(*transfers: tuple[int, float, float]) -> Bandwidth:
    bandwidth = Bandwidth()
    for transfer in transfers:
        bandwidth.add(Transfer(*transfer))
    return bandwidth


def steady(count: int, start: float = 0.0) -> list[tuple[int, float, float]]:
    """1,000 bytes every second, half of which the link works."""
    return [(1000, 0.5, start + n) for n in range(1, count + 1)]


def test_a_link_that_was_never_used_is_unknown() -> None:
    assert Bandwidth().bytes_per_second() is None
    assert Bandwidth().bytes_per_second(Transfer(0, 3.0, 3.0)) is None


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
    stalled.add(Transfer(1000, 20.0, 51.0))
    now = stalled.bytes_per_second()
    assert now is not None
    assert now < 250.0


def test_a_slow_beginning_is_believed() -> None:
    assert measured((1000, 20.0, 20.0), (1000, 0.5, 21.0)).bytes_per_second() == pytest.approx(1900 / 18.5)


def test_only_the_last_transfers_count() -> None:
    bandwidth = measured(*steady(40))
    for n in range(20):
        bandwidth.add(Transfer(1000, 0.1, 100.0 + n))
    assert bandwidth.bytes_per_second() == pytest.approx(10_000.0)


def test_a_link_that_dies_has_no_bandwidth_before_long() -> None:
    bandwidth = measured(*steady(8))
    assert bandwidth.bytes_per_second(Transfer(0, 1.0, 9.0)) == pytest.approx(2000.0)
    fading = [bandwidth.bytes_per_second(Transfer(0, seconds, 8 + seconds)) or 0.0 for seconds in (3.0, 30.0, 3000.0)]
    assert fading == sorted(fading, reverse=True)
    assert fading[-1] < 2.0
    for n in range(16):
        bandwidth.add(Transfer(0, 5.0, 100.0 + 5 * n))
    assert bandwidth.bytes_per_second() == LEAST_BANDWIDTH


def test_a_slow_transfer_under_way_counts_for_what_it_has_brought() -> None:
    assert measured(*steady(8)).bytes_per_second(Transfer(60_000, 100.0, 108.0)) == pytest.approx(600.0)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(1e-6, 1e3), st.floats(0, 1e5)), max_size=30))
def test_a_bandwidth_is_always_a_positive_number(transfers: list[tuple[int, float, float]]) -> None:
    rate = measured(*transfers).bytes_per_second()
    assert rate is None if not transfers else rate is not None and LEAST_BANDWIDTH <= rate < math.inf


def lawful(tokens: int, context: int, active: float = 1.0) -> float:
    return 2e-4 + 3e-6 * tokens + 4e-9 * active * tokens * (context + tokens / 2)


def samples(count: int, noise: float = 0.0, seed: int = 1, bend: float = 0.0) -> list[Sample]:
    """Layers that take what `lawful` says, or more of it where the context leaves the cache."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens, context = int(random.integers(1, 257)), int(random.integers(0, 8000))
        active = float(random.uniform(0.1, 1.0))
        seconds = lawful(tokens, context, active) * math.exp(random.normal(0.0, noise)) if noise else 0.0
        seconds = seconds or lawful(tokens, context, active)
        made.append(Sample(tokens, context, seconds * (1 + bend * (context > 4000)), active))
    return made


def test_a_roofline_finds_what_made_the_samples() -> None:
    fitted = Roofline.fit(samples(40))
    assert (fitted.fixed, fitted.per_token, fitted.per_pair) == pytest.approx((2e-4, 3e-6, 4e-9), rel=1e-6)
    assert fitted.error(samples(40, seed=2)) < 1e-6


def test_a_roofline_is_never_negative() -> None:
    falling = [Sample(tokens, 0, 1.0 / tokens) for tokens in range(1, 40)]
    fitted = Roofline.fit(falling)
    assert min(fitted.fixed, fitted.per_token, fitted.per_pair) >= 0.0
    assert fitted.fixed > 0.0


def test_projections_do_not_depend_on_the_context() -> None:
    fitted = Roofline.fit([Sample(n, c, 1e-4 + 1e-6 * n) for n in (16, 64, 128) for c in (0, 1000, 5000)])
    assert fitted.predict(128, 0) == pytest.approx(fitted.predict(128, 100_000))


def test_noise_leaves_a_roofline_near_the_truth() -> None:
    assert Roofline.fit(samples(200, noise=0.05)).error(samples(50, seed=3)) < 0.03


def test_the_network_learns_what_bends() -> None:
    bent = samples(400, bend=1.5)
    chosen = best_model(bent)
    assert isinstance(chosen.model, Mlp)
    assert chosen.mlp_error < 0.10
    assert chosen.mlp_error < chosen.roofline_error
    assert chosen.model.error(samples(60, seed=9, bend=1.5)) < 0.12


def test_the_roofline_is_kept_where_it_errs_less() -> None:
    chosen = best_model(samples(60))
    assert isinstance(chosen.model, Roofline)
    assert chosen.roofline_error < 1e-6 < chosen.mlp_error


def test_training_is_the_same_each_time() -> None:
    some = samples(50)
    one, other = Mlp.fit(some), Mlp.fit(some)
    assert one.predict(100, 1000) == other.predict(100, 1000)
    assert one.predict(100, 1000) != Mlp.fit(some, seed=1).predict(100, 1000)


def test_a_model_is_remembered_as_plain_values() -> None:
    for model in (Roofline.fit(samples(20)), Mlp.fit(samples(20))):
        again = model_from(json.loads(json.dumps(model.as_json())))
        assert type(again) is type(model)
        assert again is not None
        assert again.predict(77, 1234, 0.5) == model.predict(77, 1234, 0.5)


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        {},
        {"kind": "roofline"},
        {"kind": "roofline", "coefficients": [1, 2]},
        {"kind": "roofline", "coefficients": [1, -2, 3]},
        {"kind": "roofline", "coefficients": [1, "nan", 3]},
        {"kind": "mlp", "arrays": []},
        {"kind": "mlp", "arrays": [[1.0], [2.0], [3.0]]},
        {"kind": "other"},
    ],
)
def test_what_is_no_model_is_not_remembered(junk: object) -> None:
    assert model_from(junk) is None


def test_a_network_with_a_number_that_is_none_is_not_remembered() -> None:
    known = Mlp.fit(samples(10)).as_json()
    known["arrays"][1][0] = math.nan
    assert model_from(known) is None


def test_too_few_samples_are_refused() -> None:
    for fit in (Roofline.fit, Mlp.fit, best_model):
        with pytest.raises(ValueError):
            fit([])
    with pytest.raises(ValueError):
        Roofline(1.0, 1.0, 1.0).error([])


def test_later_chunks_take_longer_and_sparse_ones_less() -> None:
    model, cells = Roofline(1e-4, 1e-6, 1e-9), Cells(300, 4)
    seconds = cell_seconds(model, cells)
    assert seconds.shape == (3, 4)
    assert seconds[1, 2] == model.predict(128, 128)
    assert seconds[2, 0] == model.predict(44, 256)
    assert cell_seconds(model, cells, [1.0, 0.5, 1.0])[1, 0] < seconds[1, 0]
