"""A server in a thread of the test's own process, and an engine whose steps can be counted and held up."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from rekindle import Session
from rekindle.engine.base import Logits, Row
from rekindle.engine.fake import FakeEngine
from rekindle.errors import Cancelled
from rekindle.idle.idle import IdleOptions
from rekindle.server.auth import ApiKeys
from rekindle.server.serve import Server
from rekindle.server.service import Service
from rekindle.settings import ServerSettings

PATIENCE_SECONDS = 60.0  # after which a test has failed; nothing is measured with it
ALICE, BOB, ADMIN = "sk-alice-0000", "sk-bob-00000", "sk-admin-0000"


class Gated(FakeEngine):
    """Counts its steps and the prompts in them. While `go` is not set, a step waits before it computes.

    It notices within a step that nobody wants it any more, unless it is `deaf`: then it waits until that is so, and
    goes on as if it were not.
    """

    def __init__(self, *, deaf: bool = False) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.permits = threading.Semaphore(0)  # so many steps pass though it is not set
        self.entered = threading.Event()
        self.deaf = deaf
        self.steps = 0
        self.prompts: list[str] = []
        self.prefilled = 0

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        self.entered.set()
        while not self.go.is_set() and not self.permits.acquire(timeout=0.005):
            if cancelled is not None and cancelled():
                if self.deaf:
                    break
                raise Cancelled("The request was cancelled.")
        self.steps += 1
        for row in rows:
            if row.prefill:
                self.prefilled += len(row.tokens)
                if row.positions[0] == 0:
                    self.prompts.append(self.tokenizer.decode(list(row.tokens)))
        return super().step(rows, None if self.deaf else cancelled)


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    url: str
    server: Server
    session: Session

    @property
    def service(self) -> Service:
        """Of the default model."""
        (service, *_) = self.server.host.services()
        return service

    @property
    def engine(self) -> Gated:
        """The engine beneath the batches."""
        return self.session.engine.inner  # type: ignore[attr-defined, no-any-return]

    def openai(self, key: str = "none") -> openai.OpenAI:
        client = openai.DefaultHttpxClient(verify=False)  # see `http`
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_SECONDS, http_client=client
        )

    def http(self, key: str | None = None, **headers: str) -> httpx.Client:
        given = {"Authorization": f"Bearer {key}", **headers} if key else headers
        # There is no TLS here, and reading all certificates takes longer than most requests.
        return httpx.Client(base_url=self.url, headers=given, timeout=PATIENCE_SECONDS, verify=False)

    def post(self, path: str, key: str | None = None, **body: Any) -> httpx.Response:
        with self.http(key) as client:
            return client.post(path, json=body)

    def get(self, path: str, key: str | None = None, **headers: str) -> httpx.Response:
        with self.http(key, **headers) as client:
            return client.get(path)

    def chat(self, text: str | list[dict[str, Any]], key: str | None = None, **body: Any) -> dict[str, Any]:
        """The body of a reply to a greedy chat of a few tokens."""
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        answer = self.post(
            "/v1/chat/completions", key, **{"messages": messages, "temperature": 0, "max_tokens": 4, **body}
        )
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told


@contextmanager
def serving(
    session: Session, keys: ApiKeys | None = None, ahead: IdleOptions | None = None, **settings: Any
) -> Iterator[Served]:
    """Serve a session on a free port."""
    server = Server(session, ServerSettings(port=0, **settings), keys, ahead)
    with server.running() as url:
        yield Served(url, server, session)


@pytest.fixture(scope="module", autouse=True)
def stops_soon() -> Iterator[None]:
    """uvicorn looks every 0.1 s whether it shall stop, and waits as long again: most of the time of most tests."""

    class Hasty:
        """asyncio, but with short naps."""

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(min(seconds, 0.01))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", Hasty())
        yield


def eventually(holds: Callable[[], object]) -> None:
    """Wait until something holds; fail if it never does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.005)


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, which has to end as it should."""
    lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    yield from (json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def streamed(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """Everything that a streamed reply tells."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        return list(events(answer))


def typed_events(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The data of a stream's events, whose names are their types."""
    with served.http() as client, client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        frames = "".join(answer.iter_text()).removesuffix("\n\n").split("\n\n")
    pairs = [frame.split("\n") for frame in frames]
    found = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in found]
    return found


@contextmanager
def connected(served: Served, path: str, **body: Any) -> Iterator[socket.socket]:
    """A client that sent a request and then does what the test does; it goes away at the end."""
    place, sent = urlsplit(served.url), json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}"
    with socket.create_connection((place.hostname, place.port), PATIENCE_SECONDS) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + sent)
        yield client


class Asking(threading.Thread):
    """A call in a thread of its own, with what it gave."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._given: Any = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._given = self._call()
        except Exception as error:  # noqa: BLE001  (raised again by whoever asks for the result)
            self._error = error

    def result(self) -> Any:
        self.join(PATIENCE_SECONDS)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._given


def fake_session(folder: Path | str, engine: FakeEngine | None = None, **settings: Any) -> Session:
    """A session over the fake engine, whose requests share steps."""
    given = {"cache": str(folder), "parallel": 4, "disk_limit": "200MB", "memory_limit": "50MB", **settings}
    return Session(engine or Gated(), **given)
