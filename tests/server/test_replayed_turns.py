"""`keep_reply_tokens` in every protocol: a reply with a thought and a call comes back as clients write it, and the
tokens that the model generated stand in for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rekindle.engine.fake import VOCABULARY
from tests.server.conftest import Serve
from tests.server.scripted import ScriptedEngine
from tests.server.serving import Served
from tests.text.test_replay import THINKING, tokenizer_of

# As no template writes it: spaces, the order of the keys, a number with a point.
CALL = '<tool_call>\n{"arguments": {"unit":"C",   "days": 2.0, "city": "Ås"}, "name":"weather"}\n</tool_call>'
THOUGHT = "Hm, the wind."
REPLIES = [f"<think>\n{THOUGHT}\n</think>\n\nLet me look.\n{CALL}", "Calm."]
ARGUMENTS = {"city": "Ås", "days": 2, "unit": "C"}
SCHEMA = {"type": "object", "properties": {name: {} for name in ARGUMENTS}}
ABOUT = {"name": "weather", "description": "Tells the weather."}
ASKED = {"role": "user", "content": "Wind?"}
Turn = tuple[str, dict[str, Any], dict[str, Any]]  # a path, the first body, the second one


def openai_chat(thought: str | None) -> Turn:
    tools = [{"type": "function", "function": {**ABOUT, "parameters": SCHEMA}}]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
    said = {"role": "assistant", "content": "Let me look.", "tool_calls": [call]}
    said |= {"reasoning_content": thought} if thought else {}
    first = {"messages": [ASKED], "tools": tools}
    result = {"role": "tool", "tool_call_id": "c1", "content": "none"}
    return "/v1/chat/completions", first, {**first, "messages": [ASKED, said, result]}


def responses(thought: str | None) -> Turn:
    first = {"input": [ASKED], "tools": [{"type": "function", **ABOUT, "parameters": SCHEMA}]}
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "c1", "output": "none"},
    ]
    if thought:
        items.insert(0, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": thought}]})
    return "/v1/responses", first, {**first, "input": [ASKED, *items]}


def anthropic(thought: str | None) -> Turn:
    first = {"max_tokens": 500, "messages": [ASKED], "tools": [{**ABOUT, "input_schema": SCHEMA}]}
    blocks: list[dict[str, Any]] = [
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": ARGUMENTS},
    ]
    if thought:
        blocks.insert(0, {"type": "thinking", "thinking": thought, "signature": ""})
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "none"}]}
    return "/v1/messages", first, {**first, "messages": [ASKED, {"role": "assistant", "content": blocks}, result]}


def ollama(thought: str | None) -> Turn:
    tools = [{"type": "function", "function": {**ABOUT, "parameters": SCHEMA}}]
    first = {"messages": [ASKED], "tools": tools, "stream": False}
    said: dict[str, Any] = {"role": "assistant", "content": "Let me look."}
    said |= {"tool_calls": [{"function": {"name": "weather", "arguments": ARGUMENTS}}]}
    said |= {"thinking": thought} if thought else {}
    return "/api/chat", first, {**first, "messages": [ASKED, said, {"role": "tool", "content": "none"}]}


PROTOCOLS = [openai_chat, responses, anthropic, ollama]


def sent(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = served.post(path, **{"model": "fake-0", **body})
    assert answer.status_code == 200, answer.text
    about: dict[str, Any] = answer.json()["rekindle"]
    return about


def served_model(serve: Serve, *, keeps: bool) -> tuple[Served, ScriptedEngine]:
    engine = ScriptedEngine(REPLIES)
    engine.tokenizer = tokenizer_of(THINKING, VOCABULARY)  # type: ignore[assignment]
    return serve(engine, session={"keep_reply_tokens": keeps}), engine


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_generated_reply_stands_in(serve: Serve, protocol: Callable[[str | None], Turn]) -> None:
    served, engine = served_model(serve, keeps=True)
    path, first, second = protocol(THOUGHT)
    assert sent(served, path, first)["replayed_replies"] == 0
    about = sent(served, path, second)
    before, after = engine.prompts
    assert after.startswith(before + REPLIES[0]) and about["replayed_replies"] == 1
    new = len("\ntool\nnone\nassistant\n") + 4  # and the control tokens around it
    assert about["computed"] <= new


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_reply_without_thoughts_stands_in(serve: Serve, protocol: Callable[[str | None], Turn]) -> None:
    served, engine = served_model(serve, keeps=True)
    engine.replies = [REPLIES[0].split("</think>\n\n")[1], "Calm."]
    path, first, second = protocol(None)
    sent(served, path, first)
    assert sent(served, path, second)["replayed_replies"] == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_the_setting_the_template_writes_it(serve: Serve, protocol: Callable[[str | None], Turn]) -> None:
    served, engine = served_model(serve, keeps=False)
    path, first, second = protocol(THOUGHT)
    sent(served, path, first)
    about = sent(served, path, second)
    assert about["replayed_replies"] == 0 and '"weather", "arguments": {"city": "Ås", "days": 2,' in engine.prompts[-1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("thought", ["Hm, the rain.", None], ids=["changed", "stripped"])
def test_what_a_client_makes_of_a_thought_stays(
    serve: Serve, protocol: Callable[[str | None], Turn], thought: str | None
) -> None:
    served, engine = served_model(serve, keeps=True)
    path, first, second = protocol(thought)
    sent(served, path, first)
    assert sent(served, path, second)["replayed_replies"] == 0
    assert THOUGHT not in engine.prompts[-1] and (thought or "Let me look.") in engine.prompts[-1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_body_of_a_request_is_explained_as_it_is_answered(
    serve: Serve, protocol: Callable[[str | None], Turn]
) -> None:
    served, _ = served_model(serve, keeps=False)
    path, first, second = protocol(None)
    sent(served, path, first)
    assert served.session.flush()
    told = served.post("/v1/rekindle/explain", **{"model": "fake-0", **second}).json()
    about = sent(served, path, second)
    assert told["tokens"] == about["computed"] + about["loaded"]
    found = told["difference"]
    assert (found["where"], found["cause"]) == ("message 2 of 3 (assistant)", "thought")
    assert found["known"].startswith("<think>") and found["ours"].startswith("Let·me")
    last = served.get("/v1/rekindle/explain/last").json()
    assert last["difference"] == found and "likely cause: a stripped thought" in last["text"]
    assert len(last["text"].splitlines()) <= 10


def test_a_body_that_a_protocol_refuses_is_not_explained(serve: Serve) -> None:
    served, _ = served_model(serve, keeps=False)
    path, first, _ = anthropic(None)
    bad = {**first, "messages": [{"role": "user", "content": [{"type": "image"}]}]}
    explained, answered = (served.post(where, **bad) for where in ("/v1/rekindle/explain", path))
    assert explained.status_code == answered.status_code == 400
    assert explained.json()["error"]["message"] == answered.json()["error"]["message"]
    assert served.post("/v1/rekindle/explain", messages=[ASKED], prompt="x").status_code == 400
