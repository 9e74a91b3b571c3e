"""Passages from an origin with real weights: what comes is reused, marked, and nearly what computing gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.remote import remote_kv as streams
from rekindle.remote.fetch import RemoteChunkFetch
from rekindle.remote.publish.publisher import Publisher
from rekindle.remote.publish.serve import OriginServer, OriginSettings
from rekindle.remote.signing import SigningKey
from rekindle.session.publish import computed, levels_of
from tests.real.test_chunks import PASSAGES
from tests.remote.conftest import origin_first

__all__ = ["origin_first"]  # a fixture
pytestmark = pytest.mark.real

TEXT = " ".join(list(PASSAGES.values())[:3])
TEXTS = [TEXT, TEXT.title(), TEXT.upper()]  # no two share a run of tokens, which would be found in the other


def about(question: str, texts: list[str]) -> Request:
    messages = [{"role": "system", "content": "Answer from the passages."}, {"role": "user", "content": question}]
    return Request.of(messages, documents=texts, max_tokens=2, temperature=0)


def test_passages_come_and_the_reply_is_nearly_the_exact_one(
    smollm2: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(streams, "MIN_SHARE", 0.0)
    key = SigningKey.new()
    with Session(smollm2, cache="off") as publisher:
        for text in TEXTS[1:]:
            with computed(publisher, about("", [text])) as source:
                Publisher(tmp_path / "files", key).publish(source, levels_of("raw", publisher))
        with OriginServer(tmp_path / "files", OriginSettings(port=0)).running() as url:
            own: dict[str, Any] = {"origin": url, "origin_keys": key.public, "recompute_budget": 0.4}
            with Session(publisher.engine, cache=tmp_path / "cache", reuse="approximate", **own) as session:
                request = about("Who lit the lamp?", TEXTS)
                ahead = session.prefetch(request)
                assert ahead is not None and session.cache.remote is not None
                for coming in session.cache.remote.ahead:
                    while isinstance(coming, RemoteChunkFetch) and coming.left():
                        coming.wait(0.1)
                reply = session.answer(request).reply
                ahead.close()
                assert [chunk.source for chunk in reply.reuse.chunks] == ["exact", "reused", "reused"]
                assert [chunk.streamed for chunk in reply.reuse.chunks] == [False, True, True]
                exact = publisher.answer(request).reply
                assert reply.reuse.level == "approximate" and exact.reuse.level == "off"
                assert reply.tokens[0] == exact.tokens[0]
                assert reply.reuse.reused + reply.reuse.computed == reply.usage.prompt_tokens


@pytest.mark.llamacpp
@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize("reuse", ["exact", "quantized"])
def test_a_gguf_takes_the_beginning_of_a_prompt_from_an_origin(
    reuse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole chunks of tokens, computed from the front while the others come; an exact reply is that without."""
    monkeypatch.setattr(streams, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(streams, "MIN_SHARE", 0.0)
    key, context = SigningKey.new(), " ".join(PASSAGES.values())
    with Session("smollm2", engine="llamacpp", cache="off") as publisher:
        with computed(publisher, Request.of([{"role": "user", "content": context}])) as source:
            Publisher(tmp_path / "files", key).publish(
                source, levels_of("raw" if reuse == "exact" else "q8", publisher)
            )
        asked = Request.of([{"role": "user", "content": f"{context}\nWho lit the lamp?"}], max_tokens=8, temperature=0)
        alone = publisher.answer(asked).reply
        with OriginServer(tmp_path / "files", OriginSettings(port=0)).running() as url:
            own: dict[str, Any] = {"origin": url, "origin_keys": key.public, "reuse": reuse}
            with Session(publisher.engine, cache=tmp_path / "cache", **own) as session:
                reply = session.answer(asked).reply
    assert reply.reuse.streamed > 0 and reply.reuse.origin_miss is None and reply.reuse.level == reuse
    assert reply.reuse.reused + reply.reuse.computed == reply.usage.prompt_tokens
    assert reply.tokens == alone.tokens if reuse == "exact" else reply.tokens[0] == alone.tokens[0]
