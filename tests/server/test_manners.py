"""What clients, operators and logs may expect of every protocol: ends, refusals, and a line for each request."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from rekindle.cli.console import logged_progress
from rekindle.engine.base import Logits, Row
from rekindle.server.server_log import LogFormatter
from tests.server.conftest import Serve
from tests.server.scripted import ScriptedEngine
from tests.server.serving import ALICE, PATIENCE_SECONDS, Asking, Gated, Served, eventually

USER = [{"role": "user", "content": "Look."}]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
FUNCTION = {"name": "look", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
# One reply of each protocol: path, body, how it says the longest reply, where its text is.
REPLIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": USER}, "max_tokens"),
    "responses": ("/v1/responses", {"input": USER}, "max_output_tokens"),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 1000}, "max_tokens"),
    "ollama": ("/api/chat", {"messages": USER}, "num_predict"),
}


def ask(served: Served, name: str, max_tokens: int | None = None, **more: Any) -> dict[str, Any]:
    path, body, limit = REPLIES[name]
    body = {**body, "stream": False, **more}
    if max_tokens is not None:
        body = {**body, "options": {limit: max_tokens}} if name == "ollama" else {**body, limit: max_tokens}
    answer = served.post(path, **body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def ended(name: str, told: dict[str, Any]) -> tuple[str | None, int, str]:
    """The text of a reply, its number of calls, and why it ended."""
    if name == "chat":
        (choice,) = told["choices"]
        return choice["message"]["content"], len(choice["message"].get("tool_calls", ())), choice["finish_reason"]
    if name == "ollama":
        return told["message"]["content"], len(told["message"].get("tool_calls", ())), told["done_reason"]
    if name == "messages":
        texts = [block["text"] for block in told["content"] if block["type"] == "text"]
        return "".join(texts), sum(b["type"] == "tool_use" for b in told["content"]), told["stop_reason"]
    texts = [part["text"] for item in told["output"] for part in item.get("content", ())]
    reason = told["status"] if told["incomplete_details"] is None else told["incomplete_details"]["reason"]
    return "".join(texts), sum(item["type"] == "function_call" for item in told["output"]), reason


FORCED = {
    "chat": {"tools": TOOLS, "tool_choice": "required"},
    "responses": {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    "messages": {"tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
    "ollama": {"tools": TOOLS},
}
CUT = {"chat": "length", "responses": "max_output_tokens", "messages": "max_tokens", "ollama": "length"}


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("tokens", [14, 40, len(CALL) - 8])
def test_a_call_that_is_cut_leaks_no_markup(serve: Serve, name: str, tokens: int) -> None:
    served = serve(ScriptedEngine([CALL]))
    text, calls, reason = ended(name, ask(served, name, tokens, **FORCED[name]))
    assert not text and reason == CUT[name]
    assert calls == (tokens > 50)  # its closing marker may be missing
    assert name != "chat" or text is None


def test_a_call_behind_text_that_is_cut_leaves_the_text(serve: Serve) -> None:
    served = serve(ScriptedEngine([f"I look.\n{CALL}\n{CALL}"]))
    for tokens, calls in ((30, 0), (8 + len(CALL) + 4, 1), (8 + len(CALL) + 30, 1)):
        assert ended("chat", ask(served, "chat", tokens, tools=TOOLS)) == ("I look.", calls, "length")


def test_a_cut_call_leaks_nothing_into_a_stream(serve: Serve) -> None:
    served = serve(ScriptedEngine([CALL]))
    with served.http() as client:
        body = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 20, "stream": True}
        text = client.post("/v1/chat/completions", json=body).text
    assert "tool_call" not in text and '"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("more", "most"), [({}, 1), ({"parallel_tool_calls": True}, 8)])
def test_one_forced_call_is_one_unless_several_are_asked_for(served: Served, more: dict[str, Any], most: int) -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "temperature": 0, **more}
    told = ask(served, "chat", 1000, **body)
    assert 1 <= ended("chat", told)[1] <= most
    assert most > 1 or ended("chat", told)[2] == "tool_calls"


class Held(ScriptedEngine):
    """Goes on and on, but waits after thirty steps until it may."""

    def __init__(self) -> None:
        super().__init__(["So it goes on and on. " * 100])
        self.steps = 0
        self.reached, self.go = threading.Event(), threading.Event()

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        self.steps += 1
        if self.steps == 30:
            self.reached.set()
            assert self.go.wait(PATIENCE_SECONDS)
        return super().step(rows, cancelled)


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_whose_time_is_up_keeps_its_text(serve: Serve, name: str) -> None:
    engine = Held()
    served = serve(engine)
    asked = Asking(lambda: ask(served, name))
    assert engine.reached.wait(PATIENCE_SECONDS)
    for job in served.service._jobs:
        job.end()
    engine.go.set()
    text, _, reason = ended(name, asked.result())
    assert text is not None and text.startswith("So it goes on") and len(text) < 50 and reason == "timeout"


def test_the_time_of_a_reply_is_up_after_the_timeout(serve: Serve) -> None:
    engine = Held()
    served = serve(engine, timeout="3s")
    asked = Asking(lambda: ask(served, "chat"))
    assert engine.reached.wait(PATIENCE_SECONDS)
    eventually(lambda: all(job._time_is_up.is_set() for job in served.service._jobs))
    engine.go.set()
    assert ended("chat", asked.result())[2] == "timeout"


STREAM_ENDS = {
    "chat": ("data: ", "data: [DONE]\n\n"),
    "responses": ("event: response.failed\n", "\n\n"),
    "messages": ("event: error\n", "\n\n"),
    "ollama": ('{"error":', "}\n"),
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_stream_ends_properly_when_the_server_stops(
    serve: Serve, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Gated()
    served = serve(engine, stop_timeout="0s")
    path, body, _ = REPLIES[name]
    engine.go.clear()
    for _ in range(3):
        engine.permits.release()
    with served.http() as client, client.stream("POST", path, json={**body, "stream": True}) as answer:
        pieces = answer.iter_text()
        seen = next(pieces)
        served.server.stop()
        rest = seen + "".join(pieces)
    error, last = STREAM_ENDS[name]
    assert error in rest and "the server is stopping" in rest and rest.endswith(last)
    assert "Traceback" not in caplog.text and not [r for r in caplog.records if r.exc_info]


def test_new_requests_get_503_until_the_replies_have_ended(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    engine = Gated()
    served = serve(engine, stop_timeout="60s")
    engine.go.clear()
    engine.entered.clear()
    first = Asking(lambda: served.chat("hello"))
    eventually(engine.entered.is_set)
    served.server.stop()
    eventually(lambda: served.server.host.stopping)
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
        refused = served.post(path, messages=USER, max_tokens=3)
        assert refused.status_code == 503 and "stopping" in refused.text and refused.headers["retry-after"]
    assert served.get("/health").status_code == 503
    engine.go.set()
    assert first.result()["choices"][0]["finish_reason"] == "length"
    assert "Traceback" not in caplog.text


BAD_FIELDS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}, {"content": "x"}]}, "messages.1.role"),
    ("/v1/chat/completions", {"messages": USER, "stop": 5}, "stop"),
    ("/v1/chat/completions", {"messages": USER, "stop": ["a", 5]}, "stop.1"),
    ("/v1/chat/completions", {"messages": USER, "logit_bias": {"1": "x"}}, "logit_bias.1"),
    ("/v1/chat/completions", {"messages": USER, "temperature": "hot"}, "temperature"),
    ("/v1/chat/completions", {"messages": USER, "rekindle": {"documents": [{"text": 1}]}}, "rekindle.documents.0.text"),
    ("/v1/chat/completions", {"messages": "x " * 9000}, "messages"),
    ("/v1/completions", {"prompt": [["a"]]}, "prompt.0.0"),
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": "x " * 9000}, "prompt"),
    ("/v1/responses", {"input": "x " * 9000}, "input"),
    ("/v1/responses", {"input": 5}, "input"),
    ("/v1/embeddings", {"input": [[1], ["a"]]}, "input.1.0"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD_FIELDS)
def test_the_param_of_an_error_is_a_field_of_the_body(served: Served, path: str, body: Any, param: str) -> None:
    refused = served.post(path, **body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


HALF = b'{"messages": [{"role": "user", "content": "a\\ud83d"}], "max_tokens": 3}'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_half_a_character_and_a_null_message_have_their_own_sentences(served: Served, path: str) -> None:
    with served.http() as client:
        half = client.post(path, content=HALF)
        null = client.post(path, json={"messages": [{"role": "user", "content": None}], "max_tokens": 3})
    assert half.status_code == null.status_code == 400
    assert "messages.0.content" in half.text and "surrogate" in half.text
    assert "null" in null.text and "Give" in null.text


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1beta/models/x:generateContent", "Gemini's API is not served"),
        ("/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("/api/create", "Did you mean /api/"),
        ("/v1/messages/batches", "There is no /v1/messages/batches."),
    ],
)
def test_a_path_that_is_not_served_says_what_is(served: Served, path: str, says: str) -> None:
    refused = served.post(path)
    assert refused.status_code == 404 and says in refused.text
    assert all(api in refused.text for api in ("OpenAI", "Anthropic", "Ollama", "/docs"))


def test_a_reply_without_a_limit_has_the_default_one(serve: Serve) -> None:
    served = serve(default_reply=7)
    for name in ("chat", "responses", "ollama"):
        assert ended(name, ask(served, name))[2] == CUT[name]
    told = served.chat("hello", max_tokens=20)
    assert told["usage"]["completion_tokens"] > 7 or told["choices"][0]["finish_reason"] == "stop"


def test_a_turn_that_goes_on_is_no_miss(serve: Serve) -> None:
    served = serve(ScriptedEngine(["It is a lighthouse, and its lamp is lit at dusk."]))
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Tell me what stands on the rock. " * 20}]
    misses = []
    for _ in range(3):
        told = served.chat(chat, max_tokens=100)
        misses.append(told["rekindle"]["miss"])
        chat += [told["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    other = [*chat[:1], {"role": "assistant", "content": "A tree."}, {"role": "user", "content": "Sure?"}]
    assert misses == ["unknown", None, None]
    assert served.chat(other)["rekindle"]["miss"] == "differs"
    counted = [line for line in served.get("/metrics").text.splitlines() if line.startswith("rekindle_misses_total")]
    assert sorted(line.split('reason="')[1].split('"')[0] for line in counted) == ["differs", "unknown"]


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The lines of JSON that a server logs."""
    written, logger = io.StringIO(), logging.getLogger("rekindle.access")
    handler = logging.StreamHandler(written)
    handler.setFormatter(LogFormatter("json"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield written
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def logged(log: io.StringIO, count: int) -> list[dict[str, Any]]:
    eventually(lambda: log.getvalue().count("\n") >= count)
    return [json.loads(line) for line in log.getvalue().splitlines()]


def test_every_request_is_a_line_of_the_log(keyed: Served, log: io.StringIO) -> None:
    answers: list[httpx.Response] = []
    with keyed.http(ALICE) as client:
        for body in ({"max_tokens": 4}, {"max_tokens": 4, "stream": True}, {"max_tokens": -1}):
            answers.append(client.post("/v1/chat/completions", json={"messages": USER, **body}))
    keyed.get("/v1/models")
    whole, stream, refused, nobody = logged(log, 4)
    for line in (whole, stream):
        assert (line["method"], line["path"], line["status"], line["tenant"]) == (
            "POST", "/v1/chat/completions", 200, "alice",
        )  # fmt: skip
        assert line["outcome"] == "length" and line["completion_tokens"] == 4 and line["prompt_tokens"] > 4
        assert 0 < line["first_token_seconds"] <= line["total_seconds"] and line["time"].endswith("+00:00")
    assert stream["cached_tokens"] == answers[0].json()["usage"]["prompt_tokens"] - 1 and whole["cached_tokens"] == 0
    assert [answer.headers["x-request-id"] for answer in answers] == [line["id"] for line in (whole, stream, refused)]
    assert refused["outcome"] == "4xx" and refused["prompt_tokens"] is None
    assert nobody["status"] == 401 and nobody["tenant"] is None


def test_a_line_for_people_says_the_same() -> None:
    record = logging.makeLogRecord({"msg": "GET /x 200", "fields": {"id": "req-1", "status": 200, "tenant": None}})
    assert LogFormatter("text").format(record).endswith("+00:00 GET /x 200 id=req-1")


def test_starting_is_logged_stage_by_stage() -> None:
    lines: list[str] = []
    report = logged_progress("smollm2", lines.append)
    for done in range(0, 101, 5):
        report("download", done, 100)
    report("load", 0, 1)
    report("load", 1, 1)
    assert lines == [*(f"downloading smollm2: {share} %" for share in range(0, 101, 10)), "loading the model"]
