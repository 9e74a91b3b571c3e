"""The root of the command line; every module of commands adds its own."""

from __future__ import annotations

import typer

from rekindle import __version__

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
