"""`rekindle apps`: the apps that ask, and the states they are in. Needs no model and no engine."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from rekindle.cli import app
from rekindle.cli.cache import Folder, KeyFile, opened
from rekindle.cli.options import AsJson

apps = typer.Typer(
    help="Look at the apps that ask, say in what state they are, watch their processes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(apps, name="apps")

Tenant = Annotated[str | None, typer.Option(help="Whose apps; without it, the tenant of the settings.")]


@apps.command("ls")
def list_apps(
    every: Annotated[bool, typer.Option("--all", help="Of all tenants.")] = False,
    tenant: Tenant = None,
    folder: Folder = None,
    key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """List the apps that asked: state, requests, and how much KV is kept for them, alone and with others."""
    from rekindle.apps.known import listed
    from rekindle.apps.watch import mark_ended
    from rekindle.cli.console import print_json, print_table
    from rekindle.core.size import human_bytes

    with opened(folder, key_file) as store:
        mark_ended(store)
        found = listed(store, None if every else _tenant(tenant))
    if json:
        print_json([one.as_dict() for one in found])
        return
    now = time.time()
    print_table(
        ["app", "tenant", "state", "since", "requests", "KV", "alone", "process"],
        [
            [
                *(one.name, one.tenant, one.state, f"{max(0.0, now - one.since):,.0f} s", str(one.requests)),
                *(human_bytes(one.size_bytes), human_bytes(one.private_bytes)),
                "" if one.process is None else str(one.process),
            ]
            for one in found
        ],
    )


@apps.command("set")
def set_app(
    name: Annotated[str, typer.Argument(metavar="APP", help="The app, as it calls itself in app_id.")],
    state: Annotated[str, typer.Argument(help="foreground, background, killed, or as iOS and Android call it.")],
    tenant: Tenant = None,
    folder: Folder = None,
    key_file: KeyFile = None,
) -> None:
    """Say in what state an app is. What a killed app alone has used goes soon; what others use too stays."""
    from rekindle.apps.known import Apps
    from rekindle.settings import Settings

    with opened(folder, key_file, write=True, limit=Settings.load().disk_limit) as store:
        now = Apps(store, _tenant(tenant)).set(name, state)
    typer.echo(f"{now.name} is {now.state}")


@apps.command("watch")
def watch_app(
    process: Annotated[int, typer.Argument(metavar="PID", help="The id of the app's process.")],
    name: Annotated[str | None, typer.Option("--app", help="The app; without it, the name of the process.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Stay until it ends; else whoever uses the cache looks after it.")
    ] = True,
    tenant: Tenant = None,
    folder: Folder = None,
    key_file: KeyFile = None,
) -> None:
    """Mark an app killed when its process ends."""
    from rekindle.apps.watch import process_name, wait_for_end, watch
    from rekindle.settings import Settings

    own = name or process_name(process)
    with opened(folder, key_file, write=True, limit=Settings.load().disk_limit) as store:
        watch(store, _tenant(tenant), own, process)
        typer.echo(f"{own} lives as long as process {process}")
        if wait and wait_for_end(store, _tenant(tenant), own):
            typer.echo(f"{own} is killed")


def _tenant(given: str | None) -> str:
    from rekindle.settings import Settings

    return Settings.load().tenant if given is None else given
