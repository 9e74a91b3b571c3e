"""`rekindle serve`: an OpenAI-compatible server; `rekindle ps` and `rekindle stop`: what is running."""

from __future__ import annotations

import functools
import json as json_
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.options import (
    AsJson,
    Key,
    KeyFileToSend,
    Model,
    app,
    complete_model,
    key_to_send,
    loading_options,
    print_listing,
    server_options,
    serving_options,
    takes,
)
from rekindle.core.size import count_of, human_duration
from rekindle.errors import InvalidSetting, RekindleError
from rekindle.safe_read import read_secret_file
from rekindle.settings import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, API_KEYS_VARIABLE, ServerSettings, Settings

if TYPE_CHECKING:
    from rekindle.models.download import Progress
    from rekindle.server.host import ServedModel
    from rekindle.session.session import Session

_MODEL_MEMORY = "80%"  # where several models share the memory

_FIRST_PERSON, _NOBODY = 500, 65534  # user ids
_NO_SHELLS = ("nologin", "false", "sync", "shutdown", "halt")


@app.command()
@takes(without={"adapter"}, server=server_options, serving=serving_options, loading=loading_options)
def serve(
    models: Annotated[list[str], Model.__metadata__[0]],
    loading: dict[str, Any],
    serving: dict[str, Any],
    server: dict[str, Any],
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must send, or NAME=KEY; each is a tenant. Repeatable.")
    ] = None,
    admin_key: Annotated[list[str] | None, typer.Option(help="A key that may see and do everything.")] = None,
    admin_key_file: Annotated[
        str | None, typer.Option(help=f"A file with such keys, one a line. Also the variable {ADMIN_KEY_VARIABLE}.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            "--lora-modules",
            help="Serve this LoRA adapter as a model too: NAME=PATH, NAME=PATH,scale=0.5, or a name known from "
            "`rekindle adapters`; of another model than the first MODEL:NAME=PATH. Repeatable.",
        ),
    ] = None,
) -> None:
    """Serve models with their cache to clients of OpenAI, Anthropic, Ollama and llama.cpp, until Ctrl-C or SIGTERM.

    The first is loaded at once and answers requests that name none; the others are loaded when a request names them,
    within --model-memory."""
    from rekindle.cli.console import logged_progress, notes, progress
    from rekindle.daemon.private_socket import SUPPORTED
    from rekindle.daemon.spec import DaemonSpec
    from rekindle.engine.base import describe_context
    from rekindle.server.auth import ApiKeys, check_settings
    from rekindle.server.serve import Server
    from rekindle.server.server_log import logging_to_stderr
    from rekindle.server.service import DEFAULT_PARALLEL
    from rekindle.session.session import Session
    from rekindle.session.session_group import SessionGroup

    loading |= serving
    known, settings = Settings.load(loading), ServerSettings.load(server)
    keys = ApiKeys(
        [*(api_key or ()), *_read_keys(settings.api_key_file, API_KEYS_VARIABLE)],
        [*(admin_key or ()), *_read_keys(admin_key_file, ADMIN_KEY_VARIABLE)],
        tenant=known.tenant,
    )
    check_settings(settings, keys)  # before a model is loaded
    if known.parallel is None:
        loading["parallel"] = DEFAULT_PARALLEL
    log, as_json = logging.getLogger("rekindle.serve"), settings.log_format == "json"
    group = None
    if len(models) > 1 or settings.model_memory is not None:
        group = SessionGroup(settings.model_memory or _MODEL_MEMORY, known)

    def say(line: str) -> None:
        if as_json:
            log.info("%s", line)
        else:
            notes.print(line, soft_wrap=True)

    with ExitStack() as opened:
        opened.enter_context(logging_to_stderr(settings.log_format))

        def open_session(model: str, report: Progress) -> Session:
            started = time.perf_counter()
            with ExitStack() as shown:
                bars = notes.is_terminal and not as_json
                show = shown.enter_context(progress(model)) if bars else logged_progress(model, log.info)
                if not bars:
                    log.info("starting: %s", model)

                def both(stage: str, done: int, total: int) -> None:
                    report(stage, done, total)
                    show(stage, done, total)

                session = Session(model, **loading, progress=both, group=group)
            seconds = time.perf_counter() - started
            say(f"{session.engine.name}: {describe_context(session.engine)}, ready after {seconds:.1f} s")
            if model == models[0] and SUPPORTED:
                from rekindle.daemon.answering import accepting_commands

                opened.enter_context(accepting_commands(session, DaemonSpec.of(model, session.settings)))
            return session

        running = Server(_served(models, adapter or (), open_session), settings, keys, None, group, known)
        names = ", ".join(running.host.models)
        page = f"its page: {running.url}/, " if settings.page else ""
        say(f"{names} at {running.url}/v1 ({page}its endpoints: {running.url}/docs)")
        if not keys and _others_are_here():
            say("Every user of this machine can use this server: it has no API key. Give it one with --api-key-file.")
        running.run()
        say(_what_is_kept(known))


