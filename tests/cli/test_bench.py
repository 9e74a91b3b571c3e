"""`rekindle bench`: cold, warm and restarted starts of one's own model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.test_commands import rekindle

STARTS = ["cold", "engine", "memory", "restart"]


def test_every_start_is_measured(tiny_gguf: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plot.png"
    done = rekindle("bench", str(tiny_gguf), "--threads", "1", "--seconds", "1", "--json", "--plot", str(picture))
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert list(told["first_token"]) == STARTS
    prefix = told["tokens"] - 16  # as long as this machine computes in a moment
    assert prefix in (256, 512, 1024, 2048, 4096)
    for name, one in told["first_token"].items():
        assert one["rounds"] >= 3 and one["min_s"] <= one["median_s"] <= one["max_s"]
        # So small a model may compute sooner than it loads: then nothing is loaded.
        assert one["reused_tokens"] in {"cold": {0}, "engine": {prefix}}.get(name, {0, prefix})
    assert told["first_token"]["cold"]["speedup"] == 1
    assert picture.stat().st_size > 1000


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = rekindle("bench", str(tiny_folder), "--plot", str(tmp_path / "plot.png"))
    assert done.exit_code == 1 and "pip install 'rekindle-llm[bench]'" in str(done.exception)


@pytest.mark.real
def test_the_embedded_model_has_a_table_and_a_new_process_finds_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.cli.bench._SIZES", (96,))
    done = rekindle("bench", "smollm2", "--engine", "hf", "--seconds", "2")
    assert done.exit_code == 0, done.output
    assert all(words in done.stdout for words in ("smollm2", "cold", "in the engine", "from memory", "from disk"))
    assert re.search(r"restarted, from disk.*\b96\b", done.stdout)
