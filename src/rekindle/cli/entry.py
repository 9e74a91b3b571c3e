"""What `rekindle` runs. Only the module of the command is imported, and only its options are read: with those of all
commands, each took a tenth of a second longer to start."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import typer

from rekindle.cli.options import app
from rekindle.errors import RekindleError
from rekindle.text.visible import printable

MODULES = {  # command -> module; without a command here, help for instance, all of them
    "adapters": "models", "answers": "answers", "apps": "apps", "ask": "ask", "bench": "bench", "cache": "cache",
    "calibrate": "bench", "chat": "chat", "doctor": "doctor", "explain": "cache", "forget": "knowledge",
    "idle": "idle", "ingest": "knowledge", "knowledge": "knowledge", "list": "models", "origin": "origin",
    "ps": "server", "pull": "models", "rm": "models", "run": "chat", "serve": "server", "stop": "server",
    "top": "top", "warm": "cache",
}  # fmt: skip

_SHARED_FOLDER = """\
note: the package rekindle is installed beside rekindle-llm. It is another program, or this one under its earlier name,
and both keep their files in one folder, where they overwrite each other. Keep this program alone:
  pip uninstall rekindle
  pip install --force-reinstall --no-deps rekindle-llm"""


def main() -> None:
    """Run the command line; an error of ours is one sentence on standard error and exit status 1."""
    if "_REKINDLE_COMPLETE" not in os.environ and _installed("rekindle") and _installed("rekindle_llm"):
        typer.echo(_SHARED_FOLDER, err=True)
    words = sys.argv[1:]
    command = next(iter(words[2:] if words[:1] == ["--config"] else words), "")
    import_module(f"rekindle.cli.{MODULES.get(command, 'main')}")
    try:
        app()
    except RekindleError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        sys.exit(1)


def _installed(name: str) -> bool:
    """Whether a distribution is installed, by the names of folders: importlib.metadata takes fifty times as long."""
    return any(any(Path(folder).glob(f"{name}-[0-9]*-info")) for folder in sys.path)
