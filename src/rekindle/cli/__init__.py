"""The `rekindle` command. One file a group of commands; nothing heavy is imported before it is needed."""

from __future__ import annotations

import sys

import typer

from rekindle import __version__
from rekindle.errors import RekindleError

app = typer.Typer(
    name="rekindle",
    help="A language model on your own machine that never prefills the same context twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: it appears in half the time
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rekindle {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line; an error of ours is one sentence on standard error and exit status 1."""
    try:
        app()
    except RekindleError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


# Each module adds its commands to `app`.
from rekindle.cli import (  # noqa: E402, F401
    adapters,
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
    run,
    serve,
    warm,
)
