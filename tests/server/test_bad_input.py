"""Clients that are broken or hostile: each is refused in OpenAI's shape, and the next good request is answered."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest

from rekindle.engine.fake import FakeEngine
from rekindle.server.openapi import openapi_document
from rekindle.server.routes import ENDPOINTS, Endpoint
from rekindle.server.serve import Server
from rekindle.session.session import Session
from rekindle.settings import ServerSettings
from tests.server.hostile import (
    GOOD,
    PATIENCE_SECONDS,
    Answer,
    answers_in,
    assert_problem,
    assert_refused,
    connected,
    head,
    raw,
    read_until_closed,
)
from tests.server.soak import tiny_embedder

pytestmark = pytest.mark.exhaustive

HOME = os.environ.get("REKINDLE_HOME")  # of whoever runs the tests: their models are there
CHAT = "/v1/chat/completions"
OWN = "/v1/rekindle"
DEEP = 10_000
LONELY = "\\ud800"  # half a character, as JSON spells it


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REKINDLE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def url(home: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with usual limits."""
    embedder = tiny_embedder(tmp_path_factory.mktemp("embedder"))
    session = Session(FakeEngine(), cache=tmp_path_factory.mktemp("cache"), parallel=4, embedder=embedder)
    session.ingest(documents=["hello"])
    with Server(session, ServerSettings(port=0, max_reply=8)).running() as url:
        yield url


@pytest.fixture(scope="module")
def impatient(home: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that waits for nobody, and takes little."""
    session = Session(FakeEngine(), cache=tmp_path_factory.mktemp("cache"), parallel=2)
    settings = ServerSettings(port=0, max_reply=8, client_timeout="1s", max_body="100000")
    with Server(session, settings).running() as url:
        yield url


@pytest.fixture(autouse=True)
def the_next_good_request_is_answered(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"url", "impatient"} & set(request.fixturenames):
        reply = ask(request.getfixturevalue(name), "POST", CHAT, GOOD)
        assert reply.status == 200 and reply.json()["usage"]["completion_tokens"] > 0


def ask(url: str, method: str, path: str, body: object = b"", **headers: str) -> Answer:
    """One request on a connection of its own."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.request(method, url + path, content=content, headers=headers, timeout=PATIENCE_SECONDS)
    return Answer(answer.status_code, dict(answer.headers), answer.content)


def chat(**fields: Any) -> dict[str, Any]:
    return {**GOOD, **fields}


# What is no JSON, or not of the form.


BROKEN = {
    "nothing": b"",
    "blanks": b"  \n ",
    "cut off": json.dumps(GOOD).encode()[:-5],
    "cut off in a text": b'{"messages": [{"role": "user", "content": "hel',
    "two values": b"{}{}",
    "a comment": b'{"messages": [] // none\n}',
    "single quotes": b"{'messages': []}",
    "a trailing comma": b'{"messages": [],}',
    "no object": b"[]",
    "null": b"null",
    "a text": b'"hello"',
    "a number": b"7",
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
    "NULs": b"\0" * 1000,
    "a raw control character": b'{"messages": [{"role": "user", "content": "a\x01b"}]}',
    "a form": b"messages=hello&max_tokens=1",
    "brackets": b"[" * DEEP,
    "braces": b'{"a":' * DEEP,
    "closed brackets": b"[" * DEEP + b"]" * DEEP,
    "closing brackets": b"]" * DEEP,
    "a million brackets": b"[" * 1_000_000,
    "endless digits": b'{"max_tokens": ' + b"9" * 100_000 + b"}",
    "a fraction without end": b'{"temperature": 0.' + b"3" * 100_000 + b'e, "messages": []}',
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize(
    "path",
    [
        CHAT,
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/api/chat",
        "/api/generate",
        "/api/pull",
        "/completion",
        "/infill",
        "/apply-template",
        "/tokenize",
        f"{OWN}/explain",
        f"{OWN}/documents",
    ],
)
def test_a_body_that_is_no_request_is_refused(url: str, path: str, name: str) -> None:
    assert_refused(ask(url, "POST", path, BROKEN[name]), 400)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "a/b/c"]
)
def test_what_a_body_is_called_changes_nothing(url: str, kind: str) -> None:
    assert ask(url, "POST", CHAT, GOOD, **{"Content-Type": kind}).status == 200
    assert_refused(ask(url, "POST", CHAT, b"messages=hello", **{"Content-Type": kind}), 400)


