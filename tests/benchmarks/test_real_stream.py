"""`python -m benchmarks stream`: its fields are there and say what they should. Speed is not asserted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.stream.modes import QUICK_MODES

pytestmark = [pytest.mark.real, pytest.mark.long]

ROW = {"trace", "ratio", "mode", "ttft_s", "bytes", "streamed_share", "kl"}
FIELDS = (
    "overlap_efficiency vs_fixed vs_bidirectional worst_vs_best_single greedy_vs_exact schedule_ms exact_ms "
    "predictor_error roofline_error"
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plot = tmp_path_factory.mktemp("bench") / "plot.png"
    done = CliRunner().invoke(app, ["stream", "--quick", "--json", "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert plot.stat().st_size > 1000
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_bench_stream_prints_its_fields(told: dict[str, Any]) -> None:
    assert [row["mode"] for row in told["rows"]] == [mode.name for mode in QUICK_MODES] * 2
    assert all(set(row) >= ROW for row in told["rows"])
    assert all(told[name] > 0 for name in FIELDS.split())
    assert told["traces"] == "made by code" and {row["trace"] for row in told["rows"]} == {"constant", "step down"}


def test_schedules_are_as_good_as_the_exact_ones(told: dict[str, Any]) -> None:
    assert told["greedy_vs_exact"] <= 1.05


def test_what_is_computed_is_exact_and_what_is_streamed_nearly(told: dict[str, Any]) -> None:
    for row in told["rows"]:
        assert row["failed"] is None
        if row["mode"] in ("local", "plain"):
            assert row["bytes"] == 0 == row["streamed_share"] and row["kl"] < 1e-5
        else:
            assert row["bytes"] > 0 and row["kl"] < 0.05
        assert row["mode"] != "stream q5" or row["streamed_share"] == 1.0
