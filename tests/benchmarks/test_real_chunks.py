"""`python -m benchmarks chunks`: its fields are there and say what they should, and what it calibrates is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.chunks import calibrate as chunk_calibrate
from benchmarks.chunks import endurance as chunk_endurance
from benchmarks.chunks import streams as chunk_streams
from rekindle import Session
from rekindle.session.calibrate.prompts import read_questions

pytestmark = [pytest.mark.real, pytest.mark.long]

ROW = {"mode", "recomputed", "computed_share", "rouge_l", "kl", "top1", "f1", "ttft_s", "ttft_vs_none"}
ROW |= {"ttft_vs_prefix", "computed_tokens", "fallbacks", "budget"}
BASELINES = {"none", "prefix", "set-cache", "full-cache", "random", "h2o", "cache-craft", "rekindle"}


@pytest.fixture
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_endurance, "QUICK_QUESTIONS", 6)
    monkeypatch.setattr(chunk_streams, "QUICK_QUESTIONS", 2)


def test_bench_chunks_prints_its_fields(tmp_path: Path, shorter: None) -> None:
    arguments = ["chunks", "--quick", "--limit", "2", "--json", "--plot", str(tmp_path / "plot.png")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    rows = {row["mode"]: row for row in told["rows"]}
    assert set(rows) == BASELINES and all(set(row) >= ROW for row in rows.values())
    assert told["prompts"] == 2 and told["positions"] == 2 * 17
    # The full computation is itself; nothing exact differs from it.
    for name in ("none", "prefix"):
        assert rows[name]["rouge_l"] == 1 and rows[name]["kl"] < 1e-6 and rows[name]["recomputed"] == 1
    assert rows["full-cache"]["computed_share"] == 0 < rows["full-cache"]["kl"]
    assert rows["random"]["recomputed"] == pytest.approx(0.3, abs=0.01) and rows["random"]["fallbacks"] == 0
    assert told["best"]["mode"] == "rekindle" and told["best"]["kl"] < rows["full-cache"]["kl"]
    assert set(told["best_vs_cachecraft"]) >= {"rouge_l_diff", "low", "high"}
    assert told["cachecraft_alpha"] > 0 and 1 <= told["preload_layers"] <= 30 and told["probe_cost"] > 0
    (stream,) = told["streams"].values()
    # Passages that were computed beforehand need not be computed again.
    assert stream["warmed"]["computed_tokens"] < stream["computed_tokens_prefix"] and stream["questions"] == 2
    assert told["endurance"]["questions"] == 6 and len(told["endurance"]["windows"]) == chunk_endurance.QUICK_WINDOWS
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_what_was_calibrated_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.chunks.match.home_folder", lambda: tmp_path / "home")
    monkeypatch.setattr(chunk_calibrate, "ALPHAS", (2.0,))
    arguments = ["chunks", "--calibrate", "--kl", "0.2", "--quick", "--limit", "2", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    ours = told["calibrated"]["rekindle"]
    assert ours["reached"] and ours["best_kl"] <= 0.2 and 0 < ours["budget"] < 1
    one, other = read_questions(None)[:2]
    with Session("smollm2", engine="hf", cache=str(tmp_path / "cache"), reuse="approximate") as session:
        messages = [{"role": "user", "content": other.question}]
        session.chat(messages, documents=[other.paragraphs[0], *one.paragraphs[:2]], max_tokens=1)
        session.flush()
        reply = session.chat(messages, documents=[*one.paragraphs[1::-1], other.paragraphs[1]], max_tokens=1)
    assert reply.reuse.from_chunks > 0 and reply.reuse.calibrated is True
    assert reply.reuse.budget == pytest.approx(told["stored"]["rekindle"])
