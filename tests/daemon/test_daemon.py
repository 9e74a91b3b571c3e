"""The daemon that keeps a model loaded: real processes, on a tiny model. No process outlives its test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from rekindle.cli.main import app
from rekindle.daemon import client, private_socket
from rekindle.daemon.answering import accepting_commands
from rekindle.daemon.client import DaemonClient
from rekindle.daemon.spec import DaemonSpec
from rekindle.errors import ContextOverflow, ModelNotFound, RekindleError
from rekindle.machine import cache_folder, home_folder
from rekindle.session.session import Session
from rekindle.settings import Settings
from tests.daemons import daemons
from tests.knowledge.conftest import embedder_folder

__all__ = ["embedder_folder"]  # a fixture
pytestmark = pytest.mark.thorough

SECONDS = 300.0  # the longest wait for anything
LONG_TOKENS = 4000  # more than a socket takes while nobody reads: such a reply does not end before its client goes on
HELLO = {"kind": "generate", "prompt": "Hello", "options": {"max_tokens": 4}}
LONG = {"kind": "generate", "prompt": "Hello", "options": {"max_tokens": LONG_TOKENS, "min_tokens": LONG_TOKENS}}
TOO_LONG = "x" * (LONG_TOKENS + 200)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the sockets: a short path, as those of sockets must be. What still runs is killed."""
    folder = Path(tempfile.mkdtemp(prefix="rk-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("REKINDLE_DAEMON", "yes")
    monkeypatch.setattr(client, "_START_SECONDS", SECONDS)
    monkeypatch.setattr(client, "_STATUS_SECONDS", SECONDS)
    yield folder
    for process in processes():
        process.kill()
        process.wait(SECONDS)
    shutil.rmtree(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of llama.cpp: its process starts in a second, and one that imports torch in eight."""
    pytest.importorskip("xllamacpp")
    from tests.tiny_gguf import write_llama

    return write_llama(tmp_path / "tiny.gguf", context=LONG_TOKENS + 100)


def processes() -> list[psutil.Process]:
    """The daemons that listen in this test's folder, or that are still ending."""
    return daemons(Path(os.environ["XDG_RUNTIME_DIR"]))


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def runner(model: Path | str, keep_alive: float | None = None, **settings: Any) -> DaemonClient:
    return DaemonClient(DaemonSpec.of(str(model), Settings.load(settings)), keep_alive, lambda *_: None)


def pids() -> list[int]:
    return [status["pid"] for _, status in client.running()]


def rekindle(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_the_model_stays_loaded_and_every_command_says_the_same_as_without(
    runtime: Path, tiny_folder: Path, tmp_path: Path, embedder_folder: Path
) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("A prompt that is warmed and then explained. " * 3)
    document = tmp_path / "notes.txt"
    document.write_text("The ferry leaves at nine. The museum opens at ten.")
    library = ["--library", str(tmp_path / "library"), "--embedder", str(embedder_folder)]
    assert rekindle("ingest", str(document), *library).exit_code == 0
    commands = [
        ["run", str(tiny_folder), "Hello", "-n", "4", "--json"],
        ["ask", "When does the ferry leave?", "-m", str(tiny_folder), "-n", "4", "--json", *library],
        ["warm", str(text), "-m", str(tiny_folder), "--json"],
        ["explain", str(text), "-m", str(tiny_folder), "--json"],
        ["run", str(tiny_folder), "x" * 600],
    ]
    seen = []
    for how in ("--no-daemon", "--daemon"):
        cache = ["--cache", str(tmp_path / how)]
        results = [rekindle(*command, how, *cache) for command in commands]
        assert [result.exception for result in results[:4]] == [None] * 4
        chat = rekindle("chat", str(tiny_folder), "-n", "4", "--json", how, *cache, stdin="Hi\nAnd then?\n")
        reply, answer, warmed, explained = (json.loads(result.stdout) for result in results[:4])
        seen.append(
            [
                *(reply["tokens"], answer["tokens"], answer["sources"], explained["tokens"]),
                *(warmed["prompts"], warmed["computed_tokens"] + warmed["known_tokens"]),
                *(sorted(one) for one in (reply, answer, warmed, explained)),
                *(str(results[4].exception), json.loads("[" + chat.stdout.replace("}\n{", "},{") + "]")[1]["tokens"]),
            ]
        )
    assert seen[0] == seen[1]
    assert "The prompt has" in seen[0][-2]
    assert len(pids()) == 1


def test_a_second_command_finds_the_model_loaded_also_with_other_settings(runtime: Path, model: Path) -> None:
    first = runner(model).run(HELLO, print)
    (pid,) = pids()
    second = runner(model).run(HELLO, print)
    other = runner(model, reuse="off").run(HELLO, print)
    assert first["load_seconds"] is not None
    assert second["load_seconds"] is None and second["reply"]["reuse"]["engine"] > 0
    assert other["load_seconds"] is None and other["reply"]["reuse"]["miss"] == "off"
    assert {tuple(one["reply"]["tokens"]) for one in (first, second, other)} == {tuple(first["reply"]["tokens"])}
    assert pids() == [pid]


def test_how_far_a_prompt_is_read_comes_before_the_reply(runtime: Path, model: Path) -> None:
    for cached in (False, True):
        events: list[dict[str, Any]] = []
        result = runner(model).run(HELLO, events.append)
        told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert "text" in events[-1] and events[: len(told)] == [one for one in events if "text" not in one]
        assert told[0]["processed"] == told[0]["cache"] and (told[0]["cache"] > 0) == cached
        assert told[-1]["processed"] == told[-1]["total"] == result["reply"]["usage"]["prompt_tokens"]


def test_commands_that_start_together_share_one_process(runtime: Path, model: Path) -> None:
    results: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: results.append(runner(model).run(HELLO, lambda _: None))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(results) == 4 and len(pids()) == 1
    eventually(lambda: len(processes()) == 1)  # the others found it running


def test_it_leaves_after_keep_alive_and_keeps_what_was_computed(runtime: Path, model: Path) -> None:
    prompt = {**HELLO, "prompt": "A prompt that is longer than a block of tokens, so that it is worth keeping."}
    first = runner(model, keep_alive=0.1).run(prompt, print)
    eventually(lambda: processes() == [])
    assert list((runtime / "rekindle").glob("*.sock")) == []
    kept = json.loads(rekindle("cache", "ls", "--json").stdout)
    assert [(entry["model"], entry["tokens"] > 32) for entry in kept] == [("tiny", True)]
    again = runner(model).run(prompt, print)
    assert again["load_seconds"] is not None and again["reply"]["text"] == first["reply"]["text"]
    reuse = again["reply"]["reuse"]  # found, and loaded unless this machine is busy: never "unknown" or "lost"
    assert (reuse["disk"] > 0 and reuse["miss"] is None) or reuse["miss"] in ("late", "slower"), reuse


def test_stop_frees_the_model(runtime: Path, model: Path) -> None:
    assert "not loaded" in rekindle("stop", "other").stdout
    runner(model).run(HELLO, print)
    listed = json.loads(rekindle("ps", "--json").stdout)
    assert [(one["model"], one["state"], one["running"]) for one in listed] == [(str(model), "loaded", 0)]
    assert "background" in rekindle("ps").stdout
    assert rekindle("stop", "other").stdout.startswith("other is not loaded")
    assert rekindle("stop").stdout == f"{model} stopped\n"
    eventually(lambda: processes() == [])
    assert rekindle("ps").stdout.startswith("No server is running")


def test_what_it_answered_is_given_again_without_starting_it(
    runtime: Path, model: Path, tmp_path: Path, embedder_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # so that paths are relative
    Path("notes.txt").write_text("The ferry leaves at nine. The museum opens at ten.")
    embedder = os.path.relpath(embedder_folder)
    library = ["--library", "library", "--embedder", embedder]
    assert rekindle("ingest", "notes.txt", *library).exit_code == 0
    ask = ["ask", "When does the ferry leave?", "-m", model.name, "--answers", "direct", "-n", "24", "--json", *library]
    ask += ["--stop", json.loads(rekindle(*ask, "--retrieval", "bm25").stdout)["text"][-1]]
    answered = json.loads(rekindle(*ask).stdout)
    assert answered["finish_reason"] == "stop" and answered["stored"] is None
    assert rekindle("stop").exit_code == 0
    eventually(lambda: processes() == [])
    given = json.loads(rekindle(*ask).stdout)
    assert given["stored"]["way"] == "direct" and given["text"] == answered["text"]
    assert processes() == []


def test_one_that_was_killed_is_replaced(runtime: Path, model: Path) -> None:
    runner(model).run(HELLO, print)
    (process,) = processes()
    process.send_signal(signal.SIGKILL)
    process.wait(SECONDS)
    assert runner(model).run(HELLO, print)["load_seconds"] is not None


def test_changed_weights_are_loaded_again(runtime: Path, model: Path) -> None:
    runner(model).run(HELLO, print)
    (old,) = pids()
    model.touch()
    assert runner(model).run(HELLO, print)["load_seconds"] is not None
    assert old not in pids()


def test_another_model_takes_the_place_of_an_idle_one(runtime: Path, model: Path, tmp_path: Path) -> None:
    runner(model).run(HELLO, print)
    other = Path(shutil.copy(model, tmp_path / "other.gguf"))
    runner(other).run(HELLO, print)
    eventually(lambda: [status["model"] for _, status in client.running()] == [str(other)])


def test_errors_are_those_of_the_session(runtime: Path, model: Path) -> None:
    with pytest.raises(ModelNotFound, match="Unknown model 'nosuch'"):
        runner("nosuch").run(HELLO, print)
    eventually(lambda: processes() == [])  # it has nothing to wait for
    with pytest.raises(ContextOverflow, match="The prompt has"):
        runner(model).run({**HELLO, "prompt": TOO_LONG}, print)
    runner(model).run(HELLO, print)


def test_warnings_of_the_session_reach_every_command(
    runtime: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home_folder().mkdir()
    cache_folder().write_text("no folder")
    for _ in range(2):
        caplog.clear()
        runner(model).run(HELLO, print)
        assert [text for text in caplog.messages if text.startswith("The cache cannot be used")] != []


class _Interrupted(Exception):
    pass


def test_a_command_that_is_interrupted_stops_its_reply(runtime: Path, model: Path) -> None:
    def interrupt(_event: object) -> None:
        raise _Interrupted

    with pytest.raises(_Interrupted):
        runner(model).run(LONG, interrupt)
    eventually(lambda: [status["running"] for _, status in client.running()] == [0])
    assert runner(model).run(HELLO, print)["load_seconds"] is None


def test_a_folder_that_others_can_enter_is_not_used(runtime: Path, model: Path) -> None:
    (runtime / "rekindle").mkdir(mode=0o755)
    (runtime / "rekindle").chmod(0o755)
    with pytest.raises(OSError, match="not a folder of this user alone"):
        private_socket.private_folder()
    result = rekindle("run", str(model), "Hello", "-n", "2")
    assert result.exit_code == 0 and "does not stay loaded" in result.stderr
    (runtime / "rekindle").rmdir()
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "rekindle").symlink_to(runtime / "elsewhere")
    with pytest.raises(OSError, match="not a folder of this user alone"):
        private_socket.private_folder()


def test_one_that_dies_says_where_its_log_is(runtime: Path, model: Path) -> None:
    runner(model).run(HELLO, print)
    (process,) = processes()

    def kill(_event: object) -> None:
        if process.is_running():
            process.send_signal(signal.SIGKILL)
            process.wait(SECONDS)

    with pytest.raises(RekindleError, match=r"ended before it answered.*\.log"):
        runner(model).run(LONG, kill)


def test_the_socket_depends_on_what_the_engine_is_loaded_with(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def path(model: str = "smollm2", **settings: Any) -> Path:
        return DaemonSpec.of(model, Settings.load(settings)).socket_path

    assert path() == path(reuse="off") == path(keep_alive="1h")
    assert len({path(), path("other"), path(dtype="float32"), path(context=128)}) == 4
    before = path()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert path() != before


def test_relative_paths_are_those_of_the_command(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "publisher.pub").write_text("ab" * 32)
    given = {"cache": "kv", "adapter": "a=lora,scale=0.5", "origin_keys": f"publisher.pub, {'cd' * 32}"}
    spec = DaemonSpec.of("model", Settings.load(given))
    assert spec.model == str(tmp_path / "model")
    assert spec.settings["cache"] == str(tmp_path / "kv")
    assert spec.settings["adapter"] == f"a={tmp_path / 'lora'},scale=0.5"
    assert spec.settings["origin_keys"] == f"{tmp_path / 'publisher.pub'},{'cd' * 32}"
    assert DaemonSpec.of("smollm2", Settings.load({"cache": "off"})).settings["cache"] == "off"


def test_a_server_with_the_model_loaded_takes_the_commands(runtime: Path, model: Path, tmp_path: Path) -> None:
    with Session(model, cache=str(tmp_path / "kv"), parallel=2) as session:
        with accepting_commands(session, DaemonSpec.of(str(model), session.settings)):
            served = runner(model, cache=str(tmp_path / "kv")).run(HELLO, print)
            again = runner(model, cache=str(tmp_path / "kv")).run(HELLO, print)
            assert served["load_seconds"] is None and processes() == []
            assert again["reply"]["reuse"]["engine"] > 0
            assert served["reply"]["tokens"] == list(session.generate("Hello", max_tokens=4).tokens)
            with pytest.raises(ContextOverflow):
                runner(model, cache=str(tmp_path / "kv")).run({**HELLO, "prompt": TOO_LONG}, print)
            other = runner(model, cache=str(tmp_path / "other")).run(HELLO, print)
            assert other["load_seconds"] is not None and len(processes()) == 1  # it has another cache
        assert list((runtime / "rekindle").glob("*.server")) == []
