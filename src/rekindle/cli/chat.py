"""`rekindle run`: one prompt, one reply; `rekindle chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli import STARTED
from rekindle.cli.options import (
    AsJson,
    Key,
    KeyFileToSend,
    Model,
    OptionalModel,
    System,
    app,
    daemon_options,
    key_to_send,
    loading_options,
    print_json,
    read_document,
    read_standard_input,
    sampling_options,
    takes,
)
from rekindle.core.request import PromptLike, as_messages
from rekindle.errors import Cancelled, InvalidPrompt, InvalidSetting, RequestError
from rekindle.text.visible import printable

if TYPE_CHECKING:
    from rekindle.daemon.jobs import JobRunner

_HELP = "/system TEXT sets the system message, /clear starts over, /bye leaves. Ctrl-C stops a reply."


@app.command()
@takes(sampling=sampling_options, loading=loading_options, daemon=daemon_options)
def chat(
    sampling: dict[str, Any],
    loading: dict[str, Any],
    daemon: dict[str, Any],
    model: OptionalModel = None,
    system: System = None,
    server: Annotated[str | None, typer.Option(help="Use the running server at this address.")] = None,
    api_key: Key = None,
    api_key_file: KeyFileToSend = None,
    json: AsJson = False,
) -> None:
    """Talk to a model. When the chat outgrows the context, its oldest messages are dropped, not the system message."""
    from rekindle.cli.console import waiting
    from rekindle.cli.runner import WaitedFor, open_runner
    from rekindle.cli.server_client import ServerRunner

    if server is not None:
        if given := loading | daemon:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise InvalidSetting(f"{names}: these options belong to the server. Give them to `rekindle serve`.")
        with ServerRunner(server, key_to_send(api_key, api_key_file), model) as runner, waiting("") as (_, line):
            _Conversation(WaitedFor(runner, line), sampling, system, as_json=json).talk()
        return
    if model is None:
        raise InvalidSetting("Name a model (rekindle chat smollm2), or a server (--server URL).")
    with open_runner(model, loading, daemon) as runner:
        _Conversation(runner, {**sampling, "overflow": "drop-oldest"}, system, as_json=json).talk()


class _Conversation:
    """The messages so far, and the commands."""

    def __init__(self, runner: JobRunner, options: dict[str, Any], system: str | None, *, as_json: bool) -> None:
        self._runner = runner
        self._options = options
        self._json = as_json
        self._system = system
        self._turns: list[dict[str, str]] = []

    def talk(self) -> None:
        """Read and answer lines until the input ends or /bye."""
        terminal = sys.stdin.isatty()
        if terminal:
            typer.echo(_HELP, err=True)
        while True:
            try:
                line = input("> " if terminal else "").strip()
            except (EOFError, KeyboardInterrupt):
                if terminal:
                    typer.echo(err=True)  # the shell's prompt begins on a line of its own
                return
            if line == "/bye":
                return
            if line:
                self._take(line)

    def _take(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if line == "/clear":
            self._turns.clear()
            typer.echo("The conversation starts over.", err=True)
        elif command == "/system":
            self._system = rest.strip() or None
            typer.echo("System message set." if self._system else "System message removed.", err=True)
        elif line.startswith("/"):
            unknown = "" if line == "/help" else f"Unknown command {command}. "
            typer.echo(f"{unknown}{_HELP}", err=True)
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        from rekindle.cli.runner import ReplyPrinter

        lead = [{"role": "system", "content": self._system}] if self._system else []
        asked = {"role": "user", "content": line}
        job = {"kind": "generate", "prompt": [*lead, *self._turns, asked], "options": self._options}
        try:
            with ReplyPrinter(time.perf_counter(), silent=self._json) as printer:
                result = self._runner.run(job, printer.take)
                if self._json:
                    print_json(result["reply"])
                else:
                    printer.print_footer(result, result["reply"])
        except RequestError as error:  # this message cannot be answered; the next one may
            typer.echo(printable(f"error: {error}"), err=True)
            return
        except (KeyboardInterrupt, Cancelled):
            typer.echo("[stopped]", err=True)
        if printer.text:
            self._turns += [asked, {"role": "assistant", "content": printer.text}]


@app.command()
@takes(sampling=sampling_options, loading=loading_options, daemon=daemon_options)
def run(
    model: Model,
    sampling: dict[str, Any],
    loading: dict[str, Any],
    daemon: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="The prompt. What is piped in stands before it.")] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="Put this file before the prompt: a text, or what ingest reads. Repeatable."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: System = None,
    json: AsJson = False,
) -> None:
    """Ask a model once. The reply streams to standard output, sizes and times go to standard error."""
    from rekindle.cli.runner import ReplyPrinter, open_runner

    request = prompt_of(prompt, file, raw=raw, system=system)
    with ReplyPrinter(STARTED, silent=json) as printer:
        with open_runner(model, loading, daemon) as runner:
            result = runner.run({"kind": "generate", "prompt": request, "options": sampling}, printer.take)
        if json:
            print_json({"model": result["model"], **result["reply"]})
        else:
            printer.print_footer(result, result["reply"])


def prompt_of(prompt: str | None, file: Sequence[Path] | None, *, raw: bool, system: str | None) -> PromptLike:
    """The prompt that options and standard input mean. Raises `InvalidPrompt`."""
    text = _read_prompt(prompt, file)
    if raw and system is not None:
        raise InvalidPrompt("--raw leaves out the chat template, which --system needs. Use one of them.")
    lead = [{"role": "system", "content": system}] if system else []
    return text if raw else [*lead, *as_messages(text)]


def _read_prompt(prompt: str | None, files: Sequence[Path] | None) -> str:
    """The files, then what is piped in, then the prompt."""
    parts = [read_document(path) for path in files or ()]
    piped = sys.stdin is not None and not sys.stdin.isatty()
    if prompt == "-" or (Path("-") not in (files or ()) and (piped or (prompt is None and not files))):
        text = read_standard_input()
        parts += [text] if text.strip() else []
    if prompt not in (None, "-"):
        parts.append(prompt)
    return "\n\n".join(parts)
