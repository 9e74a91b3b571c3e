"""`python -m benchmarks answers`: its fields are there and say what they should."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.answers import bench as answers
from benchmarks.answers import report as answer_report
from benchmarks.answers import ways as answer_ways
from benchmarks.answers.ways import WAYS

pytestmark = [pytest.mark.real, pytest.mark.long]

ROW = {
    "mode", "mean_latency_s", "p50", "p95", "answer_hits", "kv_hit_share", "false_hits", "rouge_l_gold", "idle_seconds",
}  # fmt: skip
GUARD = {
    "near_misses", "false_hits", "paraphrase_recall", "pairs_precision", "pairs_recall", "cosine_precision",
    "cosine_recall",
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plot = tmp_path_factory.mktemp("bench") / "plot.png"
    with pytest.MonkeyPatch.context() as patch:
        for module in (answer_ways, answer_report, answers):
            patch.setattr(module, "NEW_TOKENS", 8)
        patch.setattr(answer_ways, "TOP_K", 2)
        patch.setattr(answers, "QUICK_ASKED", 6)
        patch.setattr("rekindle.idle.idle._FEWEST_PARAMETERS", 0)  # the embedded model asks, too
        arguments = ["answers", "--quick", "--limit", "2", "--json", "--plot", str(plot)]
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert plot.stat().st_size > 1000
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_bench_answers_prints_its_fields(told: dict[str, Any]) -> None:
    assert [row["mode"] for row in told["rows"]] == [way.name for way in WAYS]
    assert all(set(row) >= ROW for row in told["rows"])
    assert set(told["guard"]) >= GUARD
    assert {"reduction_vs_best", "reduction_best_user", "prediction_gain_kv", "prediction_gain_answers"} <= set(told)


def test_checked_answers_are_those_without_a_cache(told: dict[str, Any]) -> None:
    assert told["verified_equal"] == 1.0


def test_every_question_comes_with_those_that_follow_it(told: dict[str, Any]) -> None:
    (user,) = told["users"]
    assert user["verified_vs_none"]["low"] <= user["verified_vs_none"]["mean"] <= user["verified_vs_none"]["high"]
    assert told["reduction_users"]["worst"] == told["reduction_users"]["best"] == told["reduction_best_user"]
    assert user["questions"] == 6  # two, each in other words, and one that looks like each
    assert all(row["questions"] == 6 for row in told["rows"])


def test_without_a_cache_nothing_is_known_and_what_foresees_works_ahead(told: dict[str, Any]) -> None:
    rows = {row["mode"]: row for row in told["rows"]}
    assert rows["none"]["kv_hit_share"] == 0 == rows["none"]["answer_hits"] == rows["none"]["idle_seconds"]
    assert all(rows[name]["idle_seconds"] > 0 for name in ("percache", "ours-verified", "ours-direct"))
    assert rows["ours-verified"]["kv_hit_share"] >= rows["kv-only"]["kv_hit_share"]
    assert rows["ours-verified"]["answer_hits"] == 0


def test_the_guard_of_the_package_tells_its_own_pairs_apart(told: dict[str, Any]) -> None:
    guard = told["guard"]
    assert guard["pairs_shipped"] and guard["pairs_precision"] == 1.0
    assert guard["near_misses"] == 8 and guard["false_hits"] == 0
