"""Calibrating in idle time: only what is missing, only if allowed, and nothing is kept of what was stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.cache.coders import bits_calibrated, recall_coder
from rekindle.chunks.match import calibration_of
from rekindle.engine.base import Logits, Row
from rekindle.engine.fake import FakeEngine
from rekindle.idle.idle import IdleCalibration, IdleOptions
from rekindle.idle.worker import IdleConditions
from rekindle.session.calibrate.calibration import calibrated_parts, missing_parts, remember_budgets
from tests.lora import fake_pairs, save_lora

pytestmark = pytest.mark.thorough

ALLOWED = IdleOptions(calibrate_seconds=600.0)


class Stepping(FakeEngine):
    """Counts its steps, and calls `at_step` before each."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.at_step: Callable[[int], None] = lambda _: None

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        self.steps += 1
        self.at_step(self.steps)
        return super().step(rows, cancelled)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))


def opened(tmp_path: Path, **settings: Any) -> Session:
    return Session(Stepping(), cache=tmp_path / "cache", **{"reuse": "quantized", **settings})


def test_what_a_session_needs_and_nobody_measured_is_measured_once(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        assert missing_parts(session) == ["bits"]
        calibration = IdleCalibration(session, ALLOWED)
        found = calibration.run(threading.Event())
        assert found is not None and found.bits is not None and found.budget is None
        assert recall_coder(session.engine) == found.bits.coder
        assert calibrated_parts(session.engine.name) == ["quantized KV"]
        assert missing_parts(session) == []
        steps = session.engine.steps  # type: ignore[attr-defined]
        assert calibration.run(threading.Event()) is None
        assert session.engine.steps == steps  # type: ignore[attr-defined]


def test_deltas_are_measured_with_the_adapters_of_the_session(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        session.adapters.load("writer", save_lora(tmp_path / "lora", fake_pairs(1)))
        found = IdleCalibration(session, ALLOWED).run(threading.Event())
        assert found is not None and found.bits is not None and found.bits.kept("difference") is not None
        assert bits_calibrated(session.engine, session.settings, deltas=True)
        assert session.generate("Hello", max_tokens=2, adapter="writer").text


def test_without_leave_and_beyond_its_time_nothing_is_done(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        for options in (
            IdleOptions(),
            IdleOptions(calibrate_seconds=600, conditions=IdleConditions(max_load=0.0, on_battery=True)),
        ):
            assert IdleCalibration(session, options).run(threading.Event()) is None
        assert session.engine.steps == 0  # type: ignore[attr-defined]
        short = IdleCalibration(session, IdleOptions(calibrate_seconds=1e-9))
        assert short.run(threading.Event()) is None
        steps = session.engine.steps  # type: ignore[attr-defined]
        assert short.run(threading.Event()) is None and session.engine.steps == steps  # type: ignore[attr-defined]
        assert recall_coder(session.engine) is None


def test_it_stops_at_a_step_keeps_nothing_and_begins_again_later(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        engine, stop = session.engine, threading.Event()
        assert isinstance(engine, Stepping)
        engine.at_step = lambda number: stop.set() if number == 5 else None
        calibration = IdleCalibration(session, ALLOWED)
        assert calibration.run(stop) is None
        assert engine.steps == 5 and recall_coder(engine) is None
        assert calibration.run(threading.Event()) is not None
        assert recall_coder(engine) is not None


@pytest.mark.parametrize("settings", [{"reuse": "exact"}, {"codec": "q4"}, {"reuse": "approximate"}])
def test_only_what_the_level_of_reuse_needs_is_missing(tmp_path: Path, settings: dict[str, Any]) -> None:
    with opened(tmp_path, **settings) as session:
        wanted = ["budget"] if settings.get("reuse") == "approximate" else []
        assert missing_parts(session) == wanted
        remember_budgets(session.engine, {session.cache.chunks.recompute_policy.name: 0.2})  # type: ignore[attr-defined]
        assert calibration_of(session.engine) == 0.2 and missing_parts(session) == []
