"""`rekindle idle`: idle work for your library, and its log."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.options import AsJson, ModelOption, app, idle_options, loading_options, print_json, print_table, takes
from rekindle.core.request import DEFAULT_MAX_TOKENS
from rekindle.core.size import count_of, parse_duration
from rekindle.errors import NothingKnown
from rekindle.settings import ServerSettings
from rekindle.text.visible import printable

if TYPE_CHECKING:
    from rekindle.idle.idle import Idle
    from rekindle.idle.log import IdleAction


@app.command()
@takes(loading=loading_options, working=idle_options)
def idle(
    loading: dict[str, Any],
    working: dict[str, Any],
    model: ModelOption = "smollm2",
    watch: Annotated[
        bool, typer.Option("--watch", help="Continue until Ctrl-C, whenever load and battery allow.")
    ] = False,
    every: Annotated[str, typer.Option(help="With --watch: the pause between two runs.")] = "60s",
    log: Annotated[bool, typer.Option("--log", help="Show what was done so far, and the time it saved since.")] = False,
    last: Annotated[int, typer.Option(min=0, help="With --log: number of single actions to show.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, as users ask for it.")] = (
        DEFAULT_MAX_TOKENS
    ),
    json: AsJson = False,
) -> None:
    """Do idle work: refresh answers, predict questions, prefill what they begin with. Ctrl-C stops within a token."""
    from rekindle.cli.console import notes, progress
    from rekindle.idle.idle import Idle, IdleCalibration, IdleOptions
    from rekindle.session.session import Session

    if log:
        _show_log(loading, last, json)
        return
    options = IdleOptions.of(ServerSettings.load(working), max_tokens)
    pause = parse_duration(every)
    with progress(model) as report, Session(model, **loading, progress=report) as session, _stopping() as stop:
        if not session.knowledge.holds() and not options.calibrate_seconds:
            raise NothingKnown("Nothing was ingested yet. Do that first: rekindle ingest FOLDER")
        own = Idle(session, options, report=None if json else _print_action)
        if (why := own.why_no_questions) is not None:
            notes.print(f"{why}: passages are prefilled, but no questions are predicted", markup=False, soft_wrap=True)
        calibration = IdleCalibration(session, options)
        done, found = own.run(stop), calibration.run(stop)
        while watch and not stop.wait(pause):
            done, found = done + own.run(stop), calibration.run(stop) or found
        if found is not None:
            notes.print(found.summary, markup=False, soft_wrap=True)
        elif not done and own.blocked_by is None and not stop.is_set():
            notes.print(f"Nothing to do: {own.why_nothing()}", markup=False, soft_wrap=True)
    if json:
        print_json([asdict(action) for action in done])
        return
    _sum_up(own, done)


def _print_action(action: IdleAction) -> None:
    ended = "" if action.finished else " (stopped)"
    typer.echo(f"{action.action:<14} {action.seconds:6.1f} s {action.tokens:6} tokens  {printable(action.what)}{ended}")


def _sum_up(own: Idle, done: list[IdleAction]) -> None:
    typer.echo(f"{count_of(len(done), 'action')} in {own.spent_seconds:.1f} s")
    if own.blocked_by is not None:
        typer.echo(f"Stopped: {own.blocked_by}.", err=True)


def _show_log(loading: dict[str, Any], last: int, json: bool) -> None:
    """Print the log; needs no model."""
    from rekindle.cli.knowledge import open_knowledge
    from rekindle.idle.log import recent_actions, summarize_actions

    names = ("cache", "library", "embedder", "tenant", "cache_salt")
    with open_knowledge(
        {name: value for name, value in loading.items() if name in names and value is not None}
    ) as libraries:
        library = libraries.library()
        ways, entries = summarize_actions(library), recent_actions(library, last)
    if json:
        print_json({"actions": [asdict(way) for way in ways], "last": [asdict(entry) for entry in entries]})
        return
    rows = [
        [way.action, str(way.count), f"{way.seconds:.1f}", str(way.tokens), str(way.uses), f"{way.saved_seconds:.1f}"]
        for way in ways
    ]
    print_table(
        ["action", "count", "seconds", "tokens", "used", "seconds saved"],
        rows,
        empty="No idle work was done yet.",
    )
    for entry in entries:
        helped = f", used {count_of(entry.uses, 'time')}" if entry.uses else ""
        typer.echo(f"{entry.action}: {printable(entry.question or '-')} ({entry.seconds:.1f} s{helped})")


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one interrupts as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def asked(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop.set()

    signal.signal(signal.SIGINT, asked)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
