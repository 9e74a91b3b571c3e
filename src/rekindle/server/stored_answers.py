"""The events of a question about the library: a stored answer, or the model's, which is then kept."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from rekindle.core.reply import TextPiece
from rekindle.server.call import Call
from rekindle.server.job import ChoiceEvent, Finished, Planned
from rekindle.server.schema import CacheBody
from rekindle.session.ask import Prepared


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
