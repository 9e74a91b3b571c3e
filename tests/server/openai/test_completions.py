"""/v1/completions: what continues a text, a list of texts, token ids or lists of them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from rekindle import Session
from tests.server.serving import Served, streamed

PATH = "/v1/completions"
TEXT, OTHER = "The keeper climbed the stairs and", "Grüße aus 東京, the boats"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
PROMPTS: dict[str, Any] = {
    "text": TEXT,
    "texts": [TEXT, OTHER],
    "ids": list(TEXT.encode()),
    "lists of ids": [list(TEXT.encode()), list(OTHER.encode())],
}


def parts(prompt: Any) -> list[Any]:
    """The prompts, one by one."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


@pytest.mark.parametrize("kind", PROMPTS)
def test_replies_are_what_the_session_says(served: Served, direct: Session, kind: str) -> None:
    expected = [direct.generate(one, temperature=0.0, max_tokens=16) for one in parts(PROMPTS[kind])]
    reply = served.openai().completions.create(model="fake-0", prompt=PROMPTS[kind], **GREEDY)
    assert [choice.text for choice in reply.choices] == [one.text for one in expected]
    assert [choice.finish_reason for choice in reply.choices] == [one.finish_reason for one in expected]
    assert [choice.index for choice in reply.choices] == list(range(len(expected)))
    assert reply.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in expected)
    assert reply.usage.completion_tokens == sum(one.usage.completion_tokens for one in expected)
    assert reply.object == "text_completion"


