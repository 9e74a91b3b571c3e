"""The form of a reply: every name that clients have for it is obeyed, and a tool call goes before it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Serve
from tests.server.scripted import ScriptedEngine
from tests.server.serving import Served, streamed, typed_events

USER = [{"role": "user", "content": "How is the wind?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
SCHEMA = {
    "type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
OBEYED = {"a": "x"}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
FLAT = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
Found = tuple[str, list[tuple[str, Any]]]  # text, and calls with their arguments


def of_chat(served: Served, *, stream: bool, **body: Any) -> Found:
    """What OpenAI's own client reads."""
    extra = {name: body.pop(name) for name in list(body) if name not in ("tools", "tool_choice", "response_format")}
    asked: dict[str, Any] = {"model": "fake-0", "messages": USER, "temperature": 0, "max_tokens": 200, **body}
    chat = served.openai().chat.completions
    if stream:
        with chat.stream(**asked, extra_body=extra) as opened:
            message = opened.get_final_completion().choices[0].message
    else:
        message = chat.create(**asked, extra_body=extra).choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    return message.content or "", calls


def of_responses(served: Served, *, stream: bool, **body: Any) -> Found:
    asked = {"model": "fake-0", "input": "How is the wind?", "temperature": 0, "max_output_tokens": 200, **body}
    if stream:
        last = typed_events(served, "/v1/responses", **asked)[-1]
        assert last["type"] == "response.completed"
        output = last["response"]["output"]
    else:
        answer = served.post("/v1/responses", **asked)
        assert answer.status_code == 200, answer.text
        output = answer.json()["output"]
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    calls = [(item["name"], json.loads(item["arguments"])) for item in output if item["type"] == "function_call"]
    return "".join(texts), calls


def of_messages(served: Served, *, stream: bool, **body: Any) -> Found:
    asked = {"model": "fake-0", "messages": USER, "temperature": 0, "max_tokens": 200, **body}
    if not stream:
        answer = served.post("/v1/messages", **asked)
        assert answer.status_code == 200, answer.text
        blocks = answer.json()["content"]
        calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        return "".join(block["text"] for block in blocks if block["type"] == "text"), calls
    events = typed_events(served, "/v1/messages", **asked)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    named = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    names = [block["name"] for block in named if block["type"] == "tool_use"]
    inputs = [json.loads(delta["partial_json"]) for delta in deltas if "partial_json" in delta]
    return "".join(delta.get("text", "") for delta in deltas), list(zip(names, inputs, strict=True))


def of_ollama(served: Served, *, stream: bool, **body: Any) -> Found:
    asked = {"messages": USER, "options": {"temperature": 0, "num_predict": 200}, "stream": stream, **body}
    answer = served.post("/api/chat", **asked)
    assert answer.status_code == 200, answer.text
    messages = [json.loads(line)["message"] for line in answer.text.splitlines()]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return "".join(m["content"] for m in messages), [(call["name"], call["arguments"]) for call in calls]


# How each protocol asks for a tool, for a form, and for a call that must be made.
PROTOCOLS: dict[str, tuple[Callable[..., Found], dict[str, Any], dict[str, Any]]] = {
    "chat": (of_chat, {"tools": TOOLS, "response_format": FORM}, {"tool_choice": "required"}),
    "responses": (
        of_responses, {"tools": [{"type": "function", **FUNCTION}], "text": {"format": FLAT}},
        {"tool_choice": {"type": "function", "name": "weather"}},
    ),
    "messages": (
        of_messages,
        {"tools": [{"name": "weather", "input_schema": PARAMETERS}], "output_config": {"format": FLAT}},
        {"tool_choice": {"type": "any"}},
    ),
    "ollama": (of_ollama, {"tools": TOOLS, "format": SCHEMA}, {}),
}  # fmt: skip
CALLED = ("", [("weather", {"city": "Oslo"})])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_a_form_does_not_cancel_a_call_that_is_forced(served: Served, protocol: str, stream: bool) -> None:
    ask, body, forced = PROTOCOLS[protocol]
    assert ask(served, stream=stream, **body, **forced) == CALLED


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_model_that_may_call_calls_or_keeps_to_the_form(serve: Serve, protocol: str) -> None:
    """The model says what it wants; what the grammar does not allow ends the request."""
    ask, body, _ = PROTOCOLS[protocol]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    bare = '{"name": "weather", "arguments": {"city": "Oslo"}}'  # as small models write it
    served = serve(ScriptedEngine([call, call, bare, bare, '{"a": "x"}']))
    assert [ask(served, stream=stream, **body) for stream in (False, True) * 2] == [CALLED] * 4
    assert [ask(served, stream=stream, **body) for stream in (False, True)] == [('{"a": "x"}', [])] * 2


