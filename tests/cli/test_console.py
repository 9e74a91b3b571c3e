"""What a terminal shows while something takes long."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rekindle import Session
from rekindle.cli import console, runner
from rekindle.cli.console import WaitingLine, reading, waiting
from rekindle.cli.runner import WaitedFor
from rekindle.daemon.jobs import Event, Job, Send, run_job
from tests.server.serving import PATIENCE_SECONDS, Asking, Gated

TEXT = "The keeper of the lighthouse writes what he saw. " * 20  # several steps of the engine
JOB = {"kind": "generate", "prompt": TEXT, "options": {"max_tokens": 4, "temperature": 0}}
ERASED = "\x1b[2K"  # the end of the line that was shown


class InProcess:
    """Runs jobs on a session whose engine can be held up."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, job: Job, send: Send) -> dict[str, Any]:
        return run_job(self.session, job, send)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Gated]:
    made = Gated()
    yield made
    made.go.set()


@pytest.fixture
def waited(engine: Gated, tmp_path: Path) -> Iterator[WaitedFor]:
    with Session(engine, cache=str(tmp_path / "cache")) as session:
        yield WaitedFor(InProcess(session), WaitingLine())
        engine.go.set()


def shown_on(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> io.StringIO:
    """Standard error, as a terminal or as a file."""
    shown = io.StringIO()
    notes = Console(file=shown, force_terminal=terminal, width=160, highlight=False, _environ={})
    for module in (console, runner):
        monkeypatch.setattr(module, "notes", notes)
    return shown


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def test_the_check_of_the_weights_is_named_and_happens_once() -> None:
    assert console._STAGES["digest"] == "checking the model's weights (first time only)"


def test_a_terminal_shows_how_far_the_prompt_is_read_and_then_only_the_reply(
    monkeypatch: pytest.MonkeyPatch, engine: Gated, waited: WaitedFor
) -> None:
    shown = shown_on(monkeypatch, terminal=True)
    before: list[str] = []

    def take(event: Event) -> None:
        before.append(shown.getvalue())
        assert "text" in event

    engine.go.clear()
    asking = Asking(lambda: waited.run(JOB, take))
    eventually(lambda: "reading the prompt: 0 of 980 tokens" in shown.getvalue())
    engine.permits.release()
    eventually(lambda: "reading the prompt: 256 of 980 tokens" in shown.getvalue())
    assert " s of about " in shown.getvalue() and "; the next time at once" in shown.getvalue()
    engine.go.set()
    asking.result()
    assert before[0].endswith(ERASED) and before[0] == shown.getvalue(), "the line is gone before the reply begins"
    assert console.notes._live_stack == []


def test_a_line_that_is_no_terminal_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, engine: Gated, waited: WaitedFor
) -> None:
    monkeypatch.setattr(console, "SHOWN_AFTER_SECONDS", 0.0)
    shown = shown_on(monkeypatch, terminal=False)
    engine.go.clear()
    told = threading.Event()
    monkeypatch.setattr(runner, "reading", lambda event: told.set() or reading(event))
    asking = Asking(lambda: waited.run(JOB, lambda _: None))
    assert told.wait(PATIENCE_SECONDS)
    engine.go.set()
    asking.result()
    assert shown.getvalue() == ""


def test_a_reply_within_half_a_second_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_on(monkeypatch, terminal=True)
    monkeypatch.setattr(console, "SHOWN_AFTER_SECONDS", PATIENCE_SECONDS)
    line = WaitingLine()
    line.say(lambda _: "waiting")
    line.clear()
    assert shown.getvalue() == ""


def test_a_command_that_is_stopped_while_a_prompt_is_read_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_on(monkeypatch, terminal=True)
    line = WaitingLine()

    class Stopped:
        def run(self, job: Job, send: Send) -> dict[str, Any]:
            progress = {"total": 980, "cache": 20, "processed": 256, "time_ms": 1500}
            send({"prompt_progress": progress, "rekindle": {"expected_ms": 9000, "kept": False}})
            eventually(lambda: "256 of 980 tokens, 20 of them from the cache" in shown.getvalue())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WaitedFor(Stopped(), line).run(JOB, lambda _: None)
    assert shown.getvalue().endswith(ERASED) and "the next time" not in shown.getvalue()
    assert console.notes._live_stack == []


def test_the_stages_of_loading_are_shown_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SHOWN_AFTER_SECONDS", 0.0)
    shown = shown_on(monkeypatch, terminal=True)
    with waiting("smollm2") as (report, line):
        line.say(lambda _: "waiting for the model")
        eventually(lambda: "waiting for the model" in shown.getvalue())
        for stage, words in (("digest", "checking the model's weights"), ("load", "loading the model")):
            report(stage, 0, 100)
            eventually(lambda words=words: words in shown.getvalue())
            report(stage, 100, 100)
            assert console.notes._live_stack == []
        with line.during(lambda _: "waiting for the rest"):  # of a job, whose model is loaded first
            report("load", 0, 100)
            report("load", 100, 100)
            eventually(lambda: "waiting for the rest" in shown.getvalue())
        assert console.notes._live_stack == []
        report("download", 1, 100)
        eventually(lambda: "downloading smollm2" in shown.getvalue())
    assert console.notes._live_stack == []


def test_the_words_count_on_between_two_reports() -> None:
    progress = {"total": 8300, "cache": 0, "processed": 2048, "time_ms": 23_000}
    words = reading({"prompt_progress": progress, "rekindle": {"expected_ms": 94_000, "kept": True}})
    assert words(2.0) == "reading the prompt: 2,048 of 8,300 tokens, 25 s of about 94 s; the next time at once"
    assert words(80.0) == "reading the prompt: 2,048 of 8,300 tokens, 103 s; the next time at once"
    other = reading({"prompt_progress": {**progress, "cache": 1024}})  # of another server
    assert other(0.0) == "reading the prompt: 2,048 of 8,300 tokens, 1,024 of them from the cache, 23 s"
