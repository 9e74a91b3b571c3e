"""`python -m benchmarks adapters`: its fields are there and say what they should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.adapters import quality as adapter_quality

pytestmark = [pytest.mark.real, pytest.mark.long]

MODES = {"peft", "apart", "prefix", "lfu", "mobilora", "exact", "ours", "none", "utility"}
ROW = {"scenario", "mode", "mean_ttft_s", "hit_share", "peak_bytes", "limit_bytes"}
DELTA = {"delta_bits_lossless", "delta_bits", "top1", "kl", "plain_kl", "mobilora_bits", "mobilora_kl", "decode_mb_s"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plot = tmp_path_factory.mktemp("bench") / "plot.png"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_quality, "QUICK_POSITIONS", 2 * adapter_quality.FORCED_TOKENS)
        arguments = ["adapters", "--quick", "--limit", "3", "--json", "--plot", str(plot)]
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert plot.stat().st_size > 1000
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_bench_adapters_prints_its_fields(told: dict[str, Any]) -> None:
    assert all(set(row) >= ROW for row in told["rows"])
    assert {row["mode"] for row in told["rows"]} == MODES
    assert set(told) >= DELTA | {"reduction_vs_best", "lossless_ratio", "ablations", "within_limit", "texts_equal"}
    assert told["exponent"] == 1.16 and told["limit_share"] == 0.4
    assert len(told["data_reasons"]) == 2  # neither texts nor usage were given


def test_every_mode_stays_within_the_limit_and_says_what_it_spared(told: dict[str, Any]) -> None:
    (scenario,) = told["scenarios"]
    assert scenario["limit_bytes"] == int(scenario["working_set_bytes"] * 0.4)
    for row in told["rows"]:
        assert row["mean_ttft_s"] > 0 and row["requests"] == 3
        assert max(row["peak_bytes"], row["accounted_bytes"]) <= row["limit_bytes"]
        assert 0 <= row["hit_share"] <= scenario["max_hit_share"] + 0.05  # replies may be known, too
    assert told["within_limit"] is True


def test_what_loses_nothing_answers_as_without_a_cache(told: dict[str, Any]) -> None:
    rows = {row["mode"]: row for row in told["rows"]}
    assert told["texts_equal"] is True
    assert all(rows[name]["equal_share"] == 1.0 for name in ("none", "apart", "prefix", "lfu", "exact"))
    assert rows["peft"]["hit_share"] == 0 == rows["peft"]["peak_bytes"]


def test_differences_take_less_and_are_nearer_than_plain_numbers_of_that_size(told: dict[str, Any]) -> None:
    rows = {row["mode"]: row for row in told["rows"]}
    assert rows["ours"]["bytes_per_token"] < 0.4 * rows["prefix"]["bytes_per_token"]
    assert told["delta_bits"] < told["mobilora_bits"] < told["delta_bits_lossless"]
    assert told["plain_bits"] <= told["delta_bits"] and told["kl"] < told["plain_kl"]
    assert told["top1"] > 0.9 and told["positions"] >= 2 * adapter_quality.FORCED_TOKENS


def test_adapters_that_are_not_there_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["adapters", "--adapters", str(tmp_path)])
    assert done.exit_code != 0 and "adapter_config.json" in str(done.exception or done.output)
    other = CliRunner().invoke(app, ["store", "--adapters", str(tmp_path)])
    assert other.exit_code != 0 and "--adapters" in str(other.exception or other.output)
