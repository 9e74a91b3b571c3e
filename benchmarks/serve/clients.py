"""Clients of a server: each asks its next request when it has the reply to the last one. What they see is measured."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

_PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class ClientRequest:
    """A request: continue `prompt` greedily by exactly `tokens` tokens. `salt` None asks to do without the cache."""

    prompt: tuple[int, ...]
    tokens: int
    salt: str | None

    def body(self) -> dict[str, Any]:
        """As a server takes it."""
        cache = {"cache_prompt": False} if self.salt is None else {"cache_salt": self.salt}
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.tokens,
            "min_tokens": self.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **cache,
        }


@dataclass(frozen=True)
class Answered:
    """A reply as the client saw it; with an `error`, only as far as it came."""

    first_token_seconds: float
    text: str
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    error: str | None = None


@dataclass(frozen=True)
class LoadResult:
    """All replies, in the order of the requests, and how long it took from the first request to the last token."""

    replies: tuple[Answered, ...]
    seconds: float

    @property
    def good(self) -> list[Answered]:
        """Those without an error."""
        return [reply for reply in self.replies if reply.error is None]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of replies a second, all clients together."""
        return sum(reply.tokens for reply in self.good) / self.seconds


def serve_all(url: str, asks: Sequence[ClientRequest], clients: int) -> LoadResult:
    """Let `clients` clients send all requests, in order; one client sends one after the other."""
    return asyncio.run(_serve_all(url, asks, clients))


async def _serve_all(url: str, asks: Sequence[ClientRequest], clients: int) -> LoadResult:
    replies: dict[int, Answered] = {}
    numbered = iter(enumerate(asks))
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_SECONDS, limits=limits, trust_env=False) as http:
        started = time.perf_counter()
        await asyncio.gather(*(_client(http, numbered, replies) for _ in range(clients)))
        seconds = time.perf_counter() - started
    return LoadResult(tuple(replies[number] for number in range(len(asks))), seconds)


async def _client(
    http: httpx.AsyncClient, asks: Iterator[tuple[int, ClientRequest]], replies: dict[int, Answered]
) -> None:
    for number, ask in asks:
        replies[number] = await _answer(http, ask)


async def _answer(http: httpx.AsyncClient, ask: ClientRequest) -> Answered:
    """One reply, read as it comes. The first token has come when the first text has; of none, when all is over."""
    started = time.perf_counter()
    first, pieces = 0.0, []
    usage: dict[str, Any] = {}
    error: str | None = None
    try:
        async with http.stream("POST", "/v1/completions", json=ask.body()) as response:
            if response.status_code != httpx.codes.OK:
                error = (await response.aread()).decode("utf-8", "replace")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                error = json.dumps(event["error"]) if "error" in event else error
                text = "".join(choice["text"] for choice in event.get("choices", ()))
                first = first or (time.perf_counter() - started if text else 0.0)
                pieces.append(text)
                usage = event.get("usage") or usage
    except httpx.HTTPError as failed:
        error = f"{type(failed).__name__}: {failed}"
    tokens = usage.get("completion_tokens", 0)
    if error is None and tokens != ask.tokens:
        error = f"{tokens} tokens came, {ask.tokens} were asked for"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    first = first or time.perf_counter() - started
    return Answered(first, "".join(pieces), tokens, usage.get("prompt_tokens", 0), cached, error)
