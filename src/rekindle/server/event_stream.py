"""Responses that are streams, and clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rekindle.server.errors import api_error_of
from rekindle.server.protocol import WireProtocol

_Result = TypeVar("_Result")
PING_SECONDS = 15.0


class ClientGone(Exception):
    """The client disconnected."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await `work`, but cancel it and raise `ClientGone` as soon as the client disconnects."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
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
