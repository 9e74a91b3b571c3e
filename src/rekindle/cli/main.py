"""The `rekindle` command. One module per group of commands; heavy imports happen inside them."""

from __future__ import annotations

import sys

import typer

from rekindle.cli import (  # noqa: F401  (each module adds its commands to `app`)
    answers,
    apps,
    ask,
    bench,
    cache,
    chat,
    doctor,
    idle,
    knowledge,
    models,
    origin,
    server,
    top,
)
from rekindle.cli.options import app
from rekindle.errors import RekindleError


def main() -> None:
    """Run the command line; an error of ours is one sentence on standard error and exit status 1."""
    try:
        app()
    except RekindleError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
