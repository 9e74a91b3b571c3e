"""`rekindle apps`: the apps that send requests, and their states. Needs no model and no engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rekindle.cli.cache import RENAMED, Folder, KeyFile, is_unused, open_cache
from rekindle.cli.options import AsJson, command_group, print_listing
from rekindle.core.scope import Scope, scope_of
from rekindle.settings import Settings

if TYPE_CHECKING:
    from rekindle.apps import App

apps = command_group("apps", "List the apps that send requests, set their states, watch their processes.", RENAMED)

Tenant = Annotated[str | None, typer.Option(help="The tenant of the apps; default: that of the settings.")]
Salt = Annotated[str | None, typer.Option(help="The salt of the apps; default: that of the settings.")]


@apps.command("ls")
def list_apps(
    every: Annotated[bool, typer.Option("--all", help="Of all tenants and salts.")] = False,
    tenant: Tenant = None,
    cache_salt: Salt = None,
    folder: Folder = None,
    key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """List apps: state, and requests."""
    from rekindle.apps import list_apps, mark_ended

    found: list[App] = []
    if not is_unused(folder):
        with open_cache(folder, key_file) as store:
            mark_ended(store)
            found = list_apps(store, None if every else _scope(tenant, cache_salt))
    now = time.time()
    columns: dict[str, Callable[[App], object]] = {
        "app": lambda one: one.name,
        "tenant": lambda one: one.tenant,
        "salt": lambda one: one.salt_digest[:8],
        "state": lambda one: one.state,
        "since": lambda one: f"{max(0.0, now - one.since):,.0f} s",
        "requests": lambda one: one.requests,
        "process": lambda one: one.process or "",
    }
    print_listing(found, columns, json, lambda one: one.as_dict(), empty="No app has sent a request yet.")


@apps.command("set")
def set_app(
    name: Annotated[str, typer.Argument(metavar="APP", help="The app's app_id.")],
    state: Annotated[str, typer.Argument(help="foreground, background or killed.")],
    tenant: Tenant = None,
    cache_salt: Salt = None,
    folder: Folder = None,
    key_file: KeyFile = None,
) -> None:
    """Set the state of an app. KV that only a killed app used is evicted soon; what others use stays."""
    from rekindle.apps import Apps

    with open_cache(folder, key_file, write=True, limit=Settings.load().disk_limit) as store:
        now = Apps(store, _scope(tenant, cache_salt)).set(name, state)
    typer.echo(f"{now.name} is {now.state}")


@apps.command("watch")
def watch_app(
    process: Annotated[int, typer.Argument(metavar="PID", help="The id of the app's process.")],
    name: Annotated[str | None, typer.Option("--app", help="The app; default: the name of the process.")] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Wait until it ends; else the next process that uses the cache notices."),
    ] = True,
    tenant: Tenant = None,
    cache_salt: Salt = None,
    folder: Folder = None,
    key_file: KeyFile = None,
) -> None:
    """Mark an app killed when its process ends."""
    from rekindle.apps import process_name, wait_for_end, watch_process

    own = name or process_name(process)
    with open_cache(folder, key_file, write=True, limit=Settings.load().disk_limit) as store:
        watch_process(store, _scope(tenant, cache_salt), own, process)
        typer.echo(f"{own} is marked killed when process {process} ends")
        if wait and wait_for_end(store, _scope(tenant, cache_salt), own):
            typer.echo(f"{own} is killed")


def _scope(tenant: str | None, cache_salt: str | None) -> Scope:
    return scope_of(Settings.load(), tenant, cache_salt)
