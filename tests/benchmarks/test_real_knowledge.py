"""`python -m benchmarks knowledge`: its fields are there, and say what they should of the sample corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app

pytestmark = pytest.mark.real

WAYS = {"fused", "weighted", "bm25", "embedding"}


@pytest.mark.long
def test_bench_knowledge_prints_its_fields(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["knowledge", "--quick", "--json", "--plot", str(tmp_path / "plot.png")])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    for name in ("ingest_docs_per_s", "match_ms_1k", "retrieve_ms_1k", "retrieve_ms_100k", "load_ms_100k"):
        assert told[name] > 0
    assert told["passages_1k"] == 2000 and told["passages_100k"] == 100_000
    assert set(told["recall5"]) == set(told["recall5_passages"]) == WAYS
    assert told["index_ms_100k"] is None and told["index_reason"]
    (sample,) = told["sets"].values()
    assert sample["resumed"] and sample["embedded_twice"] == 0 and sample["questions"] >= 30
    # Not a time: what is found is the same on every machine.
    assert told["recall5"]["fused"] >= max(told["recall5"]["bm25"], told["recall5"]["embedding"]) >= 0.7
    assert told["fused_is_best"] and (tmp_path / "plot.png").stat().st_size > 1000


def test_a_folder_without_a_set_is_refused_with_a_sentence(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["knowledge", "--data", str(tmp_path)])
    assert done.exit_code != 0 and "corpus.jsonl" in str(done.exception)
