"""`rekindle run`: one prompt, one reply."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle.cli.app import app
from rekindle.cli.options import AsJson, Model, System, loading_options, read_text, sampling_options, takes
from rekindle.core.request import PromptLike
from rekindle.errors import InvalidPrompt


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
    from rekindle.cli.console import notes, print_json, progress
    from rekindle.core.request import as_messages
    from rekindle.session.session import Session

    text = _read_prompt(prompt, file)
    if raw and system is not None:
        raise InvalidPrompt("--raw has no chat template, so --system has no place. Leave one of them out.")
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
