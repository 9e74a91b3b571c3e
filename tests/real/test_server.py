"""SmolLM2 behind the server, on both engines, asked by OpenAI's own client."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from rekindle import Session
from tests.server.serving import Asking, Served, eventually, serving, streamed

pytestmark = pytest.mark.real

STORY = (
    "The lighthouse stood at the end of the long pier, and every evening the old keeper climbed its stairs to light "
    "the lamp. From up there he saw the fishing boats come home, one after the other, and counted them. "
)
CHAT = [{"role": "system", "content": STORY}, {"role": "user", "content": "What does the keeper count?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["sea", "land"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CHOSEN = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("hf", marks=pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="no torch here")),
        pytest.param(
            "llamacpp",
            marks=[
                pytest.mark.llamacpp,
                pytest.mark.long,
                pytest.mark.skipif(not importlib.util.find_spec("xllamacpp"), reason="no llama.cpp here"),
            ],
        ),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    """The engine."""
    return str(request.param)


@contextmanager
def running(kind: str, model: Any, folder: Path, **settings: Any) -> Iterator[Served]:
    given: dict[str, Any] = {"disk_limit": "1GB", **settings}
    if kind == "llamacpp":
        given |= {"engine": kind, "device": "cpu", "context": 2048, "kv_tokens": 8192}
    with serving(Session(model, cache=str(folder / "cache"), **given)) as served:
        yield served


@pytest.fixture(scope="module")
def model(kind: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("smollm2") if kind == "hf" else "smollm2"


@pytest.fixture(scope="module")
def served(kind: str, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose replies are the same to the last bit, because prefills are always cut alike.

    llama.cpp rounds by where KV lies in its buffer, so there nobody else may be answered at the same time.
    """
    parallel = 1 if kind == "llamacpp" else 4
    with running(kind, model, tmp_path_factory.mktemp(kind), deterministic=True, parallel=parallel) as served:
        yield served


