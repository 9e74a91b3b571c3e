"""`rekindle idle`, end to end on a tiny model."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import InvalidSetting, NothingKnown
from rekindle.idle.idle import Idle
from rekindle.idle.log import IdleAction
from rekindle.settings import ServerSettings, warn_once
from tests.cli.test_commands import rekindle
from tests.knowledge.conftest import embedder_folder

__all__ = ["embedder_folder"]  # a fixture

QUICK = ("--idle-settle", "0s", "--idle-stride", "1", "--max-tokens", "4", "--idle-load", "1000", "--on-battery")


@pytest.fixture
def settings(tiny_folder: Path, tmp_path: Path, embedder_folder: Path) -> list[str]:
    where = ["--cache", str(tmp_path / "cache"), "--embedder", str(embedder_folder)]
    notes = tmp_path / "notes.txt"
    notes.write_text("The lamp of Ternholm burns oil from Vesk. Mara lights it at dusk.", "utf-8")
    assert rekindle("ingest", str(notes), *where).exit_code == 0
    return ["--model", str(tiny_folder), *where]


def done(*arguments: str) -> Any:
    result = rekindle(*arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_what_was_done_is_told_and_logged(settings: list[str]) -> None:
    told = done("idle", *settings, *QUICK, "--answers", "verified", "--json")
    assert {did["action"] for did in told} == {"warm"}
    assert all(did["finished"] and did["tokens"] > 0 and did["seconds"] > 0 for did in told)
    where = settings[2:]
    log = done("idle", "--log", "--last", "10", *where, "--json")
    assert sum(way["count"] for way in log["actions"]) == len(log["last"]) == len(told)
    shown = rekindle("idle", "--log", "--last", "2", *where)
    assert shown.exit_code == 0 and "seconds saved" in shown.stdout


def test_people_see_a_line_for_each_thing(settings: list[str]) -> None:
    result = rekindle("idle", *settings, *QUICK, "--answers", "off")
    assert result.exit_code == 0, result.output
    assert "the instructions" in result.stdout and " actions in " in result.stdout
    assert "answers is off: passages are prefilled, but no questions are predicted" in result.stderr


def test_a_model_too_small_to_ask_is_named_in_a_line(settings: list[str]) -> None:
    result = rekindle("idle", *settings, *QUICK, "--answers", "verified")
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stderr.splitlines() if "too small to ask" in line]
    assert "500 million parameters: passages are prefilled, but no questions are predicted" in line
    assert "the instructions" in result.stdout


def test_options_that_are_gone_are_taken_and_named(settings: list[str], caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    gone = ("--idle-tflop", "5", "--idle-sources", "passage,history")
    assert rekindle("idle", *settings, *QUICK, "--answers", "off", *gone).exit_code == 0
    assert "idle_tflop is gone and has no effect: idle_seconds limits idle work." in caplog.messages
    assert any("questions are predicted from abstract and history" in message for message in caplog.messages)
    assert "--idle-tflop" not in rekindle("idle", "--help").stdout


def test_a_budget_and_what_is_in_the_way_are_heeded(settings: list[str]) -> None:
    assert done("idle", *settings, *QUICK, "--idle-seconds", "0s", "--json") == []
    result = rekindle("idle", *settings, "--idle-load", "0")
    assert result.exit_code == 0 and "Stopped: others keep" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--answers", "off"], "all is prepared. New documents and questions bring work; --answers verified predicts"),
        (["--answers", "verified"], "all is prepared. New documents and questions bring work; no questions are"),
        (["--idle-seconds", "0s"], "the budget is spent."),
        (["--disk-limit", "150kB", "--answers", "off"], "the cache has no room left for more. Set a larger disk_limit"),
    ],
    ids=["prepared", "too small", "budget", "room"],
)
def test_nothing_to_do_is_a_line_with_the_reason(settings: list[str], options: list[str], words: str) -> None:
    quick = [*settings, *QUICK]
    if "--disk-limit" not in options:
        assert rekindle("idle", *quick, "--answers", "off").exit_code == 0
    for more in ([], ["--json"]):
        result = rekindle("idle", *quick, *options, *more)
        assert result.exit_code == 0 and f"Nothing to do: {words}" in result.stderr, result.output


def test_nothing_to_do_without_a_cache_is_a_line(settings: list[str], tmp_path: Path) -> None:
    where = ["--library", str(tmp_path / "cache-library"), *settings[4:]]
    result = rekindle("idle", *settings[:2], *where, *QUICK, "--cache", "off", "--answers", "off")
    assert result.exit_code == 0, result.output
    assert "Nothing to do: answers is off and there is no cache." in result.stderr


def test_watching_goes_on_until_it_is_interrupted(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []

    def run(self: Idle, stop: threading.Event | None = None) -> list[IdleAction]:
        assert stop is not None
        runs.append(stop.is_set())
        if len(runs) == 3:
            signal.raise_signal(signal.SIGINT)
        return []

    monkeypatch.setattr(Idle, "run", run)
    before = signal.getsignal(signal.SIGINT)
    result = rekindle("idle", *settings, "--watch", "--every", "0s")
    assert result.exit_code == 0 and "0 actions" in result.stdout
    assert runs == [False] * 3 and signal.getsignal(signal.SIGINT) is before


def test_a_server_works_ahead_only_if_it_is_told_to(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServerSettings] = []

    def refuse(_: object, settings: ServerSettings, *__: object) -> None:
        seen.append(settings)
        raise InvalidSetting("That is enough.")

    monkeypatch.setattr("rekindle.server.serve.Server", refuse)
    for flags in ((), ("--idle", "--quiet", "5s", "--on-battery")):
        assert isinstance(rekindle("serve", str(tiny_folder), *flags).exception, InvalidSetting)
    without, with_it = seen
    assert not without.idle and with_it.idle and with_it.quiet == "5s" and with_it.on_battery


def test_what_makes_no_sense_is_refused(settings: list[str], tmp_path: Path) -> None:
    assert isinstance(rekindle("idle", *settings, "--idle-sources", "dreams").exception, InvalidSetting)
    elsewhere = [*settings, "--library", str(tmp_path / "nothing")]
    assert isinstance(rekindle("idle", *elsewhere).exception, NothingKnown)
