"""Clients that no library would let one write: bytes on a socket, and what came back."""

from __future__ import annotations

import json
import socket
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

PATIENCE_SECONDS = 60.0  # a server that takes longer hangs
GOOD = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}


@dataclass(frozen=True)
class Answer:
    """A whole reply; `closed` if the connection ended with it."""

    status: int
    headers: dict[str, str]
    body: bytes
    closed: bool = False

    def json(self) -> Any:
        return json.loads(self.body)


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """A connection that has said nothing yet."""
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_SECONDS) as connection:
        yield connection


def read_until_closed(connection: socket.socket) -> bytes:
    """Everything that comes before the server closes. Raises `TimeoutError` if it does not."""
    parts = []
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def answers_in(received: bytes) -> list[Answer]:
    """The replies in what was received until the connection was closed; all of them have a length."""
    found = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers["content-length"]) if "content-length" in headers else len(rest)
        found.append(Answer(int(first.split()[1]), headers, rest[:length], closed=True))
        received = rest[length:]
    return found


def raw(url: str, data: bytes) -> list[Answer]:
    """Send bytes, and read until the server closes: after the last whole request, or when it has waited enough."""
    with connected(url) as connection:
        with suppress(ConnectionError):
            connection.sendall(data)
        return answers_in(read_until_closed(connection))


def head(method: str, path: str, *lines: str, version: str = "1.1") -> bytes:
    """The head of a request, with the names of this machine."""
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: localhost", *lines, "", ""]).encode("latin-1")


def assert_refused(answer: Answer, *statuses: int) -> None:
    """A 4xx in the shape of its protocol."""
    assert 400 <= answer.status < 500, (answer.status, answer.body[:500])
    assert not statuses or answer.status in statuses, (answer.status, answer.body[:500])
    assert_problem(answer)


def assert_problem(answer: Answer) -> None:
    """An error in the shape of OpenAI, Anthropic, Ollama or llama.cpp, whatever its status."""
    assert answer.headers["content-type"].startswith("application/json"), answer.headers
    told = answer.json()
    if isinstance(told.get("error"), str):
        assert set(told) == {"error"} and told["error"], told
        return
    if told.get("type") == "error":
        assert set(told) == {"type", "error"} and set(told["error"]) == {"message", "type"}, told
    elif "param" not in told["error"]:
        assert set(told["error"]) >= {"code", "message", "type"} and told["error"]["code"] == answer.status, told
    else:
        assert set(told) == {"error"} and set(told["error"]) == {"message", "type", "param", "code"}, told
    assert told["error"]["message"] and isinstance(told["error"]["type"], str), told
