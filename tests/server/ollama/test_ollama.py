"""Ollama's API: lines and whole replies, options, formats, models; with its own client where that is installed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rekindle import Session
from rekindle.engine.fake import ByteTokenizer, FakeEngine
from rekindle.errors import Closed
from rekindle.models import registry
from rekindle.models.files import ModelFiles
from tests.server.conftest import Serve
from tests.server.scripted import ScriptedEngine
from tests.server.serving import ADMIN, ALICE, Served
from tests.server.soak import tiny_embedder

USER = [{"role": "user", "content": "Look."}]
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
CALLING = '<think>Hm.</think>Yes.<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
FEW = {"temperature": 0, "num_predict": 4}
DURATIONS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


def lines(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = served.post(path, **body)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("application/x-ndjson"), answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def whole(served: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = served.post(path, **body, stream=False)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def refused(served: Served, path: str, status: int, **body: Any) -> str:
    answer = served.post(path, **body)
    assert answer.status_code == status and set(answer.json()) == {"error"}, answer.text
    return str(answer.json()["error"])


def thinker(*replies: str) -> ScriptedEngine:
    engine = ScriptedEngine(replies)
    engine.tokenizer.template = "<think>"
    return engine


def test_a_reply_comes_in_lines_unless_it_is_wanted_whole(served: Served, direct: Session) -> None:
    *pieces, last = lines(served, "/api/chat", messages=USER, options=FEW)
    expected = direct.chat(USER, max_tokens=4, temperature=0)
    assert "".join(line["message"]["content"] for line in pieces) == expected.text
    assert not any(line["done"] for line in pieces) and last["done"] and last["done_reason"] == expected.finish_reason
    one = whole(served, "/api/chat", messages=USER, options=FEW)
    assert one["message"] == {"role": "assistant", "content": expected.text}
    assert one["prompt_eval_count"] == expected.usage.prompt_tokens and one["eval_count"] == 4
    assert all(isinstance(one[name], int) and one[name] >= 0 for name in DURATIONS)
    assert one["total_duration"] >= one["prompt_eval_duration"] + one["eval_duration"]
    assert one["rekindle"]["loaded"] > 0 and set(one) >= set(last)


def test_the_same_prompt_is_shared_with_the_other_protocols(served: Served) -> None:
    told = served.chat(USER)
    again = whole(served, "/api/chat", messages=USER, options=FEW)
    assert again["message"]["content"] == told["choices"][0]["message"]["content"]
    assert again["rekindle"]["computed"] == 1 and told["rekindle"]["computed"] == again["prompt_eval_count"]


def test_calls_have_objects_as_arguments_and_their_results_are_read(serve: Serve) -> None:
    engine = thinker(CALLING, "The sea.")
    served = serve(engine)
    message = whole(served, "/api/chat", messages=USER, tools=[LOOK])["message"]
    assert (message["thinking"], message["content"]) == ("Hm.", "Yes.")
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "look", "arguments": {"at": "sea"}} and made["id"]
    result = {"role": "tool", "tool_name": "look", "content": "Waves."}
    assert whole(served, "/api/chat", messages=[*USER, message, result], tools=[LOOK])["message"]["content"] == (
        "The sea."
    )
    assert "Waves." in engine.prompts[-1] and '"at"' in engine.prompts[-1]


def test_a_format_is_enforced(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    for path, asked in (("/api/chat", {"messages": USER}), ("/api/generate", {"prompt": "x"})):
        told = whole(served, path, **asked, format=schema, options={"temperature": 0, "num_predict": 64})
        text = told["message"]["content"] if "message" in told else told["response"]
        assert set(json.loads(text)) == {"a"}
    assert "nonsense" in refused(served, "/api/chat", 400, messages=USER, format={"type": "nonsense"})


def test_options_reach_the_sampler_and_others_are_named(served: Served, direct: Session) -> None:
    options = {"temperature": 1.5, "top_k": 0, "top_p": 1, "seed": 7, "num_predict": 9, "stop": ["zz"], "num_ctx": 1}
    told = whole(served, "/api/generate", prompt="hello", raw=True, options={**options, "mirostat": 1, "main_gpu": 0})
    expected = direct.generate("hello", temperature=1.5, top_p=1, seed=7, max_tokens=9)
    assert told["response"] == expected.text
    assert told["rekindle"]["ignored"] == ["options.main_gpu", "options.mirostat", "options.num_ctx"]
    penalty = whole(served, "/api/generate", prompt="hello", options={"repeat_penalty": 2, "min_p": 0.1, **FEW})
    assert penalty["eval_count"] == 4 and penalty["rekindle"]["ignored"] == []


def test_a_prompt_that_does_not_fit_names_both_numbers(served: Served) -> None:
    context = served.session.engine.context_tokens
    message = refused(served, "/api/chat", 400, messages=[{"role": "user", "content": "x" * 9999}])
    assert "9,999" in message or "10,0" in message
    assert f"{context:,}" in message


def test_generate_reads_a_system_prompt_and_raw_does_without_a_template(served: Served) -> None:
    told = whole(served, "/api/generate", prompt="hello", system="Be brief.", options=FEW)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert told["prompt_eval_count"] == served.chat(messages)["usage"]["prompt_tokens"]
    assert whole(served, "/api/generate", prompt="hello", raw=True, options=FEW)["prompt_eval_count"] == 5


@pytest.mark.parametrize(("field", "value"), [("template", "{{ x }}"), ("context", [1]), ("images", ["aGk="])])
def test_what_would_change_the_prompt_and_has_no_meaning_here_is_refused(
    served: Served, field: str, value: Any
) -> None:
    assert refused(served, "/api/generate", 400, prompt="x", **{field: value}).startswith(f"{field}: ")


def test_images_in_messages_are_refused_and_named(served: Served) -> None:
    message = {"role": "user", "content": "x", "images": ["aGk="]}
    assert refused(served, "/api/chat", 400, messages=[message]).startswith("messages.0.images: ")


def test_without_a_prompt_the_model_is_loaded_or_freed(served: Served) -> None:
    (line,) = lines(served, "/api/generate", model="fake-0")
    assert (line["response"], line["done"], line["done_reason"]) == ("", True, "load")
    told = whole(served, "/api/chat", messages=[], keep_alive=0)
    assert told["message"] == {"role": "assistant", "content": ""} and told["done_reason"] == "unload"


def test_thinking_is_named_where_the_template_has_no_switch(serve: Serve) -> None:
    without, engine = serve(thinker("<think>Hm.</think>Yes.")), thinker("<think>Hm.</think>Yes.")
    assert whole(without, "/api/chat", messages=USER, think=False)["rekindle"]["ignored"] == ["think"]
    engine.tokenizer.template += "{% if enable_thinking %}"
    assert whole(serve(engine), "/api/generate", prompt="x", think="low")["rekindle"]["ignored"] == []


def test_documents_and_reuse_of_rekindle_work_here_too(served: Served) -> None:
    own = {"documents": ["The lamp is lit at dusk."], "reuse": "off"}
    told = whole(served, "/api/chat", messages=USER, options=FEW, rekindle=own)["rekindle"]
    assert told["documents"] == {"quoted": 1, "left_out": 0} and told["level"] == "off"
    refused(served, "/api/generate", 400, prompt="x", raw=True, rekindle={"knowledge": {}})


def test_models_are_listed_and_shown(serve: Serve) -> None:
    served = serve(thinker("x"))
    assert [model["model"] for model in served.get("/api/tags").json()["models"]] == ["fake-0", "minilm"]
    (running,) = served.get("/api/ps").json()["models"]
    assert running["context_length"] == served.session.engine.context_tokens and running["expires_at"]
    shown = served.post("/api/show", model="fake-0:latest").json()
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == running["context_length"]
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert served.post("/api/show", name="minilm").json()["capabilities"] == ["embedding"]
    assert "fake-0" in refused(served, "/api/show", 404, model="llama3.2")
    assert served.get("/api/version").json()["version"]
    assert served.get("/api/nothing").json().keys() == {"error"}


def test_a_model_of_ollama_goes_by_its_name_there(serve: Serve) -> None:
    engine = FakeEngine()
    engine.name = "ollama:llama3.2"
    served = serve(engine)
    for name in ("llama3.2", "llama3.2:latest", "ollama:llama3.2"):
        assert whole(served, "/api/generate", model=name, prompt="x", options=FEW)["model"] == "ollama:llama3.2"


def test_texts_are_embedded(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> None:
    embedder = tiny_embedder(tmp_path_factory.mktemp("embedder"))
    served = serve(session={"embedder": embedder})
    told = served.post("/api/embed", model=embedder, input=["a lamp", "tea"]).json()
    expected = served.post("/v1/embeddings", input=["a lamp", "tea"]).json()
    assert told["embeddings"] == [item["embedding"] for item in expected["data"]]
    assert told["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    alone = served.post("/api/embeddings", prompt="a lamp").json()["embedding"]
    assert alone == pytest.approx(told["embeddings"][0], abs=1e-5)  # one text and two round otherwise
    refused(served, "/api/embed", 404, model="another", input="x")
    refused(served, "/api/embeddings", 400, prompt="")


def test_only_operators_pull_and_delete(keyed: Served, tmp_path: Any) -> None:
    for key, status in ((ALICE, 403), (ADMIN, 404)):
        assert keyed.post("/api/pull", key, model="no-such-model").status_code == status
        with keyed.http(key) as client:
            assert client.request("DELETE", "/api/delete", json={"model": "no-such-model"}).status_code == status
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    registry.add("tiny", "decoder", str(gguf), ModelFiles("tiny", tmp_path, gguf))
    with keyed.http(ADMIN) as client:
        assert client.request("DELETE", "/api/delete", json={"model": "fake-0"}).status_code == 409
        assert client.request("DELETE", "/api/delete", json={"model": "tiny"}).status_code == 200
    assert registry.lookup("tiny") is None and gguf.exists()


def test_pulling_tells_its_progress(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(spec: str, progress: Any) -> None:
        progress("downloading", 1, 2)
        progress("downloading", 2, 2)
        if spec == "minilm":
            raise FileNotFoundError("gone")

    monkeypatch.setattr("rekindle.server.ollama_models.pull", pull)
    first, half, done, last = lines(served, "/api/pull", model="smollm2")
    assert (first["status"], last["status"]) == ("pulling manifest", "success") and half["digest"] == done["digest"]
    assert [(line["completed"], line["total"]) for line in (half, done)] == [(1, 2), (2, 2)]
    assert last["rekindle"] == {"served": False, "ignored": []}
    assert whole(served, "/api/pull", name="smollm2")["status"] == "success"
    assert set(lines(served, "/api/pull", model="minilm")[-1]) == {"error"}
    for name in ("/etc/passwd", "~root", "\0", "../x"):
        refused(served, "/api/pull", 404, model=name)


def test_its_own_client_works(serve: Serve) -> None:
    ollama = pytest.importorskip("ollama", reason="Ollama's client is not installed (pip install ollama)")
    client = ollama.Client(host=serve(thinker(CALLING)).url)
    reply = client.chat("fake-0", USER, tools=[LOOK])
    assert reply.message.content == "Yes." and reply.message.tool_calls[0].function.arguments == {"at": "sea"}
    pieces = list(client.chat("fake-0", USER, tools=[LOOK], stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == "Yes." and pieces[-1].done
    assert client.list().models[0].model == client.ps().models[0].model == "fake-0"
    assert client.show("fake-0").capabilities == ["completion", "tools", "thinking"]
    with pytest.raises(ollama.ResponseError) as raised:
        client.chat("llama3.2", USER)
    assert raised.value.status_code == 404


def test_a_model_is_shown_while_it_may_be_unloaded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokenizer, a part of the model with llama.cpp, is used only where the model stays loaded."""
    served = serve()
    real = ByteTokenizer.token_of

    def token_of(tokenizer: ByteTokenizer, spelling: str) -> int | None:
        if not served.session._alive.users:
            raise Closed("The engine was closed. Load the model again.")
        return real(tokenizer, spelling)

    monkeypatch.setattr(ByteTokenizer, "token_of", token_of)
    assert served.post("/api/show", model="fake-0").status_code == 200
