"""/v1/messages: Anthropic's requests, replies, streams and errors, as its clients send and read them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from rekindle.server import protocol
from tests.server.conftest import Serve
from tests.server.scripted import ScriptedEngine
from tests.server.serving import ALICE, Served, typed_events

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "How is the wind?"}
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = 'Let me look.<tool_call>\n{"name": "weather", "arguments": {"city": "Tromsø"}}\n</tool_call>'
BODY: dict[str, Any] = {"model": "fake-0", "max_tokens": 200, "messages": [USER]}


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
    engine = served.session.engine.inner  # type: ignore[attr-defined]
    assert isinstance(engine, ScriptedEngine)
    return engine.prompts[-1]


def test_a_reply_with_a_tool_call(scripted: Served) -> None:
    reply = sent(scripted, tools=[WEATHER])
    text, call = reply["content"]
    assert text == {"type": "text", "text": "Let me look."}
    assert call == {"type": "tool_use", "id": call["id"], "name": "weather", "input": {"city": "Tromsø"}}
    assert reply["type"] == "message" and reply["role"] == "assistant" and reply["model"] == "fake-0"
    assert reply["stop_reason"] == "tool_use" and reply["stop_sequence"] is None and reply["id"].startswith("msg")


def test_a_stream_has_all_events_in_order(scripted: Served) -> None:
    events = stream_of(scripted, tools=[WEATHER])
    start, ping, *rest, delta, stop = events
    assert start["type"] == "message_start" and start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None and start["message"]["usage"]["output_tokens"] == 0
    assert ping == {"type": "ping"} and stop == {"type": "message_stop"}
    text = [event for event in rest if event["index"] == 0]
    assert text[0]["content_block"] == {"type": "text", "text": ""} and text[-1]["type"] == "content_block_stop"
    assert {event["delta"]["type"] for event in text[1:-1]} == {"text_delta"} and len(text) > 4, "it comes in pieces"
    assert "".join(event["delta"]["text"] for event in text[1:-1]) == "Let me look."
    opened, filled, closed = (event for event in rest if event["index"] == 1)
    block = opened["content_block"]
    assert block == {"type": "tool_use", "id": block["id"], "name": "weather", "input": {}}
    assert filled["type"] == "content_block_delta" and filled["delta"]["type"] == "input_json_delta"
    assert json.loads(filled["delta"]["partial_json"]) == {"city": "Tromsø"}
    assert closed == {"type": "content_block_stop", "index": 1} and rest == [*text, opened, filled, closed]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == len(CALL.encode()) + 1


def test_a_silent_model_is_bridged_by_pings(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PING_SECONDS", 0.01)
    served.engine.go.clear()
    body = {**BODY, "max_tokens": 4, "stream": True}
    with served.http() as client, client.stream("POST", PATH, json=body) as answer:
        names = (line for line in answer.iter_lines() if line.startswith("event: "))
        assert [next(names) for _ in range(4)] == ["event: message_start", *["event: ping"] * 3]
        served.engine.go.set()
        assert list(names)[-1] == "event: message_stop"


def test_a_whole_conversation_as_the_model_reads_it(scripted: Served) -> None:
    """System blocks, thoughts, calls, results with and without blocks, instructions between messages."""
    called = [
        {"type": "thinking", "thinking": "Wind is weather.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "7 m/s", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True,
         "content": [{"type": "text", "text": "Where?"}, {"type": "image", "source": {}}]},
        {"type": "text", "text": "Well?"},
    ]  # fmt: skip
    reply = sent(
        scripted,
        system=[{"type": "text", "text": "Be short."}, {"type": "text", "text": "Be kind."}],
        messages=[USER, {"role": "system", "content": "Mind the time."}, {"role": "assistant", "content": called},
                  {"role": "user", "content": results}],
        tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
        thinking={"type": "adaptive"}, context_management={"edits": []}, output_config={"effort": "high"},
    )  # fmt: skip
    prompt = prompt_of(scripted)
    assert "Be short.\n\nBe kind." in prompt and "system\nMind the time." in prompt and "Tells the weather." in prompt
    assert 'I look.\n<tool_call>\n{"name": "weather"' in prompt and '"content": "7 m/s"' in prompt
    assert "Where?\\n\\n[An image was left out" in prompt and "user\nWell?" in prompt
    assert prompt.index("How is the wind?") < prompt.index("Mind the time.") < prompt.index("I look.")
    assert "web_search" not in prompt
    assert reply["rekindle"]["ignored"] == [
        "context_management", "messages.2.content.1 (redacted_thinking)", "messages.3.content.1.content.1 (image)",
        "output_config.effort", "thinking", "tools.web_search (web_search_20250305)",
    ]  # fmt: skip


def test_usage_sums_up_to_the_prompt(scripted: Served) -> None:
    system = [{"type": "text", "text": "Be short. " * 60, "cache_control": {"type": "ephemeral"}}]
    count = scripted.post(COUNT, model="fake-0", messages=[USER], system=system).json()["input_tokens"]
    first, second = (sent(scripted, system=system)["usage"] for _ in range(2))
    assert first["cache_creation_input_tokens"] == count == len(prompt_of(scripted).encode()) + 5  # control tokens
    assert first["cache_read_input_tokens"] == 0 == first["input_tokens"]
    assert second["cache_read_input_tokens"] > 600 and second["output_tokens"] == len("Calm.") + 1
    assert second["cache_read_input_tokens"] + second["cache_creation_input_tokens"] == count
    started = stream_of(scripted, system="Be short. " * 60)[0]["message"]["usage"]
    assert started["cache_creation_input_tokens"] == 0, "nothing is marked"
    assert started["input_tokens"] + started["cache_read_input_tokens"] == count


@pytest.mark.parametrize("stream", [False, True])
def test_why_a_reply_stopped(serve: Serve, stream: bool) -> None:
    served = serve(ScriptedEngine(["One, two, three."]))

    def stopped(**body: Any) -> tuple[str, str | None]:
        reply = stream_of(served, **body)[-2]["delta"] if stream else sent(served, **body)
        return reply["stop_reason"], reply["stop_sequence"]

    assert stopped() == ("end_turn", None)
    assert stopped(stop_sequences=["never", "two"]) == ("stop_sequence", "two")
    assert stopped(max_tokens=4) == ("max_tokens", None)


def test_choices_of_tools(scripted: Served) -> None:
    forced = sent(scripted, tools=[WEATHER], tool_choice={"type": "none"})
    assert forced["stop_reason"] == "end_turn" and "<tool_call>" in forced["content"][0]["text"]
    wrong = scripted.post(PATH, **BODY, tools=[WEATHER], tool_choice={"type": "tool", "name": "wether"})
    assert wrong.status_code == 400 and "weather" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("header", ["x-api-key", "Authorization"])
def test_either_header_carries_the_key(keyed: Served, header: str) -> None:
    value = ALICE if header == "x-api-key" else f"Bearer {ALICE}"
    with httpx.Client(base_url=keyed.url, headers={header: value}) as client:
        assert client.post(PATH, json={**BODY, "max_tokens": 1}).status_code == 200
    refused = keyed.post(PATH, **BODY)
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("change", "status", "kind", "named"),
    [
        ({"model": "claude"}, 404, "not_found_error", "'claude' is not served"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", '"image"'),
        ({"messages": [{"role": "user", "content": [{"text": 3}]}]}, 400, "invalid_request_error", "type null"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, 400, "invalid_request_error",
         "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, 400,
         "invalid_request_error", "tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": 7}]}]}, 400,
         "invalid_request_error", "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": {}}]}, USER]}, 400,
         "invalid_request_error", "messages.0.content.0.name"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, 400, "invalid_request_error", "a b"),
        ({"tools": [WEATHER, WEATHER]}, 400, "invalid_request_error", "weather"),
        ({"tool_choice": {"type": "sometimes"}}, 400, "invalid_request_error", "tool_choice.type"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "invalid_request_error",
         "prompt is too long: 5000 tokens > 4096 maximum"),
    ],
)  # fmt: skip
def test_bad_input_gets_an_error_of_the_protocol(
    served: Served, change: dict[str, Any], status: int, kind: str, named: str
) -> None:
    for stream in (False, True):
        answer = served.post(PATH, **{**BODY, "stream": stream, **change})
        error = answer.json()
        assert answer.status_code == status and error["type"] == "error" and error["error"]["type"] == kind
        assert named in error["error"]["message"], error
    assert served.engine.steps == 0


def test_other_errors_have_the_same_shape(served: Served) -> None:
    with served.http() as client:
        answers = [
            client.post(PATH, content=b"{"),
            client.get(PATH),
            client.post(f"{PATH}/batches", json={}),
            client.post(PATH, json=BODY, headers={"Origin": "https://example.org"}),
        ]
    assert [answer.status_code for answer in answers] == [400, 405, 404, 403]
    assert all(answer.json()["type"] == "error" and answer.json()["error"]["message"] for answer in answers)


def test_an_error_within_a_stream_is_an_event(served: Served) -> None:
    served.engine.go.clear()
    body = {**BODY, "metadata": {"user_id": "somebody"}, "stream": True}
    with served.http() as client, client.stream("POST", PATH, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        with served.http() as other:
            stopped = other.put("/v1/rekindle/apps/somebody", json={"state": "killed"}).json()
        assert stopped["stopped_requests"] == 1
        last = json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))
    assert last["type"] == "error" and last["error"]["type"] == "overloaded_error"


def test_a_client_that_looks_first_finds_somebody(keyed: Served) -> None:
    with keyed.http() as client:
        assert client.head("/").status_code == 200 and client.get("/").json()["name"] == "Rekindle"


def test_what_other_protocols_have_is_named_and_not_heeded(served: Served) -> None:
    foreign = {
        "min_p": "x",
        "presence_penalty": [],
        "seed": -1,
        "stop": ["a", 3],
        "rekindle": {"knowledge": {"top_k": 3}},
    }
    reply, plain = sent(served, temperature=0, max_tokens=8, **foreign), sent(served, temperature=0, max_tokens=8)
    assert reply["content"] == plain["content"]
    assert reply["rekindle"]["ignored"] == ["min_p", "presence_penalty", "rekindle.knowledge", "seed", "stop"]
    warmed = served.post("/v1/rekindle/warm", prompt="The wind is calm.", rekindle={"reuse": "off"})
    assert warmed.status_code == 200 and warmed.json()["rekindle"]["ignored"] == ["rekindle"]
