"""The log of a server: a line for each request, for people or as JSON, and what it does while it starts."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.core.reply import TextPiece
from rekindle.server.job import Event, Finished

access = logging.getLogger("rekindle.access")
_ID_HEADER = "X-Request-Id"


@dataclass
class AccessRecord:
    """What is logged of a request. Tokens and times are None where nothing was generated."""

    method: str
    path: str
    id: str = field(default_factory=lambda: f"req-{secrets.token_hex(12)}")
    tenant: str | None = None
    operator: bool = False  # not logged
    status: int | None = None
    outcome: str | None = None  # why the reply ended; disconnected, 4xx or 5xx if it did not
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    first_token_seconds: float | None = None
    started: float = field(default_factory=time.perf_counter)

    def add(self, event: Event) -> None:
        """Take note of an event of the reply; several replies are counted together."""
        if isinstance(event, TextPiece | Finished) and self.first_token_seconds is None:
            self.first_token_seconds = round(time.perf_counter() - self.started, 4)
        if isinstance(event, Finished):
            usage = event.reply.usage
            self.outcome = event.reply.finish_reason
            self.prompt_tokens = (self.prompt_tokens or 0) + usage.prompt_tokens
            self.cached_tokens = (self.cached_tokens or 0) + usage.cached_tokens
            self.completion_tokens = (self.completion_tokens or 0) + usage.completion_tokens

    def fields(self) -> dict[str, Any]:
        """All of it by name, with the time until now."""
        names = ("id", "tenant", "method", "path", "status", "outcome", "prompt_tokens", "cached_tokens",
                 "completion_tokens", "first_token_seconds")  # fmt: skip
        about = {name: getattr(self, name) for name in names}
        return {**about, "total_seconds": round(time.perf_counter() - self.started, 4)}


_current: ContextVar[AccessRecord | None] = ContextVar("access_record", default=None)


def current_record() -> AccessRecord:
    """The record of the request that is being answered; outside of one, a record that nobody reads."""
    return _current.get() or AccessRecord("", "")


class RequestLogger:
    """Logs every request when it has ended, and gives it an id that its response has too (`X-Request-Id`).

    Requests that are cut off because the server stops end without an exception. `running` has the tasks of all.
    """

    def __init__(self, app: ASGIApp, running: set[asyncio.Task[Any]], is_stopping: Callable[[], bool]) -> None:
        self._app = app
        self._running = running
        self._is_stopping = is_stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer, then log."""
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return
        record = AccessRecord(scope["method"], scope["path"])
        _current.set(record)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[_ID_HEADER] = record.id
            await send(message)

        self._running.add(task)
        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if not self._is_stopping():
                raise
        finally:
            self._running.discard(task)
            access.info("%s %s %s", record.method, quote(record.path), record.status, extra={"fields": record.fields()})


class LogFormatter(logging.Formatter):
    """A line with its time; as JSON, or with the fields of a request behind the message."""

    def __init__(self, form: Literal["text", "json"]) -> None:
        super().__init__()
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """The line. What it says is on one line also if the message, or an exception, has several."""
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        if self._json:
            shown = {"time": at, "level": record.levelname.lower(), "logger": record.name, **fields}
            if record.exc_info:
                shown["exception"] = self.formatException(record.exc_info)
            return json.dumps({**shown, "message": record.getMessage()}, ensure_ascii=False)
        words = [f"{name}={value}" for name, value in fields.items() if name not in _SAID and value is not None]
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return " ".join([at, record.getMessage(), *words]) + trace


_SHOWN = ("rekindle.access", "rekindle.serve")  # also what is no warning
_SAID = ("method", "path", "status")  # in the message already


@contextmanager
def logging_to_stderr(form: Literal["text", "json"]) -> Iterator[None]:
    """Write the log of this process to standard error: warnings of all, and what the server does."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(form))
    logging.getLogger().addHandler(handler)
    for name in _SHOWN:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
