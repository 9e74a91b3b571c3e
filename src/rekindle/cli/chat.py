"""`rekindle run`: one prompt, one reply; `rekindle chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle.cli.options import (
    AsJson,
    Model,
    OptionalModel,
    System,
    app,
    loading_options,
    print_json,
    read_text,
    sampling_options,
    takes,
)
from rekindle.core.request import PromptLike, as_messages
from rekindle.errors import Cancelled, InvalidPrompt, InvalidSetting, RequestError

_HELP = "/system TEXT sets the system message, /clear starts over, /bye leaves. Ctrl-C stops a reply."


@app.command()
@takes(sampling=sampling_options, loading=loading_options)
def chat(
    sampling: dict[str, Any],
    loading: dict[str, Any],
    model: OptionalModel = None,
    system: System = None,
    server: Annotated[str | None, typer.Option(help="Use the running server at this address.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The key to send to the server.")] = None,
    json: AsJson = False,
) -> None:
    """Talk to a model. When the chat outgrows the context, its oldest messages are dropped, not the system message."""
    from rekindle.cli.console import progress
    from rekindle.session.session import Session

    if server is not None:
        if loading:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in loading)
            raise InvalidSetting(f"{names}: these options belong to the server. Give them to `rekindle serve`.")
        _talk_to_server(server, api_key, model, sampling, system, as_json=json)
        return
    if model is None:
        raise InvalidSetting("Name a model (rekindle chat smollm2), or a server (--server URL).")
    with progress(model) as report:
        session = Session(model, **loading, progress=report)
    with session:
        _Conversation(session, {**sampling, "overflow": "drop-oldest"}, system, as_json=json).talk()


def _talk_to_server(
    url: str, api_key: str | None, model: str | None, sampling: dict[str, Any], system: str | None, *, as_json: bool
) -> None:
    from rekindle.cli.server_client import ServerSession

    session = ServerSession(url, api_key, model)
    try:
        _Conversation(session, sampling, system, as_json=as_json).talk()
    finally:
        session.close()


class _Conversation:
    """The messages so far, and the commands."""

    def __init__(self, session: Any, options: dict[str, Any], system: str | None, *, as_json: bool) -> None:
        self._session = session
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
        from rekindle.cli.console import notes

        lead = [{"role": "system", "content": self._system}] if self._system else []
        asked = {"role": "user", "content": line}
        pieces: list[str] = []
        stream = None
        try:
            stream = self._session.stream([*lead, *self._turns, asked], **self._options)
            for piece in stream:
                pieces.append(piece)
                if not self._json:
                    typer.echo(piece, nl=False)
            if self._json:
                print_json(stream.reply.as_dict())
            else:
                typer.echo()
                notes.print(stream.reply.summary(), style="dim", soft_wrap=True)
        except RequestError as error:  # this message cannot be answered; the next one may
            typer.echo(f"error: {error}", err=True)
            return
        except (KeyboardInterrupt, Cancelled):
            if stream is not None:
                stream.close()
            typer.echo(" [stopped]", err=True)
        if pieces:
            self._turns += [asked, {"role": "assistant", "content": "".join(pieces)}]


@app.command()
@takes(sampling=sampling_options, loading=loading_options)
def run(
    model: Model,
    sampling: dict[str, Any],
    loading: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Put this file's text before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: System = None,
    json: AsJson = False,
) -> None:
    """Ask a model once. The reply streams to standard output, sizes and times go to standard error."""
    from rekindle.cli.console import notes, progress
    from rekindle.session.session import Session

    text = _read_prompt(prompt, file)
    if raw and system is not None:
        raise InvalidPrompt("--raw leaves out the chat template, which --system needs. Use one of them.")
    lead = [{"role": "system", "content": system}] if system else []
    request: PromptLike = text if raw else [*lead, *as_messages(text)]
    with progress(model) as report, Session(model, **loading, progress=report) as session:
        stream = session.stream(request, **sampling)
        for piece in stream:
            if not json:
                typer.echo(piece, nl=False)
        if json:
            print_json({"model": session.engine.name, **stream.reply.as_dict()})
        else:
            typer.echo()
            notes.print(stream.reply.summary(), style="dim", soft_wrap=True)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    parts = [] if file is None else [read_text(file)]
    if prompt == "-" or (prompt is None and file is None):
        try:
            parts.append(sys.stdin.buffer.read().decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidPrompt(f"Standard input is not UTF-8 text: byte {error.start}. Convert it first.") from None
    elif prompt is not None:
        parts.append(prompt)
    return "\n\n".join(parts)