def test_a_model_that_may_call_cannot_leave_the_form_otherwise(served: Served) -> None:
    for first, then, expected in (("<", "n", CALLED), ("{", "n", CALLED), ("{", "a", (OBEYED, []))):
        liked = {str(ord(first)): 100, str(ord(then)): 90}
        text, calls = of_chat(served, stream=False, **PROTOCOLS["chat"][1], logit_bias=liked)
        assert (json.loads(text) if text else "", calls) == expected


def test_a_tool_that_may_not_be_called_leaves_the_form_alone(served: Served) -> None:
    text, calls = of_chat(
        served, stream=False, tools=TOOLS, tool_choice="none", response_format=FORM, logit_bias={str(ord("<")): 100}
    )
    assert json.loads(text) == OBEYED and calls == []


FORMS: dict[str, dict[str, Any]] = {
    "a format": {"response_format": FORM},
    "a schema beside json_object": {"response_format": {"type": "json_object", "schema": SCHEMA}},
    "a schema beside json_schema": {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    "llama.cpp's schema": {"json_schema": SCHEMA},
    "llama.cpp's grammar": {"grammar": 'root ::= "{\\"a\\": \\"x\\"}"'},
    "vLLM's schema": {"structured_outputs": {"json": SCHEMA, "regex": None}},
    "vLLM's pattern": {"structured_outputs": {"regex": r'\{"a": "x"\}'}},
    "vLLM's choice": {"structured_outputs": {"choice": ['{"a": "x"}']}},
    "vLLM's rules": {"structured_outputs": {"grammar": 'start: "{" /"a": "x"/ "}"'}},
    "an older schema": {"guided_json": json.dumps(SCHEMA)},
    "an older pattern": {"guided_regex": r'\{"a": "x"\}'},
    "an older choice": {"guided_choice": ['{"a": "x"}']},
    "older rules": {"guided_grammar": 'root ::= "{\\"a\\": \\"x\\"}"'},
}
TEXTS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], str]]] = {
    "/v1/chat/completions": (
        {"messages": USER, "max_tokens": 40}, lambda reply: reply["choices"][0]["message"]["content"],
    ),
    "/v1/completions": ({"prompt": "Wind:", "max_tokens": 40}, lambda reply: reply["choices"][0]["text"]),
    "/v1/responses": ({"input": "Wind?"}, lambda reply: reply["output"][0]["content"][0]["text"]),
    "/v1/messages": ({"messages": USER, "max_tokens": 40}, lambda reply: reply["content"][0]["text"]),
    "/completion": ({"prompt": "Wind:", "n_predict": 40}, lambda reply: reply["content"]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_obeyed_by_every_name_and_at_every_path(served: Served, form: str) -> None:
    for path, (body, text_of) in TEXTS.items():
        answer = served.post(path, **body, **FORMS[form])
        assert answer.status_code == 200, answer.text
        assert json.loads(text_of(answer.json())) == OBEYED, path
        assert answer.json()["rekindle"]["ignored"] == []


def test_anthropics_older_name_of_the_format_is_obeyed_and_an_effort_is_named(served: Served) -> None:
    reply = served.post(
        "/v1/messages", messages=USER, max_tokens=40, output_format=FLAT, output_config={"effort": "low"}
    )
    assert json.loads(reply.json()["content"][0]["text"]) == OBEYED
    assert reply.json()["rekindle"]["ignored"] == ["output_config.effort"]


def test_a_choice_may_begin_another(served: Served) -> None:
    for bias, expected in (({}, ("a", "ab")), ({str(ord("b")): 100}, ("ab",))):
        reply = served.chat(USER, guided_choice=["a", "ab"], logit_bias=bias, max_tokens=8)
        assert reply["choices"][0]["message"]["content"] in expected


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided"),
        ({"json_schema": SCHEMA, "grammar": 'root ::= "x"'}, "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.type"),
    ],
)
def test_a_form_that_cannot_be_obeyed_is_refused_by_name(served: Served, form: dict[str, Any], param: str) -> None:
    refused = served.post("/v1/chat/completions", messages=USER, **form)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


def test_openais_paths_are_answered_without_v1(served: Served) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        body = {**TEXTS[path][0], "temperature": 0}
        short, long = (served.post(one, **body) for one in (path.removeprefix("/v1"), path))
        assert short.status_code == 200 and TEXTS[path][1](short.json()) == TEXTS[path][1](long.json())
    with served.http() as client:
        assert streamed(client, "/chat/completions", messages=USER, max_tokens=2)
    assert served.get("/models").json() == served.get("/v1/models").json()
    assert served.get("/models/fake-0").json() == served.get("/v1/models/fake-0").json()
    for path in ("/completions", "/embeddings"):  # as OpenAI writes errors, not as llama.cpp does at /completion
        assert served.post(path).json()["error"]["type"] == "invalid_request_error"
        assert served.get(path).json()["error"]["type"] == "invalid_request_error"
