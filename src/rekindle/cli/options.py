"""The root of the command line, options that several commands share, and prompts read from files.

    @takes(loading=loading_options, sampling=sampling_options)
    def run(prompt: str, loading: dict[str, Any], sampling: dict[str, Any]) -> None: ...

gives the command every option of both groups; it receives each group as one dictionary.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle import __version__
from rekindle.core.request import DEFAULT_MAX_TOKENS, PromptLike
from rekindle.errors import InvalidPrompt
from rekindle.settings import ENGINE_SETTINGS, SETTINGS, names_in
from rekindle.settings.setting import Setting
from rekindle.text.visible import printable

Group = Callable[..., dict[str, Any]]


def complete_model(incomplete: str) -> list[str]:
    """Model names for the shell's completion."""
    from rekindle.models.ollama import names
    from rekindle.models.registry import entries
    from rekindle.models.sources import NAMED

    known = {*NAMED, *(e.name for e in entries()), *map(str, names())}
    return sorted(n for n in known if n.startswith(incomplete))


Model = Annotated[
    str,
    typer.Argument(
        help="A name (smollm2), a folder, a .gguf file, ollama:NAME, or ORG/NAME[:QUANT] on the hub.",
        autocompletion=complete_model,
    ),
]
ModelOption = Annotated[
    str,
    typer.Option("--model", "-m", help="A name, a folder, a .gguf file, or ORG/NAME.", autocompletion=complete_model),
]
OptionalModel = Annotated[str | None, Model.__metadata__[0]]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
System = Annotated[str | None, typer.Option(help="The system message.")]


def settings_options(names: Iterable[str]) -> Group:
    """A group with the options of these settings. The command receives those that were given, by name; the others come
    from the environment, the file and the defaults.
    """

    def given(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    parameters = [_parameter(SETTINGS[name]) for name in names]
    given.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return given


def _parameter(setting: Setting) -> inspect.Parameter:
    """A setting as a typer option. Choices are only shown here; the settings model checks them."""
    flags = f"{setting.flag}/--no-{setting.flag[2:]}" if setting.type is bool else setting.flag
    default = str(setting.default) if setting.default else False
    option = typer.Option(flags, help=setting.doc, metavar="|".join(setting.choices) or None, show_default=default)
    kind = list[str] if setting.type is list else setting.type
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


engine_options = settings_options(ENGINE_SETTINGS)
loading_options = settings_options(names_in("model", "cache", "chunks", "library", "answers", "remote"))
serving_options = settings_options(names_in("retention", "serving"))
server_options = settings_options(names_in("server"))
daemon_options = settings_options(["daemon", "keep_alive"])
library_options = settings_options(["cache", *names_in("library"), "key_file", "tenant", "cache_salt"])


def sampling_options(
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="The longest reply, in tokens.")
    ] = DEFAULT_MAX_TOKENS,
    min_tokens: Annotated[int, typer.Option(help="The shortest reply, in tokens.")] = 0,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens with this share of the probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only tokens this share as likely as the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 avoids repetition.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text. Repeatable.")] = None,
) -> dict[str, Any]:
    return {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop or (),
    }


def takes(without: Container[str] = (), **groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these groups, instead of its parameters of the same names.

    Options named in `without` are left out and keep their defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        shared = {
            name: {
                option: p
                for option, p in inspect.signature(group, eval_str=True).parameters.items()
                if option not in without
            }
            for name, group in groups.items()
        }

        @functools.wraps(command)
        def with_groups(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group(**{option: given.pop(option) for option in shared[name]})
            command(**given)

        parameters = [p for p in own.parameters.values() if p.name not in groups]
        parameters += [p for group in shared.values() for p in group.values()]
        with_groups.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_groups.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_groups

    return decorate


def read_document(path: Path) -> str:
    """The text of a document, read as `rekindle ingest` reads it; what is left out is one line on standard error.

    Raises `UnreadableDocument` or `ExtraMissing`.
    """
    from rekindle.knowledge.read.file import read_file_text

    found = read_file_text(path)
    for problem in found.problems:
        typer.echo(f"note: {printable(problem.reason)}", err=True)
    return found.text


def _read_utf8(path: Path) -> str:
    """The text of a file. Raises `InvalidPrompt` if it is not UTF-8 or cannot be read."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPrompt(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}. "
            "Convert it first, for example with: iconv -f latin1 -t utf-8"
        ) from None
    except OSError as error:
        raise InvalidPrompt(f"{path} cannot be read ({error.strerror}).") from None


def read_prompts(path: Path, *, raw: bool, as_system: bool) -> list[PromptLike]:
    """The prompts of a file.

    .json    one prompt: a list of messages, `{"messages": [...]}`, or `{"prompt": "text"}`
    .jsonl   one such prompt per line
    others   a document: a user message, a system message, or as it is (`raw`)
    """
    if path.suffix == ".json":
        return [_parse(_read_utf8(path), str(path))]
    if path.suffix == ".jsonl":
        return list(_parse_lines(_read_utf8(path), path))
    text = read_document(path)
    if raw:
        return [text]
    return [[{"role": "system" if as_system else "user", "content": text}]]


def _parse_lines(text: str, path: Path) -> Iterator[PromptLike]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield _parse(line, f"{path}, line {number}")


def _parse(text: str, where: str) -> PromptLike:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise InvalidPrompt(f"{where} is not JSON ({error}).") from None
    if isinstance(value, dict):
        value = value.get("messages", value.get("prompt"))
    if not isinstance(value, (list, str)) or not value:
        raise InvalidPrompt(
            f'{where} is no prompt. Write a list of messages, {{"messages": ...}} or {{"prompt": ...}}.'
        )
    return value


app = typer.Typer(
    name="rekindle",
    help="A language model on your own machine that does not prefill the same context twice.",
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


def print_json(value: Any) -> None:
    """One JSON value on standard output, and nothing else."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """A table on standard output; numbers align right."""
    from rich.console import Console  # slow to import
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(row[index][:1].isdigit() for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console(highlight=False).print(table)
