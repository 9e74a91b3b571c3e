"""Terminal output: progress on standard error, results on standard output."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
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
)
from rich.progress import TransferSpeedColumn as SpeedColumn
from rich.status import Status
from rich.text import Text

if TYPE_CHECKING:
    from rekindle.models.download import Progress as Report

notes = Console(stderr=True, highlight=False)

SHOWN_AFTER_SECONDS = 0.5  # of waiting
_LOOKS = 4.0  # a second at what is waited for: each takes time from a model that computes on the same cores
_STAGES = {
    "convert": "converting the GGUF for this engine (first time only, about half a minute)",
    "digest": "checking the model's weights (first time only)",
    "load": "loading the model",
}


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that counts items, from the first one until the block ends; shown on a terminal only."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal)
    task = bar.add_task(what, total=None)

    def count(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield count
    finally:
        bar.stop()


def logged_progress(what: str, log: Callable[[str], None]) -> Report:
    """The same as lines of a log: one for each stage, and for each tenth of a download."""
    seen: set[tuple[str, int]] = set()

    def report(stage: str, done: int, total: int) -> None:
        tenth = 10 * done // max(1, total) if stage == "download" else 0
        if (stage, tenth) not in seen:
            seen.add((stage, tenth))
            log(f"downloading {what}: {10 * tenth} %" if stage == "download" else _STAGES.get(stage, stage))

    return report


class WaitingLine:
    """What is waited for, on standard error: shown after half a second, gone as if it had never been there.

    Nothing is shown where standard error is no terminal.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status: Status | None = None
        self._shows: threading.Timer | None = None
        self._job: Callable[[float], str] | None = None

    @contextmanager
    def during(self, words: Callable[[float], str]) -> Iterator[None]:
        """While the block runs, `words` are said unless something else is waited for."""
        self._job = words
        self.say(words)
        try:
            yield
        finally:
            self._job = None
            self.clear()

    def stage_ended(self) -> None:
        """What was waited for is over; the rest of a job is waited for again."""
        if self._job is None:
            self.clear()
        else:
            self.say(self._job)

    def say(self, words: Callable[[float], str]) -> None:
        """Something is waited for from now on; `words` gets for how many seconds."""
        text = _Ticking(words)
        with self._lock:
            if self._status is not None:
                self._status.update(text)
            elif notes.is_terminal:
                self._status = Status(text, console=notes, refresh_per_second=_LOOKS)
                self._shows = threading.Timer(SHOWN_AFTER_SECONDS, self._status.start)
                self._shows.daemon = True
                self._shows.start()

    def clear(self) -> None:
        """Nothing is waited for. Idempotent."""
        with self._lock:
            status, shows, self._status, self._shows = self._status, self._shows, None, None
        if status is not None and shows is not None:
            shows.cancel()
            shows.join()  # it may be showing it at this moment
            status.stop()


class _Ticking:
    """A text that says how long something has taken until now."""

    def __init__(self, words: Callable[[float], str]) -> None:
        self._words, self._since = words, time.monotonic()

    def __rich__(self) -> Text:
        return Text(self._words(time.monotonic() - self._since))


def reading(event: Mapping[str, Any]) -> Callable[[float], str]:
    """The words for how far a prompt is read, as `PromptProgress.as_event` says it."""
    progress, more = event["prompt_progress"], event.get("rekindle") or {}
    cached = f", {progress['cache']:,} of them from the cache" if progress["cache"] else ""
    tokens = f"reading the prompt: {progress['processed']:,} of {progress['total']:,} tokens{cached}"
    later = "; the next time at once" if more.get("kept") else ""
    expected = (more.get("expected_ms") or 0.0) / 1e3

    def words(seconds: float) -> str:
        taken = progress["time_ms"] / 1e3 + seconds
        return f"{tokens}, {taken:.0f} s{f' of about {expected:.0f} s' if expected > taken else ''}{later}"

    return words


@contextmanager
def waiting(what: str) -> Iterator[tuple[Report, WaitingLine]]:
    """Progress of downloading and loading `what` while the block runs; shown on a terminal only."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn())
    downloads = Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal)
    task = downloads.add_task(f"downloading {what}")
    line, shown = WaitingLine(), ""

    def report(stage: str, done: int, total: int) -> None:
        nonlocal shown
        if stage == "download":
            if stage != shown:
                line.clear()
                downloads.reset(task)
                downloads.start()
            downloads.update(task, completed=done, total=total)
        elif stage != shown:
            line.say(lambda seconds: f"{_STAGES.get(stage, stage)}, {seconds:.0f} s")
        shown = stage if done < total else ""
        if not shown:
            downloads.stop()
            line.stage_ended()

    try:
        yield report, line
    finally:
        downloads.stop()
        line.clear()


@contextmanager
def progress(what: str) -> Iterator[Report]:
    """The same without the line."""
    with waiting(what) as (report, _):
        yield report
