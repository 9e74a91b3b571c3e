"""Where the jobs of a command run: in the daemon that keeps the model loaded, else in this process."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rekindle.cli.console import WaitingLine, notes, reading, waiting
from rekindle.core.plan import RefusedChunks
from rekindle.core.reply import OriginFinding
from rekindle.core.size import human_duration, keep_alive_seconds
from rekindle.daemon.client import DaemonClient, is_running
from rekindle.daemon.private_socket import SUPPORTED
from rekindle.daemon.spec import DaemonSpec
from rekindle.errors import RekindleError
from rekindle.models.sources import name_of
from rekindle.settings import SETTINGS, CommandSettings, Settings
from rekindle.text.visible import printable

if TYPE_CHECKING:
    from rekindle.daemon.jobs import Event, Job, JobRunner, Send
    from rekindle.models.download import Progress

KEEP_ALIVE = "5m"  # of a model in the background, as other tools have it
_LONG_SECONDS = 1.0  # a wait worth a sentence of advice


@contextmanager
def open_runner(model: str, loading: dict[str, Any], daemon: dict[str, Any]) -> Iterator[JobRunner]:
    """Runs jobs on a model. `loading` and `daemon` are the options that were given."""
    settings = Settings.load(loading)
    with waiting(model) as (report, line), ExitStack() as opened, _naming_as_typed(model, settings):
        runner = _in_daemon(model, settings, daemon, report) or _InProcess(model, loading, report, opened)
        yield WaitedFor(runner, line)


class WaitedFor:
    """Runs jobs with another runner. Until the reply begins, a line says what is waited for."""

    def __init__(self, runner: JobRunner, line: WaitingLine) -> None:
        self._runner, self._line = runner, line

    def run(self, job: Job, send: Send) -> dict[str, Any]:
        def take(event: Event) -> None:
            if "prompt_progress" in event:
                self._line.say(reading(event))
            else:
                self._line.clear()
                send(event)

        with self._line.during(lambda seconds: f"waiting for the model, {seconds:.0f} s"):
            return self._runner.run(job, take)


@contextmanager
def _naming_as_typed(model: str, settings: Settings) -> Iterator[None]:
    """Errors name files as the user did: the background process, whose current folder is another, gets whole paths."""
    try:
        yield
    except RekindleError as error:
        adapter = (settings.adapter or "").partition("=")[2].partition(",scale=")[0]
        files = [value for name, value in asdict(settings).items() if SETTINGS[name].is_path and value]
        message = str(error)
        for path in filter(None, [model, adapter, *files]):
            message = path.join(re.split(rf"{re.escape(str(Path(path).absolute()))}(?![\w-])", message))
        error.args = (message,)
        raise


def stored_answer(question: str, model: str, loading: dict[str, Any], options: dict[str, Any]) -> dict[str, Any] | None:
    """The result of an `ask` job, if answers=direct gives a stored answer without a model. None: run the job."""
    from rekindle.session.without_model import ModelFreeAsk, in_other_words, in_same_words

    settings = Settings.load(loading)
    asked = ModelFreeAsk.of(question, model, settings, options)
    if asked is None:
        return None
    try:  # where a model is loaded, so is the embedder
        loaded = SUPPORTED and is_running(DaemonSpec.of(model, settings))
        answer = in_same_words(asked) or (None if loaded else in_other_words(asked))
    except (RekindleError, OSError):  # the job says what is wrong
        return None
    if answer is None:
        return None
    fields = {"answer": answer.as_dict(), "summary": answer.summary(), "reuse": str(answer.reuse), "spelled": []}
    return {"model": asked.model.name, **fields}


def _in_daemon(model: str, settings: Settings, daemon: dict[str, Any], report: Progress) -> JobRunner | None:
    given = dict(daemon)
    keep_alive = given.pop("keep_alive", None) or settings.keep_alive or KEEP_ALIVE
    seconds = keep_alive_seconds(keep_alive)
    if not (SUPPORTED and CommandSettings.load(given).daemon) or seconds == 0:
        return None
    try:
        spec = DaemonSpec.of(model, settings)
        if not is_running(spec):
            name_of(model)  # a typo is found before a model that is loaded leaves for the one that is not there
        return DaemonClient(spec, seconds, report)
    except OSError as error:
        notes.print(f"The model does not stay loaded in the background: {error}.", style="dim", soft_wrap=True)
        return None


class _InProcess:
    """Loads the model for the first job."""

    def __init__(self, model: str, loading: dict[str, Any], report: Progress, opened: ExitStack) -> None:
        self._model, self._loading, self._report, self._opened = model, loading, report, opened
        self._session: Any = None

    def run(self, job: Job, send: Send) -> dict[str, Any]:
        from rekindle.daemon.jobs import run_job
        from rekindle.session.session import Session

        started, first = time.perf_counter(), self._session is None
        if self._session is None:
            session = Session(self._model, **self._loading, progress=self._report)
            self._session = self._opened.enter_context(session)
        seconds = time.perf_counter() - started
        return {**run_job(self._session, job, send), "load_seconds": seconds if first else None}


def for_terminal(text: str) -> str:
    """The text of a model as it is printed: raw into files and pipes, but a terminal would obey its escapes."""
    return printable(text) if sys.stdout.isatty() else text


class ReplyPrinter(logging.Handler):
    """Prints the pieces of a reply as they come, and measures how long the user waited for the first.

    Inside its block, warnings are lines of their own on standard error: before the reply, else behind it.
    """

    def __init__(self, started: float, *, silent: bool) -> None:
        """`started`: when the user asked, by `time.perf_counter`."""
        super().__init__(logging.WARNING)
        self._started = started
        self._silent = silent
        self._seconds: float | None = None
        self._in_line = False
        self._waiting: list[str] = []
        self.text = ""

    def __enter__(self) -> ReplyPrinter:
        logging.getLogger("rekindle").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.end_line()
        logging.getLogger("rekindle").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning, once the line that is being written has ended."""
        self._waiting.append(f"note: {record.getMessage()}")
        if not self._in_line:
            self.end_line()

    def take(self, event: Event) -> None:
        """An event of the job."""
        if self._seconds is None:
            self._seconds = time.perf_counter() - self._started
        self.text += event["text"]
        if not self._silent and event["text"]:
            self._in_line = True
            # color: click would remove escapes from what is piped
            typer.echo(for_terminal(event["text"]), nl=False, color=True)

    def end_line(self) -> None:
        """End the reply's last line, if one is open, and print the warnings that waited for it."""
        if self._in_line:
            typer.echo()
        self._in_line = False
        while self._waiting:
            typer.echo(self._waiting.pop(0), err=True)

    def print_footer(self, result: dict[str, Any], reply: dict[str, Any]) -> None:
        """Where the wait went, and what would shorten its larger part."""
        self.end_line()
        first_token = reply["timings"].get("first_token_seconds")
        if first_token is None:  # a server's: its model is loaded
            notes.print(result["summary"], style="dim", soft_wrap=True)
            return
        before = max(0.0, (self._seconds or 0.0) - first_token)
        loaded = result.get("load_seconds") is not None
        start = f"{'model loaded' if loaded else 'started'} in {before:.1f} s; "
        notes.print(f"{start}{result['summary']}", style="dim", soft_wrap=True)
        if (miss := reply["reuse"]["origin_miss"]) is not None:
            notes.print(f"Nothing came from the origin: {OriginFinding(miss=miss)}", style="dim", soft_wrap=True)
        if advice := _advice(result, reply["reuse"], loaded=loaded and before > max(first_token, _LONG_SECONDS)):
            notes.print(advice, style="dim", soft_wrap=True)


def _advice(result: dict[str, Any], reuse: dict[str, Any], *, loaded: bool) -> str | None:
    if loaded and "stays_seconds" not in result:
        return "--daemon would keep the model loaded for the next command."
    if loaded:
        stays = result["stays_seconds"]
        time_left = (
            "until `rekindle stop`" if stays is None else f"for {human_duration(stays)} (or until `rekindle stop`)"
        )
        return f"The model stays loaded {time_left}: the next command starts at once."
    if (refused := reuse["refused_chunks"]) is not None:
        return f"{RefusedChunks(**refused)}."
    cold = reuse["cold_seconds"] or 0.0
    if reuse["miss"] == "differs" and cold > _LONG_SECONDS:
        return f"{reuse['computed']:,} tokens were computed: `rekindle explain --last` says why."
    return None
