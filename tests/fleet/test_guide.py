"""The example of docs/guide/vllm.md, in two processes: vLLM as users run it, with costs as they are measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks, outputs

PAGE = ["docs/guide/vllm.md"]


@pytest.mark.real
def test_the_example_loads_the_second_time(tmp_path: Path) -> None:
    ((_, code),), ((prints,),) = blocks(PAGE, "python"), outputs(PAGE, "python")
    script = tmp_path / "example.py"
    script.write_text(code)
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "REKINDLE_CACHE": str(tmp_path / "kv")}
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, script], env=env, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        said.append(next(line for line in done.stdout.splitlines() if re.search(prints, line)))
    first, second = (re.match(r"(\d+) of (\d+) tokens loaded: (.*)", line) for line in said)
    assert first is not None and second is not None
    assert first[1] == "0"
    assert int(second[1]) == int(second[2]) - 1
    assert first[3] == second[3]