VALUES: list[Any] = [
    None, True, -1, 0, 0.5, 2**31, 2**64, -(10**30), 1e308, "", "x", "\0", "x" * 2000,
    [], {}, [[]], [None], ["x"], [""], [-1], [0.5], [True], [[-1]], {"type": None},
]  # fmt: skip
WORDS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"' + LONELY + '"', '["' + LONELY + '"]', "9" * 5000]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {**GOOD, "max_tokens": 0},
    "/v1/completions": {"prompt": "hello", "max_tokens": 0},
    "/v1/responses": {"input": "hello", "max_output_tokens": 0},
    "/v1/messages": {**GOOD, "max_tokens": 0},
    "/v1/messages/count_tokens": {"messages": GOOD["messages"]},
    "/v1/embeddings": {"input": "hello"},
    "/api/chat": {"messages": GOOD["messages"], "options": {"num_predict": 0}, "stream": False},
    "/api/generate": {"prompt": "hello", "options": {"num_predict": 0}, "stream": False},
    "/completion": {"prompt": "hello", "n_predict": 0},
    "/infill": {"input_prefix": "hello", "n_predict": 0},
    "/apply-template": {"messages": GOOD["messages"]},
    "/api/embed": {"input": "hello"},
    "/api/embeddings": {"prompt": "hello"},
    "/api/show": {},
    "/api/pull": {"model": "no-such-model"},
    "/api/delete": {"model": "no-such-model"},
    "/v1/load_lora_adapter": {"lora_name": "writer", "lora_path": "."},
    "/v1/unload_lora_adapter": {"lora_name": "writer"},
    "/tokenize": {"content": "hello"},
    "/detokenize": {"tokens": [104]},
    f"{OWN}/ask": {"question": "hello", "max_tokens": 0},
    f"{OWN}/search": {"query": "hello"},
    f"{OWN}/documents": {"documents": ["hello"]},
    f"{OWN}/library/check": {},
    f"{OWN}/check": {},
    f"{OWN}/warm": {"prompt": "hello"},
    f"{OWN}/explain": {"prompt": "hello"},
    f"{OWN}/apps/{{id}}": {"state": "foreground"},
}
BODIES = [endpoint for endpoint in ENDPOINTS if endpoint.body is not None]


def _fields(endpoint: Endpoint) -> dict[str, Any]:
    assert endpoint.body is not None
    schema = openapi_document(ENDPOINTS)["components"]["schemas"][endpoint.body.__name__]
    fields: dict[str, Any] = schema["properties"]
    return fields


@pytest.mark.parametrize("endpoint", BODIES, ids=lambda endpoint: endpoint.path)
def test_a_value_that_the_schema_does_not_allow_is_refused_and_the_field_named(url: str, endpoint: Endpoint) -> None:
    components, path = openapi_document(ENDPOINTS)["components"], endpoint.path.replace("{id}", "an-app")
    with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
        for number, (name, schema) in enumerate(_fields(endpoint).items()):
            valid = jsonschema_rs.validator_for({**schema, "components": components})
            for value in VALUES[number % 2 :: 2]:  # every value meets every second field
                body = {**BASE[endpoint.path], name: value}
                got = client.request(endpoint.method, path, json=body)
                answer = Answer(got.status_code, dict(got.headers), got.content)
                if answer.status != 200:
                    assert_refused(answer, 400, 404)
                if not valid.is_valid(value):
                    assert_refused(answer, 400)
                    error = answer.json()["error"]
                    named = error if isinstance(error, str) else error.get("param") or error["message"]
                    assert re.split(r"[.:]", named)[0] == name, (name, value, answer.body)


