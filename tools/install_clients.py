"""Installs the clients of `make test-clients` into .clients/: those of npm, and an environment with those of PyPI.

Their versions are those of tests/clients/versions.json. What cannot be installed is said and left out: its tests are
skipped. Runs with the standard library alone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINNED = ROOT / "tests" / "clients" / "versions.json"
FOLDER = ROOT / ".clients"
PYTHON = FOLDER / "venv" / "bin" / "python"


def main() -> None:
    """Install what is not there in its version."""
    pinned, installed = json.loads(PINNED.read_text("utf-8")), FOLDER / "installed.json"
    done = json.loads(installed.read_text("utf-8")) if installed.exists() else {}
    FOLDER.mkdir(exist_ok=True)
    if not PYTHON.exists():
        run([sys.executable, "-m", "venv", str(FOLDER / "venv")])
    npm = shutil.which("npm")
    if npm is None:
        print("npm is not installed: the clients that come from there are skipped")
    for source, packages in pinned.items():
        for name, version in packages.items():
            if done.get(name) == version or (source == "npm" and npm is None):
                continue
            of_npm = [str(npm), "install", "--prefix", str(FOLDER), "--no-audit", "--no-fund", f"{name}@{version}"]
            of_pypi = [str(PYTHON), "-m", "pip", "install", "-q", f"{name}=={version}"]
            if run(of_npm if source == "npm" else of_pypi):
                done[name] = version
    installed.write_text(json.dumps(done), "utf-8")


def run(command: list[str]) -> bool:
    """Whether a command succeeds; if not, what it printed is printed."""
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        print(f"{' '.join(command)} failed:\n{found.stdout}{found.stderr}")
    return found.returncode == 0


if __name__ == "__main__":
    main()
