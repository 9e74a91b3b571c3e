"""One API call: the HTTP request, its caller, and helpers that endpoints share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rekindle.core.reply import Reply, Reuse, TextPiece
from rekindle.core.request import Message, Request
from rekindle.core.scope import Scope
from rekindle.errors import ContextOverflow
from rekindle.server.auth import Caller
from rekindle.server.canonical import canonical_request
from rekindle.server.errors import ApiError
from rekindle.server.host import Host
from rekindle.server.job import ChoiceEvent, Finished, Planned, ReplyPart, reply_parts
from rekindle.server.protocol import OPENAI, EventStream, WireProtocol, until_disconnect
from rekindle.server.schema import CacheBody, RequestBody, RetrievalOptions
from rekindle.server.server_log import current_record
from rekindle.server.service import Service
from rekindle.session.ask import Prepared

_Result = TypeVar("_Result")
PAGE = 100
MAX_PAGE = 1000
PLAN_HEADER = "X-Rekindle-Plan"


@dataclass(frozen=True)
class Page:
    """The requested part of a list: `limit` items after the one named `after`."""

    limit: int
    after: str


@dataclass(frozen=True)
class Call:
    """What an endpoint gets besides the body."""

    http: HttpRequest
    host: Host
    caller: Caller
    salt: str | None = None  # from the body or the query
    protocol: WireProtocol = OPENAI
    opened: Service | None = None

    @property
    def service(self) -> Service:
        """That of the model which the call names: for endpoints that need one."""
        assert self.opened is not None
        return self.opened

    @property
    def scope(self) -> Scope:
        """The caller's tenant, and the salt of the call."""
        return self.host.shared.scope(self.caller, self.salt)

    @property
    def stats_scope(self) -> Scope | None:
        """The scope of statistics: the call's own; None (everybody's) for an operator who names no salt."""
        return None if self.caller.operator and self.salt is None else self.scope

    def adapter_of(self, name: str | None) -> str:
        """The adapter that a model name stands for, "" for the base model. Raises `ApiError` 404 for unknown names."""
        return self.host.resolve(name).adapter

    def canonical(self, request: Request) -> tuple[Request, list[str]]:
        """The request without what no model should read, and the names of that."""
        return canonical_request(request, self.host.shared.settings.canonical)

    def ignored(self, body: RequestBody) -> list[str]:
        """The request fields that were ignored, for everybody or for this caller."""
        barred = isinstance(body, CacheBody) and body.keep_alive is not None and not self.caller.operator
        return sorted([*body.ignored(), *(["keep_alive"] if barred else [])])

    def check_tokens(self, prompt: object) -> None:
        """Raises `ContextOverflow` for more token ids than the context holds."""
        context = self.service.session.engine.context_tokens
        if isinstance(prompt, list) and len(prompt) > context:
            raise ContextOverflow(len(prompt), context, "Send fewer.")

    def require_operator(self) -> None:
        """Raises `ApiError` 403 unless the caller is an operator."""
        if not self.caller.operator:
            raise ApiError(403, "This concerns all tenants: use an --admin-key.", code="operator_only")

    def page(self) -> Page:
        """`limit` and `after` of the query. Raises `ApiError` 400."""
        query = self.http.query_params
        limit = query.get("limit", str(PAGE))
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_PAGE):
            raise ApiError(400, f"limit is a number from 1 to {MAX_PAGE}.", param="limit")
        return Page(int(limit), query.get("after", ""))

    async def in_thread(self, work: Callable[[], _Result], threads: Executor | None = None) -> _Result:
        """Run something in a thread. Raises `ClientGone` as soon as the client disconnects.

        Work that has not begun is then cancelled; work that has begun continues.
        """
        threads = threads or (None if self.opened is None else self.opened.side_threads)
        working = asyncio.get_running_loop().run_in_executor(threads, work)

        async def done() -> _Result:
            return await working

        return await until_disconnect(self.http.receive, done())

    async def template(self) -> str:
        """The model's chat template."""
        return await self.in_thread(lambda: self.service.template)

    async def with_passages(self, request: Request, wanted: RetrievalOptions) -> Prepared:
        """A chat with passages of the library for its last user message. Raises `ApiError` 400 if that is empty."""
        said = [m.content for m in request.prompt if isinstance(m, Message) and m.role == "user"]
        if not said or not said[-1].strip():
            raise ApiError(400, "messages: No message of the user has text to search for.", param="messages")
        session = self.service.session
        return await self.in_thread(lambda: session.prepare_request(said[-1], request, wanted.top_k, wanted.retrieval))

    def parts(
        self, events: AsyncGenerator[ChoiceEvent, None], request: Request, count: int = 1
    ) -> AsyncGenerator[ReplyPart, None]:
        """The parts of `count` replies to a request, as they come."""
        return reply_parts(events, request, self.service.session.engine.tokenizer, count)

    async def stream(
        self,
        events: AsyncGenerator[ChoiceEvent, None],
        write: Callable[[Reuse], AsyncGenerator[Mapping[str, Any], None]],
    ) -> Response:
        """A stream of the protocol, begun when the first prompt is planned: `write` makes its items of the events that
        follow, and gets the planned reuse."""
        try:
            planned = await until_disconnect(self.http.receive, _first(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(self.protocol, write(planned), plan_header(planned), events, self.failed)

    def failed(self, outcome: str) -> None:
        """Count a request that ended without a reply: disconnected, 4xx, 5xx."""
        current_record().outcome = outcome
        self.host.shared.metrics.failed(self.scope, outcome)

    async def collect(self, events: AsyncGenerator[ChoiceEvent, None], count: int) -> tuple[Reuse, list[Reply]]:
        """All replies, and the reuse of the first prompt."""
        return await until_disconnect(self.http.receive, _collected(events, count))


def plan_header(reuse: Reuse) -> dict[str, str]:
    """The reuse of a prompt, in one header."""
    parts = {"level": reuse.level, "engine": reuse.engine, "memory": reuse.memory, "disk": reuse.disk}
    if reuse.quantized:
        parts["quantized"] = reuse.quantized
    if reuse.from_chunks:
        parts["from_chunks"] = reuse.from_chunks
    if reuse.streamed:
        parts["streamed"] = reuse.streamed
    fields = {**parts, "computed": reuse.computed, "miss": reuse.miss or "none"}
    return {PLAN_HEADER: "; ".join(f"{name}={value}" for name, value in fields.items())}


async def _first(events: AsyncGenerator[ChoiceEvent, None]) -> Reuse:
    async for item in events:
        if isinstance(item.event, Planned):
            return item.event.reuse
    raise AssertionError("a request is planned before it is finished")


async def _collected(events: AsyncGenerator[ChoiceEvent, None], count: int) -> tuple[Reuse, list[Reply]]:
    replies: dict[int, Reply] = {}
    async with aclosing(events) as events:
        async for item in events:
            if isinstance(item.event, Finished):
                replies[item.choice] = item.event.reply
    ordered = [replies[number] for number in range(count)]
    return ordered[0].reuse, ordered


async def answer_prepared(
    call: Call, body: CacheBody, prepared: Prepared, started: float
) -> AsyncGenerator[ChoiceEvent, None]:
    """Answer a question whose passages were found; `started` is when it came (`time.perf_counter`)."""
    if prepared.given:
        events = _stored_answer(call, body, prepared)
    else:
        events = call.service.answer([prepared.request], call.caller, body, prepared)
    async with aclosing(events):
        async for item in events:
            if isinstance(item.event, Finished) and prepared.consulted is not None:
                seconds = time.perf_counter() - started
                call.service.session.answers.keep(prepared.consulted, item.event.reply, seconds)
            yield item


async def _stored_answer(call: Call, body: CacheBody, prepared: Prepared) -> AsyncGenerator[ChoiceEvent, None]:
    """The events of a stored answer: no model runs."""
    reply, service = prepared.given, call.service
    assert reply is not None
    if service.idle_thread is not None:  # its own answer is found later
        service.idle_thread.arrive(prepared.request)
        service.idle_thread.leave()
    record = service.begin(prepared.request, call.caller, body, prepared)
    for event in (Planned(reply.reuse), TextPiece(reply.text), Finished(reply)):
        service.record(record, event)
        yield ChoiceEvent(0, event)