@pytest.mark.parametrize("endpoint", BODIES, ids=lambda endpoint: endpoint.path)
def test_what_json_has_no_word_for_is_refused_in_every_field(url: str, endpoint: Endpoint) -> None:
    path = endpoint.path.replace("{id}", "an-app")
    with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
        for name in _fields(endpoint):
            for word in WORDS:
                base = {key: value for key, value in BASE[endpoint.path].items() if key != name}
                body = f'{json.dumps(base)[:-1]}{"," if base else ""} "{name}": {word}}}'
                got = client.request(endpoint.method, path, content=body)
                assert_refused(Answer(got.status_code, dict(got.headers), got.content), 400)


MESSAGES: dict[str, Any] = {
    "no messages": [],
    "no role": [{"content": "x"}],
    "an unknown role": [{"role": "emperor", "content": "x"}],
    "an empty role": [{"role": "", "content": "x"}],
    "a number as role": [{"role": 1, "content": "x"}],
    "a number as content": [{"role": "user", "content": 5}],
    "an object as content": [{"role": "user", "content": {"text": "x"}}],
    "an image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    "a part without type": [{"role": "user", "content": [{"text": "x"}]}],
    "a part without text": [{"role": "user", "content": [{"type": "text"}]}],
    "a number as text": [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    "a text as part": [{"role": "user", "content": ["x"]}],
    "a list in a list": [[{"role": "user", "content": "x"}]],
    "calls that are none": [{"role": "assistant", "content": None, "tool_calls": "x"}, *GOOD["messages"]],  # type: ignore[misc]
    "calls of nothing": [{"role": "assistant", "content": None, "tool_calls": [{}]}, *GOOD["messages"]],  # type: ignore[misc]
    "a call without name": [
        {"role": "assistant", "content": None, "tool_calls": [{"id": 1, "function": {"name": None}}]},
        {"role": "user", "content": "x"},
    ],
    "more than fit": [{"role": "user", "content": "x" * 5000}],
    "a hundred thousand": [{"role": "user", "content": "x"}] * 100_000,
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_that_make_no_chat_are_refused(url: str, name: str) -> None:
    assert_refused(ask(url, "POST", CHAT, chat(messages=MESSAGES[name])), 400)


def function(name: Any = "look", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def deep(levels: int, leaf: Any) -> Any:
    for _ in range(levels):
        leaf = {"properties": {"a": leaf}, "type": "object"}
    return leaf


REFUSED: dict[str, dict[str, Any]] = {
    "ten thousand stop strings": {"stop": [f"stop {number}" for number in range(10_000)]},
    "a stop string of a megabyte": {"stop": "x" * 1_000_000},
    "an empty stop string": {"stop": ["x", ""]},
    "fewer than no tokens": {"max_tokens": -1},
    "fewer than no tokens, by the new name": {"max_completion_tokens": -5},
    "more tokens at least than at most": {"min_tokens": 5, "max_tokens": 2},
    "too many choices": {"n": 9},
    "no choices": {"n": 0},
    "likelihoods without likelihoods": {"top_logprobs": 5},
    "a tool that is none": {"tools": [{}]},
    "a tool of another kind": {"tools": [{"type": "retrieval"}]},
    "a tool without function": {"tools": [{"type": "function"}]},
    "a tool with a path as name": {"tools": [function("../../etc/passwd")]},
    "a tool with a NUL in its name": {"tools": [function("a\0b")]},
    "a tool with a number as name": {"tools": [function(5)]},
    "two tools of one name": {"tools": [function("a"), function("a")]},
    "ten thousand tools": {"tools": [function(f"t{number}") for number in range(10_000)]},
    "parameters that are none": {"tools": [function(parameters="x")]},
    "parameters of no object": {"tools": [function(parameters={"type": "array"})]},
    "properties that are none": {"tools": [function(parameters={"type": "object", "properties": []})]},
    "a choice without tools": {"tool_choice": "required"},
    "a choice of a tool that is not there": {"tools": [function("a")], "tool_choice": function("b")},
    "a choice that is none": {"tools": [function("a")], "tool_choice": {"type": "allowed_tools"}},
    "a word for a choice that is none": {"tools": [function("a")], "tool_choice": "perhaps"},
    "a call that cannot be": {
        "tools": [function("a", parameters={"type": "object", "properties": {"b": {"type": "nonsense"}}})],
        "tool_choice": "required",
    },
    "a format that is none": {"response_format": {"type": "xml"}},
    "a format without schema": {"response_format": {"type": "json_schema"}},
    "a schema that is none": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
    "a schema that nothing fulfils": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "minLength": 10**12}}}
    },
    "a schema that names another host": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1:1/x"}}}
    },
    "a grammar that is none": {"grammar": "hello"},
    "a grammar with a NUL": {"grammar": "root ::= \0"},
    "a grammar of a megabyte": {"grammar": 'root ::= "' + "a" * 1_000_000 + '"'},
    "a grammar of brackets": {"grammar": "root ::= " + "(" * 5000},
    "a grammar and a format": {"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}},
    "a salt of a megabyte": {"cache_salt": "x" * 1_000_000},
    "an app of a megabyte": {"app_id": "x" * 1_000_000},
    "a state that is none": {"app_state": "killed"},
    "another model": {"model": "x" * 100_000},
    "a path as model": {"model": "../../../etc/passwd"},
    "a NUL as model": {"model": "\0"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_makes_no_sense_is_refused_streamed_or_whole(url: str, name: str) -> None:
    for stream in (False, True):
        assert_refused(ask(url, "POST", CHAT, chat(**REFUSED[name], stream=stream)), 400, 404)


NESTED: dict[str, Callable[[str], str]] = {
    "anywhere": lambda deep: f'{{"messages": [{{"role": "user", "content": "x"}}], "more": {deep}}}',
    "in a message": lambda deep: f'{{"messages": [{{"role": "user", "content": "x", "more": {deep}}}]}}',
    "in the parts of a message": lambda deep: f'{{"messages": [{{"role": "user", "content": [{deep}]}}]}}',
    "in a tool": lambda deep: (
        '{"messages": [{"role": "user", "content": "x"}], "tools": '
        f'[{{"type": "function", "function": {{"name": "a", "parameters": {deep}}}}}]}}'
    ),
    "in the arguments of a call": lambda deep: (
        '{"messages": [{"role": "assistant", "content": "x", "tool_calls": '
        f'[{{"function": {{"name": "a", "arguments": {deep}}}}}]}}]}}'
    ),
    "in a schema": lambda deep: (
        '{"messages": [{"role": "user", "content": "x"}], "response_format": '
        f'{{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}}}'
    ),
}


@pytest.mark.parametrize("opening, closing", [('{"not":', "}"), ('{"a":[', "]}"), ("[", "]")])
@pytest.mark.parametrize("where", NESTED)
def test_what_is_nested_too_deep_is_refused(url: str, where: str, opening: str, closing: str) -> None:
    body = NESTED[where](opening * DEEP + "1" + closing * DEEP)
    assert_refused(ask(url, "POST", CHAT, body.encode()), 400)


@pytest.mark.parametrize("opening, closing", [('{"not":', "}"), ('{"a":[', "]}")])
@pytest.mark.parametrize("where", NESTED)
def test_what_is_nested_as_deep_as_is_read_breaks_nothing(url: str, where: str, opening: str, closing: str) -> None:
    for levels in (40, 150, 195):
        body = NESTED[where](opening * levels + "{}" + closing * levels)
        answer = ask(url, "POST", CHAT, body.encode())
        assert answer.status in (200, 400), (levels, answer.body)


def test_a_million_wrong_items_are_told_as_one(url: str) -> None:
    """Not because it is much to tell: others would wait for minutes until it is."""
    body = b'{"prompt": [' + b"-1," * 1_000_000 + b"-1]}"
    answer = ask(url, "POST", "/v1/completions", body)
    assert_refused(answer, 400)
    assert len(answer.body) < 1000


def test_brackets_in_a_text_are_not_nested(url: str) -> None:
    text = '[{"' * 300 + "\\"
    assert ask(url, "POST", CHAT, chat(messages=[{"role": "user", "content": text}])).status == 200


def test_arguments_of_a_call_may_be_any_text(url: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "[" * 300}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "x"}]
    assert ask(url, "POST", CHAT, chat(messages=turns)).status == 200


