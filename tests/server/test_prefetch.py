"""A request that stands in line: what the origin has of its prompt comes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.core.cells import CHUNK_TOKENS
from rekindle.core.request import Request
from rekindle.engine.fake import FakeEngine
from rekindle.remote import remote_kv as streams
from tests.server.conftest import Serve
from tests.server.serving import Asking, Gated, Served, connected, eventually

pytest.importorskip("cryptography", reason="part of the crypto extra")

from rekindle.remote.publish.publisher import Publisher
from rekindle.remote.publish.serve import OriginServer, OriginSettings
from rekindle.remote.signing import SigningKey
from rekindle.session.publish import computed, levels_of

PATH = "/v1/completions"
PROMPT = "The keeper lights the lamp at dusk and writes the hour into the book. " * 6
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


@pytest.fixture
def served(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server of one place, whose origin has the prompt, and whose engine waits for `go`."""
    monkeypatch.setattr(streams, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(streams, "MIN_SHARE", 0.0)
    key, files = SigningKey.new(), tmp_path / "files"
    with Session(FakeEngine(), cache="off") as session, computed(session, Request.of(PROMPT)) as source:
        Publisher(files, key).publish(source, levels_of("raw", session))
    with OriginServer(files, OriginSettings(port=0)).running() as url:
        served = serve(Gated(), session={"parallel": 1, "origin": url, "origin_keys": key.public})
        served.engine.go.clear()
        yield served
        served.engine.go.set()


def ahead(served: Served) -> int:
    """How many cells of prompts that wait are here."""
    assert served.session.cache.remote is not None
    return sum(len(coming.arrived_cells) for coming in served.session.cache.remote.ahead)


def busy(served: Served) -> Asking:
    """Somebody who has the only place."""
    first = Asking(lambda: served.post(PATH, prompt="Somebody else.", **ASKED))
    assert served.engine.entered.wait(60)
    return first


def test_what_waits_comes_meanwhile_and_says_the_same(served: Served) -> None:
    with Session(FakeEngine(), cache="off") as alone:
        expected = alone.generate(PROMPT + "And then", max_tokens=4).text
    first = busy(served)
    second = Asking(lambda: served.post(PATH, prompt=PROMPT + "And then", **ASKED))
    layers = len(served.session.engine.layout.layers)
    chunks = -(-len(PROMPT) // CHUNK_TOKENS)
    eventually(lambda: ahead(served) == chunks * (layers - 1))  # but for the lowest layer, which costs little
    served.engine.go.set()
    assert first.result().status_code == 200
    told = second.result().json()
    assert told["choices"][0]["text"] == expected
    assert told["rekindle"]["streamed"] > 0
    assert not ahead(served)


def test_who_leaves_the_line_leaves_nothing_behind(served: Served) -> None:
    first = busy(served)
    with connected(served, PATH, prompt=PROMPT + "And then", **ASKED):
        eventually(lambda: ahead(served) > 0)
    eventually(lambda: not ahead(served))
    served.engine.go.set()
    assert first.result().status_code == 200


def test_few_prompts_come_ahead(served: Served) -> None:
    first = busy(served)
    others = [Asking(lambda end=end: served.post(PATH, prompt=PROMPT + end, **ASKED)) for end in ("a", "b", "c", "d")]
    eventually(lambda: served.service.admission.waiting == 4)
    eventually(lambda: ahead(served) > 0)
    assert served.session.cache.remote is not None
    assert len(served.session.cache.remote.ahead) <= streams.MAX_AHEAD
    served.engine.go.set()
    assert [asked.result().status_code for asked in (first, *others)] == [200] * 5
    assert not served.session.cache.remote.ahead
