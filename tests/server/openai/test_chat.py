"""/v1/chat/completions: what the session says, in OpenAI's words, to OpenAI's own client."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import openai
import psutil
import pytest

from rekindle import Session
from rekindle.server.schema import ChatRequest
from rekindle.text import sandbox as limited_process
from tests.server.conftest import Serve
from tests.server.serving import Served, connected, eventually, streamed
from tests.text.hostile_grammars import HOSTILE

PATH = "/v1/chat/completions"
CHAT = [{"role": "system", "content": "You keep a lighthouse."}, {"role": "user", "content": "How is the wind?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
DRAWN: dict[str, Any] = {"temperature": 1.5, "max_tokens": 24, "seed": 11}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo"]}, "days": {"enum": [3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CHOSEN = {"type": "function", "function": {"name": "weather"}}


def test_a_reply_is_what_the_session_says(served: Served, direct: Session) -> None:
    expected = direct.chat(CHAT, temperature=0.0, max_tokens=24)
    reply = served.openai().chat.completions.create(model="fake-0", messages=CHAT, **GREEDY)
    (choice,) = reply.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason and choice.index == 0
    assert reply.usage.prompt_tokens == expected.usage.prompt_tokens
    assert reply.usage.completion_tokens == expected.usage.completion_tokens
    assert reply.usage.total_tokens == expected.usage.total_tokens
    assert reply.object == "chat.completion" and reply.model == "fake-0" and reply.id.startswith("chatcmpl-")


def test_streamed_pieces_join_to_the_whole_reply(served: Served, direct: Session) -> None:
    expected = direct.chat(CHAT, temperature=0.0, max_tokens=24)
    stream = served.openai().chat.completions.create(model="fake-0", messages=CHAT, stream=True, **GREEDY)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)
    assert len(chunks) > 10, "it comes in pieces"


def test_a_stream_tells_usage_at_its_end_if_it_is_asked_to(served: Served, direct: Session) -> None:
    expected = direct.chat(CHAT, temperature=0.0, max_tokens=24).usage
    stream = served.openai().chat.completions.create(
        model="fake-0", messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = list(stream)
    assert last.choices == [] and all(chunk.usage is None for chunk in chunks)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        expected.prompt_tokens,
        expected.completion_tokens,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_reply_before_it(served: Served, direct: Session, stream: bool) -> None:
    whole = direct.chat(CHAT, temperature=0.0, max_tokens=24).text
    stop = whole[9:11]
    expected = direct.chat(CHAT, temperature=0.0, max_tokens=24, stop=["never", stop])
    reply = served.openai().chat.completions.create(
        model="fake-0", messages=CHAT, stop=["never", stop], stream=stream, **GREEDY
    )
    if stream:
        chunks = list(reply)
        text, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert text == whole[: whole.index(stop)] == expected.text and reason == "stop"


def test_a_seed_decides_what_is_drawn(served: Served, direct: Session) -> None:
    first, again = (served.chat(CHAT, **DRAWN)["choices"][0]["message"]["content"] for _ in range(2))
    other = served.chat(CHAT, **{**DRAWN, "seed": 12})["choices"][0]["message"]["content"]
    assert first == again == direct.chat(CHAT, **DRAWN).text != other


def test_sampling_fields_reach_the_session(served: Served, direct: Session) -> None:
    fields = {"top_p": 0.7, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 24}
    said = served.chat(CHAT, **DRAWN, **fields)["choices"][0]["message"]["content"]
    assert said == direct.chat(CHAT, **DRAWN, **fields).text
    assert said != direct.chat(CHAT, **DRAWN).text


def test_without_a_temperature_it_is_one(served: Served, direct: Session) -> None:
    reply = served.post(PATH, messages=CHAT, seed=3, max_tokens=24).json()
    assert reply["choices"][0]["message"]["content"] == direct.chat(CHAT, temperature=1.0, seed=3, max_tokens=24).text


def test_every_choice_has_a_seed_of_its_own(served: Served, direct: Session) -> None:
    reply = served.openai().chat.completions.create(model="fake-0", messages=CHAT, n=3, **DRAWN)
    expected = [direct.chat(CHAT, **{**DRAWN, "seed": DRAWN["seed"] + number}) for number in range(3)]
    assert [choice.message.content for choice in reply.choices] == [one.text for one in expected]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage.prompt_tokens == expected[0].usage.prompt_tokens, "the prompt counts once"
    assert reply.usage.completion_tokens == sum(one.usage.completion_tokens for one in expected)


def test_streamed_choices_are_those_of_the_whole_reply(served: Served) -> None:
    whole = served.chat(CHAT, n=3, **DRAWN)
    texts, reasons = {0: "", 1: "", 2: ""}, {}
    with served.http() as client:
        for chunk in streamed(client, PATH, messages=CHAT, n=3, **DRAWN):
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    assert reasons == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}


def test_choices_without_a_seed_differ(served: Served) -> None:
    reply = served.chat(CHAT, n=4, temperature=2.0, max_tokens=24)
    assert len({choice["message"]["content"] for choice in reply["choices"]}) == 4


@pytest.mark.parametrize(
    "given", [{"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 3, "max_completion_tokens": 7}]
)
def test_a_reply_has_as_many_tokens_as_was_asked_for(served: Served, given: dict[str, int]) -> None:
    reply = served.post(PATH, messages=CHAT, temperature=0, **given).json()
    assert reply["usage"]["completion_tokens"] == 7 and reply["choices"][0]["finish_reason"] == "length"


def test_a_reply_is_never_longer_than_the_server_allows(serve: Serve) -> None:
    served = serve(max_reply=5)
    for given in ({}, {"max_tokens": 100}):
        reply = served.post(PATH, messages=CHAT, temperature=0, min_tokens=5, **given).json()
        assert reply["usage"]["completion_tokens"] == 5


def test_logprobs_are_those_of_the_session(served: Served, direct: Session) -> None:
    drawn = direct.chat(CHAT, temperature=0.0, max_tokens=8, logprobs=3).logprobs
    reply = served.openai().chat.completions.create(
        model="fake-0", messages=CHAT, logprobs=True, top_logprobs=3, temperature=0, max_tokens=8
    )
    told = reply.choices[0].logprobs.content
    assert [bytes(one.bytes) for one in told] == [one.chosen.text for one in drawn]
    assert [one.logprob for one in told] == pytest.approx([one.chosen.logprob for one in drawn])
    for one, expected in zip(told, drawn, strict=True):
        assert len(one.top_logprobs) == 3 and one.top_logprobs[0].bytes == one.bytes, "greedy takes the likeliest"
        assert [top.logprob for top in one.top_logprobs] == pytest.approx([o.logprob for o in expected.top])


def test_without_top_logprobs_there_is_the_drawn_token_alone(served: Served) -> None:
    told = served.chat(CHAT, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert len(told) == 4 and all(one["top_logprobs"] == [] for one in told)
    assert served.chat(CHAT)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stops", [False, True])
def test_streamed_logprobs_are_those_of_the_whole_reply(served: Served, direct: Session, stops: bool) -> None:
    text = direct.chat(CHAT, temperature=0.0, max_tokens=24).text
    body = {"messages": CHAT, "logprobs": True, "top_logprobs": 2, **GREEDY, "stop": [text[9:11]] if stops else None}
    whole = served.post(PATH, **body).json()["choices"][0]["logprobs"]["content"]
    with served.http() as client:
        chunks = streamed(client, PATH, **body)
    told = [one for chunk in chunks for one in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert told == whole


def test_contents_may_come_in_parts(served: Served) -> None:
    parts = [{"type": "text", "text": "How is "}, {"type": "text", "text": "the wind?"}]
    split = [CHAT[0], {"role": "user", "content": parts}]
    assert served.chat(split)["choices"][0]["message"] == served.chat(CHAT)["choices"][0]["message"]


def test_fields_that_mean_nothing_here_are_named(served: Served) -> None:
    fields = {"store": False, "metadata": {}, "what_is_this": [1]}
    assert served.chat(CHAT, **fields)["rekindle"]["ignored"] == sorted(fields)
    with served.http() as client:
        last = streamed(client, PATH, messages=CHAT, **GREEDY, **fields)[-1]
    assert last["rekindle"]["ignored"] == sorted(fields)
    assert served.chat(CHAT)["rekindle"]["ignored"] == []


def test_a_bias_and_penalties_change_what_is_drawn(served: Served) -> None:
    plain = served.chat(CHAT)["choices"][0]["message"]["content"]
    biased = served.chat(CHAT, logit_bias={str(ord("q")): 100})
    assert set(biased["choices"][0]["message"]["content"]) == {"q"} and biased["rekindle"]["ignored"] == []
    varied = served.chat(CHAT, logit_bias={str(ord("q")): 100, str(ord("r")): 99.5}, frequency_penalty=1)
    assert set(varied["choices"][0]["message"]["content"]) == {"q", "r"}
    assert served.chat(CHAT, presence_penalty=0)["choices"][0]["message"]["content"] == plain
    refused = served.post(PATH, messages=CHAT, logit_bias={"999999": 1})
    assert refused.status_code == 400 and "this model has tokens 0 to" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"hello": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"reasoning_effort": "great"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs"),
    ],
)
def test_a_bias_or_an_effort_out_of_range_is_refused_by_name(served: Served, fields: Any, param: str) -> None:
    refused = served.post(PATH, messages=CHAT, **fields)
    assert refused.status_code == 400 and refused.json()["error"]["param"].startswith(param)


def test_thinking_without_a_switch_is_named_and_so_are_unknown_variables(served: Served) -> None:
    found = served.chat(CHAT, reasoning_effort="low", chat_template_kwargs={"enable_thinking": True, "tone": "dry"})
    wanted = ["chat_template_kwargs", "chat_template_kwargs.tone", "reasoning_effort"]
    assert sorted(found["rekindle"]["ignored"]) == wanted


@pytest.mark.parametrize(
    ("effort", "variables", "think"),
    [
        (None, None, None),
        ("none", None, False),
        ("minimal", None, "low"),
        (None, {"enable_thinking": False}, False),
        ("high", {"enable_thinking": False}, False),
        ("high", {"thinking": True}, "high"),
        (None, {"reasoning_effort": "medium"}, "medium"),
    ],
)
def test_what_thinking_a_chat_asks_for(effort: str | None, variables: Any, think: Any) -> None:
    body = {"messages": CHAT, "reasoning_effort": effort, "chat_template_kwargs": variables}
    assert ChatRequest.model_validate(body).think == think


def test_the_second_ask_is_spared_what_the_first_computed(served: Served) -> None:
    first, again = served.chat(CHAT), served.chat(CHAT)
    tokens = first["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens - 1
    assert again["usage"]["prompt_tokens"] == tokens, "what is cached counts too"
    assert first["rekindle"]["computed"] == tokens and again["rekindle"]["computed"] == 1
    assert first["choices"] == again["choices"]


def test_a_reply_tells_where_its_kv_came_from(served: Served) -> None:
    served.chat(CHAT)
    told = served.chat(CHAT)
    about, tokens = told["rekindle"], told["usage"]["prompt_tokens"]
    assert about["level"] == "exact" and about["miss"] is None and about["from_chunks"] == about["streamed"] == 0
    assert about["loaded"] == sum(about["loaded_from"].values()) == tokens - 1
    assert set(about["loaded_from"]) == {"engine", "memory", "disk"}
    timings = told["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (tokens - 1, 1, 4)
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] > 0


def test_a_stream_ends_with_the_same_facts(served: Served) -> None:
    served.chat(CHAT)
    whole = served.chat(CHAT)
    with served.http() as client:
        last = streamed(client, PATH, messages=CHAT, temperature=0, max_tokens=4)[-1]
    for told in (last, whole):
        del told["rekindle"]["load_ms"], told["rekindle"]["cold_ms"]
    assert last["rekindle"] == whole["rekindle"] and set(last["timings"]) == set(whole["timings"])
    assert last["timings"]["cache_n"] == whole["timings"]["cache_n"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_header_tells_the_plan(served: Served, stream: bool) -> None:
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 4, "stream": stream}
    cold, warm = (served.post(PATH, **body).headers["X-Rekindle-Plan"] for _ in range(2))
    plans = [dict(field.split("=") for field in plan.split("; ")) for plan in (cold, warm)]
    assert plans[0]["level"] == "exact" and plans[0]["miss"] == "unknown" and int(plans[0]["computed"]) > 1
    assert plans[1]["computed"] == "1" and plans[1]["miss"] == "none"
    assert int(plans[1]["engine"]) + int(plans[1]["memory"]) + int(plans[1]["disk"]) == int(plans[0]["computed"]) - 1


def test_cache_prompt_false_neither_reads_nor_keeps(served: Served) -> None:
    first = served.chat(CHAT, cache_prompt=False)
    assert served.chat(CHAT)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "it was not kept"
    again = served.chat(CHAT, cache_prompt=False)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "it is not read"
    assert again["rekindle"]["level"] == first["rekindle"]["level"] == "off" and again["rekindle"]["miss"] == "off"
    assert first["choices"] == again["choices"]


def test_a_forced_call_comes_back_as_a_call(served: Served) -> None:
    reply = served.openai().chat.completions.create(
        model="fake-0", messages=CHAT, tools=[WEATHER], tool_choice="required", temperature=0
    )
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls" and not choice.message.content and choice.message.tool_calls
    for call in choice.message.tool_calls:  # it may make several
        assert call.type == "function" and call.id and call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 3}


def test_a_streamed_call_is_the_same_call(served: Served) -> None:
    with served.openai().chat.completions.stream(
        model="fake-0", messages=CHAT, tools=[WEATHER], tool_choice=CHOSEN, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and not choice.message.content and "chunk" in kinds
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Oslo", "days": 3}


def test_the_result_of_a_call_is_read_by_the_model(served: Served, direct: Session) -> None:
    client = served.openai()
    asked: list[Any] = list(CHAT)
    message = (
        client.chat.completions.create(
            model="fake-0", messages=asked, tools=[WEATHER], tool_choice=CHOSEN, temperature=0
        )
        .choices[0]
        .message
    )
    (call,) = message.tool_calls
    asked += [message, {"role": "tool", "tool_call_id": call.id, "content": "Storm."}]
    reply = client.chat.completions.create(
        model="fake-0", messages=asked, tools=[WEATHER], tool_choice="none", **GREEDY
    )
    given = [*CHAT, message.model_dump(exclude_none=True), asked[-1]]
    expected = direct.chat(given, tools=[WEATHER], tool_choice="none", temperature=0.0, max_tokens=24)
    assert reply.choices[0].message.content == expected.text and not reply.choices[0].message.tool_calls
    assert reply.usage.prompt_tokens == expected.usage.prompt_tokens
    calm = [*given[:-1], {**given[-1], "content": "Calm."}]
    assert direct.chat(calm, tools=[WEATHER], tool_choice="none", temperature=0.0, max_tokens=24).text != expected.text


def test_tools_that_need_not_be_called_leave_text(served: Served, direct: Session) -> None:
    expected = direct.chat(CHAT, tools=[WEATHER], temperature=0.0, max_tokens=24)
    body = {"messages": CHAT, "tools": [WEATHER], **GREEDY}
    (choice,) = served.post(PATH, **body).json()["choices"]
    assert choice["message"]["content"] == expected.text and choice["finish_reason"] == "length"
    with served.http() as client:
        chunks = streamed(client, PATH, **body)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected.text


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red"]}, "many": {"type": "boolean"}},
    "required": ["colour", "many"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_obeyed(served: Served, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA, "strict": True}}
    reply = served.openai().chat.completions.create(
        model="fake-0", messages=CHAT, response_format=form, temperature=0, stream=stream
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
    else:
        text = reply.choices[0].message.content
    told = json.loads(text)
    assert told["colour"] == "red" and isinstance(told["many"], bool) and set(told) == {"colour", "many"}


def test_others_are_answered_while_a_schema_is_compiled_and_a_client_that_leaves_ends_that(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_process, "CPU_SECONDS", 3600.0)
    monkeypatch.setattr(limited_process, "HEAP_BYTES", 64 * 1024**3)
    if served.service.session._grammars is not None:
        served.service.session._grammars.close()  # those that wait have the usual limit
    before = set(psutil.Process().children())

    def started() -> set[psutil.Process]:
        return set(psutil.Process().children()) - before

    schema = json.loads(HOSTILE["all of patterns (26)"]().text)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with connected(served, PATH, messages=CHAT, response_format=form, max_tokens=4):
        # It is ready sooner, and never ends by itself.
        eventually(lambda: any(child.cpu_times().user > 1.0 for child in started()))
        compiling = list(started())
        assert served.get("/health").status_code == 200
        assert served.chat(CHAT, grammar='root ::= "yes"')["choices"][0]["message"]["content"] == "yes"
        assert compiling[0].is_running()
    eventually(lambda: not compiling[0].is_running())
    eventually(lambda: not served.service._jobs)


def test_a_grammar_is_obeyed(served: Served) -> None:
    reply = served.chat(CHAT, grammar='root ::= "yes" | "no"', max_tokens=24)
    assert reply["choices"][0]["message"]["content"] in ("yes", "no")
    assert reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": CHAT, "temperature": -1}, "temperature"),
        ({"messages": CHAT, "n": 99}, "n"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ({"messages": CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
def test_what_is_wrong_is_named(served: Served, body: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.openai().post(PATH.removeprefix("/v1"), body=body, cast_to=object)
    assert raised.value.param == named and raised.value.type == "invalid_request_error"
    assert raised.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_longer_than_the_context_is_refused(served: Served, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.openai().chat.completions.create(
            model="fake-0", messages=[{"role": "user", "content": "x" * 5000}], stream=stream
        )
    assert raised.value.code == "context_length_exceeded"


def test_another_model_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        served.openai().chat.completions.create(model="gpt-5", messages=CHAT)
    assert raised.value.code == "model_not_found"


def test_curl_gets_the_same(served: Served, direct: Session) -> None:
    expected = direct.chat(CHAT, temperature=0.0, max_tokens=24)
    body = json.dumps({"messages": CHAT, **GREEDY})
    command = ["curl", "-sS", "--fail", f"{served.url}{PATH}", "-H", "Content-Type: application/json", "-d", body]
    told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert told["choices"][0]["message"]["content"] == expected.text


def test_curl_reads_a_stream(served: Served, direct: Session) -> None:
    expected = direct.chat(CHAT, temperature=0.0, max_tokens=24)
    body = json.dumps({"messages": CHAT, "stream": True, **GREEDY})
    command = ["curl", "-sSN", "--fail", "-i", f"{served.url}{PATH}", "-d", body]
    head, *parts = (
        subprocess.run(command, capture_output=True, check=True).stdout.decode().replace("\r", "").split("\n\n")
    )
    chunks = [json.loads(part.removeprefix("data: ")) for part in parts if part.startswith("data: {")]
    assert "content-type: text/event-stream" in head.lower() and "x-rekindle-plan: " in head.lower()
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected.text
    assert parts[-2:] == ["data: [DONE]", ""]
