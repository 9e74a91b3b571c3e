"""`rekindle serve`, `ps` and `chat --server`: what people type."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner, Result

from rekindle import Session
from rekindle.cli import server as cli_server
from rekindle.cli.main import app
from rekindle.cli.server_client import ServerError
from rekindle.engine.fake import FakeEngine
from rekindle.errors import InvalidSetting, ModelError, OutOfMemory
from rekindle.server.auth import ApiKeys
from rekindle.server.serve import servers_folder
from tests.parity.engines import needs, onnx_folder
from tests.server.serving import ADMIN, ALICE, BOB, Served, fake_session, serving
from tests.tiny_gguf import write_llama

PATIENCE_SECONDS = 120


def rekindle(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(fake_session(tmp_path / "cache")) as running:
        yield running


@contextmanager
def started(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The real command in a process of its own, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rekindle", "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    killer = threading.Timer(PATIENCE_SECONDS, process.kill)
    killer.start()
    try:
        assert process.stderr is not None
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r" at (http://\S+?)/v1", line):
                yield process, found.group(1)
                return
        raise AssertionError(f"it did not start: {said}")
    finally:
        killer.cancel()
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], number: int) -> int:
    """How it ends after a signal."""
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode


def test_a_conversation_with_a_server_is_one_with_its_session(served: Served) -> None:
    result = rekindle("chat", "--server", served.url, "-n", "6", "--json", stdin="Hello\nAnd then?\n")
    with Session(FakeEngine(), cache="off") as direct:
        first = direct.chat("Hello", max_tokens=6)
        turns = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And then?"},
        ]
        second = direct.chat(turns, max_tokens=6)
    decoder, replies, rest = json.JSONDecoder(), [], result.stdout.strip()
    while rest:
        reply, end = decoder.raw_decode(rest)
        replies.append(reply)
        rest = rest[end:].lstrip()
    assert result.exit_code == 0
    assert [reply["text"] for reply in replies] == [first.text, second.text]
    assert [reply["usage"]["prompt_tokens"] for reply in replies] == [
        first.usage.prompt_tokens,
        second.usage.prompt_tokens,
    ]
    assert replies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the second turn goes on from the first"


def test_sampling_options_and_the_system_message_reach_the_server(served: Served) -> None:
    options = "-n 9 -t 0.9 --top-k 20 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1 --seed 4 --stop QQ"
    result = rekindle(
        "chat", "--server", f"{served.url}/v1", "--json", "--system", "S", *options.split(), stdin="Hello\n"
    )
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hello"}]
    with Session(FakeEngine(), cache="off") as direct:
        expected = direct.chat(
            messages,
            max_tokens=9,
            temperature=0.9,
            top_k=20,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.1,
            seed=4,
            stop="QQ",
        )
    assert json.loads(result.stdout)["text"] == expected.text


def test_without_a_temperature_a_server_is_as_greedy_as_a_session(served: Served) -> None:
    said = {rekindle("chat", "--server", served.url, "-n", "12", stdin="Hello\n").stdout for _ in range(3)}
    with Session(FakeEngine(), cache="off") as direct:
        assert said == {direct.chat("Hello", max_tokens=12).text + "\n"}


def test_a_message_that_is_refused_does_not_end_the_conversation(served: Served) -> None:
    result = rekindle("chat", "--server", served.url, "-n", "4", "--json", stdin=f"{'x' * 5000}\nHello\n")
    assert result.exit_code == 0 and "error: " in result.stderr
    assert json.loads(result.stdout)["usage"]["completion_tokens"] == 4


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        result = rekindle("chat", "--server", f"http://127.0.0.1:{taken.getsockname()[1]}", stdin="Hello\n")
    assert isinstance(result.exception, ServerError) and "rekindle ps" in str(result.exception)


def test_a_server_with_keys_wants_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(fake_session(tmp_path / "cache"), keys=ApiKeys([ALICE, BOB])) as served:
        refused = rekindle("chat", "--server", served.url, stdin="Hello\n")
        assert isinstance(refused.exception, ServerError) and "API key" in str(refused.exception)
        let_in = rekindle("chat", "--server", served.url, "--api-key", ALICE, "-n", "3", "--json", stdin="Hello\n")
        assert json.loads(let_in.stdout)["usage"]["completion_tokens"] == 3
        (told,) = json.loads(rekindle("ps", "--server", served.url, "--json").stdout)
        assert "--api-key" in told["state"]
        (told,) = json.loads(rekindle("ps", "--server", served.url, "--api-key", BOB, "--json").stdout)
        assert told["state"] == "loaded" and "pid" not in told
        file = tmp_path / "key"
        file.write_text(f"{BOB}\n", "utf-8")
        file.chmod(0o600)
        (told,) = json.loads(rekindle("ps", "--server", served.url, "--api-key-file", str(file), "--json").stdout)
        assert told["state"] == "loaded"
        monkeypatch.setenv("REKINDLE_API_KEY", ALICE)
        let_in = rekindle("chat", "--server", served.url, "-n", "3", "--json", stdin="Hello\n")
        assert json.loads(let_in.stdout)["usage"]["completion_tokens"] == 3
        file.chmod(0o644)
        refused = rekindle("ps", "--server", served.url, "--api-key-file", str(file))
        assert isinstance(refused.exception, InvalidSetting) and "chmod 600" in str(refused.exception)


def test_settings_of_the_model_are_not_for_whoever_asks_a_server(served: Served) -> None:
    result = rekindle("chat", "--server", served.url, "--device", "cpu", stdin="Hello\n")
    assert isinstance(result.exception, InvalidSetting) and "--device" in str(result.exception)


def test_ps_asks_the_server_that_is_named(served: Served) -> None:
    (told,) = json.loads(rekindle("ps", "--server", served.url, "--json").stdout)
    assert (told["url"], told["model"], told["state"], told["running"]) == (served.url, "fake-0", "loaded", 0)
    table = rekindle("ps", "--server", served.url).stdout
    assert "fake-0" in table and "0 of 4" in table


def test_ps_forgets_servers_that_are_dead() -> None:
    folder = servers_folder()
    folder.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    about = json.dumps({"url": "http://127.0.0.1:1", "pid": gone.pid, "model": "m"})
    (folder / f"{gone.pid}.json").write_text(about)
    (folder / "2.json").write_text("not json")
    (folder / "somebodys.json").write_text(about)
    assert json.loads(rekindle("ps", "--json").stdout) == []
    assert sorted(path.name for path in folder.iterdir()) == ["2.json", "somebodys.json"]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--host", "0.0.0.0"], "--allow-unauthenticated"),
        (["--api-key", "short"], "at least 8"),
        (["--api-key-file", "/nowhere/keys"], "There is no file /nowhere/keys."),
        (["--port", "70000"], "port"),
        (["--queue", "-1"], "queue"),
        (["--timeout", "0s"], "timeout"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_a_model_is_loaded(options: list[str], advice: str) -> None:
    result = rekindle("serve", "no-such-model-anywhere", *options)
    assert isinstance(result.exception, InvalidSetting) and advice in str(result.exception)


def test_a_port_that_is_taken_is_told(served: Served, tiny_folder: Path) -> None:
    result = rekindle("serve", str(tiny_folder), "--port", served.url.rsplit(":", 1)[1])
    assert isinstance(result.exception, InvalidSetting) and "--port" in str(result.exception)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_well_when_it_is_told_to(tiny_gguf: Path, tmp_path: Path, number: int) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# whose they are\nalice={ALICE}\n\n", "utf-8")
    keys.chmod(0o600)
    cache = tmp_path / "cache"
    with started(
        str(tiny_gguf),
        "--threads",
        "1",
        "--cache",
        str(cache),
        "--api-key-file",
        str(keys),
        REKINDLE_API_KEYS=f"bob={BOB}",
        REKINDLE_ADMIN_KEY=ADMIN,
    ) as (process, url):
        about = f"{url}/v1/rekindle/server"
        told_to = [
            httpx.get(about, headers={"Authorization": f"Bearer {key}"}, timeout=60).json() for key in (ALICE, ADMIN)
        ]
        assert ["pid" in told for told in told_to] == [False, True], "the operator has a key of its own"
        for key in (ALICE, BOB):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            reply = client.completions.create(model="tiny", prompt="The keeper of the lighthouse", max_tokens=3)
            assert reply.usage.prompt_tokens_details.cached_tokens == 0
        assert httpx.get(f"{url}/v1/models").status_code == 401
        (told,) = json.loads(rekindle("ps", "--json", "--api-key", ALICE).stdout)
        assert told["url"] == url and told["model"] == "tiny"
        process.send_signal(number)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0
        assert re.search(rf"stopped; the KV of [\d,]+ tokens is kept in {re.escape(str(cache))} for the next", said), (
            said
        )
    assert json.loads(rekindle("ps", "--json").stdout) == []
    with Session(tiny_gguf, cache=str(cache), tenant="alice") as session:
        assert session.generate("The keeper of the lighthouse", max_tokens=1).reuse.disk > 0


def test_several_models_are_served_on_one_address(tiny_gguf: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other.gguf", seed=1)
    options = ["--threads", "1", "--cache", str(tmp_path / "cache"), "--alias", "claude-*=other"]
    with started(str(tiny_gguf), str(other), *options) as (process, url):
        body = {"messages": [{"role": "user", "content": "Who keeps the light?"}], "max_tokens": 4, "temperature": 0}
        said = []
        for name in ("tiny", "other", "claude-opus"):
            answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "model": name}, timeout=PATIENCE_SECONDS)
            said.append(answer.raise_for_status().json())
        assert [reply["model"] for reply in said] == ["tiny", "other", "other"]
        assert said[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert said[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert "tiny*, other*" in rekindle("ps", "--server", url).stdout
        assert ended(process, signal.SIGTERM) == 0


def test_models_that_cannot_be_served_together_are_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    result = rekindle("serve", str(tiny_gguf), str(tiny_gguf))
    assert isinstance(result.exception, InvalidSetting) and "same name" in str(result.exception)
    result = rekindle("serve", str(tiny_gguf), str(tmp_path / "gone.gguf"))
    assert isinstance(result.exception, ModelError)
    result = rekindle("serve", str(tiny_gguf), "smollm2", "--adapter", f"smollm2={tmp_path}")
    assert isinstance(result.exception, InvalidSetting) and "name of a model" in str(result.exception)


def test_a_model_that_cannot_be_loaded_ends_the_command(tiny_gguf: Path) -> None:
    result = rekindle("serve", str(tiny_gguf), "--port", "0", "--model-memory", "1KB", "--threads", "1")
    assert isinstance(result.exception, OutOfMemory) and "model_memory allows" in str(result.exception)


def test_a_stream_is_cut_when_the_time_to_stop_is_over(tiny_gguf: Path, tmp_path: Path) -> None:
    with started(str(tiny_gguf), "--threads", "1", "--cache", str(tmp_path / "cache"), "--stop-timeout", "1s") as (
        process,
        url,
    ):
        body = {"prompt": "The keeper", "stream": True, "max_tokens": 100000, "min_tokens": 200, "temperature": 0}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_SECONDS) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            try:
                last = [line for line in lines if line][-1]
            except httpx.HTTPError:
                last = "cut"
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0 and (last == "cut" or last.startswith("data: "))


@needs("onnx")
def test_a_graph_is_served(tmp_path: Path) -> None:
    """Several requests at a time, and none changes another's answer."""
    with started(str(onnx_folder()), "--threads", "1", "--parallel", "3", "--cache", str(tmp_path / "cache")) as (
        _,
        url,
    ):
        about = {"role": "system", "content": "The keeper lights the lamp at dusk. " * 6}

        def asked(question: str) -> Any:
            body = {"messages": [about, {"role": "user", "content": question}], "temperature": 0}
            body |= {"max_tokens": 6, "min_tokens": 6}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS)
            return answer.raise_for_status().json()

        first = asked("Who?")
        with ThreadPoolExecutor(3) as pool:
            others = list(pool.map(asked, ("When?", "Why?", "Who?")))
        assert others[2]["choices"][0]["message"] == first["choices"][0]["message"]
        assert all(reply["usage"]["completion_tokens"] == 6 for reply in (first, *others))


