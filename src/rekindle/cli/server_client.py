"""A client of a running server, for `rekindle chat --server` and `rekindle ps`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from rekindle.addresses import is_loopback, refuse_plain_authorization
from rekindle.core.size import count_of
from rekindle.errors import RekindleError, RequestError

_OPTIONS = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
TIMEOUT = httpx.Timeout(30.0, read=None)  # a model or a long prompt may take long


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
        # Else a proxy could see what must stay on this machine.
        trust_env=at.scheme == "https" or not is_loopback(at.host),
    )


class ServerRunner:
    """Runs the jobs of a chat on a server. See `JobRunner`."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self._model = model
        self._client = make_client(url.rstrip("/").removesuffix("/v1"), api_key, TIMEOUT)

    def __enter__(self) -> ServerRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def run(self, job: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        options = job["options"]
        chosen = {name: options[name] for name in _OPTIONS if options.get(name) not in (None, ())}
        watching = {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}
        body = {"messages": job["prompt"], **watching, **chosen}
        reply: dict[str, Any] = {"text": "", "finish_reason": None, "usage": {}, "timings": {}, "rekindle": {}}
        try:
            for chunk in self._chunks({**body, "model": self._model} if self._model else body):
                _add(chunk, reply, send)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(
                f"The server at {self._client.base_url} does not answer ({error}). Is it running? `rekindle ps`"
            ) from None
        return {"model": self._model, "reply": reply, "summary": _summary(reply)}

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise refusal(answer.status_code, answer.read())
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))


def _add(chunk: dict[str, Any], reply: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    """Add a chunk of the stream to the reply."""
    if "error" in chunk:
        raise ServerError(str(chunk["error"].get("message")))
    if "prompt_progress" in chunk:
        send(chunk)
        return
    for name in ("usage", "timings", "rekindle"):
        reply[name] = chunk.get(name) or reply[name]
    for choice in chunk.get("choices", ()):
        reply["finish_reason"] = choice.get("finish_reason") or reply["finish_reason"]
        if text := choice["delta"].get("content"):
            reply["text"] += text
            send({"text": text})


def _summary(reply: dict[str, Any]) -> str:
    """One line for people, as `Reply.summary` has it."""
    timings, usage = reply["timings"], reply["usage"]
    parts = [f"first token {timings['prompt_ms'] / 1e3:.3f} s"] if "prompt_ms" in timings else []
    parts.append(f"{timings.get('cache_n') or 0:,} of {usage.get('prompt_tokens', 0):,} tokens reused")
    rate = timings.get("predicted_per_second")  # 0 if it is unknown
    out = f"{count_of(usage.get('completion_tokens', 0), 'token')} out"
    parts.append(f"{out}, {rate:.1f} tokens/s" if rate else out)
    return "; ".join(parts)


def refusal(status: int, body: bytes) -> RekindleError:
    """The error that a server answered with."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"The server answered with status {status}."
    return RequestError(message) if status in (400, 413) else ServerError(message)
