"""The published predictor, beside the roofline."""

from __future__ import annotations

import pytest

from benchmarks.baselines import predictor
from benchmarks.baselines.predictor import Mlp, best_model, mean_error
from rekindle.remote.latency import Roofline
from tests.remote.test_latency import samples


def test_the_network_learns_what_bends() -> None:
    bent = samples(400, bend=1.5)
    chosen = best_model(bent)
    assert isinstance(chosen.model, Mlp)
    assert chosen.mlp_error < 0.10
    assert chosen.mlp_error < chosen.roofline_error
    assert mean_error(chosen.model, samples(60, seed=9, bend=1.5)) < 0.12


def test_the_roofline_is_kept_where_it_errs_less() -> None:
    chosen = best_model(samples(60))
    assert isinstance(chosen.model, Roofline)
    assert chosen.roofline_error < 1e-6 < chosen.mlp_error


def test_training_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "_TRAINING", 50)
    some = samples(50)
    one, other = Mlp.fit(some), Mlp.fit(some)
    assert one.predict(100, 1000) == other.predict(100, 1000)
    assert one.predict(100, 1000) != Mlp.fit(some, seed=1).predict(100, 1000)


def test_too_few_samples_are_refused() -> None:
    for fit in (Mlp.fit, best_model):
        with pytest.raises(ValueError):
            fit([])
    with pytest.raises(ValueError):
        mean_error(Roofline(1.0, 1.0, 1.0), [])
