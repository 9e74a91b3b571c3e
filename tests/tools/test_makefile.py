"""What the Makefile runs starts: scripts find what they import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"\$\(BIN\)/python (-m [\w.]+|tools/\w+\.py)", (ROOT / "Makefile").read_text("utf-8"))
OWN = sorted({command for command in COMMANDS if "tools" in command or "benchmarks" in command})


@pytest.mark.parametrize("command", OWN)
def test_a_command_of_the_makefile_imports_all_it_needs(command: str) -> None:
    module = command.removeprefix("-m ")
    # As python sets the path up: the current folder for a module, the script's own folder for a script.
    if command.startswith("-m "):
        code = f"import sys; sys.path[0] = {str(ROOT)!r}; import {module}"
    else:
        code = f"import sys, runpy; sys.path[0] = {str(ROOT / 'tools')!r}; runpy.run_path({module!r}, run_name='x')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_commands_were_found() -> None:
    assert {"-m tools.demo", "-m benchmarks", "tools/ledger.py"} <= set(OWN)
