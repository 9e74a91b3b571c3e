"""`tools/install.py` runs before anything is installed, and says what it does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.install import PACKAGE, run

ROOT = Path(__file__).parents[2]


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = "import runpy; runpy.run_path('tools/install.py', run_name='x')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_step_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    run("packages", [sys.executable, "-c", "print('Downloading numpy-2.4.6-cp311.whl (16.0 MB)')"])
    assert re.fullmatch(r"packages \.\.\. \d+ s\n", capsys.readouterr().out)


def test_a_step_that_fails_ends_with_what_it_printed() -> None:
    with pytest.raises(SystemExit, match="no such thing"):
        run("packages", [sys.executable, "-c", "print('no such thing'); raise SystemExit(1)"])


@pytest.mark.parametrize("how", ["Downloading", "Using cached"])
def test_packages_and_their_sizes_are_read_from_what_pip_prints(how: str) -> None:
    found = PACKAGE.match(f"  {how} pydantic_core-2.50.4-cp311-cp311-manylinux_2_17_aarch64.whl (2.1 MB)\n")
    assert found is not None and found.groups() == ("pydantic_core", "(2.1 MB)")
