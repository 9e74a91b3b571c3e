"""One call of the server: who calls, what is asked, and what answers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rekindle.core.reply import Reply, Reuse
from rekindle.errors import nearest
from rekindle.server.job import Finished, Planned
from rekindle.server.keys import Caller
from rekindle.server.problem import Problem
from rekindle.server.replies import plan_header
from rekindle.server.schema import Asked, Cached
from rekindle.server.service import Happened, Service
from rekindle.server.stream import EventStream, while_there

_Result = TypeVar("_Result")
PAGE = 100
MOST_PAGE = 1000


@dataclass(frozen=True)
class Page:
    """Which part of a list is wanted: so many, behind the one of that name."""

    limit: int
    after: str


@dataclass(frozen=True)
class Call:
    """What an endpoint gets beside its body."""

    http: HttpRequest
    service: Service
    caller: Caller

    def adapter_of(self, name: str | None) -> str:
        """The adapter that a model's name stands for, "" for the model itself. Raises `Problem` 404 for others."""
        served, loaded = self.service.model, [adapter.name for adapter in self.service.session.adapters]
        if not name or name == served:
            return ""
        if name not in loaded:
            near = nearest(name, [served, *loaded])
            raise Problem(404, f"The model {name!r} is not served here.{near}", code="model_not_found")
        return name

    def ignored(self, body: Asked) -> list[str]:
        """The fields that mean nothing here, or nothing from this caller."""
        barred = isinstance(body, Cached) and body.keep_alive is not None and not self.caller.operator
        return sorted([*body.ignored(), *(["keep_alive"] if barred else [])])

    def require_operator(self) -> None:
        """Raises `Problem` 403 for whoever may only see what is theirs."""
        if not self.caller.operator:
            raise Problem(403, "This concerns all tenants: use an --admin-key.", code="operator_only")

    def page(self) -> Page:
        """What `limit` and `after` say behind the path. Raises `Problem` 400."""
        query = self.http.query_params
        limit = query.get("limit", str(PAGE))
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST_PAGE):
            raise Problem(400, f"limit is a number from 1 to {MOST_PAGE}.", param="limit")
        return Page(int(limit), query.get("after", ""))

    async def aside(self, work: Callable[[], _Result], threads: Executor | None = None) -> _Result:
        """Do something beside the event loop. Raises `Gone` as soon as the client leaves.

        What has not begun then never does; what has goes on unless it looks whether it should.
        """
        working = asyncio.get_running_loop().run_in_executor(threads or self.service.aside, work)

        async def done() -> _Result:
            return await working

        return await while_there(self.http.receive, done())

    async def begin(self, happened: AsyncGenerator[Happened, None]) -> tuple[Reuse, AsyncGenerator[Happened, None]]:
        """Wait until the first prompt is planned; what it is spared, and what happens from then on."""
        try:
            return await while_there(self.http.receive, _first(happened)), happened
        except BaseException:
            await happened.aclose()
            raise

    def stream(
        self, items: AsyncGenerator[Mapping[str, Any], None], planned: Reuse, happened: AsyncGenerator[Happened, None]
    ) -> Response:
        """Chunks that are made of what happens, as server-sent events."""
        failed = functools.partial(self.service.metrics.failed, self.caller.tenant)
        return EventStream(items, plan_header(planned), happened, failed)

    async def collect(self, happened: AsyncGenerator[Happened, None], count: int) -> tuple[Reuse, list[Reply]]:
        """All replies, and what the first prompt was spared."""
        return await while_there(self.http.receive, _collected(happened, count))


async def _first(happened: AsyncGenerator[Happened, None]) -> Reuse:
    async for what in happened:
        if isinstance(what.event, Planned):
            return what.event.reuse
    raise AssertionError("a request is planned before it is finished")


async def _collected(happened: AsyncGenerator[Happened, None], count: int) -> tuple[Reuse, list[Reply]]:
    replies: dict[int, Reply] = {}
    async with aclosing(happened) as events:
        async for what in events:
            if isinstance(what.event, Finished):
                replies[what.choice] = what.event.reply
    ordered = [replies[number] for number in range(count)]
    return ordered[0].reuse, ordered
