"""The small endpoints: models, tokens, health, documents."""

from __future__ import annotations

import json
import subprocess

import openai
import pytest

from rekindle import Session, __version__
from rekindle.core.request import parse_prompt
from rekindle.server.routes import ENDPOINTS
from tests.server.serving import ALICE, Served

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße aus 東京 🙂"}]


def test_the_models_are_the_one_that_writes_and_the_one_that_embeds(served: Served) -> None:
    client = served.openai()
    assert [model.id for model in client.models.list()] == ["fake-0", "minilm"]
    assert client.models.retrieve("fake-0").owned_by == "rekindle"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/another")


@pytest.mark.parametrize("text", ["Hello there", "Grüße aus 東京 🙂", " a\n\n b\t", ""])
def test_tokens_of_a_text_are_its_text_again(served: Served, direct: Session, text: str) -> None:
    told = served.post("/tokenize", content=text).json()
    assert told["tokens"] == direct.engine.tokenizer.encode(text) and told["count"] == len(told["tokens"])
    back = served.post("/detokenize", tokens=told["tokens"]).json()
    assert back["content"] == back["prompt"] == text
    assert served.post("/tokenize", prompt=text).json() == told


def test_messages_become_the_tokens_of_the_template(served: Served, direct: Session) -> None:
    told = served.post("/tokenize", messages=CHAT).json()
    assert told["tokens"] == direct.engine.tokenizer.encode_chat(parse_prompt(CHAT))
    assert told["count"] == served.chat(CHAT)["usage"]["prompt_tokens"]


def test_pieces_are_spelled_beside_their_ids(served: Served) -> None:
    told = served.post("/tokenize", content="Hi!", with_pieces=True).json()
    assert told["tokens"] == [{"id": 72, "piece": "H"}, {"id": 105, "piece": "i"}, {"id": 33, "piece": "!"}]


@pytest.mark.parametrize("body", [{}, {"content": "a", "messages": CHAT}])
def test_tokenize_wants_one_thing(served: Served, body: dict[str, object]) -> None:
    assert served.post("/tokenize", **body).status_code == 400


def test_detokenize_refuses_ids_that_are_none(served: Served) -> None:
    assert served.post("/detokenize", tokens=[258]).status_code == 400
    assert served.post("/detokenize", tokens=[-1]).status_code == 400


def test_health_needs_no_key(keyed: Served) -> None:
    told = json.loads(subprocess.run(["curl", "-sSf", f"{keyed.url}/health"], capture_output=True, check=True).stdout)
    assert told["status"] == "ok" and told["version"] == __version__ and told["uptime_seconds"] >= 0
    assert set(told) == {"status", "version", "uptime_seconds"}, "whoever has no key learns nothing else"
    assert keyed.get("/health", key="wrong-key").status_code == 200


def test_the_document_and_the_page_name_every_endpoint(served: Served) -> None:
    document, page = served.get("/openapi.json").json(), served.get("/docs")
    assert page.headers["content-type"].startswith("text/html") and document["openapi"].startswith("3.1")
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace(":path", "")
        assert endpoint.method.lower() in document["paths"][path]
        assert f"<b>{endpoint.method}</b> <code>{endpoint.path}</code>" in page.text
    assert "http" not in page.text.replace(served.url, ""), "it needs no foreign host"


def test_every_reference_of_the_document_is_there(served: Served) -> None:
    text = served.get("/openapi.json").text
    document = json.loads(text)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named and named <= set(document["components"]["schemas"])


def test_what_is_not_there_is_told_in_the_same_shape(served: Served) -> None:
    missing = served.get("/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    wrong = served.get("/v1/chat/completions")
    assert wrong.status_code == 405 and set(wrong.json()["error"]) == {"message", "type", "param", "code"}


def test_a_key_opens_what_it_should(keyed: Served) -> None:
    for path in ("/v1/models", "/metrics", "/v1/rekindle/server"):
        assert keyed.get(path).status_code == 401
        assert keyed.get(path, ALICE).status_code == 200
