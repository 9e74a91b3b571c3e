"""How far a prompt is read: in the streams of clients that ask for it, as llama.cpp's server tells it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from rekindle import Session
from rekindle.cli.server_client import ServerRunner
from tests.server.serving import PATIENCE_SECONDS, Asking, Served

TEXT = "The keeper of the lighthouse writes what he saw. " * 20  # several steps of the engine
ENDPOINTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/completion": {"prompt": TEXT, "n_predict": 4},
}


@contextmanager
def streaming(served: Served, path: str, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The chunks of a stream as they come."""
    with (
        served.http() as client,
        client.stream("POST", path, json={**ENDPOINTS[path], "temperature": 0, "stream": True, **body}) as answer,
    ):
        assert answer.status_code == 200
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
        yield (json.loads(line) for line in lines if line != "[DONE]")


def text_of(chunk: Mapping[str, Any]) -> str:
    choice = (chunk.get("choices") or [{}])[0]
    return chunk.get("content") or choice.get("text") or choice.get("delta", {}).get("content") or ""


def next_progress(chunks: Iterator[dict[str, Any]]) -> dict[str, Any]:
    return next(chunk for chunk in chunks if "prompt_progress" in chunk)


def let_steps_through_until(served: Served, holds: Callable[[], bool]) -> None:
    """The engine makes one step after the other, each held up until the one before was seen."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        served.engine.permits.release()
        time.sleep(0.01)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_stream_tells_while_the_prompt_is_read_how_far_it_is(served: Served, path: str) -> None:
    served.engine.go.clear()
    with streaming(served, path, return_progress=True) as chunks:
        first = next_progress(chunks)
        assert set(first["prompt_progress"]) == {"total", "cache", "processed", "time_ms"}
        total = first["prompt_progress"]["total"]
        assert total >= len(TEXT) and first["prompt_progress"]["cache"] == first["prompt_progress"]["processed"] == 0
        assert first["rekindle"]["kept"] and first["rekindle"]["expected_ms"] >= 0
        reading = Asking(lambda: next_progress(chunks))
        let_steps_through_until(served, lambda: not reading.is_alive())
        second = reading.result()["prompt_progress"]
        assert 0 < second["processed"] < total and second["time_ms"] >= first["prompt_progress"]["time_ms"]
        served.engine.go.set()
        rest = list(chunks)
    told = [first["prompt_progress"], second, *(one["prompt_progress"] for one in rest if "prompt_progress" in one)]
    processed = [one["processed"] for one in told]
    assert processed == sorted(set(processed)) and processed[-1] == total
    assert {(one["total"], one["cache"]) for one in told} == {(total, 0)}
    begins = next(place for place, chunk in enumerate(rest) if text_of(chunk))
    assert not any("prompt_progress" in chunk for chunk in rest[begins:])


@pytest.mark.parametrize("path", ENDPOINTS)
def test_only_who_asks_is_told_and_the_text_is_the_same(served: Served, path: str) -> None:
    with streaming(served, path, return_progress=True) as chunks:
        told = list(chunks)
    for silent in ({}, {"return_progress": False}, {"return_progress": None}):
        with streaming(served, path, **silent) as chunks:
            plain = list(chunks)
        assert not any("prompt_progress" in chunk for chunk in plain)
        assert "".join(map(text_of, plain)) == "".join(map(text_of, told))
    whole = served.post(path, **{**ENDPOINTS[path], "temperature": 0, "return_progress": True}).json()
    assert "prompt_progress" not in whole and whole["rekindle"]["ignored"] == []


def test_the_first_chunk_says_what_comes_from_the_cache(served: Served) -> None:
    path = "/v1/chat/completions"
    for known in (False, True):
        with streaming(served, path, return_progress=True) as chunks:
            told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert told[0]["cache"] == told[0]["processed"] == (told[0]["total"] - 1 if known else 0)
        assert told[-1]["processed"] == told[-1]["total"]
    with streaming(served, path, return_progress=True, cache_prompt=False) as chunks:
        first = next_progress(chunks)
    assert first["prompt_progress"]["cache"] == 0 and not first["rekindle"]["kept"]


def test_chat_on_a_server_gets_it_before_the_reply(served: Served) -> None:
    events: list[dict[str, Any]] = []
    job = {"kind": "generate", "prompt": [{"role": "user", "content": TEXT}], "options": {"max_tokens": 4}}
    result = ServerRunner(served.url).run(job, events.append)
    kinds = ["progress" if "prompt_progress" in event else "text" for event in events]
    assert kinds[0] == "progress" and kinds == sorted(kinds)
    assert "".join(event.get("text", "") for event in events) == result["reply"]["text"]
    assert result["reply"]["rekindle"]["computed"] >= len(TEXT)  # the last chunk's, not that of the progress


def test_a_reply_that_is_stopped_while_its_prompt_is_read_tells_nothing_more(served: Served, direct: Session) -> None:
    told: list[int] = []
    served.engine.go.clear()
    stream = served.session.stream(TEXT, max_tokens=4, temperature=0)
    asking = Asking(lambda: list(stream.watched(lambda progress: told.append(progress.processed))))
    assert served.engine.entered.wait(PATIENCE_SECONDS)
    stream.cancel()
    assert asking.result() == []
    count = len(told)
    served.engine.go.set()
    expected = direct.generate(TEXT, max_tokens=4, temperature=0).text
    assert "".join(served.session.stream(TEXT, max_tokens=4, temperature=0).watched(lambda _: None)) == expected
    assert len(told) == count
