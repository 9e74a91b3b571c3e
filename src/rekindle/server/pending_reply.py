"""Replies to a call while they are written: what is alike in all protocols before each says it in its own words."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.reply import Reply, Reuse, TextPiece
from rekindle.core.request import Message, Request
from rekindle.server.call import PLAN_HEADER, Call
from rekindle.server.errors import ApiError
from rekindle.server.job import ChoiceEvent, Finished, Planned, ReplyPart, reply_parts
from rekindle.server.protocol import EventStream, until_disconnect
from rekindle.server.reply_fields import quoting_of, rekindle_of
from rekindle.server.schema import CacheBody, ChatOptions
from rekindle.session.ask import Prepared
from rekindle.text.reasoning import has_think_switch

_SEEDS = 2**64


@dataclass(frozen=True)
class PendingReply:
    """The answer to a request, or `count` of them; of several requests, `request` is the first.

    ignored    the names of what was sent and has no effect
    prepared   the passages of the library and the earlier answers that take part
    """

    call: Call
    request: Request
    events: AsyncGenerator[ChoiceEvent, None]
    ignored: list[str]
    count: int = 1
    prepared: Prepared | None = None
    started: float = field(default_factory=time.perf_counter)

    @property
    def model(self) -> str:
        """The name of what answers."""
        return self.request.adapter or self.call.service.model

    def parts(self) -> AsyncGenerator[ReplyPart, None]:
        """Thoughts, text and tool calls as they come."""
        return reply_parts(self.events, self.request, self.call.service.session.engine.tokenizer, self.count)

    def about(self, reply: Reply) -> dict[str, Any]:
        """What stands under `rekindle` in a reply."""
        return rekindle_of(reply.reuse, self.ignored) | quoting_of(len(self.request.quotes), reply, self.prepared)

    async def respond(
        self,
        streamed: bool | None,
        items: Callable[[Reuse], AsyncGenerator[Mapping[str, Any], None]],
        whole: Callable[[list[Reply]], Any],
    ) -> Response:
        """A stream of `items`, begun when the first prompt is planned, or one object with the whole replies."""
        if not streamed:
            planned, replies = await self.replies()
            return JSONResponse(whole(replies), headers=_plan_header(planned))
        try:
            planned = await until_disconnect(self.call.http.receive, _first(self.events))
        except BaseException:
            await self.events.aclose()
            raise
        header = _plan_header(planned)
        return EventStream(self.call.protocol, items(planned), header, self.events, self.call.failed)

    async def replies(self) -> tuple[Reuse, list[Reply]]:
        """All replies, and the reuse of the first prompt."""
        return await until_disconnect(self.call.http.receive, _collected(self.events, self.count))


async def begin_chat(
    call: Call,
    body: CacheBody,
    request: Request,
    *,
    ignored: Sequence[str] = (),
    switches: Sequence[str] = (),
    count: int = 1,
) -> PendingReply:
    """Begin to answer a chat.

    ignored    what the protocol left out of it
    switches   the fields that say whether to think: ignored too if the model's template reads none of them

    Raises `ApiError`, and what the session raises.
    """
    started, adapter = time.perf_counter(), call.adapter_of(getattr(body, "model", None))
    request, dropped = call.canonical(replace(request, adapter=adapter))
    names = [*call.ignored(body), *ignored, *dropped]
    if request.think is not None and not has_think_switch(await call.template()):
        names += switches
    prepared = await _prepared(call, body, request, count)
    request = request if prepared is None else prepared.request
    if prepared is not None and count == 1:
        events = answer_prepared(call, body, prepared, started)
    else:
        requests = [request_of_choice(request, number) for number in range(count)]
        events = call.service.answer(requests, call.caller, body)
    return PendingReply(call, request, events, sorted(names), count, prepared, started)


def request_of_choice(request: Request, number: int) -> Request:
    """The request of the n-th choice: with a seed, each choice gets its own."""
    seed = request.sampling.seed
    if number == 0 or seed is None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + number) % _SEEDS))


async def _prepared(call: Call, body: CacheBody, request: Request, count: int) -> Prepared | None:
    """Passages of the library for a chat, or earlier answers about its own documents; None if it wants neither."""
    own, session = getattr(body, "rekindle", None), call.service.session
    wanted = own.knowledge if isinstance(own, ChatOptions) else None
    if wanted is None:
        return (
            await call.in_thread(lambda: session.prepare_with_documents(request))
            if count == 1 and request.quotes
            else None
        )
    if count > 1 and session.answers.way(request) == "direct":  # the same reply several times is no choice
        request = replace(request, answers="verified")
    said = [m.content for m in request.prompt if isinstance(m, Message) and m.role == "user"]
    if not said or not said[-1].strip():
        raise ApiError(400, "messages: No message of the user has text to search for.", param="messages")
    top_k, retrieval = wanted.top_k, wanted.retrieval
    return await call.in_thread(lambda: session.prepare_request(said[-1], request, top_k, retrieval))


async def answer_prepared(
    call: Call, body: CacheBody, prepared: Prepared, started: float
) -> AsyncGenerator[ChoiceEvent, None]:
    """Answer a question whose passages were found; `started` is when it came (`time.perf_counter`)."""
    if prepared.stored_reply:
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
    reply, service = prepared.stored_reply, call.service
    assert reply is not None
    if service.idle_thread is not None:  # its own answer is found later
        service.idle_thread.arrive(prepared.request)
        service.idle_thread.leave()
    record = service.begin(prepared.request, call.caller, body, prepared)
    for event in (Planned(reply.reuse), TextPiece(reply.text), Finished(reply)):
        service.record(record, event)
        yield ChoiceEvent(0, event)


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


def _plan_header(reuse: Reuse) -> dict[str, str]:
    """The reuse of a prompt, in one header."""
    more = {"quantized": reuse.quantized, "from_chunks": reuse.from_chunks, "streamed": reuse.streamed}
    counts = {"engine": reuse.engine, "memory": reuse.memory, "disk": reuse.disk}
    counts |= {**{name: count for name, count in more.items() if count}, "computed": reuse.computed}
    parts = [f"level={reuse.level}", *(f"{name}={count}" for name, count in counts.items())]
    return {PLAN_HEADER: "; ".join([*parts, f"miss={reuse.miss or 'none'}"])}
