"""`python -m benchmarks store --quick`: it ends, and prints every field that it names. Speed is not asserted."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app

FIELDS = (
    "put_mb_s get_mb_s file_get_mb_s lookup_us_1k lookup_us_1m evict_us reopen_s_1m fsyncs_per_keep get_vs_file "
    "get_vs_file_cold_pages index_memory_mb_1m storm_peak_share"
)


@pytest.mark.long
def test_bench_store_prints_its_fields() -> None:
    result = CliRunner().invoke(app, ["store", "--quick", "--json"])
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    assert all(found[name] > 0 for name in FIELDS.split())
    assert found["fsyncs_per_keep"] == 1 and found["storm_peak_share"] <= 1
    assert found["wear_trace_gb"]["second-use"] < found["wear_trace_gb"]["always"]
    assert found["index_memory_mb_1m"] < 20  # SQLite's page cache, whatever the number of rows
    assert {"measure", "ours", "baseline", "ratio", "bar"} == set(found["table"][0])
