"""The same hostile conversations in each protocol: all are refused, in the protocol's own form, before anything is
computed; and an error within a stream is an item of that protocol's streams.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import Gated, Served, fake_session, serving

USER = {"role": "user", "content": "hello"}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
LONG = "x" * 5000  # more than the context
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "ollama_chat": "/api/chat",
    "ollama_generate": "/api/generate",
}
GOOD: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER]},
    "completions": {"prompt": "hello"},
    "responses": {"input": [USER]},
    "messages": {"messages": [USER], "max_tokens": 9},
    "count_tokens": {"messages": [USER]},
    "ollama_chat": {"messages": [USER]},
    "ollama_generate": {"prompt": "hello"},
}


def said(message: Any) -> dict[str, dict[str, Any]]:
    """A conversation with one odd message, in all protocols that have conversations."""
    turns = [USER, message, USER]
    names = ("chat", "messages", "count_tokens", "ollama_chat")
    return {"responses": {"input": turns}, **{name: {"messages": turns} for name in names}}


def every(**fields: Any) -> dict[str, dict[str, Any]]:
    return {name: dict(fields) for name in PATHS}


HOSTILE: dict[str, dict[str, dict[str, Any]]] = {
    "an unknown role": said({"role": "emperor", "content": "x"}),
    "no role": said({"content": "x"}),
    "a number as content": said({"role": "user", "content": 7}),
    "an object as content": said({"role": "user", "content": {"text": "x"}}),
    "a text as message": said("hello"),
    "a list as message": said([USER]),
    "half a character": said({"role": "user", "content": "\ud800"}),
    "an image": {
        "chat": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "messages": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "count_tokens": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "ollama_chat": {"messages": [{**USER, "images": ["aGk="]}]},
        "ollama_generate": {"images": ["aGk="]},
    },
    "a call without a name": {
        "chat": {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, USER]},
        "responses": {"input": [{"type": "function_call", "call_id": "1", "arguments": "{}"}, USER]},
        "messages": {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}, USER]},
        "ollama_chat": {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}, USER]},
    },
    "the result of no call": {
        "responses": {"input": [USER, {"type": "function_call_output", "output": "x"}]},
        "messages": {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
    },
    "a tool without a name": {
        "chat": {"tools": [{"type": "function", "function": {}}]},
        "responses": {"tools": [{"type": "function"}]},
        "messages": {"tools": [{"input_schema": {}}]},
        "count_tokens": {"tools": [{"input_schema": {}}]},
        "ollama_chat": {"tools": [{"type": "function", "function": {}}]},
    },
    "two tools of one name": {
        "chat": {"tools": [{"type": "function", "function": FUNCTION}] * 2},
        "responses": {"tools": [{"type": "function", **FUNCTION}] * 2},
        "messages": {"tools": [{"name": "look", "input_schema": {}}] * 2},
        "count_tokens": {"tools": [{"name": "look", "input_schema": {}}] * 2},
        "ollama_chat": {"tools": [{"type": "function", "function": FUNCTION}] * 2},
    },
    "more than fits": {
        "chat": {"messages": [{"role": "user", "content": LONG}]},
        "completions": {"prompt": LONG},
        "responses": {"input": LONG},
        "messages": {"messages": [{"role": "user", "content": LONG}]},
        "ollama_chat": {"messages": [{"role": "user", "content": LONG}]},
        "ollama_generate": {"prompt": LONG},
    },
    "a hundred thousand messages": said(USER) | {
        name: {"input" if name == "responses" else "messages": [USER] * 100_000}
        for name in ("chat", "responses", "messages", "count_tokens", "ollama_chat")
    },
    "a number as model": every(model=7),
    "a model that is not here": every(model="no/such-model"),
    "a text as stream": {name: {"stream": "yes"} for name in PATHS if name != "count_tokens"},
    "an empty stop": {
        "chat": {"stop": [""]},
        "completions": {"stop": [""]},
        "messages": {"stop_sequences": [""]},
        "ollama_chat": {"options": {"stop": [""]}},
        "ollama_generate": {"options": {"stop": [""]}},
    },
    "fewer than no tokens": {
        "chat": {"max_tokens": -1},
        "completions": {"max_tokens": -1},
        "responses": {"max_output_tokens": -1},
        "messages": {"max_tokens": -1},
    },
}  # fmt: skip
CASES = [(name, variant) for variant, bodies in HOSTILE.items() for name in bodies]
STREAMS = [name for name in PATHS if name != "count_tokens"]


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(fake_session(tmp_path_factory.mktemp("cache"))) as served:
        yield served


def error_in(name: str, body: Any) -> str:
    """The sentence of an error that has its protocol's form, and no other."""
    if name.startswith("ollama"):
        assert set(body) == {"error"}
        sentence = body["error"]
    elif name in ("messages", "count_tokens"):
        assert set(body) == {"type", "error"} and body["type"] == "error"
        assert set(body["error"]) == {"type", "message"} and body["error"]["type"].endswith("_error")
        sentence = body["error"]["message"]
    else:
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
        sentence = body["error"]["message"]
    assert isinstance(sentence, str) and sentence
    return sentence


@pytest.mark.parametrize(("name", "variant"), CASES, ids=[f"{name}: {variant}" for name, variant in CASES])
def test_bad_input_gets_the_protocols_own_error(hosted: Served, name: str, variant: str) -> None:
    steps = hosted.engine.steps
    for stream in (False, True):
        body = {**GOOD[name], "stream": stream, **HOSTILE[variant][name]}
        with hosted.http() as client:
            answer = client.post(PATHS[name], content=json.dumps(body))
        assert answer.status_code in (400, 404), answer.text
        assert answer.headers["content-type"] == "application/json"
        error_in(name, answer.json())
    assert hosted.engine.steps == steps


@pytest.mark.parametrize("name", STREAMS)
def test_an_error_within_a_stream_has_the_protocols_form(tmp_path: Path, name: str) -> None:
    engine = Gated()
    engine.go.clear()
    with serving(fake_session(tmp_path, engine)) as served:
        body = {**GOOD[name], "app_id": "somebody", "stream": True}
        with served.http() as client, client.stream("POST", PATHS[name], json=body) as answer, served.http() as other:
            while not other.put("/v1/rekindle/apps/somebody", json={"state": "killed"}).json()["stopped_requests"]:
                pass
            lines = [line for line in answer.iter_lines() if line.startswith(("data: {", "{"))]
        last = json.loads(lines[-1].removeprefix("data: "))
    if name == "responses":
        assert last["type"] == "response.failed" and last["response"]["error"]["message"]
    else:
        error_in(name, last)