@pytest.fixture(scope="module")
def sharing(kind: str, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server as it is by default: requests share steps, and reuse whatever they can."""
    with running(kind, model, tmp_path_factory.mktemp(kind), parallel=4) as served:
        yield served


def test_a_chat_is_what_the_session_says_cold_and_warm_whole_and_streamed(served: Served) -> None:
    expected = served.session.chat(CHAT, reuse="off", temperature=0.0, max_tokens=8)
    client = served.openai()
    for salt in ("cold, then warm", "cold, then warm"):
        more = {"extra_body": {"cache_salt": salt}}
        reply = client.chat.completions.create(model="smollm2", messages=CHAT, **GREEDY, **more)
        stream = client.chat.completions.create(model="smollm2", messages=CHAT, stream=True, **GREEDY, **more)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert reply.choices[0].message.content == said == expected.text
        assert reply.choices[0].finish_reason == expected.finish_reason
        assert reply.usage.prompt_tokens == expected.usage.prompt_tokens
        assert reply.usage.completion_tokens == expected.usage.completion_tokens


@pytest.mark.parametrize(
    "form",
    [
        "text",
        pytest.param("texts", marks=pytest.mark.long),
        pytest.param("ids", marks=pytest.mark.long),
        "lists of ids",
    ],
)
def test_a_completion_is_what_the_session_says(served: Served, form: str) -> None:
    texts = ["The sea was calm, and", "def fibonacci(n):\n"]
    ids = [served.post("/tokenize", content=text).json()["tokens"] for text in texts]
    prompt: Any = {"text": texts[0], "texts": texts, "ids": ids[0], "lists of ids": ids}[form]
    several = texts if form in ("texts", "lists of ids") else texts[:1]
    expected = [served.session.generate(text, reuse="off", temperature=0.0, max_tokens=6).text for text in several]
    reply = served.openai().completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=6)
    assert [choice.text for choice in reply.choices] == expected
    said = [""] * len(expected)
    for chunk in served.openai().completions.create(
        model="smollm2", prompt=prompt, temperature=0, max_tokens=6, stream=True
    ):
        said[chunk.choices[0].index] += chunk.choices[0].text
    assert said == expected


def test_seeds_logprobs_and_choices_are_as_the_client_reads_them(served: Served) -> None:
    client = served.openai()
    drawn: dict[str, Any] = {"model": "smollm2", "messages": CHAT, "temperature": 1.0, "top_p": 0.9, "max_tokens": 8}
    first, again = (client.chat.completions.create(seed=7, n=2, **drawn) for _ in range(2))
    assert [one.message.content for one in first.choices] == [one.message.content for one in again.choices]
    assert first.choices[0].message.content != first.choices[1].message.content
    chat = client.chat.completions.create(logprobs=True, top_logprobs=2, model="smollm2", messages=CHAT, **GREEDY)
    told = chat.choices[0].logprobs.content
    assert len(told) == chat.usage.completion_tokens - (chat.choices[0].finish_reason == "stop")
    assert b"".join(bytes(one.bytes) for one in told).decode() == chat.choices[0].message.content
    assert all(one.logprob == pytest.approx(one.top_logprobs[0].logprob) for one in told), "greedy is the likeliest"
    legacy = client.completions.create(model="smollm2", prompt=STORY, logprobs=2, temperature=0, max_tokens=6)
    assert "".join(legacy.choices[0].logprobs.tokens) == legacy.choices[0].text
    assert all(len(top) == 2 for top in legacy.choices[0].logprobs.top_logprobs)


@pytest.mark.parametrize("temperature", [pytest.param(0, marks=pytest.mark.long), 1.5])
def test_a_json_object_is_one(served: Served, temperature: float) -> None:
    asked = [{"role": "user", "content": "Describe a cat as a small JSON object with name and age."}]
    reply = served.openai().chat.completions.create(
        model="smollm2",
        messages=asked,
        response_format={"type": "json_object"},
        temperature=temperature,
        seed=3,
        max_tokens=60,
    )
    if reply.choices[0].finish_reason == "stop":  # a small model may not find an end
        assert isinstance(json.loads(reply.choices[0].message.content), dict)
    else:
        assert reply.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("temperature", "stream"),
    [
        (0, False),
        (1.5, True),
        pytest.param(0, True, marks=pytest.mark.long),
        pytest.param(1.5, False, marks=pytest.mark.long),
    ],
)
def test_a_json_schema_is_obeyed(served: Served, temperature: float, stream: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema_rs")
    form = {"type": "json_schema", "json_schema": {"name": "writer", "schema": SCHEMA, "strict": True}}
    body = {"messages": CHAT, "response_format": form, "temperature": temperature, "seed": 5, "max_tokens": 300}
    with served.http() as client:
        if stream:
            chunks = streamed(client, "/v1/chat/completions", **body)
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            reason = chunks[-1]["choices"][0]["finish_reason"]
        else:
            (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
            text, reason = choice["message"]["content"], choice["finish_reason"]
    assert reason == "stop"
    jsonschema.validate(SCHEMA, json.loads(text))


def test_the_client_parses_a_reply_into_a_model_of_pydantic(served: Served) -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        many: bool
        count: int

    reply = served.openai().chat.completions.parse(
        model="smollm2", messages=CHAT, response_format=Answer, temperature=0, max_tokens=100
    )
    assert isinstance(reply.choices[0].message.parsed, Answer)


def test_a_forced_call_and_its_result_go_round(served: Served) -> None:
    client, asked = served.openai(), [{"role": "user", "content": "How is the weather in Oslo?"}]
    options: dict[str, Any] = {"model": "smollm2", "tools": [WEATHER], "tool_choice": CHOSEN, "temperature": 0}
    (choice,) = client.chat.completions.create(messages=asked, max_tokens=60, **options).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments["city"], str) and set(arguments) <= {"city", "days"}
    with client.chat.completions.stream(messages=asked, max_tokens=60, **options) as stream:
        (same,) = stream.until_done().get_final_completion().choices
    assert same.finish_reason == "tool_calls"
    assert same.message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear", "celsius": -3}'}
    reply = client.chat.completions.create(
        model="smollm2", messages=[*asked, choice.message, result], tools=[WEATHER], tool_choice="none", **GREEDY
    )
    assert reply.choices[0].message.content and not reply.choices[0].message.tool_calls
    assert reply.usage.prompt_tokens > 60


def test_a_client_that_leaves_frees_its_place(served: Served) -> None:
    stream = served.openai().chat.completions.create(model="smollm2", messages=CHAT, stream=True, max_tokens=1500)
    next(iter(stream))
    stream.close()
    eventually(lambda: served.service.admission.running == 0)
    assert served.chat(CHAT)["usage"]["completion_tokens"] == 4


def test_texts_longer_than_the_context_are_refused(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.openai().completions.create(model="smollm2", prompt=[5] * 9000, max_tokens=1)
    assert raised.value.code == "context_length_exceeded"


def test_the_second_ask_is_spared_nearly_all_of_it(sharing: Served) -> None:
    asked = [{"role": "system", "content": STORY * 3}, CHAT[1]]
    cold, warm = (
        sharing.openai().chat.completions.create(model="smollm2", messages=asked, temperature=0, max_tokens=2)
        for _ in range(2)
    )
    assert cold.usage.prompt_tokens_details.cached_tokens < 16 < 100 < warm.usage.prompt_tokens_details.cached_tokens
    assert warm.usage.prompt_tokens == cold.usage.prompt_tokens
    assert cold.choices[0].message == warm.choices[0].message


def test_clients_with_one_beginning_compute_it_once(sharing: Served) -> None:
    system = {"role": "system", "content": STORY * 4}
    asked = [[system, {"role": "user", "content": f"{number} and {number}?"}] for number in range(4)]
    replies = [one.result() for one in [Asking(lambda c=c: sharing.chat(c, cache_salt="once")) for c in asked]]
    tokens = replies[0]["usage"]["prompt_tokens"]
    computed = [reply["rekindle"]["computed"] for reply in replies]
    assert max(computed) <= tokens and sum(computed) < 1.5 * tokens, "one computes it, the others wait for it"


def test_a_queued_chat_finds_in_memory_what_the_last_server_wrote(kind: str, model: Any, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": STORY * 4}, CHAT[1]]
    with running(kind, model, tmp_path) as served:
        cold = served.chat(chat)
    with running(kind, model, tmp_path, parallel=1) as served:
        store = served.session.cache.store
        assert store is not None and len(store.memory) == 0
        long: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"min_tokens": 1500}}
        writing = served.openai().chat.completions.create(model="smollm2", messages=CHAT, stream=True, **long)
        next(iter(writing))
        queued = Asking(lambda: served.chat(chat))
        eventually(lambda: len(store.memory) > 0)
        writing.close()
        reply = queued.result()
        assert reply["choices"] == cold["choices"]
        assert reply["rekindle"]["loaded_from"]["memory"] > 100 and not reply["rekindle"]["loaded_from"]["disk"]
