"""The root of the command line, options that several commands share, and prompts read from files.

    @takes(loading=loading_options, sampling=sampling_options)
    def run(prompt: str, loading: dict[str, Any], sampling: dict[str, Any]) -> None: ...

gives the command every option of both groups; it receives each group as one dictionary.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from rekindle import __version__
from rekindle.core.request import DEFAULT_MAX_TOKENS, PromptLike
from rekindle.errors import InvalidPrompt, why_unreadable
from rekindle.safe_read import read_secret_file
from rekindle.settings import API_KEY_VARIABLE, ENGINE_SETTINGS, GONE, GROUPS, SETTINGS, names_in
from rekindle.settings.setting import PREFIX, Setting
from rekindle.text.visible import escaped, printable

_SILENT_SECONDS = 1.0  # before standard input is waited for visibly

Group = Callable[..., dict[str, Any]]
_Item = TypeVar("_Item")
_Function = TypeVar("_Function", bound=Callable[..., Any])


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


def settings_options(names: Iterable[str], gone: Iterable[str] = ()) -> Group:
    """A group with the options of these settings. The command receives those that were given, by name; the others come
    from the environment, the file and the defaults. Those that are `gone` are taken, and not shown.
    """

    def given(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    parameters = [_parameter(SETTINGS[name]) for name in names]
    unseen = Annotated[str | None, typer.Option(hidden=True)]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=unseen) for name in gone
    ]
    given.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return given


# Settings that people choose on a command line; the help of a command has the others under headings.
_FREQUENT = ("engine", "device", "context", "threads", "adapter", "cache", "reuse", "disk_limit", "answers", "host",
             "port", "model_memory", "keep_alive", "daemon")  # fmt: skip


def _parameter(setting: Setting) -> inspect.Parameter:
    """A setting as a typer option. Choices are only shown and completed here; the settings model checks them."""

    def complete(incomplete: str) -> list[str]:
        from rekindle.models.adapter_registry import entries

        values = [entry.name for entry in entries()] if setting.name == "adapter" else setting.choices
        return [value for value in values if value.startswith(incomplete)]

    option = typer.Option(
        f"{setting.flag}/--no-{setting.flag[2:]}" if setting.type is bool else setting.flag,
        help=setting.doc,
        metavar="|".join(setting.choices) or None,
        show_default=str(setting.default) if setting.default else False,
        autocompletion=complete if setting.choices or setting.name == "adapter" else None,
        rich_help_panel=None if setting.name in _FREQUENT else GROUPS[setting.group],
    )
    kind = list[str] if setting.type is list else setting.type
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


engine_options = settings_options(ENGINE_SETTINGS)
loading_options = settings_options(names_in("model", "cache", "chunks", "library", "answers", "remote"))
serving_options = settings_options(names_in("retention", "serving"))
idle_options = settings_options(names_in("idle"), GONE)
server_options = settings_options(names_in("server", "idle"), GONE)
daemon_options = settings_options(["daemon", "keep_alive"])
library_options = settings_options(["cache", *names_in("library"), "key_file", "tenant", "cache_salt"])


_SAMPLING = "Sampling"  # a heading of the help


def sampling_options(
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="The longest reply, in tokens.")
    ] = DEFAULT_MAX_TOKENS,
    min_tokens: Annotated[int, typer.Option(help="The shortest reply, in tokens.", rich_help_panel=_SAMPLING)] = 0,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens.", rich_help_panel=_SAMPLING)] = None,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens with this share of the probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Only tokens this share as likely as the likeliest.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 avoids repetition.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text. Repeatable.")] = None,
) -> dict[str, Any]:
    given = locals()
    return {**given, "stop": stop or ()}


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
    """The text of a document, read as `rekindle ingest` reads it; what is left out is one line on standard error. `-`
    is standard input.

    Raises `UnreadableDocument`, `ExtraMissing` or `InvalidPrompt`.
    """
    from rekindle.knowledge.read.file import read_file_text

    if str(path) == "-":
        return read_standard_input()
    found = read_file_text(path)
    for problem in found.problems:
        typer.echo(f"note: {printable(problem.reason)}", err=True)
    return found.text


def read_standard_input() -> str:
    """All of standard input, if there is one. While it stays open and silent, a note says how it ends."""
    if sys.stdin is None:
        return ""
    how = "Ctrl-Z and Enter end it" if sys.platform == "win32" else "Ctrl-D ends it"
    note = threading.Timer(_SILENT_SECONDS, typer.echo, [f"note: reading standard input; {how}."], {"err": True})
    note.daemon = True
    note.start()
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"Standard input is not UTF-8 text: byte {error.start}. Convert it first.") from None
    finally:
        note.cancel()


def _read_utf8(path: Path) -> str:
    """The text of a file. Raises `InvalidPrompt` if it is empty, not UTF-8 or cannot be read."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPrompt(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}. "
            "Convert it first, for example with: iconv -f latin1 -t utf-8"
        ) from None
    except OSError as error:
        raise InvalidPrompt(why_unreadable(path, error)) from None
    if not text.strip():
        raise InvalidPrompt(f"{path} is empty.")
    return text


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


