"""llama.cpp's own endpoints: whole replies and streams, infill, template, slots, and its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rekindle import Session
from tests.server.conftest import Serve
from tests.server.scripted import ScriptedEngine, fill_in_engine
from tests.server.serving import ADMIN, ALICE, Served

FEW = {"temperature": 0, "n_predict": 6, "min_p": 0, "top_k": 0, "top_p": 1}
TEXT = "Once upon a time"


def whole(served: Served, path: str, **body: Any) -> Any:
    answer = served.post(path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = served.post(path, **body, stream=True)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def refused(served: Served, path: str, status: int, **body: Any) -> dict[str, Any]:
    answer = served.post(path, **body)
    error: dict[str, Any] = answer.json()["error"]
    assert answer.status_code == error["code"] == status and isinstance(error["message"], str), answer.text
    return error


def test_a_whole_reply_and_a_stream_have_the_same_text(served: Served, direct: Session) -> None:
    expected = direct.generate(TEXT, temperature=0, max_tokens=6)
    one = whole(served, "/completion", prompt=TEXT, **FEW)
    *pieces, last = chunks(served, "/completion", prompt=TEXT, **FEW)
    assert one["content"] == "".join(piece["content"] for piece in pieces) == expected.text
    assert not any(piece["stop"] for piece in pieces) and last["stop"] and last["content"] == ""
    for reply in (one, last):
        assert (reply["stop_type"], reply["stopping_word"], reply["truncated"]) == ("limit", "", False)
        assert (reply["tokens_predicted"], reply["tokens_evaluated"]) == (6, len(TEXT))
        assert reply["timings"]["predicted_n"] == 6 and reply["generation_settings"]["temperature"] == 0
    assert one["tokens_cached"] == 0 and last["tokens_cached"] == last["timings"]["cache_n"] == len(TEXT) - 1


def test_a_stop_string_and_the_end_are_named(serve: Serve) -> None:
    served = serve(ScriptedEngine(["One, two.\nThree."]))
    word = whole(served, "/completion", prompt=TEXT, stop=["two"])
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("One, ", "word", "two")
    end = whole(served, "/completion", prompt=TEXT)
    assert (end["content"], end["stop_type"], end["has_new_line"]) == ("One, two.\nThree.", "eos", True)
    assert end["generation_settings"]["top_k"] == 40 and end["generation_settings"]["min_p"] == 0.05


def test_prompts_are_texts_tokens_or_both(served: Served) -> None:
    tokens, answer = list(TEXT.encode()), whole(served, "/completion", prompt=TEXT, **FEW)["content"]
    mixed = [TEXT[:4], *tokens[4:9], TEXT[9:]]
    for prompt in (tokens, mixed):
        assert whole(served, "/completion", prompt=prompt, **FEW)["content"] == answer
    several = whole(served, "/completion", prompt=[TEXT, "Never"], **FEW)
    assert [reply["index"] for reply in several] == [0, 1] and several[0]["content"] == answer
    assert whole(served, "/completion", prompt=[tokens, tokens], **FEW)[1]["content"] == answer


def test_tokens_and_their_likelihoods_come_if_they_are_asked_for(served: Served) -> None:
    one = whole(served, "/completion", prompt=TEXT, return_tokens=True, n_probs=2, **FEW)
    assert len(one["tokens"]) == 6 == len(one["completion_probabilities"])
    first = one["completion_probabilities"][0]
    assert first["id"] == one["tokens"][0] and len(first["top_logprobs"]) == 2 and first["logprob"] <= 0
    streamed = chunks(served, "/completion", prompt=TEXT, return_tokens=True, **FEW)
    assert [token for chunk in streamed for token in chunk["tokens"]] == one["tokens"]
    assert whole(served, "/completion", prompt=TEXT, **FEW)["tokens"] == []


def test_options_have_an_effect(served: Served) -> None:
    yes = whole(served, "/completion", prompt=TEXT, grammar='root ::= "yes"', **FEW)
    assert yes["content"] == "yes"
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    assert json.loads(whole(served, "/completion", prompt=TEXT, json_schema=schema, **FEW)["content"]) == {}
    for bias in ([[65, 100]], {"65": 100}):
        biased = whole(served, "/completion", prompt=TEXT, logit_bias=bias, **FEW)
        assert biased["content"].startswith("A")
    full = whole(served, "/completion", prompt=TEXT, **{**FEW, "n_predict": 50}, ignore_eos=True)
    assert full["tokens_predicted"] == 50
    odd = whole(served, "/completion", prompt=TEXT, mirostat=2, id_slot=3, rekindle={"x": 1}, **FEW)
    assert odd["rekindle"]["ignored"] == ["id_slot", "mirostat", "rekindle.x"]
    assert whole(served, "/completion", prompt=TEXT, cache_prompt=False, **FEW)["tokens_cached"] == 0


def test_infill_writes_what_goes_between(serve: Serve) -> None:
    engine = fill_in_engine("return a + b")
    served = serve(engine)
    given = {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n"}
    one = whole(served, "/infill", **given, prompt="# sum\n", input_extra=[{"filename": "x.py", "text": "X = 1"}])
    assert one["content"] == "return a + b" and one["stop_type"] == "eos"
    assert engine.prompts[-1] == "--- x.py ---\nX = 1\n\n\x01def add(a, b):\n    # sum\n\x02\n\x03"
    assert "".join(chunk["content"] for chunk in chunks(served, "/infill", **given)) == "return a + b"
    suffixed = served.post("/v1/completions", prompt="a", suffix="b").json()
    assert suffixed["choices"][0]["text"] == "return a + b" and engine.prompts[-1] == "\x01a\x02b\x03"
    inserted = served.post("/api/generate", prompt="a", suffix="b", stream=False).json()
    assert inserted["response"] == "return a + b" and engine.prompts[-1] == "\x01a\x02b\x03"
    assert "insert" in served.post("/api/show", model="fake-0").json()["capabilities"]


def test_a_session_fills_in_too(tmp_path: Any) -> None:
    with Session(fill_in_engine("middle"), cache=tmp_path) as session:
        assert session.fill_in("a", "b").text == "middle"


def test_without_the_tokens_every_protocol_refuses_in_its_words(served: Served) -> None:
    assert "no fill-in-the-middle" in refused(served, "/infill", 400, input_prefix="a", input_suffix="b")["message"]
    suffix = served.post("/v1/completions", prompt="a", suffix="b")
    assert suffix.status_code == 400 and suffix.json()["error"]["param"] == "suffix"
    assert "fill-in-the-middle" in served.post("/api/generate", prompt="a", suffix="b").json()["error"]
    tokens = served.post("/v1/completions", prompt=[1, 2], suffix="b")
    assert tokens.status_code == 400 and tokens.json()["error"]["param"] == "suffix"


def test_the_template_the_properties_and_the_slots_are_shown(served: Served) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    assert whole(served, "/apply-template", messages=messages)["prompt"] == (
        "<start>user\nHello.<end><start>assistant\n"
    )
    props = served.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096 and props["total_slots"] == 4
    slots = served.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3] and not any(slot["is_processing"] for slot in slots)


def test_slots_are_for_operators(keyed: Served) -> None:
    assert keyed.get("/slots", ALICE).status_code == 403 and keyed.get("/slots", ADMIN).status_code == 200
    assert keyed.get("/props", ALICE).status_code == 200
    nobody = keyed.post("/completion", prompt=TEXT)
    assert nobody.status_code == 401 and nobody.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {}),
        ("/completion", {"prompt": ""}),
        ("/completion", {"prompt": []}),
        ("/completion", {"prompt": [["a"]]}),
        ("/completion", {"prompt": [TEXT] * 65}),
        ("/completion", {"prompt": TEXT, "n_probs": 21}),
        ("/completion", {"prompt": TEXT, "logit_bias": [[1]]}),
        ("/completion", {"prompt": TEXT, "logit_bias": [["a", 1]]}),
        ("/completion", {"prompt": TEXT, "logit_bias": [[1, 1000]]}),
        ("/completion", {"prompt": TEXT, "grammar": "root ::= x", "n_predict": 1}),
        ("/completion", {"prompt": TEXT, "grammar": 'root ::= "x"', "json_schema": {}}),
        ("/completion", {"prompt": TEXT, "temperature": -1}),
        ("/infill", {"input_prefix": 5}),
        ("/infill", {"input_extra": [{"text": 5}]}),
        ("/apply-template", {}),
        ("/apply-template", {"messages": [{"role": "user", "content": None}]}),
    ],
)
def test_bad_input_gets_its_own_error(served: Served, path: str, body: dict[str, Any]) -> None:
    assert refused(served, path, 400, **body)["type"] == "invalid_request_error"


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(served: Served) -> None:
    for prompt in ("x " * 5000, [65] * 5000):
        error = refused(served, "/completion", 400, prompt=prompt)
        assert error["type"] == "exceed_context_size_error"
        assert (error["n_prompt_tokens"] >= 5000, error["n_ctx"]) == (True, 4096)
    assert refused(served, "/slots/0", 404)["type"] == "not_found_error"
