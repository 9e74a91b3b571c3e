"""What the core needs to know of a protocol: how it writes errors and streams.

The core takes a `Request` of the session (`Call.service.answer`) and gives back a `Reply`, or its parts while they
come (`reply_parts`). A protocol translates between these and its own JSON; none imports another. To add one:

1. `server/NAME.py`: a subclass of `CacheBody` for each body, a function `answer_...(call, body)` for each endpoint.
2. In it, make a `Request.of(messages, **options)`: `cache_options` gives tenant, salt, app and reuse.
3. `pending = await begin_chat(call, body, request)`, then `pending.respond`: what it writes whole is made of replies,
   what it streams of `pending.parts()`.
4. A `WireProtocol` with its errors and the frame of a stream's items; raise `ApiError`, the core writes it.
5. Rows in `routes.ENDPOINTS`, with `protocol=` (and a prefix in `routes.protocol_of` for paths it does not have).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rekindle.server.errors import ApiError, api_error_of


def to_json(value: object) -> str:
    """Compact JSON; invalid Unicode is replaced."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace").decode()


def _data_frame(item: Mapping[str, Any]) -> str:
    return f"data: {to_json(item)}\n\n"


def typed_frame(item: Mapping[str, Any]) -> str:
    """A server-sent event that is named by the item's `type`."""
    return f"event: {item['type']}\n{_data_frame(item)}"


@dataclass(frozen=True)
class WireProtocol:
    """How a protocol writes errors and streams.

    error         the body of an error response
    stream_error  an error as an item of a stream; None: as in a response
    frame         the text of one item of a stream
    ping          sent while no item comes, to keep the connection open
    end           the last text of a stream
    media_type    of a stream
    """

    name: str
    error: Callable[[ApiError], dict[str, Any]]
    frame: Callable[[Mapping[str, Any]], str] = _data_frame
    stream_error: Callable[[ApiError], dict[str, Any]] | None = None
    ping: str = ": waiting\n\n"
    end: str = ""
    media_type: str = "text/event-stream"

    def error_response(self, problem: ApiError) -> Response:
        """An error as a response of its own."""
        body = to_json(self.error(problem)).encode("utf-8")
        return Response(body, problem.status, problem.headers, media_type="application/json")


def error_kind(problem: ApiError, kinds: Mapping[int, str], server: str = "server_error") -> str:
    """The word for an error: of `kinds` and those that all protocols share, by status; else whose fault it is."""
    shared = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    return {**shared, **kinds}.get(problem.status, "invalid_request_error" if problem.status < 500 else server)


def openai_error(problem: ApiError) -> dict[str, Any]:
    """An error in OpenAI's format, which our own endpoints use too."""
    kind, message = error_kind(problem, {429: "rate_limit_error"}), problem.message
    if problem.overflow is not None:  # in the words that clients look for
        words = "This model's maximum context length is {1} tokens. However, your messages resulted in {0} tokens. {2}"
        message = words.format(*problem.overflow, message)
    return {"error": {"message": message, "type": kind, "param": problem.param, "code": problem.code}}


OPENAI = WireProtocol("OpenAI", openai_error, end="data: [DONE]\n\n")


_Result = TypeVar("_Result")
PING_SECONDS = 15.0


class ClientGone(Exception):
    """The client disconnected."""


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, _Result], limit_seconds: float | None = None
) -> _Result:
    """Await `work`, but cancel it and raise `ClientGone` as soon as the client disconnects, or `TimeoutError`."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, timeout=limit_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone if leaving.done() else TimeoutError
        return working.result()
    finally:
        for task in (leaving, working):
            task.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of items as a protocol writes them. An error on the way is an item too.

    `failed` is called if it does not end normally: disconnected, 4xx, 5xx. `source`, the generator behind the items, is
    closed in any case.
    """

    def __init__(
        self,
        protocol: WireProtocol,
        items: AsyncGenerator[Mapping[str, Any], None],
        headers: Mapping[str, str],
        source: AsyncGenerator[Any, None],
        failed: Callable[[str], None],
    ) -> None:
        unbuffered = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**unbuffered, **headers}, media_type=protocol.media_type)
        del self.headers["content-length"]
        self._protocol = protocol
        self._items = items
        self._source = source
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send everything, unless the client disconnects."""
        try:
            await until_disconnect(receive, self._send(send))
        except ClientGone:
            self._failed("disconnected")
        finally:
            await self._source.aclose()  # the client may have left before the items were started

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def write(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode("utf-8"), "more_body": True})

        try:
            async with aclosing(_with_pings(self._items, write, self._protocol.ping)) as items:
                async for item in items:
                    await write(self._protocol.frame(item))
        except Exception as error:  # noqa: BLE001  (the status is already sent, so it goes into the stream)
            problem = api_error_of(error)
            self._failed(problem.outcome)
            as_item = self._protocol.stream_error or self._protocol.error
            await write(self._protocol.frame(as_item(problem)))
        await write(self._protocol.end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_pings(
    items: AsyncGenerator[Mapping[str, Any], None], write: Callable[[str], Awaitable[None]], ping: str
) -> AsyncGenerator[Mapping[str, Any], None]:
    """The items; while none comes, pings keep the connection open."""
    following: asyncio.Future[Mapping[str, Any] | None] | None = None
    try:
        while True:
            following = asyncio.ensure_future(_next(items))
            while not (await asyncio.wait({following}, timeout=PING_SECONDS))[0]:
                await write(ping)
            if (item := following.result()) is None:
                return
            yield item
    finally:
        if following is not None and not following.done():
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await items.aclose()


async def _next(items: AsyncGenerator[Mapping[str, Any], None]) -> Mapping[str, Any] | None:
    return await anext(items, None)