def read_body(path: Path) -> dict[str, Any] | None:
    """The body of a request, as a client sent it, in a .json file; None for any other prompt."""
    try:
        body = json.loads(_read_utf8(path)) if path.suffix == ".json" else None
    except ValueError:  # `read_prompts` says what is wrong
        return None
    return body if isinstance(body, dict) and ("messages" in body or "input" in body) else None


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
            f'{where} is not a prompt. Write a list of messages, {{"messages": ...}} or {{"prompt": ...}}.'
        )
    return value


class _CommandWithHeadings(TyperCommand):
    """Shows its options under headings, those without one first; typer itself does so only in help that is slow."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        headings: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            heading = getattr(parameter, "rich_help_panel", None) or kind
            if (record := parameter.get_help_record(ctx)) is not None:
                headings.setdefault(heading, []).append(record)
        for heading, records in headings.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class _App(typer.Typer):
    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Function], _Function]:
        return super().command(name, **{"cls": _CommandWithHeadings, **settings})


app = _App(
    name="rekindle",
    help="A language model on your own machine that does not prefill the same context twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: it appears in half the time
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command_group(name: str, help: str, renamed: Mapping[str, str] | None = None) -> typer.Typer:
    """The commands `rekindle NAME ...`. `renamed` options still work under their old name, and a note says the new."""

    def new_name(option: str) -> str:
        now = (renamed or {}).get(option, option)
        if now != option:
            typer.echo(f"note: --{option} is called --{now} now; the next version knows only that.", err=True)
        return now

    settings = {"token_normalize_func": new_name}
    group = _App(help=help, no_args_is_help=True, rich_markup_mode=None, context_settings=settings)
    app.add_typer(group, name=name)
    return group


def _use_config(file: Path | None) -> None:
    if file is not None:
        os.environ[f"{PREFIX}CONFIG"] = str(file.absolute())  # also for the processes that a command starts


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rekindle {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
    ),
    config: Path | None = typer.Option(
        None, "--config", metavar="FILE", help="A file of settings in place of your own.", callback=_use_config
    ),
) -> None:
    pass


def print_json(value: Any) -> None:
    """One JSON value on standard output, and nothing else."""
    typer.echo(escaped(json.dumps(value, ensure_ascii=False, indent=2)))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None, empty: str | None = None
) -> None:
    """A table on standard output; numbers align right. Without rows only the sentence `empty`, if one is given.

    Cells wrap between words, but those of a column "what" stay in one line; columns without a text are left out. Where
    even that does not fit, on a terminal paths lose their first folders, then each row takes several lines; elsewhere
    the table gets wider. No word is broken.
    """
    from rich.console import Console  # slow to import
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    if not rows and empty is not None:
        typer.echo(empty)
        return
    used = [index for index in range(len(columns)) if not rows or any(row[index] for row in rows)]
    columns, rows = [columns[index] for index in used], [[row[index] for index in used] for row in rows]
    numeric = [bool(rows) and all(row[index][:1].isdigit() for row in rows) for index in range(len(columns))]
    console, gaps = Console(highlight=False), _GAP * (len(columns) - 1)
    whole = [number or name == "what" for name, number in zip(columns, numeric, strict=True)]
    widths = _fitting_widths([columns, *rows], whole, console.width - gaps)
    if console.is_terminal and (excess := sum(widths) + gaps - console.width) > 0:
        rows = _with_short_paths(rows, max(widths) - excess)
        widths = _fitting_widths([columns, *rows], whole, console.width - gaps)
    lines = _fold(widths, console.width) if console.is_terminal else [range(len(widths))]
    console.width = max([console.width, *(_GAP * len(line) + sum(widths[index] for index in line) for line in lines)])
    if title is not None:
        console.print(escape(title), style="italic", soft_wrap=True)

    def show(line: Sequence[int], some: Sequence[Sequence[str]], style: str) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        for index in line:
            table.add_column(justify="right" if numeric[index] else "left", width=widths[index])
        for row in some:
            table.add_row(*(escape(row[index]) for index in line), style=style)
        return table

    blocks = [rows] if len(lines) == 1 else [[row] for row in rows]
    for block, style in [([columns], "bold"), *((block, "") for block in blocks if block)]:
        for number, line in enumerate(lines):
            console.print(Padding(show(line, block, style), (0, 0, 0, _GAP * (number > 0))))


def print_listing(
    found: Sequence[_Item], columns: Mapping[str, Callable[[_Item], object]], json: bool,
    as_json: Callable[[_Item], Any], *, empty: str,
) -> None:  # fmt: skip
    """Items as JSON, or as a table: its columns by their names, each with the text of an item in it."""
    if json:
        print_json([as_json(item) for item in found])
    else:
        print_table(list(columns), [[str(cell(item)) for cell in columns.values()] for item in found], empty=empty)


_GAP = 2  # cells between two columns
_MAX_NUMBER = 12  # characters: "1,200 tokens"


def _fitting_widths(rows: Sequence[Sequence[str]], whole: Sequence[bool], room: int) -> list[int]:
    """The width of each column: the widest ones shrink until the row fits, but not those whose cells stay whole, and
    never below their longest word."""
    from rich.cells import cell_len

    texts = list(zip(*rows, strict=True))
    widths = [max(map(cell_len, column)) for column in texts]
    least = [
        width if stays else max(cell_len(word) for text in column for word in _words(text))
        for column, stays, width in zip(texts, whole, widths, strict=True)
    ]
    while sum(widths) > room and widths != least:
        widest = max((index for index in range(len(widths)) if widths[index] > least[index]), key=widths.__getitem__)
        widths[widest] -= 1
    return widths


def _fold(widths: Sequence[int], room: int) -> list[Sequence[int]]:
    """The columns of each line of a row; all lines but the first are indented."""
    lines: list[list[int]] = [[]]
    used = 0
    for index, width in enumerate(widths):
        if lines[-1] and used + _GAP + width > room:
            lines.append([])
            used = _GAP
        used += width + _GAP * bool(lines[-1])
        lines[-1].append(index)
    return list(lines)


def _with_short_paths(rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The rows, with as many first folders of each path left out as it takes to fit into `width`."""

    def short(word: str) -> str:
        parts = word.split("/")
        while len(parts) > 1 and len(word) > width:
            parts = parts[1:]
            word = "/".join(["…", *parts])
        return word

    return [[" ".join(map(short, cell.split(" "))) for cell in row] for row in rows]


def _words(text: str) -> list[str]:
    """The parts of a cell between which it may be wrapped: a number stays with its unit."""
    return [text] if text[:1].isdigit() and len(text) <= _MAX_NUMBER else text.split() or [""]


def brief(text: str, max_characters: int) -> str:
    """The beginning of a text on one line; what is left out ends with a word, if it has any."""
    line = " ".join(text.split())
    if len(line) <= max_characters:
        return line
    head = line[:max_characters]  # the last character makes room for the ellipsis
    return (head.rpartition(" ")[0] or head[:-1]) + "…"


Key = Annotated[
    str | None,
    typer.Option(
        help=f"The key to send to a server; others can see it in the list of processes, {API_KEY_VARIABLE} not."
    ),
]
KeyFileToSend = Annotated[str | None, typer.Option(help="A file with the key to send.")]


def key_to_send(key: str | None, path: str | None) -> str | None:
    """The key that commands send to a server: given, in a file that nobody else can read, or in the environment."""
    if key is None and path is not None:
        return read_secret_file(Path(path), "The key file").decode("utf-8", "replace").strip()
    return key or os.environ.get(API_KEY_VARIABLE)
