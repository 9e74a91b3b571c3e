"""KV that one build of llama.cpp wrote and another reads: the same bytes, or a miss. `make test-llamacpp LIBRARY=...`
reads with that build; otherwise the other build is the wheel's own file under another name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp")

from rekindle.engine.llamacpp import c_api
from tests.tiny_gguf import write_llama

pytestmark = [pytest.mark.llamacpp]

ASK = """
import json, sys
from rekindle import Session
task = json.loads(sys.argv[1])
with Session(task["model"], engine="llamacpp", threads=1, device="cpu", **task["settings"]) as session:
    cold = session.generate(task["tokens"], max_tokens=8, min_tokens=8, reuse="off")
    reply = session.generate(task["tokens"], max_tokens=8, min_tokens=8)
    session.flush()
    print(json.dumps({"cold": list(cold.tokens), "tokens": list(reply.tokens), "reused": reply.reuse.reused}))
"""


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_kv_of_one_build_is_never_misread_by_another(tmp_path: Path, kv_type: str) -> None:
    model = write_llama(tmp_path / "wide.gguf", dim=64)
    (wheel, _), *_ = c_api._candidates(None)
    other = os.environ.get("TEST_LLAMA_LIBRARY")
    if other is None:
        (tmp_path / "libllama.so").symlink_to(wheel)
        other = str(tmp_path / "libllama.so")

    def ask(library: str) -> dict[str, Any]:
        settings = {"cache": str(tmp_path / "cache"), "kv_type": kv_type, "llama_library": library}
        task = {"model": str(model), "tokens": [token % 200 + 3 for token in range(90)], "settings": settings}
        done = subprocess.run(
            [sys.executable, "-c", ASK, json.dumps(task)], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    first, theirs, again = ask(str(wheel)), ask(other), ask(str(wheel))
    assert first["reused"] == 0 and theirs["reused"] == 0, "another build may round otherwise"
    assert again["reused"] >= 80, "and what the first one kept is still its own"
    assert first["tokens"] == again["tokens"] == first["cold"] and theirs["tokens"] == theirs["cold"]
