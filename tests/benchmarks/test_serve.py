"""`python -m benchmarks serve --quick` on a tiny model: it ends and prints its fields. Speed is not asserted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.serve.workload import BLOCK_TOKENS, make_workload, read_trace, scale, shared_share
from rekindle.errors import InvalidSetting

FIELDS = "ttft_p50 ttft_p99 tokens_per_s batch_ratio_4 shared_share trace_shared_share"


def test_bench_serve_prints_its_fields(tiny_folder: Path) -> None:
    arguments = ["serve", "--model", str(tiny_folder), "--device", "cpu", "--quick", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    assert all(found[name] > 0 for name in FIELDS.split())
    assert found["errors"] == 0 and found["errors_told"] == [] and found["equal_texts"] in (True, False)
    rows = {(row["clients"], row["cache"]): row for row in found["rows"]}
    assert list(rows) == [(clients, cache) for clients in (1, 4, 16) for cache in ("on", "off")]
    assert all(row["requests"] == 16 and row["ttft_p50"] <= row["ttft_p99"] for row in rows.values())
    assert all(rows[clients, "off"]["cached_share"] == 0 for clients in (1, 4, 16))
    # What is worth loading is the planner's choice; no more can be spared than what prompts have in common.
    assert 0 < rows[1, "on"]["cached_share"] <= found["shared_share"] + 0.05
    assert {"measure", "ours", "baseline", "ratio", "bar"} == set(found["table"][0])


def test_clients_that_paste_passages_are_told_what_was_reused(spacious: Path, tmp_path: Path) -> None:
    arguments = ["serve", "--workload", "rag", "--model", str(spacious), "--device", "cpu", "--quick", "--json"]
    arguments += ["--resume", str(tmp_path / "units.jsonl"), "--plot", str(tmp_path / "chart.png")]
    for part in ("known, *", "*"):  # the second run measures what the first one left
        result = CliRunner().invoke(app, [*arguments, "--part", part])
        assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    assert [part["steps"] for part in found["measured_by"]] == [1, 1] and (tmp_path / "chart.png").exists()
    rows = {(row["part"], row["reuse"]): row for row in found["rows"]}
    assert list(rows) == [(part, level) for part in ("first", "known") for level in ("approximate", "exact", "off")]
    assert all(row["requests_per_s"] > 0 and row["requests"] == 4 for row in rows.values())
    for part in ("first", "known"):  # what is exact is never marked, and says the same
        assert rows[part, "exact"]["from_chunks"] == rows[part, "off"]["from_chunks"] == 0
        assert rows[part, "exact"]["equal_share"] == 1
    known = rows["known", "approximate"]
    assert known["from_chunks"] <= known["prompt_tokens"]
    assert known["computed_tokens"] + known["from_chunks"] - known["recomputed"] <= known["prompt_tokens"]


def test_an_unknown_workload_is_refused() -> None:
    result = CliRunner().invoke(app, ["serve", "--workload", "other"])
    assert isinstance(result.exception, InvalidSetting) and "trace or rag" in str(result.exception)


def test_a_scaled_trace_shares_as_much_as_the_whole() -> None:
    trace = read_trace(None)
    drawn = [scale(trace, 32, 8, np.random.default_rng(seed)) for seed in range(20)]
    assert all(len(asked) == 32 and max(map(len, asked)) <= 8 for asked in drawn)
    assert np.mean([shared_share(asked) for asked in drawn]) == pytest.approx(shared_share(trace), abs=0.1)


def test_prompts_begin_alike_exactly_where_their_blocks_do() -> None:
    (first, again, other) = make_workload([(0, 1, 2), (0, 1, 3), (4,)], range(1000), 1000, seed=0).prompts
    same = next(place for place, (a, b) in enumerate(zip(first, again, strict=True)) if a != b)
    assert same == 2 * BLOCK_TOKENS
    assert first[0] != other[0]


@pytest.mark.parametrize("line", ["{}", "[]", '{"hash_ids": []}', '{"hash_ids": ["a"]}', "nothing"])
def test_a_trace_that_is_none_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    tmp_path.joinpath("trace.jsonl").write_text('{"hash_ids": [0]}\n' + line + "\n")
    with pytest.raises(InvalidSetting, match=r"trace\.jsonl, line 2"):
        read_trace(tmp_path)
