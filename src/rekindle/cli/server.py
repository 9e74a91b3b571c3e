"""`rekindle serve`: an OpenAI-compatible server; `rekindle ps` and `rekindle stop`: what is running."""

from __future__ import annotations

import json as json_
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle.cli.options import (
    AsJson,
    Model,
    app,
    complete_model,
    loading_options,
    print_json,
    print_table,
    server_options,
    serving_options,
    takes,
)
from rekindle.core.size import human_duration
from rekindle.errors import InvalidSetting
from rekindle.safe_read import read_secret_file
from rekindle.settings import API_KEYS_VARIABLE, ServerSettings, Settings


@app.command()
@takes(without={"adapter"}, server=server_options, serving=serving_options, loading=loading_options)
def serve(
    model: Model,
    loading: dict[str, Any],
    serving: dict[str, Any],
    server: dict[str, Any],
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must send, or NAME=KEY; each is a tenant. Repeatable.")
    ] = None,
    admin_key: Annotated[list[str] | None, typer.Option(help="A key that may see and do everything.")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            "--lora-modules",
            help="Serve this LoRA adapter as a model too: NAME=PATH, NAME=PATH,scale=0.5, or a name known from "
            "`rekindle adapters`. Repeatable.",
        ),
    ] = None,
) -> None:
    """Serve a model with its cache to clients of OpenAI and Anthropic. Ctrl-C or SIGTERM stops it and loses nothing."""
    from rekindle.cli.console import notes, progress
    from rekindle.daemon.private_socket import SUPPORTED
    from rekindle.daemon.spec import DaemonSpec
    from rekindle.server.auth import ApiKeys, check_settings
    from rekindle.server.serve import Server
    from rekindle.server.service import DEFAULT_PARALLEL
    from rekindle.session.session import Session

    loading |= serving
    known, settings = Settings.load(loading), ServerSettings.load(server)
    keys = ApiKeys([*(api_key or ()), *_read_keys(settings.api_key_file)], admin_key or (), tenant=known.tenant)
    check_settings(settings, keys)  # before the model is loaded
    if known.parallel is None:
        loading["parallel"] = DEFAULT_PARALLEL
    with progress(model) as report:
        session = Session(model, **loading, progress=report)
    for text in adapter or ():
        if session.adapters.load_text(text).name == session.engine.name:
            raise InvalidSetting(f"--adapter {text}: that is the name of the model itself. Use another.")
    running = Server(session, settings, keys)
    page = f"its page: {running.url}/, " if settings.page else ""
    notes.print(f"{session.engine.name} at {running.url}/v1 ({page}its endpoints: {running.url}/docs)", soft_wrap=True)
    with ExitStack() as opened:
        if SUPPORTED:
            from rekindle.daemon.answering import accepting_commands

            opened.enter_context(accepting_commands(session, DaemonSpec.of(model, session.settings)))
        running.run()


def _read_keys(path: str | None) -> list[str]:
    texts = [os.environ.get(API_KEYS_VARIABLE, "")]
    if path is not None:
        try:
            texts.append(read_secret_file(Path(path), "The key file").decode())
        except UnicodeDecodeError as error:
            raise InvalidSetting(f"The key file {path} cannot be read: {error.reason}.") from None
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@app.command()
def ps(
    server: Annotated[str | None, typer.Option(help="Ask this server only.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The key to send, for servers that need one.")] = None,
    json: AsJson = False,
) -> None:
    """List what this user is running: servers, and the model that commands left in the background."""
    from rekindle.daemon.client import running

    found = [_ask(url, api_key) for url in ([server] if server else _known_servers())]
    if server is None:
        found += [{"url": None, "state": _state(status), **status} for _, status in running()]
    if json:
        print_json(found)
        return
    lines = [
        [
            one["url"] or "background",
            one.get("model", "-"),
            one["state"],
            _load(one),
            str(one.get("waiting", "-")),
            human_duration(one["uptime_seconds"]) if "uptime_seconds" in one else "-",
        ]
        for one in found
    ]
    print_table(
        ["server", "model", "state", "answering", "waiting", "up"],
        lines,
        empty="No server is running, and no model is loaded in the background.",
    )


def _state(status: dict[str, Any]) -> str:
    left = status["leaves_in_seconds"]
    state = "loaded" if status["loaded"] else "loading"
    return state if left is None else f"{state}, leaves in {human_duration(left)}"


def _load(one: dict[str, Any]) -> str:
    if "running" not in one:
        return "-"
    return f"{one['running']} of {one['parallel']}" if "parallel" in one else str(one["running"])


@app.command()
def stop(
    model: Annotated[str | None, typer.Argument(help="The model; default: any.", autocompletion=complete_model)] = None,
) -> None:
    """Free the model that commands left in the background, after the replies it is writing."""
    from rekindle.daemon.client import ask, running

    stopped = [
        status["model"]
        for path, status in running()
        if model in (None, status["model"]) and ask(path, {"kind": "leave", "only_if_idle": False})
    ]
    for name in stopped:
        typer.echo(f"{name} stopped")
    if not stopped:
        what = "No model is" if model is None else f"{model} is not"
        typer.echo(f"{what} loaded in the background. Servers stop with Ctrl-C, or SIGTERM.")


def _known_servers() -> list[str]:
    import psutil

    from rekindle.server.serve import servers_folder

    urls = []
    for path in sorted(servers_folder().glob("*.json")):
        try:
            about = json_.loads(path.read_text("utf-8"))
            url, process = str(about["url"]), int(about["pid"])
            ours = path.name == f"{process}.json" and not path.is_symlink()
            alive = psutil.pid_exists(process) or not ours
            urls += [url] if ours and alive else []
        except (OSError, ValueError, KeyError, TypeError):
            alive = True  # being written, or not ours
        if not alive:
            path.unlink(missing_ok=True)
    return urls


def _ask(url: str, api_key: str | None) -> dict[str, Any]:
    import httpx

    from rekindle.cli.server_client import make_client

    # A server that listens on all addresses is asked on the loopback one.
    here = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    try:
        with make_client(here.rstrip("/"), api_key, httpx.Timeout(5.0)) as client:
            answer = client.get("/v1/rekindle/server")
        if answer.status_code in (401, 403):
            return {"url": url, "state": "needs a key: --api-key"}
        about: dict[str, Any] = answer.raise_for_status().json()
    except InvalidSetting as error:
        return {"url": url, "state": str(error)}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return {"url": url, "state": f"does not answer ({type(error).__name__})"}
    return {"url": url, "state": "loaded" if about.get("loaded") else "unloaded", **about}
