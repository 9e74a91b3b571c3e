"""What the Makefile runs starts: scripts find what they import."""

from __future__ import annotations

import re
import shutil
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


def make(folder: Path, *arguments: str) -> str:
    """What `make` prints in a folder with the files that it looks at."""
    (folder / ".venv").mkdir(exist_ok=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        if not (folder / name).exists():
            shutil.copy2(ROOT / name, folder)
    command = ["make", "--no-print-directory", "PYTHON=true", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_the_demo_installs_llama_cpp_alone_and_the_tests_the_rest(tmp_path: Path) -> None:
    (installed,) = re.findall(r"install\.py (\S+)", make(tmp_path, "-n", "demo"))
    assert installed == "llamacpp"
    make(tmp_path, ".venv/.demo")
    assert "install.py" not in make(tmp_path, "-n", "demo")
    assert "install.py hf,llamacpp" in make(tmp_path, "-n", "test")


def test_the_demo_installs_nothing_after_the_tests(tmp_path: Path) -> None:
    make(tmp_path, ".venv/.installed")
    assert "install.py" not in make(tmp_path, "-n", "demo") + make(tmp_path, "-n", "test")