@pytest.mark.real
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("hf", marks=pytest.mark.long),  # as the server of the guide: tests/docs/test_server.py
        pytest.param("llamacpp", marks=pytest.mark.llamacpp),
    ],
)
def test_serve_ps_and_chat_with_the_real_model(engine: str, tmp_path: Path) -> None:
    pytest.importorskip("torch" if engine == "hf" else "xllamacpp")
    with started("smollm2", "--engine", engine, "--device", "cpu", "--cache", str(tmp_path / "cache")) as (
        process,
        url,
    ):
        command = [sys.executable, "-m", "rekindle"]
        talk = [*command, "chat", "--server", url, "-n", "12", "--json"]
        said = [
            json.loads(
                subprocess.run(talk, input="What is a lighthouse?\n", capture_output=True, text=True, check=True).stdout
            )
            for _ in range(2)
        ]
        assert said[0]["text"] and said[0]["usage"]["completion_tokens"] <= 12
        cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in said]
        assert cached[0] == 0 and cached[1] == said[1]["usage"]["prompt_tokens"] - 1
        shown = subprocess.run([*command, "ps", "--json"], capture_output=True, text=True, check=True).stdout
        assert [one for one in json.loads(shown) if one["url"] == url and one["model"] == "smollm2"]
        curl = ["curl", "-sSf", f"{url}/v1/models"]
        assert "smollm2" in subprocess.run(curl, capture_output=True, text=True, check=True).stdout
        assert ended(process, signal.SIGTERM) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="no accounts to look at")
@pytest.mark.parametrize(
    ("name", "user", "shell", "is_another"),
    [
        ("root", 0, "/bin/bash", False),
        ("daemon", 7, "/usr/sbin/nologin", False),
        ("builds", 1007, "/usr/sbin/nologin", False),
        ("nobody", 65534, "/bin/sh", False),
        ("me", os.geteuid() if sys.platform != "win32" else 0, "/bin/bash", False),
        ("ann", 1999, "/bin/zsh", True),
    ],
)
def test_who_else_may_use_a_server_without_a_key_are_people_with_a_shell(
    name: str, user: int, shell: str, is_another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pwd

    account = pwd.struct_passwd((name, "x", user, user, "", "/", shell))
    monkeypatch.setattr(pwd, "getpwall", lambda: [account])
    assert cli_server._others_are_here() is is_another
