"""/v1/responses as OpenAI publishes its objects and as Open Responses tests them; models as each client reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.conftest import Serve
from tests.server.scripted import ScriptedEngine
from tests.server.serving import Served, typed_events

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Oslo"}}\n</tool_call>'
# What Open Responses requires of a response; none of the second ones may be null.
NULLABLE = {
    "completed_at", "incomplete_details", "previous_response_id", "instructions", "error", "reasoning", "user", "usage",
    "max_output_tokens", "max_tool_calls", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
NEVER_NULL = {
    "id", "object", "created_at", "status", "model", "output", "tools", "tool_choice", "truncation",
    "parallel_tool_calls", "text", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature",
    "store", "background", "service_tier", "metadata",
}  # fmt: skip
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def check(response: dict[str, Any]) -> None:
    """What both schemas say of a response."""
    Response.model_validate(response)
    assert set(response) >= NULLABLE | NEVER_NULL and not [name for name in NEVER_NULL if response[name] is None]
    assert response["id"].startswith("resp_") and isinstance(response["created_at"], int)
    prefixes = {"message": "msg_", "function_call": "fc_", "reasoning": "rs_"}
    for item in response["output"]:
        assert item["id"].startswith(prefixes[item["type"]])
        texts = [part for part in item.get("content", ()) if part["type"] == "output_text"]
        assert all(part["annotations"] == part["logprobs"] == [] for part in texts)
    assert response["text"]["format"]["type"] and set(response["reasoning"]) == {"effort", "summary"}
    for tool in response["tools"]:
        assert {"type", "name", "description", "parameters", "strict"} <= set(tool)


def ask(served: Served, *, stream: bool, **body: Any) -> dict[str, Any]:
    """The response; of a stream, all events are checked too."""
    if not stream:
        answer = served.post(PATH, **body)
        assert answer.status_code == 200, answer.text
        check(answer.json())
        told: dict[str, Any] = answer.json()
        return told
    events = typed_events(served, PATH, **body)
    for event in events:
        EVENTS.validate_python(event)
        if "response" in event:
            check(event["response"])
        assert ("logprobs" in event) == (event["type"] in ("response.output_text.delta", "response.output_text.done"))
    last: dict[str, Any] = events[-1]["response"]
    return last


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


CONFORMING: dict[str, tuple[str, dict[str, Any]]] = {  # as Open Responses' own tests ask
    "text": ("Hello.", {"input": [said("user", "Say hello in exactly 3 words.")]}),
    "instructions": ("Ahoy.", {"input": [said("system", "You are a pirate."), said("user", "Say hello.")]}),
    "a call": (CALL, {"input": [said("user", "How is the weather in Oslo?")], "tools": [WEATHER]}),
    "several turns": (
        "Alice.", {"input": [said("user", "I am Alice."), said("assistant", "Hello Alice!"), said("user", "Who?")]},
    ),
    "a thought": ("<think>Hm.</think>Yes.", {"input": "Well?"}),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CONFORMING)
def test_responses_and_events_are_as_they_are_published(serve: Serve, case: str, stream: bool) -> None:
    reply, body = CONFORMING[case]
    engine = ScriptedEngine([reply])
    engine.tokenizer.template = "<think>"
    found = ask(serve(engine), stream=stream, **body)
    assert found["status"] == "completed" and found["output"] and found["completed_at"] >= found["created_at"]
    assert (found["output"][-1]["type"] == "function_call") == (case == "a call")
    computed = found["rekindle"]["computed"]
    assert found["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": computed}
    off = ask(serve(ScriptedEngine([reply])), stream=stream, **body, cache_prompt=False)
    assert off["usage"]["input_tokens_details"]["cache_write_tokens"] == 0


def test_a_picture_is_refused_by_its_place(served: Served) -> None:
    content = [
        {"type": "input_text", "text": "What?"},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBO"},
    ]
    refused = served.post(PATH, input=[{"type": "message", "role": "user", "content": content}])
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "input.0.content.1" and "only text" in error["message"]


def test_what_was_asked_comes_back(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"], "additionalProperties": False}
    asked = {
        "metadata": {"topic": "demo"}, "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "max_output_tokens": 90,
        "instructions": "Be short.", "user": "anna", "tool_choice": "none", "tools": [WEATHER],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
    }  # fmt: skip
    served = serve()
    for stream in (False, True):
        found = ask(served, stream=stream, input="Hello.", **asked)
        assert {name: found[name] for name in asked if name != "tools"} == {
            n: v for n, v in asked.items() if n != "tools"
        }
        assert found["tools"] == [{**WEATHER, "strict": None}] and found["rekindle"]["ignored"] == []


def test_a_failed_stream_ends_with_the_response_that_failed(served: Served) -> None:
    served.engine.go.clear()
    with (
        served.http() as client,
        client.stream("POST", PATH, json={"input": "Hello.", "app_id": "somebody", "stream": True}) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        first = json.loads(next(lines).removeprefix("data: "))
        with served.http() as other:
            other.put("/v1/rekindle/apps/somebody", json={"state": "killed"})
        *_, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    EVENTS.validate_python(last)
    check(last["response"])
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
    assert last["response"]["id"] == first["response"]["id"] and last["sequence_number"] == 2


def test_the_tokens_of_a_conversation_are_counted_without_answering_it(served: Served) -> None:
    body: dict[str, Any] = {"input": "How is the wind?", "instructions": "Be short.", "tools": [WEATHER]}
    counted = served.openai().responses.input_tokens.count(model="fake-0", **body)
    assert counted.object == "response.input_tokens" and served.engine.steps == 0
    assert served.post(PATH, **body, max_output_tokens=1).json()["usage"]["input_tokens"] == counted.input_tokens


LOOK, SING = ({"type": "function", "function": {"name": name}} for name in ("look", "sing"))


@pytest.mark.parametrize("stream", [False, True])
def test_of_allowed_tools_one_is_called_and_the_prompt_has_all(served: Served, stream: bool) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [SING]}}
    chat = served.openai().chat.completions
    asked: Any = {"model": "fake-0", "messages": [{"role": "user", "content": "Go."}], "tools": [LOOK, SING]}
    if stream:
        with chat.stream(**asked, tool_choice=choice) as opened:
            message = opened.get_final_completion().choices[0].message
    else:
        message = chat.create(**asked, tool_choice=choice).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["sing"]
    counts = {chat.create(**asked, tool_choice=one, max_tokens=1).usage.prompt_tokens for one in (choice, "required")}
    assert len(counts) == 1
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sing"}]}
    tools = [{"type": "function", "name": name} for name in ("look", "sing")]
    found = ask(served, stream=stream, input="Go.", tools=tools, tool_choice=flat)
    assert [item["name"] for item in found["output"]] == ["sing"] and found["tool_choice"] == flat


def test_a_model_that_may_call_reads_of_the_allowed_tools_alone(serve: Serve) -> None:
    engine = ScriptedEngine(['<tool_call>{"name": "look", "arguments": {}}</tool_call>'])
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [SING]}}
    body: dict[str, Any] = {"tools": [LOOK, SING], "tool_choice": choice, "max_tokens": 200}
    message = serve(engine).chat("Go.", **body)["choices"][0]["message"]
    assert "tool_calls" not in message and '"look"' not in engine.prompts[0] and '"sing"' in engine.prompts[0]


@pytest.mark.parametrize(
    "allowed",
    [{"mode": "any", "tools": [SING]}, {"mode": "auto", "tools": []}, {"mode": "auto", "tools": ["sing"]},
     {"mode": "auto", "tools": [{"type": "function", "function": {"name": "dance"}}]}, [], {}],
)  # fmt: skip
def test_allowed_tools_that_are_none_are_refused(served: Served, allowed: Any) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    refused = served.post("/v1/chat/completions", messages=[], tools=[LOOK, SING], tool_choice=choice)
    assert refused.status_code == 400
    refused = served.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], tools=[LOOK, SING], tool_choice=choice
    )
    assert refused.status_code == 400, refused.text


def test_a_message_says_that_it_is_no_refusal(served: Served) -> None:
    message = served.chat("Go.")["choices"][0]["message"]
    assert "refusal" in message and message["refusal"] is None


def test_models_have_anthropics_form_for_anthropics_clients(served: Served) -> None:
    version = {"anthropic-version": "2023-06-01"}
    listed = served.get("/v1/models", **version).json()
    assert set(listed) == {"data", "has_more", "first_id", "last_id"} and listed["has_more"] is False
    (model,) = listed["data"]
    assert set(model) == {"type", "id", "display_name", "created_at"} and model["type"] == "model"
    assert listed["first_id"] == listed["last_id"] == model["id"] == "fake-0" and "T" in model["created_at"]
    assert served.get("/v1/models/fake-0", **version).json() == model
    assert served.get("/v1/models").json()["object"] == "list"
