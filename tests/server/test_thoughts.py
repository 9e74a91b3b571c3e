"""Thoughts in every protocol, whole and as a stream: apart from the text, and read again when they come back."""

from __future__ import annotations

import pytest

from tests.server.conftest import Serve
from tests.server.scripted import ScriptedEngine
from tests.server.serving import Served, streamed, typed_events

REPLY = "<think>\nHm, the wind.\n</think>\n\nCalm."
CHAT = [{"role": "user", "content": "Wind?"}]


@pytest.fixture
def thinking(serve: Serve) -> Served:
    engine = ScriptedEngine([REPLY])
    engine.tokenizer.template = "<think>"
    return serve(engine)


def test_chat_completions(thinking: Served) -> None:
    message = thinking.chat(CHAT, max_tokens=100)["choices"][0]["message"]
    assert message.pop("refusal") is None
    assert message == {"role": "assistant", "content": "Calm.", "reasoning_content": "Hm, the wind."}
    with thinking.http() as client:
        chunks = streamed(client, "/v1/chat/completions", messages=CHAT, max_tokens=100)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, the wind."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Calm."


def test_messages(thinking: Served) -> None:
    body = {"model": "fake-0", "max_tokens": 100, "messages": CHAT}
    thought, text = thinking.post("/v1/messages", **body).json()["content"]
    assert thought == {"type": "thinking", "thinking": "Hm, the wind.", "signature": ""} and text["text"] == "Calm."
    told = typed_events(thinking, "/v1/messages", **body)
    blocks = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert blocks == ["thinking", "text"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm, the wind."
    assert "".join(delta.get("text", "") for delta in deltas) == "Calm."


def test_responses(thinking: Served) -> None:
    reply = thinking.post("/v1/responses", input=CHAT).json()
    thought, message = reply["output"]
    assert thought["type"] == "reasoning" and thought["summary"] == []
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, the wind."}]
    assert message["content"][0]["text"] == "Calm."
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Hm, the wind.")}
    told = typed_events(thinking, "/v1/responses", input=CHAT)
    deltas = [event["delta"] for event in told if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Hm, the wind."
    assert [item["type"] for item in told[-1]["response"]["output"]] == ["reasoning", "message"]


def test_a_thought_that_is_cut_leaves_no_text(thinking: Served) -> None:
    choice = thinking.chat(CHAT, max_tokens=12)["choices"][0]
    assert choice["message"]["content"] == "" and choice["message"]["reasoning_content"] == "Hm, "
    assert choice["finish_reason"] == "length"
