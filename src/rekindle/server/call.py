"""One call of the server: who calls, what is asked, and what answers."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Call:
    """What an endpoint gets beside its body."""

    http: HttpRequest
    service: Service
    caller: Caller

    def check_model(self, name: str | None) -> None:
        """Raises `Problem` 404 if that model is not the one that is served."""
        served = self.service.model
        if name and name != served:
            raise Problem(
                404, f"The model {name!r} is not served here.{nearest(name, [served])}", code="model_not_found"
            )

    def ignored(self, body: Asked) -> list[str]:
        """The fields that mean nothing here, or nothing from this caller."""
        barred = isinstance(body, Cached) and body.keep_alive is not None and not self.caller.operator
        return sorted([*body.ignored(), *(["keep_alive"] if barred else [])])

    def require_operator(self) -> None:
        """Raises `Problem` 403 for whoever may only see what is theirs."""
        if not self.caller.operator:
            raise Problem(403, "This concerns all tenants: use an --admin-key.", code="operator_only")

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