def _what_is_kept(settings: Settings) -> str:
    """What the next start finds, for people who stop a server."""
    from rekindle.cli.cache import open_cache
    from rekindle.machine import cache_folder
    from rekindle.store import report

    if "off" in (settings.cache, settings.reuse):
        return "stopped; no KV is kept, because the cache is off"
    try:
        with open_cache(
            Path(settings.cache or cache_folder()), None if settings.key_file is None else Path(settings.key_file)
        ) as store:
            found = report.summary(store)
    except RekindleError as error:
        return f"stopped; no KV is kept: {error}"
    return f"stopped; the KV of {count_of(found['tokens'], 'token')} is kept in {store.folder} for the next start"


def _others_are_here() -> bool:
    """Whether other people have accounts on this machine."""
    if sys.platform == "win32":
        return False
    import pwd

    people = [user for user in pwd.getpwall() if user.pw_uid >= _FIRST_PERSON and user.pw_uid != _NOBODY]
    return any(user.pw_uid != os.geteuid() and not user.pw_shell.endswith(_NO_SHELLS) for user in people)


def _served(
    specs: Sequence[str], adapters: Sequence[str], open_session: Callable[[str, Progress], Session]
) -> list[ServedModel]:
    """The models that are served, with their adapters; the first is the default. Raises `InvalidSetting`, and
    `ModelError` for a model that is neither here nor can be pulled."""
    from rekindle.models import adapter_registry
    from rekindle.models.sources import name_of
    from rekindle.server.host import ServedModel

    names = [name_of(spec) for spec in specs]
    texts: dict[str, list[str]] = {name: [] for name in names}
    if len(texts) < len(names):
        raise InvalidSetting(f"Two of the models have the same name ({', '.join(names)}). Serve one of them.")
    for given in adapters:
        owner = next((name for name in names if given.startswith(f"{name}:")), None)
        text = given if owner is None else given.removeprefix(f"{owner}:")
        if (adapter_registry.parse(text).name if "=" in text else text) in texts:
            raise InvalidSetting(f"--adapter {given}: that is the name of a model itself. Use another.")
        texts[owner or names[0]].append(text)
    return [
        ServedModel(name, functools.partial(open_session, spec), texts[name])
        for name, spec in zip(names, specs, strict=True)
    ]


def _read_keys(path: str | None, variable: str) -> list[str]:
    texts = [os.environ.get(variable, "")]
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
    api_key: Key = None,
    api_key_file: KeyFileToSend = None,
    json: AsJson = False,
) -> None:
    """List what this user is running: servers, and the model that commands left in the background."""
    from rekindle.daemon.client import running

    key = key_to_send(api_key, api_key_file)
    found = [_ask(url, key) for url in ([server] if server else _known_servers())]
    if server is None:
        found += [{"url": None, "state": _state(status), **status} for _, status in running()]
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "server": lambda one: one["url"] or "background",
        "model": _models,
        "state": lambda one: one["state"],
        "answering": _load,
        "waiting": lambda one: one.get("waiting", "-"),
        "up": lambda one: human_duration(one["uptime_seconds"]) if "uptime_seconds" in one else "-",
    }
    nothing = "No server is running, and no model is loaded in the background."
    print_listing(found, columns, json, dict, empty=nothing)


def _state(status: dict[str, Any]) -> str:
    left = status["leaves_in_seconds"]
    state = "loaded" if status["loaded"] else "loading"
    return state if left is None else f"{state}, leaves in {human_duration(left)}"


def _models(one: dict[str, Any]) -> str:
    """The models of a server; those of several that are loaded are marked."""
    several = one.get("models", ())
    if len(several) < 2:
        return str(one.get("model", "-"))
    return ", ".join(f"{model['model']}{'*' if model['loaded'] else ''}" for model in several)


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
            return {"url": url, "state": f"needs a key: {API_KEY_VARIABLE} or --api-key-file"}
        about: dict[str, Any] = answer.raise_for_status().json()
    except InvalidSetting as error:
        return {"url": url, "state": str(error)}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return {"url": url, "state": f"does not answer ({type(error).__name__})"}
    loaded = any(model.get("loaded") for model in about.get("models", [about]))
    return {"url": url, "state": "loaded" if loaded else "unloaded", **about}
