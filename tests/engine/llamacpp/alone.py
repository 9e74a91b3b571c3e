"""Code in a process of its own: for what may end the process, and for what must not print a word."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[3]
_BEFORE = """
import faulthandler, sys, threading
from pathlib import Path
import numpy as np
from rekindle.core.kv import Span
from rekindle.core.request import Message, Sampling
from rekindle.engine.base import Row
from rekindle.errors import Closed, KvLost, RekindleError, StepRefused
from rekindle.text.base import WrittenReply
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.llamacpp.options import LlamaOptions
from tests.tiny_gguf import files_of
faulthandler.enable()
out = sys.argv[1]
def load(path, **options):
    return LlamaCppEngine(files_of(Path(path)), LlamaOptions(threads=1, device="cpu", **options))
"""


def alone(code: str, *, out: Path | None = None, timeout_seconds: float = 120) -> None:
    """Run it; fails with its output if it ends badly or prints. It may write to the file that it knows as `out`."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", _BEFORE + textwrap.dedent(code), str(out or "")]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    printed = f"{done.stdout}{done.stderr}".strip()
    assert done.returncode == 0 and not printed, f"it ended with {done.returncode} and said:\n{printed[-2000:]}"
