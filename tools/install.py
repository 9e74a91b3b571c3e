"""Makes .venv and installs the package into it, a line for each step: `python tools/install.py EXTRAS [FOLDER]...`.

Each FOLDER has another package, as in contrib/.

Runs before anything is installed: on any Python, with the standard library alone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

VENV = Path(".venv")
PIP = ("pip", "install", "--disable-pip-version-check", "--no-compile", "-c", "constraints.txt")
PACKAGE = re.compile(r"\s*(?:Downloading|Using cached) (\w+)-\S+ (\(.*\))")


def main() -> None:
    """Install what is missing."""
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit(
            f"Rekindle needs Python 3.10 or later, and this is {sys.version.split()[0]}. Give one: PYTHON=python3.12"
        )
    python = VENV / "bin" / "python"
    if not python.exists():
        run(f"environment {VENV}", [sys.executable, "-m", "venv", str(VENV)])
    if [*VENV.glob("lib/*/site-packages/rekindle-[0-9]*-info")]:
        run("without the package's earlier name", [str(python), "-m", "pip", "uninstall", "--yes", "rekindle"])
    own = [part for folder in (f".[{sys.argv[1]}]", *sys.argv[2:]) for part in ("-e", folder)]
    run("packages", [str(python), "-m", *PIP, *own])


def run(title: str, command: list[str]) -> None:
    """Run a step and print its seconds; on a terminal also what it fetches. If it fails, exit with what it printed."""
    started, printed = time.monotonic(), []
    begin = "\r\033[K" if sys.stdout.isatty() else ""
    print(f"{title} ...", end="", flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            printed.append(line)
            now = PACKAGE.match(line)
            if begin and now:
                shown = f"{title} ... {now[1]} {now[2]}"[: shutil.get_terminal_size().columns - 1]
                print(f"{begin}{shown}", end="", flush=True)
    print(f"{begin}{title} ..." if begin else "", f"{time.monotonic() - started:.0f} s")
    if process.returncode:
        sys.exit("".join(printed))


if __name__ == "__main__":
    main()
