"""Replies that continue a message of the assistant, in every protocol; how prompts and replies begin and end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rekindle import Session
from tests.server.conftest import Serve
from tests.server.scripted import ScriptedEngine
from tests.server.serving import Served, streamed, typed_events

USER = {"role": "user", "content": "How is the wind?"}
BEGUN = {"role": "assistant", "content": "The wind is"}
CHAT = [USER, BEGUN]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {"messages": CHAT, "max_tokens": 40},
    "/v1/responses": {"input": CHAT},
    "/api/chat": {"messages": CHAT},
}
TIMINGS = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second",
    "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_last_message_of_the_assistant_is_continued(serve: Serve, path: str, stream: bool) -> None:
    engine = ScriptedEngine(["!"])
    answer = serve(engine).post(path, **ENDPOINTS[path], stream=stream)
    assert answer.status_code == 200 and "The wind is" not in answer.text and '"!"' in answer.text
    assert engine.prompts == ["user\nHow is the wind?assistant\nThe wind is"]


def test_a_continued_reply_is_the_rest_of_the_reply(served: Served) -> None:
    """The constraint makes the model write what can be cut into text anywhere."""
    form = {"guided_regex": "[a-z ]{40}"}
    whole = served.chat([USER], max_tokens=40, **form)["choices"][0]["message"]["content"]
    begun = {"role": "assistant", "content": whole[:12]}
    rest = {"guided_regex": "[a-z ]{28}", "max_tokens": 40}
    assert served.chat([USER, begun], **rest)["choices"][0]["message"]["content"] == whole[12:]
    told = served.chat([USER, begun], **rest, continue_final_message=True)
    assert told["choices"][0]["message"]["content"] == whole[12:] and told["rekindle"]["ignored"] == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/tokenize", {"messages": [USER], "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_contradicts_itself_is_refused(served: Served, path: str, fields: Any, param: str) -> None:
    refused = served.post(path, **fields)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_calls_without_their_results_are_no_beginning(served: Served) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    refused = served.post("/v1/chat/completions", messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert refused.status_code == 400 and "result of each call" in refused.json()["error"]["message"]


def test_a_thought_that_was_begun_goes_on(serve: Serve) -> None:
    engine = ScriptedEngine(["Hm.</think>Calm."])
    engine.tokenizer.template = "<think>"
    begun = {"role": "assistant", "content": "<think>So: "}
    message = serve(engine).chat([USER, begun], max_tokens=40)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Calm.")
    engine.replies = ["alm."]
    begun = {"role": "assistant", "content": "<think>So: </think>C"}
    message = serve(engine).chat([USER, begun], max_tokens=40)["choices"][0]["message"]
    assert message["content"] == "alm." and "reasoning_content" not in message


def test_a_generation_prompt_can_be_left_out(serve: Serve) -> None:
    engine = ScriptedEngine(["x"])
    served = serve(engine)
    served.chat([USER], add_generation_prompt=False)
    assert engine.prompts == ["user\nHow is the wind?"]
    shown = [
        served.post("/apply-template", messages=[USER], add_generation_prompt=b).json()["prompt"] for b in (0 > 1, True)
    ]
    assert shown == ["<start>user\nHow is the wind?<end>", "<start>user\nHow is the wind?<end><start>assistant\n"]
    continued = served.post("/apply-template", messages=CHAT).json()["prompt"]
    assert continued == f"{shown[1]}The wind is"
    counts = [
        served.post("/tokenize", messages=[USER], **more).json()["count"]
        for more in ({}, {"add_generation_prompt": False})
    ]
    assert counts[0] - counts[1] == len("assistant\n") + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": [USER]}), ("/v1/completions", {"prompt": "The wind"})],
)
def test_times_have_llama_cpps_names_and_no_nulls_in_the_usage_too(served: Served, path: str, body: Any) -> None:
    for most in (0, 1, 4):
        whole = served.post(path, **body, max_tokens=most).json()
        with served.http() as client:
            *_, last, usage = streamed(client, path, **body, max_tokens=most, stream_options={"include_usage": True})
        for told in (whole, last, usage):
            assert set(told["timings"]) == TIMINGS
            assert all(isinstance(value, (int, float)) for value in told["timings"].values())
        assert usage["choices"] == [] and usage["timings"] == last["timings"]


def test_a_reply_that_is_cut_inside_a_character_keeps_the_half_back(serve: Serve) -> None:
    served = serve(ScriptedEngine(["né🙂"]))
    for most, expected in ((2, "n"), (3, "né"), (5, "né"), (7, "né🙂")):
        told = served.chat([USER], max_tokens=most)
        assert told["choices"][0]["message"]["content"] == expected and told["usage"]["completion_tokens"] == most
        with served.http() as client:
            chunks = streamed(client, "/v1/chat/completions", messages=[USER], max_tokens=most)
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected


def test_a_stream_of_completion_has_the_tokens_of_each_piece(served: Served, direct: Session) -> None:
    body = {"prompt": "Once upon a time", "temperature": 0, "n_predict": 12, "min_p": 0, "top_k": 0, "top_p": 1}
    expected = direct.generate("Once upon a time", temperature=0, max_tokens=12)
    answer = served.post("/completion", **body, stream=True)
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert [token for chunk in chunks for token in chunk["tokens"]] == list(expected.tokens)
    assert all(chunk["tokens"] and "completion_probabilities" not in chunk for chunk in chunks[:-1])
    tokens = [served.post("/completion", **body, return_tokens=wanted).json()["tokens"] for wanted in (False, True)]
    assert tokens == [[], list(expected.tokens)]


def test_a_text_is_tokenized_with_or_without_what_begins_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = type(served.session.engine.tokenizer)
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda self, text, **how: [256, *encode(self, text, **how)])
    for fields, begins in (
        ({"content": "a"}, False), ({"content": "a", "add_special": True}, True), ({"prompt": "a"}, True),
        ({"prompt": "a", "add_special_tokens": False}, False),
    ):  # fmt: skip
        assert served.post("/tokenize", **fields).json()["tokens"] == [*([256] if begins else []), ord("a")]


def test_a_stream_of_anthropics_is_continued_too(serve: Serve) -> None:
    events = typed_events(serve(ScriptedEngine([" calm."])), "/v1/messages", **ENDPOINTS["/v1/messages"])
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == " calm."
