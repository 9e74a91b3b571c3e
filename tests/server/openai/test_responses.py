"""/v1/responses: items in, items out, whole and as a stream, to OpenAI's own client; what Codex sends."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.conftest import Serve
from tests.server.scripted import ScriptedEngine
from tests.server.serving import Served, typed_events

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = 'Let me look.<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BODY: dict[str, Any] = {"model": "fake-0", "input": "How is the wind?"}


@pytest.fixture
def scripted(serve: Serve) -> Served:
    """A server whose model says one thing, then another."""
    return serve(ScriptedEngine([CALL, "Calm."]))


def sent(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.post(PATH, **{**BODY, **body})
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def stream_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    return typed_events(served, PATH, **{**BODY, **body})


def prompt_of(served: Served) -> str:
    prompt: str = served.session.engine.inner.prompts[-1]  # type: ignore[attr-defined]
    return prompt


def test_a_reply_with_a_call(scripted: Served) -> None:
    reply = scripted.openai().responses.create(**BODY, tools=[WEATHER])  # type: ignore[call-overload]
    message, call = reply.output
    assert message.type == "message" and message.content[0].text == "Let me look." == reply.output_text
    assert call.type == "function_call" and call.name == "weather" and json.loads(call.arguments) == {"city": "Oslo"}
    assert reply.status == "completed" and reply.object == "response" and reply.id.startswith("resp")
    assert reply.usage.output_tokens == len(CALL) + 1 and reply.usage.input_tokens_details.cached_tokens == 0


def test_a_stream_has_all_events_in_order(scripted: Served) -> None:
    events = stream_of(scripted, tools=[WEATHER])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    pieces = names.count("output_text.delta")
    assert pieces > 3, "it comes in pieces"
    assert names == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * pieces,
        "output_text.done", "content_part.done", "output_item.done", "output_item.added",
        "function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    whole = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    last = events[-1]["response"]
    assert whole == "Let me look." == last["output"][0]["content"][0]["text"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == last["output"] and [e["output_index"] for e in done] == [0, 1]
    assert last["output"][1]["arguments"] == events[-3]["arguments"] and last["status"] == "completed"
    assert last["usage"]["output_tokens"] == len(CALL) + 1 and last["rekindle"]["ignored"] == []


def test_a_whole_conversation_as_the_model_reads_it(scripted: Served) -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Wind?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "7 m/s"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "Where?"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"role": "developer", "content": "Mind the time."},
        {"role": "user", "content": "Well?"},
    ]
    tools = [WEATHER, {"type": "web_search"}, {"type": "namespace", "name": "agents", "tools": []}]
    reply = sent(scripted, input=items, instructions="Be short.", tools=tools, include=["x"], client_metadata={})
    prompt = prompt_of(scripted)
    assert "system\nBe short.\n\nBe kind." in prompt and prompt.count("assistant\n") == 2
    assert prompt.index("I look.\n<tool_call>") < prompt.index("7 m/s") < prompt.index("Where?")
    assert prompt.index("Where?") < prompt.index("system\nMind the time.") < prompt.index("user\nWell?")
    assert reply["rekindle"]["ignored"] == [
        "client_metadata", "include", "input.8 (web_search_call)", "tools (namespace agents)", "tools (web_search)",
    ]  # fmt: skip


def test_the_reply_sent_back_continues_the_prompt(scripted: Served) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": "Wind? " * 50}]
    first = sent(scripted, input=items, tools=[WEATHER])
    items += [*first["output"], {"type": "function_call_output", "call_id": first["output"][1]["call_id"],
                                 "output": "7 m/s"}]  # fmt: skip
    second = sent(scripted, input=items, tools=[WEATHER])
    before = first["usage"]["input_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= before
    assert second["output"][0]["content"][0]["text"] == "Calm."


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_is_cut_says_so(scripted: Served, stream: bool) -> None:
    options = {"max_output_tokens": 5}
    reply = stream_of(scripted, **options)[-1] if stream else sent(scripted, **options)
    if stream:
        assert reply["type"] == "response.incomplete"
        reply = reply["response"]
    assert reply["status"] == "incomplete" and reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["output"][-1]["status"] == "incomplete"


def test_json_is_enforced(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    reply = sent(served, text=text, max_output_tokens=100)
    assert json.loads(reply["output"][0]["content"][0]["text"]) == {"a": 3}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "x", "arguments": {}}]}, "input.0.arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"input": "x" * 5000}, "input"),
    ],
)
def test_bad_input_is_refused_and_named(served: Served, change: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = served.post(PATH, **{**BODY, "stream": stream, **change})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param), answer.text
    assert served.engine.steps == 0


def test_a_refusal_of_an_earlier_response_says_what_to_do(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="whole conversation"):
        served.openai().responses.create(**BODY, previous_response_id="resp_1")


def test_an_error_within_a_stream_is_an_event(served: Served) -> None:
    served.engine.go.clear()
    body = {**BODY, "app_id": "somebody", "stream": True}
    with served.http() as client, client.stream("POST", PATH, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        with served.http() as other:
            stopped = other.put("/v1/rekindle/apps/somebody", json={"state": "killed"}).json()
        assert stopped["stopped_requests"] == 1
        last = json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
