"""What one request makes the server look at is bounded, and long work of one tenant delays no other's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rekindle import errors
from rekindle.engine.fake import ByteTokenizer, FakeEngine
from rekindle.server.body import parse
from rekindle.server.errors import ApiError
from rekindle.server.llamacpp import NativeCompletionRequest
from rekindle.server.schema import ChatRequest
from rekindle.session.session import Session
from tests.server.conftest import Serve
from tests.server.serving import Served, serving
from tests.server.soak import tiny_embedder

LONG = "x" * 3_000_000
CHAT = {"messages": [{"role": "user", "content": "a"}]}
NAMED = {"type": "function", "function": {"name": LONG}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The length of every name that is compared with known ones."""
    lengths: list[int] = []
    real = errors.get_close_matches

    def compare(name: str, *others: object, **how: object) -> list[str]:
        lengths.append(len(name))
        return real(name, *others, **how)

    monkeypatch.setattr(errors, "get_close_matches", compare)
    yield lengths
    assert max(lengths, default=0) < 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "model": LONG}),
        ("/v1/embeddings", {"input": "a", "model": LONG}),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": LONG}),
        (
            "/v1/chat/completions",
            {**CHAT, "tools": [TOOL], "tool_choice": NAMED},
        ),
        ("/api/chat", {**CHAT, "model": LONG}),
    ],
)
def test_a_name_of_megabytes_is_neither_compared_nor_echoed(
    path: str, body: dict[str, object], serve: Serve, compared: list[int]
) -> None:
    answer = serve().post(path, **body)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 5000


@pytest.mark.parametrize("kind", [ChatRequest, NativeCompletionRequest])
def test_a_bias_for_too_many_tokens_is_refused_before_each_is_looked_at(
    kind: type[ChatRequest] | type[NativeCompletionRequest],
) -> None:
    body = {**CHAT, "prompt": "a", "logit_bias": {str(token): "wrong" for token in range(2000)}}
    with pytest.raises(ApiError) as refused:
        parse(kind, json.dumps(body).encode())
    assert "2,000 tokens" in refused.value.message, "not a sentence about one of them"


class Hanging:
    """Work that goes on until it is cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)

    def until(self, is_cancelled: Callable[[], bool]) -> None:
        self.begun.release()
        try:
            while not is_cancelled():
                threading.Event().wait(0.01)
        finally:
            self.ended.release()


@pytest.fixture
def embedding(tmp_path: Path) -> Iterator[Served]:
    session = Session(FakeEngine(), cache=tmp_path / "cache", embedder=tiny_embedder(tmp_path / "embedder"))
    session.ingest(documents=["The lamp is lit."])
    with serving(session, timeout="2s") as served:
        yield served


def test_embedding_ends_in_time_and_delays_nothing_else(embedding: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging()
    real = embedding.session.knowledge.embedder()

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def embed(self, texts: list[str], *, cancelled: Callable[[], bool] | None = None) -> object:
            if cancelled is None or texts[0] != "long":
                return real.embed(texts, cancelled=cancelled)
            return hanging.until(cancelled)

    monkeypatch.setattr(embedding.session.knowledge, "embedder", Slow)
    with ThreadPoolExecutor(2) as clients:
        embeds = [clients.submit(embedding.post, "/v1/embeddings", input="long") for _ in range(2)]
        for _ in embeds:
            assert hanging.begun.acquire(timeout=60)
        assert embedding.post("/tokenize", content="abc").json()["count"] == 3
        assert embedding.post("/v1/rekindle/search", query="lamp").status_code == 200
        assert httpx.get(f"{embedding.url}/v1/rekindle/stats", timeout=60).status_code == 200
        assert [embed.result(60).status_code for embed in embeds] == [504, 504]
    for _ in embeds:
        assert hanging.ended.acquire(timeout=60), "the work goes on for nobody"


def test_counting_tokens_ends_in_time_and_delays_nothing_else(
    embedding: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rekindle.text.base import is_cancelled

    hanging, real = Hanging(), ByteTokenizer.encode_chat

    def encode_chat(self: ByteTokenizer, messages: list, **how: object) -> list[int]:
        if messages[-1].content == "long":
            hanging.until(is_cancelled)
        return real(self, messages, **how)

    monkeypatch.setattr(ByteTokenizer, "encode_chat", encode_chat)
    body = {"model": "fake-0", "messages": [{"role": "user", "content": "long"}]}
    with ThreadPoolExecutor(2) as clients:
        counts = [clients.submit(embedding.post, "/v1/messages/count_tokens", **body) for _ in range(2)]
        for _ in counts:
            assert hanging.begun.acquire(timeout=60)
        assert embedding.post("/v1/rekindle/search", query="lamp").status_code == 200
        assert embedding.post("/v1/embeddings", input="a").status_code == 200
        assert [count.result(60).status_code for count in counts] == [504, 504]
    for _ in counts:
        assert hanging.ended.acquire(timeout=60)
