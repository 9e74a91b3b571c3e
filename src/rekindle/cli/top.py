"""`rekindle top`: what a running server does now, in a terminal. The same data as its page, without text of prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.options import Key, KeyFileToSend, app, key_to_send
from rekindle.core.size import human_bytes
from rekindle.text.visible import printable

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

_SHOWN = 20
_BAR_COLUMNS = 32  # at most
_OTHER_COLUMNS = 70  # the widest row without its bar
_ENDED = ("done", "cancelled", "failed")


@app.command()
def top(
    server: Annotated[str, typer.Option(help="The server to watch.")] = "http://127.0.0.1:8377",
    api_key: Key = None,
    api_key_file: KeyFileToSend = None,
    once: Annotated[bool, typer.Option("--once", help="Print one view and leave.")] = False,
) -> None:
    """Watch a server: requests in flight and the last ones, each by where its prompt's KV came from. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    rows: dict[int, dict[str, Any]] = {}
    console = Console()
    with Live(console=console, auto_refresh=False, screen=not once and console.is_terminal) as screen:
        for item in _items(server, key_to_send(api_key, api_key_file)):
            if item["first"]:
                rows.clear()
            rows |= {row["id"]: row for row in item["rows"]}
            rows = dict(list(rows.items())[-1000:])
            screen.update(_view(item["server"], rows, console.width), refresh=True)
            if once:
                return


def _items(url: str, api_key: str | None) -> Iterator[dict[str, Any]]:
    """What the server sends, until it stops. Raises `ServerError`."""
    import httpx

    from rekindle.cli.server_client import TIMEOUT, ServerError, make_client, refusal

    try:
        client = make_client(url.rstrip("/"), api_key, TIMEOUT)
        with client, client.stream("GET", "/v1/rekindle/live") as answer:
            if answer.status_code != 200:
                raise refusal(answer.status_code, answer.read())
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"The server at {url} does not answer ({error}). Is it running? `rekindle ps`") from None


def _view(server: Mapping[str, Any], rows: Mapping[int, Mapping[str, Any]], width: int) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from rekindle.core.reply import SOURCES

    tiers = [
        f"{name} {human_bytes(server[name]['bytes'])} of {human_bytes(server[name]['limit_bytes'])}"
        for name in ("memory", "disk")
        if name in server
    ]
    load = f"{server['running']} of {server['parallel']} running, {server['waiting']} waiting"
    head = Text(f"{server['model']}, {server['engine']} on {server['device']}; {load}; {', '.join(tiers)}")
    legend = Text("  ").join(Text.assemble(("█ ", colour), name) for name, colour in SOURCES.items())
    room = width - _OTHER_COLUMNS
    columns, name_columns = max(1, min(_BAR_COLUMNS, room)), 12 + max(0, min(8, room - _BAR_COLUMNS))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("at", "app", "prompt", "tokens", "reused", "first", "without", "rate", "state"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("at", "app", "prompt", "state") else "right")
    newest = sorted(rows.values(), key=lambda row: (row["state"] in _ENDED, -row["id"]))
    for row in newest[:_SHOWN]:
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(row["at"])),
            Text(printable(row["app"] or row["model"])[:name_columns]),
            _bar(row, columns),
            f"{row['tokens']:,}",
            f"{row.get('reused', 0) / row['tokens']:.0%}" if row["tokens"] else "-",
            _seconds(row.get("first_ms")),
            _seconds(row.get("cold_ms")),
            "-" if row.get("rate") is None else f"{row['rate']:.1f}",
            row["state"] if row["state"] != "done" else row.get("miss") or "all reused",
        )
    return Group(head, legend, table)


def _bar(row: Mapping[str, Any], columns: int) -> Text:
    """The prompt in columns, coloured by source; what is not read yet is faint."""
    from rich.text import Text

    from rekindle.core.reply import SOURCES

    bar, total = Text(), max(1, row["tokens"])
    for start, stop, source in row["spans"]:
        for column in range(start * columns // total, stop * columns // total):
            present = column * total // columns < row["present"]
            bar.append("█" if present else "░", SOURCES[source])
    return bar


def _seconds(milliseconds: float | None) -> str:
    seconds = (milliseconds or 0.0) / 1e3
    return "-" if milliseconds is None else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
