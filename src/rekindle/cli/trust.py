"""`rekindle trust`: let a `rekindle.toml` in a project folder set everything."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated

import typer

from rekindle.cli.app import app
from rekindle.cli.options import AsJson
from rekindle.errors import InvalidSetting
from rekindle.settings import SETTINGS, Settings
from rekindle.settings.file import FILE_NAME, SettingsFile, distrust, place_of, trusted_places
from rekindle.settings.file import trust as trust_file


@app.command()
def trust(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help=f"The {FILE_NAME} of a folder that you work in.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Trust it no longer.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the files that are trusted.")] = False,
    json: AsJson = False,
) -> None:
    """Let a rekindle.toml in the current folder set everything until it changes; an untrusted one may set little."""
    if list_:
        _list(as_json=json)
        return
    if file is None:
        raise InvalidSetting(f"Name the file: rekindle trust {FILE_NAME}")
    if remove:
        if not distrust(file):
            raise InvalidSetting(f"{file} was not trusted. `rekindle trust --list` shows what is.")
        typer.echo(f"{place_of(file)} is trusted no longer.")
        return
    if file.name != FILE_NAME:
        raise InvalidSetting(f"Only files called {FILE_NAME} are looked for. Name others in REKINDLE_CONFIG.")
    Settings.load(environment={}, file=file)  # one with mistakes is refused
    found = SettingsFile.read(file)
    trust_file(found)
    typer.echo(f"{found.place} is trusted until it is changed. It sets:")
    for name, value in found.values.items():
        if not SETTINGS[name].anywhere:
            typer.echo(f"  {name} = {json_.dumps(value, default=str)}")  # quoted: it may hold terminal escape codes


def _list(*, as_json: bool) -> None:
    from rekindle.cli.console import print_json

    states = {place: _state(Path(place), digest) for place, digest in trusted_places().items()}
    if as_json:
        print_json([{"file": place, "state": state} for place, state in states.items()])
        return
    for place, state in states.items():
        typer.echo(f"{place}: {state}")


def _state(path: Path, digest: str) -> str:
    try:
        return "trusted" if SettingsFile.read(path).digest == digest else "changed since"
    except InvalidSetting:
        return "cannot be read"
