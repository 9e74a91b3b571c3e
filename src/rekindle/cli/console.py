"""Terminal output: progress on standard error, results on standard output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import TransferSpeedColumn as SpeedColumn

if TYPE_CHECKING:
    from rekindle.models.download import Progress as Report

notes = Console(stderr=True, highlight=False)

_STAGES = {
    "convert": "converting the GGUF for this engine (first time only, about half a minute)",
    "digest": "checking the model's weights (first time only)",
    "load": "loading the model",
}


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that counts items while the block runs; shown on a terminal only."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def logged_progress(what: str, log: Callable[[str], None]) -> Report:
    """The same as lines of a log: one for each stage, and for each tenth of a download."""
    seen: set[tuple[str, int]] = set()

    def report(stage: str, done: int, total: int) -> None:
        tenth = 10 * done // max(1, total) if stage == "download" else 0
        if (stage, tenth) not in seen:
            seen.add((stage, tenth))
            log(f"downloading {what}: {10 * tenth} %" if stage == "download" else _STAGES.get(stage, stage))

    return report


@contextmanager
def progress(what: str) -> Iterator[Report]:
    """Progress bars for downloading and loading while the block runs; shown on a terminal only."""
    spinner = SpinnerColumn()
    columns = (spinner, TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn())
    downloads = Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal)
    stages = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
    )
    running: dict[str, Any] = {}

    def report(stage: str, done: int, total: int) -> None:
        bars = downloads if stage == "download" else stages
        if stage not in running:
            bars.start()
            words = f"downloading {what}" if stage == "download" else _STAGES.get(stage, stage)
            running[stage] = bars.add_task(words, total=total)
        bars.update(running[stage], completed=done, total=total)
        if done >= total:
            bars.stop()

    try:
        yield report
    finally:
        downloads.stop()
        stages.stop()