def _texts(text: str) -> dict[str, dict[str, Any]]:
    """A body for every place where a text can stand."""
    return {
        "content": chat(messages=[{"role": "user", "content": text}]),
        "a part": chat(messages=[{"role": "user", "content": [{"type": "text", "text": text}]}]),
        "a name": chat(messages=[{"role": "user", "content": "x", "name": text}]),
        "a call": chat(
            messages=[
                {"role": "assistant", "content": "", "tool_calls": [{"id": text, "function": {"name": "a"}}]},
                {"role": "tool", "content": text, "tool_call_id": text},
            ]
        ),
        "arguments": chat(
            messages=[
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "a", "arguments": text}}]},
                {"role": "user", "content": "x"},
            ]
        ),
        "stop": chat(stop=text),
        "stops": chat(stop=["x", text]),
        "salt": chat(cache_salt=text),
        "app": chat(app_id=text),
        "session": chat(session_id=text),
        "key": chat(prompt_cache_key=text),
        "user": chat(user=text),
        "a description": chat(tools=[function(description=text)]),
        "a property": chat(tools=[function(parameters={"type": "object", "properties": {text: {}}})]),
        "a forced call": chat(
            tools=[function(parameters={"type": "object", "properties": {text: {"enum": [text]}}})],
            tool_choice="required",
        ),
        "a schema": chat(
            response_format={"type": "json_schema", "json_schema": {"name": text, "schema": {"enum": [text]}}}
        ),
        "an unknown field": chat(**{"unknown": text, text or "-": "x"}),
    }