@pytest.mark.parametrize("kind", PROMPTS)
def test_streamed_pieces_join_to_the_whole_replies(served: Served, direct: Session, kind: str) -> None:
    expected = [direct.generate(one, temperature=0.0, max_tokens=16) for one in parts(PROMPTS[kind])]
    stream = served.openai().completions.create(
        model="fake-0", prompt=PROMPTS[kind], stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = list(stream)
    texts, reasons = [""] * len(expected), [None] * len(expected)
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
        assert chunk.usage is None
    assert texts == [one.text for one in expected] and reasons == [one.finish_reason for one in expected]
    assert last.choices == [] and last.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in expected)
    assert last.usage.completion_tokens == sum(one.usage.completion_tokens for one in expected)


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_stands_before_the_reply(served: Served, kind: str, stream: bool) -> None:
    plain = served.post(PATH, prompt=PROMPTS[kind], **GREEDY).json()["choices"]
    body = {"prompt": PROMPTS[kind], "echo": True, **GREEDY}
    if stream:
        said = [""] * len(plain)
        with served.http() as client:
            for chunk in streamed(client, PATH, **body):
                said[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    else:
        said = [choice["text"] for choice in served.post(PATH, **body).json()["choices"]]
    assert said == [before + choice["text"] for before, choice in zip([TEXT, OTHER], plain, strict=False)]


def test_every_prompt_has_its_choices_in_order(served: Served, direct: Session) -> None:
    drawn: dict[str, Any] = {"temperature": 1.5, "max_tokens": 16}
    reply = served.openai().completions.create(model="fake-0", prompt=[TEXT, OTHER], n=2, seed=4, **drawn)
    expected = [direct.generate(text, seed=seed, **drawn) for text in (TEXT, OTHER) for seed in (4, 5)]
    assert [choice.text for choice in reply.choices] == [one.text for one in expected]
    assert len({choice.text for choice in reply.choices}) == 4
    assert reply.usage.prompt_tokens == expected[0].usage.prompt_tokens + expected[2].usage.prompt_tokens
    assert reply.usage.completion_tokens == sum(one.usage.completion_tokens for one in expected)


def test_a_stop_string_ends_the_reply_before_it(served: Served, direct: Session) -> None:
    whole = direct.generate(TEXT, temperature=0.0, max_tokens=16).text
    stop = whole[5:7]
    reply = served.openai().completions.create(model="fake-0", prompt=TEXT, stop=stop, **GREEDY)
    assert reply.choices[0].text == whole[: whole.index(stop)] and reply.choices[0].finish_reason == "stop"


def test_a_seed_decides_what_is_drawn(served: Served) -> None:
    drawn: dict[str, Any] = {"prompt": TEXT, "temperature": 1.5, "max_tokens": 16}
    first, again, other = (served.post(PATH, seed=seed, **drawn).json()["choices"][0]["text"] for seed in (1, 1, 2))
    assert first == again != other


def test_logprobs_are_those_of_the_session(served: Served, direct: Session) -> None:
    drawn = direct.generate(TEXT, temperature=0.0, max_tokens=8, logprobs=3).logprobs
    reply = served.openai().completions.create(model="fake-0", prompt=TEXT, logprobs=3, temperature=0, max_tokens=8)
    told = reply.choices[0].logprobs
    assert told.token_logprobs == pytest.approx([one.chosen.logprob for one in drawn])
    assert len(told.tokens) == len(told.text_offset) == len(told.top_logprobs) == 8
    assert told.text_offset == sorted(told.text_offset) and told.text_offset[0] == 0
    for token, likely, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert top[token] == max(top.values()) == pytest.approx(likely)


@pytest.mark.parametrize("stops", [False, True])
def test_streamed_logprobs_are_those_of_the_whole_reply(served: Served, direct: Session, stops: bool) -> None:
    text = direct.generate(TEXT, temperature=0.0, max_tokens=16).text
    body = {"prompt": TEXT, "logprobs": 2, "stop": text[5:7] if stops else None, **GREEDY}
    whole = served.post(PATH, **body).json()["choices"][0]["logprobs"]
    told: dict[str, list[Any]] = {name: [] for name in whole}
    with served.http() as client:
        for chunk in streamed(client, PATH, **body):
            for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
                told[name] += values
    del told["text_offset"], whole["text_offset"]  # where a character comes in parts they are counted otherwise
    assert told == whole and whole["tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_second_ask_hits_the_cache_and_a_header_tells(served: Served, stream: bool) -> None:
    body = {"prompt": TEXT, "stream": stream, **GREEDY}
    cold, warm = (served.post(PATH, **body).headers["X-Rekindle-Plan"] for _ in range(2))
    assert f"computed={len(TEXT)}; miss=unknown" in cold and "computed=1; miss=none" in warm


def test_a_reply_tells_what_was_reused_and_what_was_ignored(served: Served) -> None:
    served.post(PATH, prompt=TEXT, **GREEDY)
    told = served.post(PATH, prompt=TEXT, store=True, **GREEDY).json()
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == told["timings"]["cache_n"] == len(TEXT) - 1
    assert told["rekindle"]["ignored"] == ["store"] and told["rekindle"]["computed"] == 1
    with served.http() as client:
        last = streamed(client, PATH, prompt=TEXT, store=True, **GREEDY)[-1]
    assert last["rekindle"]["ignored"] == ["store"] and last["timings"]["cache_n"] == len(TEXT) - 1


def test_zero_tokens_only_read_the_prompt(served: Served) -> None:
    told = served.post(PATH, prompt=TEXT, max_tokens=0).json()
    assert told["choices"][0]["text"] == "" and told["usage"]["completion_tokens"] == 0
    assert served.post(PATH, prompt=TEXT, **GREEDY).json()["timings"]["cache_n"] == len(TEXT) - 1


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, None),
        ({"prompt": ""}, None),
        ({"prompt": [70000]}, None),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": TEXT, "suffix": "end"}, "suffix"),
        ({"prompt": TEXT, "best_of": 3}, "best_of"),
        ({"prompt": TEXT, "echo": True, "logprobs": 1}, "echo"),
        ({}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_refused(served: Served, body: dict[str, Any], named: str | None, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.openai().post("/completions", body={**body, "stream": stream}, cast_to=object)
    assert raised.value.param == named and raised.value.message
