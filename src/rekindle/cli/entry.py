"""What `rekindle` runs. Only the module of the command is imported, and only its options are read: with those of all
commands, each took a tenth of a second longer to start."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from rekindle.cli.options import app
from rekindle.errors import RekindleError

MODULES = {  # command -> module; without a command here, help for instance, all of them
    "adapters": "models", "answers": "answers", "apps": "apps", "ask": "ask", "bench": "bench", "cache": "cache",
    "calibrate": "bench", "chat": "chat", "doctor": "doctor", "explain": "cache", "forget": "knowledge",
    "idle": "idle", "ingest": "knowledge", "knowledge": "knowledge", "list": "models", "origin": "origin",
    "ps": "server", "pull": "models", "rm": "models", "run": "chat", "serve": "server", "stop": "server",
    "top": "top", "warm": "cache",
}  # fmt: skip


def main() -> None:
    """Run the command line; an error of ours is one sentence on standard error and exit status 1."""
    words = sys.argv[1:]
    command = next(iter(words[2:] if words[:1] == ["--config"] else words), "")
    import_module(f"rekindle.cli.{MODULES.get(command, 'main')}")
    try:
        app()
    except RekindleError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