@pytest.mark.parametrize("place", _texts(""))
def test_a_nul_is_a_character_like_others(url: str, place: str) -> None:
    for stream in (False, True):
        assert ask(url, "POST", CHAT, {**_texts("a\0b\0")[place], "stream": stream}).status == 200


@pytest.mark.parametrize("place", _texts(""))
def test_half_a_character_is_refused_wherever_it_stands(url: str, place: str) -> None:
    body = json.dumps(_texts("HERE")[place]).replace("HERE", f"a{LONELY}b")
    assert_refused(ask(url, "POST", CHAT, body.encode()), 400)


@pytest.mark.parametrize(
    "text", ["\u202e\ufeff\ufffe\uffff", "e\u0301" * 9, "\U0010ffff", "<|im_end|><start>", "\x7f\x85\u2028"]
)
def test_odd_characters_are_text(url: str, text: str) -> None:
    for place, body in _texts(text).items():
        assert ask(url, "POST", CHAT, body).status == 200, place


# HTTP that is wrong, or seldom.


NAMES = ["..", "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e", "%00", "a%00b", "%ff%fe", "'%20OR%201=1--", "%",
         "x" * 5000, "*", "%5c..%5c", "a%0d%0aX-Evil:%201", "%F0%9F%98%80", "~", "C:%5C"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_a_trick_names_nothing(url: str, name: str) -> None:
    for method, path in (
        ("GET", f"/v1/models/{name}"),
        ("DELETE", f"{OWN}/entries/{name}"),
        ("GET", f"{OWN}/documents/{name}"),
        ("DELETE", f"{OWN}/documents/{name}"),
        ("PUT", f"{OWN}/entries/{name}/pin"),
        ("DELETE", f"{OWN}/entries/{name}/pin"),
        ("GET", f"/{name}"),
        ("GET", f"{OWN}/{name}"),
    ):
        (answer,) = raw(url, head(method, path, "Connection: close"))
        assert_refused(answer, 404, 405)
        assert "x-evil" not in answer.headers


@pytest.mark.parametrize(
    "query", ["limit=x", "limit=-1", "limit=0", "limit=1e9", "limit=" + "9" * 5000, "limit=%00", "limit=%D9%A1"]
)
def test_a_page_without_size_is_refused(url: str, query: str) -> None:
    for what in ("entries", "documents"):
        assert_refused(ask(url, "GET", f"{OWN}/{what}?{query}"), 400)


@pytest.mark.parametrize(
    "method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "LINK", "get"]
)
def test_other_methods_are_refused_by_name(url: str, method: str) -> None:
    (answer,) = raw(url, head(method, CHAT, "Connection: close"))
    assert answer.status == 405 and "POST" in answer.headers["allow"]
    if method != "HEAD":
        assert_refused(answer)


def test_a_head_has_no_body(url: str) -> None:
    (answer,) = raw(url, head("HEAD", "/health", "Connection: close"))[:1]
    assert answer.status == 200 and int(answer.headers["content-length"]) > 0 and answer.body == b""


@pytest.mark.parametrize(
    "path", ["//", "/v1", "/v1/", "/v1/chat", f"{CHAT}/x", "/favicon.ico", "/.git/config", "/v1/audio"]
)
def test_unknown_paths_are_not_found(url: str, path: str) -> None:
    for method in ("GET", "POST"):
        (answer,) = raw(url, head(method, path, "Connection: close"))
        assert_refused(answer, 404)


INVALID = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 600,
    "no words": b"\r\n" * 10 + b"hello\r\n\r\n",
    "another protocol": b"GET /health SPDY/1.1\r\nHost: localhost\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
    "a blank before a colon": head("GET", "/health", "Content-Length : 5"),
    "a folded header": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\tfolded: x\r\nX\r\n\r\n",
    "a NUL in a header": head("GET", "/health", "X-Y: a\0b"),
    "lengths that differ": head("POST", CHAT, "Content-Length: 5", "Content-Length: 6") + b"hello!",
    "a negative length": head("POST", CHAT, "Content-Length: -1"),
    "a length that is none": head("POST", CHAT, "Content-Length: many"),
    "a length of a thousand digits": head("POST", CHAT, "Content-Length: " + "9" * 1000),
    "an unknown coding": head("POST", CHAT, "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n",
    "a chunk without length": head("POST", CHAT, "Transfer-Encoding: chunked") + b"zz\r\nhello\r\n",
    "a chunk that is longer than it says": head("POST", CHAT, "Transfer-Encoding: chunked")
    + b"2\r\nhello\r\n0\r\n\r\n",
    "a huge header": head("GET", "/health", "X-Huge: " + "x" * 200_000),
    "a hundred thousand headers": head("GET", "/health", *(f"X-{number}: x" for number in range(20_000))),
    "a huge path": head("GET", "/" + "x" * 200_000),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_is_no_http_is_refused_and_the_connection_closed(impatient: str, name: str) -> None:
    """Smuggling included: what follows on such a connection is never read as a request."""
    answers = raw(impatient, INVALID[name] + head("GET", "/health"))
    assert all(400 <= answer.status < 500 for answer in answers) and len(answers) <= 1, answers


def test_http_1_0_is_answered_and_closed(url: str) -> None:
    body = json.dumps(GOOD).encode()
    (answer,) = raw(url, head("POST", CHAT, f"Content-Length: {len(body)}", version="1.0") + body)
    assert answer.status == 200 and answer.json()["choices"]
    (streamed,) = raw(url, _post(json.dumps(chat(stream=True)).encode(), version="1.0"))
    assert streamed.status == 200 and streamed.body.endswith(b"data: [DONE]\n\n")


def _post(body: bytes, *lines: str, path: str = CHAT, version: str = "1.1") -> bytes:
    return head("POST", path, f"Content-Length: {len(body)}", *lines, version=version) + body


def test_pipelined_requests_are_answered_in_order(url: str) -> None:
    bad, good = b'{"messages": 1}', json.dumps(GOOD).encode()
    sent = (
        head("GET", "/health") + _post(bad) + _post(good) + head("GET", "/nothing") + _post(good, "Connection: close")
    )
    answers = raw(url, sent)
    assert [answer.status for answer in answers] == [200, 400, 200, 404, 200]
    assert answers[2].json()["choices"] == answers[4].json()["choices"]


def test_duplicate_and_empty_headers_do_no_harm(url: str) -> None:
    lines = ["Authorization: Bearer a", "Authorization: Basic b", "X:", "Accept:", "Content-Type: a", "Content-Type: b"]
    (answer,) = raw(url, _post(json.dumps(GOOD).encode(), *lines, "Connection: close"))
    assert answer.status == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "", "[", "localhost:8377:evil", "\xe9"])
