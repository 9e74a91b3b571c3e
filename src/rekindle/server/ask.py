"""/v1/rekindle/ask: questions about documents, answered with their sources."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.reply import Piece, Reply
from rekindle.run.ask import Prepared
from rekindle.run.session import Session
from rekindle.server.asked import ask_options
from rekindle.server.call import Call
from rekindle.server.job import Finished, Planned
from rekindle.server.replies import (
    new_id,
    plan_header,
    rekindle_of,
    retrieval_of,
    sources_of,
    stored_of,
    timings_of,
    usage_of,
)
from rekindle.server.schema import AskRequest
from rekindle.server.service import Happened, Service


async def answer_question(call: Call, body: AskRequest) -> Response:
    """The answer to a question from the caller's own documents, with its sources, whole or as a stream."""
    adapter = call.adapter_of(body.model)
    session, options = call.service.session, ask_options(body, call.caller.tenant, call.service.most_tokens())
    options["adapter"] = adapter
    started = time.perf_counter()
    prepared = await call.aside(lambda: session.prepare(body.question, **options))
    service = call.service
    happened = _given(service, prepared) if prepared.given else service.answer([prepared.request], call.caller, body)
    happened = _keeping(happened, session, prepared, started)
    head = {"id": new_id("answer"), "created": int(time.time()), "model": adapter or call.service.model}
    if body.stream:
        first, rest = await call.begin(happened)
        return call.stream(_chunks(head, prepared, rest, call.ignored(body)), first, rest)
    planned, (reply,) = await call.collect(happened, 1)
    told = {"question": body.question, "answer": reply.text, "sources": sources_of(prepared)}
    ended = _ended(reply, prepared, call.ignored(body))
    return JSONResponse({**head, "object": "rekindle.answer", **told, **ended}, headers=plan_header(planned))


async def _given(service: Service, prepared: Prepared) -> AsyncGenerator[Happened, None]:
    """What happens when the stored answer is given: no model is asked."""
    reply = prepared.given
    assert reply is not None
    if service.idler is not None:  # its true answer is found later
        service.idler.arrive(prepared.request)
        service.idler.leave()
    yield Happened(0, Planned(reply.reuse))
    yield Happened(0, Piece(reply.text))
    yield Happened(0, Finished(reply))


async def _keeping(
    happened: AsyncGenerator[Happened, None], session: Session, prepared: Prepared, started: float
) -> AsyncGenerator[Happened, None]:
    """The same, and the answer is kept at its end."""
    async with aclosing(happened):
        async for what in happened:
            if isinstance(what.event, Finished) and prepared.consulted is not None:
                session.answers.keep(prepared.consulted, what.event.reply, time.perf_counter() - started)
            yield what


async def _chunks(
    head: Mapping[str, Any], prepared: Prepared, happened: AsyncGenerator[Happened, None], ignored: list[str]
) -> AsyncGenerator[Mapping[str, Any], None]:
    """The sources, then the answer in pieces, then all that is known at its end."""
    head = {**head, "object": "rekindle.answer.chunk"}
    yield {**head, "sources": sources_of(prepared), "delta": "", "finish_reason": None}
    async for what in happened:
        if isinstance(what.event, Piece):
            yield {**head, "delta": str(what.event), "finish_reason": None}
        elif isinstance(what.event, Finished):
            yield {**head, "delta": "", **_ended(what.event.reply, prepared, ignored)}


def _ended(reply: Reply, prepared: Prepared, ignored: list[str]) -> dict[str, Any]:
    about = {**rekindle_of(reply.reuse, ignored), "retrieval": retrieval_of(prepared), **stored_of(prepared, reply)}
    told = {"usage": usage_of([reply]), "timings": timings_of(reply), "rekindle": about}
    return {"finish_reason": reply.finish_reason, **told}
