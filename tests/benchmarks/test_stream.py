"""`python -m benchmarks stream --quick` on a tiny model: it ends and prints its fields. Speed is not asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from rekindle.errors import InvalidSetting

pytest.importorskip("cryptography", reason="part of the crypto extra")


def test_bench_stream_prints_its_fields(tiny_folder: Path, tmp_path: Path) -> None:
    (traces := tmp_path / "traces").mkdir()
    for name, rates in (("a", "1 2 3"), ("b", "5 1 1")):
        lines = [f"{second},{rate}" for second, rate in enumerate(rates.split())]
        traces.joinpath(f"{name}.csv").write_text("\n".join(["time_s,mbps", *lines, ""]))
    arguments = ["--model", str(tiny_folder), "--device", "cpu", "--traces", str(traces), "--limit", "2"]
    arguments += ["--resume", str(tmp_path / "units.jsonl"), "--quick", "--json"]
    result = CliRunner().invoke(app, ["stream", *arguments])
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    later = CliRunner().invoke(app, ["stream", *arguments, "--minutes", "0"])
    assert later.exit_code == 0, later.exception
    again = json.loads(later.stdout)
    assert {name: again[name] for name in found} | {"command": ""} == found | {"command": ""} and again["measured_by"]
    assert {row["trace"] for row in found["rows"]} == {"a", "b"} and found["traces"] == "as given with --traces"
    assert [case["ratio"] for case in found["cases"]] == [1.0, 1.0]
    assert all(row["ttft_s"] > 0 and 0 <= row["streamed_share"] <= 1 for row in found["rows"])
    assert {row["mode"]: row["streamed_share"] for row in found["rows"]}["stream q5"] == 1.0
    assert all(found[name] > 0 for name in ("overlap_efficiency", "schedule_ms", "predictor_error", "roofline_error"))
    assert {"measure", "ours", "baseline", "ratio", "bar"} == set(found["table"][0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["store", "--traces", "."], "--traces is for the bench stream"),
        (["stream", "--traces", "nowhere"], "not a folder"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny_folder: Path, arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, [*arguments, "--model", str(tiny_folder), "--quick"])
    assert isinstance(result.exception, InvalidSetting) and says in str(result.exception)