def test_another_host_is_refused(url: str, host: str) -> None:
    data = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("latin-1")
    (answer,) = raw(url, data)
    assert_refused(answer, 403)


def test_an_upgrade_is_not_taken(url: str) -> None:
    lines = ["Upgrade: websocket", "Connection: Upgrade, close", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA=="]
    (answer,) = raw(url, head("GET", "/nothing", *lines))
    assert_refused(answer, 404)


# Bodies that are too large, or never end.


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(head("POST", CHAT, f"Content-Length: {1 << 40}"))
        (answer,) = answers_in(_one_answer(connection))
    assert_refused(answer, 413)


def _one_answer(connection: socket.socket) -> bytes:
    """What comes until a whole answer with a length is there."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    start = received.index(b"\r\n\r\n") + 4
    length = int(received[:start].lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(received) < start + length:
        received += connection.recv(1 << 16)
    return received


def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(head("POST", CHAT, "Transfer-Encoding: chunked"))
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        for _ in range((8 << 20) // 0x10000 + 2):  # its end is never sent
            connection.sendall(chunk)
        (answer,) = answers_in(_one_answer(connection))
    assert_refused(answer, 413)


def test_a_client_that_sends_on_though_it_was_refused_is_cut_off(impatient: str) -> None:
    """What it sends is thrown away, not collected; and not for ever."""
    with connected(impatient) as connection:
        connection.sendall(head("POST", CHAT, f"Content-Length: {1 << 40}"))
        (answer,) = answers_in(_one_answer(connection))
        assert_refused(answer, 413)
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(b"x" * 0x10000)


def test_whoever_waits_to_be_told_to_go_on_is_refused_at_once(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(head("POST", CHAT, "Content-Length: 100000000", "Expect: 100-continue"))
        (answer,) = answers_in(_one_answer(connection))
    assert_refused(answer, 413)


def test_a_body_longer_than_it_said_is_no_request(url: str) -> None:
    body = json.dumps(GOOD).encode()
    answers = raw(url, head("POST", CHAT, f"Content-Length: {len(body)}") + body + b"and more\r\n\r\n")
    assert answers[0].status == 200 and all(400 <= answer.status < 500 for answer in answers[1:])


SLOW = {
    "says nothing": (b"", b""),
    "sends its head byte by byte": (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 10_000),
    "never ends its head": (b"GET /health HTTP/1.1\r\n", b"X: x\r\n" * 10_000),
    "sends less than it said": (head("POST", CHAT, "Content-Length: 1000") + b'{"messages":', b""),
    "sends its body byte by byte": (head("POST", CHAT, "Content-Length: 50000"), b" " * 50_000),
    "never ends its chunks": (head("POST", CHAT, "Transfer-Encoding: chunked"), b"1\r\n \r\n" * 10_000),
    "is silent after a reply": (head("GET", "/health"), b""),
    "begins a second request": (head("GET", "/health"), b"GET /health HTTP/1.1\r\n" + b"X: x\r\n" * 10_000),
    "sends a body where none belongs": (head("GET", "/health", "Content-Length: 50000"), b" " * 50_000),
}


@pytest.mark.parametrize("who", SLOW)
def test_a_client_that_lets_the_server_wait_is_closed_while_others_are_served(impatient: str, who: str) -> None:
    at_once, slowly = SLOW[who]
    with connected(impatient) as connection:
        connection.sendall(at_once)
        closed = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            reading = threads.submit(read_until_closed, connection)
            reading.add_done_callback(lambda _: closed.set())
            for byte in slowly:
                if closed.wait(0.01):
                    break
                try:
                    connection.sendall(bytes([byte]))
                except ConnectionError:
                    break
                if byte % 7 == 0:
                    assert ask(impatient, "GET", "/health").status == 200
            assert ask(impatient, "POST", CHAT, GOOD).status == 200
            answers = answers_in(reading.result(PATIENCE_SECONDS))
    for answer in answers:
        if answer.status != 200:
            assert_refused(answer, 408)


def test_a_hundred_silent_clients_do_not_keep_others_out(impatient: str) -> None:
    connections = []
    try:
        for number in range(100):
            with_words = [b"", b"GET /hea", head("POST", CHAT, "Content-Length: 10"), b"POST"][number % 4]
            connections.append(connected(impatient))
            connections[-1].__enter__().sendall(with_words)
        assert ask(impatient, "POST", CHAT, GOOD).status == 200
    finally:
        for connection in connections:
            connection.__exit__(None, None, None)


def test_a_client_that_reads_nothing_is_closed(impatient: str) -> None:
    """It asks for much, again and again, and takes nothing: what it is owed must not pile up."""
    asked = head("GET", "/openapi.json") * 10  # large, and made only once
    with connected(impatient) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(asked)


def test_a_stream_that_nobody_reads_is_given_up(impatient: str) -> None:
    service_free = False
    body = json.dumps({"prompt": ["hello"] * 8, "n": 8, "stream": True, "echo": True, "logprobs": None}).encode()
    with connected(impatient) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(_post(body, path="/v1/completions"))
        for _ in range(100):
            told = ask(impatient, "GET", f"{OWN}/server").json()
            service_free = told["running"] == 0 and told["waiting"] == 0
            if service_free:
                break
            time.sleep(0.05)
        assert service_free, told


# Many at once.


def test_of_two_hundred_at_once_each_is_answered_or_refused(url: str) -> None:
    def one(number: int) -> Answer:
        return ask(url, "POST", CHAT, chat(messages=[{"role": "user", "content": f"client {number}"}]))

    with concurrent.futures.ThreadPoolExecutor(200) as threads:
        answers = list(threads.map(one, range(200)))
    statuses = {answer.status for answer in answers}
    assert 200 in statuses and statuses <= {200, 429, 503}, statuses
    for answer in answers:
        if answer.status == 429:
            assert_problem(answer)
            assert int(answer.headers["retry-after"]) >= 1


def test_two_hundred_that_leave_at_once_leave_nothing_behind(url: str) -> None:
    body = _post(json.dumps(chat(stream=True, max_tokens=8)).encode())
    for _ in range(200):
        with connected(url) as connection:
            connection.sendall(body)
    for _ in range(600):
        told = ask(url, "GET", f"{OWN}/server").json()
        if told["running"] == told["waiting"] == 0:
            return
        time.sleep(0.1)
    raise AssertionError(told)


# The same with a real tokenizer and template.


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if HOME is None:
            patch.delenv("REKINDLE_HOME", raising=False)
        else:
            patch.setenv("REKINDLE_HOME", HOME)
        session = Session("smollm2", cache=tmp_path_factory.mktemp("cache"), parallel=4)
        with Server(session, ServerSettings(port=0, max_reply=4)).running() as url:
            yield url


@pytest.mark.real
def test_a_real_model_takes_odd_texts_and_refuses_what_is_none(real: str) -> None:
    for place, body in _texts("a\0b\U0010ffff<|im_end|>").items():
        assert ask(real, "POST", CHAT, body).status == 200, place
    for place, body in _texts("HERE").items():
        broken = json.dumps(body).replace("HERE", f"a{LONELY}b").encode()
        assert ask(real, "POST", CHAT, broken).status == 400, place


@pytest.mark.real
@pytest.mark.parametrize("name", [*MESSAGES, *REFUSED])
def test_a_real_model_refuses_what_makes_no_sense(real: str, name: str) -> None:
    fields = {"messages": MESSAGES[name]} if name in MESSAGES else REFUSED[name]
    if name == "more than fit":
        fields = {"messages": [{"role": "user", "content": "no end " * 10_000}]}
    assert_refused(ask(real, "POST", CHAT, chat(**fields)), 400, 404)


@pytest.mark.real
def test_a_real_model_answers_after_all_of_that(real: str) -> None:
    assert ask(real, "POST", CHAT, GOOD).status == 200
