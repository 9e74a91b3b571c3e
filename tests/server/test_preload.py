"""A queued request: what this machine's disk has of its prompt is brought to memory meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.core.kv import LayerKv
from rekindle.core.request import Request
from rekindle.engine.fake import FakeEngine
from rekindle.session.prompt import encode_prompt
from rekindle.store.extents import ExtentFiles, OpenExtent
from tests.parity.sessions import opened
from tests.server.serving import PATIENCE_SECONDS, Asking, Gated, Served, connected, eventually, serving

PATH = "/v1/completions"
STORIES = [f"{name} lights the lamp at dusk and writes the hour into the book. " * 6 for name in ("Ada", "Bo", "Cy")]
PASSAGES = ["The lamp in the hall burns for nine hours.", "Boats leave Vesk on Tuesdays at six."]
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
ONE_PLACE: dict[str, Any] = {"reuse": "approximate", "recompute_budget": 0.3, "parallel": 1}


@contextmanager
def restarted(folder: Path, **settings: Any) -> Iterator[Served]:
    """A server of one place, whose disk has everything and whose memory nothing, and whose engine waits for `go`."""
    with opened(FakeEngine(), folder, **ONE_PLACE) as session:
        for story in STORIES:
            session.generate(story, max_tokens=1)
        session.chat("Who?", documents=PASSAGES, max_tokens=1)
        assert session.flush()
    engine = Gated()
    with opened(engine, folder, **ONE_PLACE, **settings) as session, serving(session) as served:
        engine.go.clear()
        yield served
        engine.go.set()


@contextmanager
def busy(served: Served) -> Iterator[Asking]:
    """While somebody has the only place; then the engine goes on."""
    running = Asking(lambda: served.post(PATH, prompt="Somebody else.", **ASKED))
    assert served.engine.entered.wait(PATIENCE_SECONDS)
    yield running
    served.engine.go.set()
    assert running.result().status_code == 200


def memory_of(served: Served) -> Any:
    store = served.session.cache.store
    assert store is not None
    return store.memory


def is_unclaimed(served: Served) -> bool:
    memory = memory_of(served)
    return bool(memory.unclaimed_bytes == memory.limit_bytes)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that is asked for whole extents, and gives nothing before this is set."""
    answers, read = threading.Event(), ExtentFiles.layers

    def layers(self: ExtentFiles, extent: OpenExtent, tokens: int) -> Iterator[LayerKv]:
        assert answers.wait(PATIENCE_SECONDS)
        return read(self, extent, tokens)

    monkeypatch.setattr(ExtentFiles, "layers", layers)
    yield answers
    answers.set()


def test_a_queued_prompt_is_in_memory_when_its_turn_comes_and_its_reply_is_the_same(tmp_path: Path) -> None:
    with Session(FakeEngine(), cache="off") as alone:
        expected = alone.generate(STORIES[0] + "And then", max_tokens=4, temperature=0.0).text
    with restarted(tmp_path / "cache") as served:
        with busy(served):
            queued = Asking(lambda: served.post(PATH, prompt=STORIES[0] + "And then", **ASKED))
            eventually(lambda: len(memory_of(served)) > 0)
        reply = queued.result().json()
        assert reply["choices"][0]["text"] == expected
        assert reply["rekindle"]["loaded_from"] == {"engine": 0, "memory": len(STORIES[0]), "disk": 0}
        eventually(lambda: is_unclaimed(served))


def test_passages_of_a_queued_prompt_are_in_memory_when_its_turn_comes(tmp_path: Path) -> None:
    with restarted(tmp_path / "cache") as served:
        asked = Request.of([{"role": "user", "content": "Why?"}], documents=PASSAGES[::-1])
        prompt, cache = encode_prompt(served.session.engine, asked), served.session.cache

        def tiers() -> list[str | None]:
            """Where the passages are."""
            with cache.peek(asked, prompt.tokens, prompt.prompt_layout) as looked:
                assert looked.lookup.passages is not None
                return [None if one.known is None else one.known.tier for one in looked.lookup.passages.picked]

        assert tiers() == ["disk", "disk"]
        with busy(served):
            queued = Asking(lambda: served.chat("Why?", rekindle={"documents": PASSAGES[::-1]}))
            eventually(lambda: tiers() == ["memory", "memory"])
        assert queued.result()["rekindle"]["from_chunks"] > 0
        eventually(lambda: is_unclaimed(served))


def test_a_client_that_leaves_the_queue_stops_the_reading_and_claims_nothing(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    with restarted(tmp_path / "cache") as served, busy(served):
        with connected(served, PATH, prompt=STORIES[0], **ASKED):
            eventually(lambda: served.service.admission.waiting)
        eventually(lambda: not served.service.admission.waiting)
        slow_disk.set()
        eventually(lambda: served.service.prefetching.submit(lambda: True).result(PATIENCE_SECONDS))  # behind it
        assert len(memory_of(served)) == 0 and is_unclaimed(served)


def test_a_disk_that_does_not_answer_delays_neither_the_running_nor_the_queued_request(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    with restarted(tmp_path / "cache") as served:
        with busy(served):
            queued = Asking(lambda: served.post(PATH, prompt=STORIES[0], **ASKED))
            eventually(lambda: served.service.admission.waiting)
        assert queued.result().json()["rekindle"]["loaded_from"]["disk"] > 0
        assert not slow_disk.is_set()
        slow_disk.set()
        eventually(lambda: is_unclaimed(served))


def test_queued_prompts_never_take_more_than_the_memory_limit_nor_from_each_other(tmp_path: Path) -> None:
    story_bytes = len(STORIES[0]) * FakeEngine().layout.token_bytes
    with restarted(tmp_path / "cache", memory_limit=3 * story_bytes) as served:  # half of it is for parked contexts
        memory = memory_of(served)
        with busy(served):
            queued = []
            for number, story in enumerate(STORIES, start=1):
                queued.append(Asking(lambda story=story: served.post(PATH, prompt=story + "And then", **ASKED)))
                eventually(lambda number=number: served.service.admission.waiting == number)
            eventually(lambda: len(memory) > 0)
            served.service.prefetching.submit(lambda: None).result(PATIENCE_SECONDS)  # behind all three
            assert len(memory) == 1 and 0 < memory.size_bytes <= memory.limit_bytes
        told = [asked.result().json()["rekindle"] for asked in queued]
        assert told[0]["loaded_from"]["memory"] > 0 and all(about["loaded"] > 0 for about in told)
