"""What people write becomes a request, or one sentence that says what to change."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rekindle.core.reply import SOURCES, Reply, Reuse, Timings, Usage
from rekindle.core.request import Message, Request, Sampling, parse_prompt
from rekindle.errors import InvalidPrompt, InvalidSampling, InvalidSetting, RequestError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": 1e6}, "temperature"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": True}, "temperature=True"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": -1}, "min_p=-1"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"repetition_penalty": -2}, "repetition_penalty=-2"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens=4"),
        ({"stop": ""}, "stop string is empty"),
        ({"stop": ["a", ""]}, "stop string is empty"),
    ],
)
def test_an_absurd_value_is_refused_by_name(options: dict, words: str) -> None:
    with pytest.raises(InvalidSampling, match=words):
        Request.of("hello", **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"temperature": 100, "top_p": 1e-9, "min_p": 1.0, "top_k": 1, "repetition_penalty": 100, "seed": 2**64 - 1},
        {"max_tokens": 0},
        {"stop": "x"},
        {"stop": ["x", "yz"], "overflow": "drop-oldest"},
    ],
)
def test_the_edges_of_the_ranges_are_allowed(options: dict) -> None:
    Request.of("hello", **options)


def test_an_unknown_option_names_the_nearest_known_one() -> None:
    with pytest.raises(InvalidSetting, match="Did you mean 'temperature'"):
        Request.of("hello", temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(InvalidSetting, match="overflow='bend'"):
        Request.of("hello", overflow="bend")  # type: ignore[typeddict-item]


def test_a_request_error_is_a_value_error_too() -> None:
    with pytest.raises(ValueError):
        Request.of("")
    assert issubclass(InvalidPrompt, RequestError)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        (b"bytes", "bytes"),
        ("a\ud800b", "character 1"),
        ([{"role": "user"}], "'role' and 'content'"),
        ([{"content": "x"}], "'role' and 'content'"),
        ([{"role": "usr", "content": "x"}], "Did you mean 'user'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of a message is text"),
        ([{"role": "user", "content": "\udfff"}], "user message is not valid Unicode"),
        ({"role": "user", "content": "x"}, "come as a list"),
        ([1, "x"], "A prompt is"),
        ([1.5], "A prompt is"),
        ([True], "A prompt is"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: object, words: str) -> None:
    with pytest.raises(InvalidPrompt, match=words):
        parse_prompt(prompt)  # type: ignore[arg-type]


def test_text_ids_and_messages_are_told_apart() -> None:
    assert parse_prompt("text") == "text"
    assert parse_prompt([1, 2]) == (1, 2)
    assert parse_prompt(np.array([3, 4])) == (3, 4)  # type: ignore[arg-type]
    expected = Message("user", "hi", {"name": "Ann"})
    assert parse_prompt([{"role": "user", "content": "hi", "name": "Ann"}]) == (expected,)
    assert parse_prompt([Message("assistant", "x")]) == (Message("assistant", "x"),)
    assert expected.as_template_input() == {"role": "user", "content": "hi", "name": "Ann"}


def test_a_message_without_content_is_empty_text() -> None:
    """An assistant that only called a tool has no content."""
    assert parse_prompt([{"role": "assistant", "content": None, "tool_calls": []}]) == (
        Message("assistant", "", {"tool_calls": []}),
    )


def test_greedy_is_the_default() -> None:
    assert Sampling().greedy
    assert not Sampling(temperature=0.1).greedy


def test_a_reply_shows_itself() -> None:
    reuse = Reuse("exact", computed=1, disk=2)
    reply = Reply("a <b>", (1, 2), "stop", Usage(3, 2, 1, cached_tokens=2), Timings(0.5, 0.1, 10.0), reuse)
    assert str(reply) == "a <b>"
    assert reply.as_dict()["usage"]["total_tokens"] == 5
    assert "&lt;b&gt;" in reply._repr_html_() and "<b>" not in reply._repr_html_()
    assert "2 disk" in reply._repr_html_() and f"width:66.67%;background:{SOURCES['disk']}" in reply._repr_html_()
    summary = "first token 0.500 s; 2 of 3 tokens reused; 2 tokens out, 10.0 tokens/s; 1 oldest message left out"
    assert reply.summary() == summary
    assert str(reply.reuse) == "2 of 3 tokens reused (2 from disk); 1 computed"
    other = Reuse("approximate", computed=5, engine=1, from_chunks=8, recomputed=3, miss="differs")
    assert str(other) == (
        "6 of 11 tokens reused (1 from the engine, 8 from other prompts, 3 of them recomputed); "
        "5 computed (earlier prompts differ from there)"
    )
    assert reply.as_dict()["reuse"]["disk"] == reply.reuse.reused == 2
