"""`rekindle serve`: an OpenAI-compatible server; `rekindle ps`: those that run."""

from __future__ import annotations

import json as json_
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle.cli import app
from rekindle.cli.options import AsJson, Model, loading_options, takes
from rekindle.errors import InvalidSetting
from rekindle.settings import doc_of

KEYS_VARIABLE = "REKINDLE_API_KEYS"
_DEFAULT_PORT = 8377


@app.command()
@takes(without={"adapter"}, loading=loading_options)
def serve(
    model: Model,
    loading: dict[str, Any],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.")] = _DEFAULT_PORT,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that clients must send, or NAME=KEY; each is a tenant. May be given several times."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help=f"A file with such keys, one a line. Also the variable {KEYS_VARIABLE}.")
    ] = None,
    admin_key: Annotated[list[str] | None, typer.Option(help="A key that may see and do everything.")] = None,
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Let others in without a key.")
    ] = False,
    allowed_hosts: Annotated[
        list[str] | None, typer.Option(help="Answer to this name in the Host header; * to any. Several times.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Let web pages of this origin read replies. Several times.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            "--lora-modules",
            help="Serve this LoRA adapter as a model too: NAME=PATH, NAME=PATH,scale=0.5, or a name known from "
            "`rekindle adapters`. Several times.",
        ),
    ] = None,
    parallel: Annotated[int | None, typer.Option(help=doc_of("parallel"))] = None,
    queue: Annotated[int, typer.Option(help="How many requests may wait; more are refused with 429.")] = 64,
    max_body: Annotated[str, typer.Option(help="The largest body that is read.")] = "8MB",
    max_reply: Annotated[int | None, typer.Option(help="The longest reply, in tokens.")] = None,
    timeout: Annotated[str, typer.Option(help="The longest a request may take, waiting included.")] = "10m",
    stop_timeout: Annotated[str, typer.Option(help="How long replies may go on after a signal to stop.")] = "15s",
    keep_alive: Annotated[str | None, typer.Option(help=doc_of("keep_alive"))] = None,
    idle: Annotated[
        bool, typer.Option("--idle", help="Work ahead while nobody asks, as `rekindle idle` does.")
    ] = False,
    quiet: Annotated[str, typer.Option(help="With --idle: begin when nobody asked for so long.")] = "30s",
    on_battery: Annotated[bool, typer.Option("--on-battery", help="With --idle: also without mains.")] = False,
) -> None:
    """Serve a model to OpenAI's clients, with its cache. Ctrl-C or SIGTERM stops it and loses nothing."""
    from rekindle.cli.console import notes, progress
    from rekindle.core.size import parse_duration, parse_limit
    from rekindle.predict.populate import Conditions
    from rekindle.run.idle import IdleOptions
    from rekindle.run.session import Session
    from rekindle.server.keys import Keys
    from rekindle.server.serve import Server
    from rekindle.server.settings import DEFAULT_PARALLEL, ServerSettings
    from rekindle.settings import Settings

    loading = {**loading, "parallel": parallel, "keep_alive": keep_alive}
    known = Settings.load(loading)
    settings = ServerSettings(
        host=host,
        port=port,
        keys=Keys([*(api_key or ()), *_read_keys(api_key_file)], admin_key or (), tenant=known.tenant),
        allow_unauthenticated=allow_unauthenticated,
        allowed_hosts=tuple(allowed_hosts or ()),
        origins=tuple(cors_origin or ()),
        queue=queue,
        body_bytes=parse_limit(max_body).resolve(0),
        most_tokens=max_reply,
        timeout_seconds=parse_duration(timeout),
        stop_seconds=parse_duration(stop_timeout),
        ahead=IdleOptions(conditions=Conditions(on_battery=on_battery)) if idle else None,
        quiet_seconds=parse_duration(quiet),
    )
    if known.parallel is None:
        loading["parallel"] = DEFAULT_PARALLEL
    with progress(model) as report:
        session = Session(model, **loading, progress=report)
    for text in adapter or ():
        if session.adapters.load_text(text).name == session.engine.name:
            raise InvalidSetting(f"--adapter {text}: that is the name of the model itself. Use another.")
    server = Server(session, settings)
    notes.print(f"{session.engine.name} at {server.url}/v1 ({server.url}/docs tells more)", soft_wrap=True)
    server.run()


def _read_keys(path: Path | None) -> list[str]:
    texts = [os.environ.get(KEYS_VARIABLE, "")]
    if path is not None:
        try:
            texts.append(path.expanduser().read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSetting(f"The key file {path} cannot be read: {error}.") from None
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@app.command()
def ps(
    server: Annotated[str | None, typer.Option(help="Ask this server only.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The key to send, for servers that want one.")] = None,
    json: AsJson = False,
) -> None:
    """List the servers of this user that run: address, model, what they are doing."""
    from rekindle.cli.console import print_json, print_table

    found = [_ask(url, api_key) for url in ([server] if server else _known_servers())]
    if json:
        print_json(found)
        return
    lines = [
        [
            one["url"],
            one.get("model", "-"),
            one["state"],
            f"{one['running']} of {one['parallel']}" if "running" in one else "-",
            str(one.get("waiting", "-")),
            _duration(one.get("uptime_seconds")),
        ]
        for one in found
    ]
    print_table(["server", "model", "state", "answering", "waiting", "up"], lines)


def _known_servers() -> list[str]:
    import psutil

    from rekindle.server.serve import servers_folder

    urls = []
    for path in sorted(servers_folder().glob("*.json")):
        try:
            about = json_.loads(path.read_text("utf-8"))
            alive = psutil.pid_exists(int(about["pid"]))
            urls += [str(about["url"])] if alive else []
        except (OSError, ValueError, KeyError, TypeError):
            alive = True  # being written, or not ours to judge
        if not alive:
            path.unlink(missing_ok=True)
    return urls


def _ask(url: str, api_key: str | None) -> dict[str, Any]:
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/rekindle/server", headers=headers, timeout=5.0)
        if answer.status_code in (401, 403):
            return {"url": url, "state": "wants a key: --api-key"}
        about: dict[str, Any] = answer.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return {"url": url, "state": f"does not answer ({type(error).__name__})"}
    return {"url": url, "state": "loaded" if about.get("loaded") else "resting", **about}


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
