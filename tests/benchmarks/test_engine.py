"""`python -m benchmarks engine` on a tiny model: it ends and prints its fields. Speed is not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle import __version__


@pytest.mark.long
def test_bench_engine_prints_its_fields(tiny_folder: Path, tmp_path: Path) -> None:
    """On a model too small to say anything about speed: the fields, the plot, the data, nothing else on stdout."""
    from tests.tiny import tiny_model

    folder = tmp_path / "long"
    folder.mkdir()
    for path in tiny_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tiny_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    data = tmp_path / "data"
    data.mkdir()
    (data / "corpus.jsonl").write_text(json.dumps({"text": "Some words. " * 30}) + "\n")
    plot = tmp_path / "plot.png"
    command = [
        sys.executable, "-m", "benchmarks", "engine", "--model", str(folder), "--quick", "--limit", "1",
        "--data", str(data), "--plot", str(plot), "--json", "--device", "cpu",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    fields = json.loads(done.stdout)
    for name in ("prefill_vs_model", "decode_vs_generate", "batch4_speedup", "scattered30_vs_full"):
        assert fields[name] > 0, name
    assert fields["import_seconds"] >= 0 and fields["help_seconds"] > 0
    assert fields["greedy_equal"] is True
    assert fields["suffix_long_ms"] is None and "CUDA" in fields["long_reason"]
    assert fields["machine"]["cores"] and fields["versions"]["rekindle"] == __version__
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_does_not_exist_is_said_in_one_sentence() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks", "nosuch"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no bench 'nosuch'" in done.stderr and "Traceback" not in done.stderr
