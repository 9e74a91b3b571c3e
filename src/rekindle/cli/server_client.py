"""A client of a running server, for `rekindle chat --server` and `rekindle ps`."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from rekindle.addresses import is_loopback, refuse_plain_authorization
from rekindle.core.size import count_of
from rekindle.errors import Cancelled, RekindleError, RequestError

_OPTIONS = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
_TIMEOUT = httpx.Timeout(30.0, read=None)  # a long prompt may take long


class ServerError(RekindleError):
    """The server cannot be reached, or refuses."""


def make_client(url: str, api_key: str | None, timeout: httpx.Timeout) -> httpx.Client:
    """An HTTP client of a server. Its requests raise `InvalidSetting` before a key would be sent over plain http."""
    at = httpx.URL(url if "://" in url else f"http://{url}")
    return httpx.Client(
        base_url=at,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=timeout,
        event_hooks={"request": [refuse_plain_authorization]},
        trust_env=at.scheme == "https"
        or not is_loopback(at.host),  # else a proxy could see what must stay on this machine
    )


@dataclass
class ServerReply:
    """The reply so far."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    rekindle: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The reply as plain values, for JSON."""
        return dict(vars(self))

    def summary(self) -> str:
        """One line for people: tokens and times."""
        cached = self.timings.get("cache_n") or 0
        line = f"{count_of(self.usage.get('prompt_tokens', 0), 'token')} in" + (f" ({cached} reused)" if cached else "")
        line += f", {self.usage.get('completion_tokens', 0)} out"
        if "prompt_ms" in self.timings:
            line += f", first token {self.timings['prompt_ms'] / 1e3:.3f} s"
        rate = self.timings.get("predicted_per_second")
        return line if rate is None else f"{line}, {rate:.1f} tokens/s"


class ServerStream:
    """Pieces of text as they arrive. Leaving the loop or `close()` stops the server's work."""

    def __init__(self, client: httpx.Client, body: dict[str, Any]) -> None:
        self.reply = ServerReply()
        self._closed = False
        self._pieces = self._read(client, body)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def close(self) -> None:
        self._closed = True
        self._pieces.close()

    def _read(self, client: httpx.Client, body: dict[str, Any]) -> Generator[str, None, None]:
        try:
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, answer.read())
                for line in answer.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield from self._take(json.loads(line.removeprefix("data: ")))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if self._closed:
                raise Cancelled("The stream was closed.") from None
            where = client.base_url
            raise ServerError(
                f"The server at {where} does not answer ({error}). Is it running? `rekindle ps`"
            ) from None

    def _take(self, chunk: dict[str, Any]) -> Iterator[str]:
        if "error" in chunk:
            raise ServerError(str(chunk["error"].get("message")))
        self.reply.usage = chunk.get("usage") or self.reply.usage
        self.reply.timings = chunk.get("timings") or self.reply.timings
        self.reply.rekindle = chunk.get("rekindle") or self.reply.rekindle
        for choice in chunk.get("choices", ()):
            self.reply.finish_reason = choice.get("finish_reason") or self.reply.finish_reason
            if text := choice["delta"].get("content"):
                self.reply.text += text
                yield text


class ServerSession:
    """The part of a `Session` that a chat needs, on a server."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self._model = model
        self._client = make_client(url.rstrip("/").removesuffix("/v1"), api_key, _TIMEOUT)

    def stream(self, messages: Sequence[dict[str, str]], **options: Any) -> ServerStream:
        """Answer a chat, piece by piece."""
        chosen = {name: options[name] for name in _OPTIONS if options.get(name) not in (None, ())}
        body = {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}, **chosen}
        return ServerStream(self._client, {**body, "model": self._model} if self._model else body)

    def close(self) -> None:
        self._client.close()


def _refusal(status: int, body: bytes) -> RekindleError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"The server answered with status {status}."
    return RequestError(message) if status in (400, 413) else ServerError(message)
