"""/api/pull and /api/delete: the models on this machine, for operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.identity import digest_of_fields
from rekindle.models import ollama, registry
from rekindle.models.hub import HUB_NAME
from rekindle.models.pull import pull
from rekindle.models.sources import NAMED
from rekindle.server.call import Call
from rekindle.server.errors import ApiError
from rekindle.server.event_stream import EventStream
from rekindle.server.ollama.schema import ModelBody, PullRequest
from rekindle.server.ollama.wire import OLLAMA


async def pull_model(call: Call, body: PullRequest) -> Response:
    """Get a model, so that `rekindle serve NAME` finds it; this server goes on with its own."""
    call.require_operator()
    spec = _spec(body)
    if not (spec in NAMED or spec.startswith(ollama.PREFIX) or HUB_NAME.fullmatch(spec)):  # no path of this machine
        raise ApiError(404, f"model: {spec!r} is no name of a model. Give one (smollm2), ollama:NAME or ORG/NAME.")
    last = {"status": "success", "rekindle": {"served": spec == call.service.model, "ignored": body.ignored()}}
    lines = _progress(spec, last)
    if body.stream is not False:
        return EventStream(OLLAMA, lines, {}, lines, lambda outcome: call.service.metrics.failed(call.scope, outcome))
    async for _ in lines:
        pass
    return JSONResponse(last)


async def _progress(spec: str, last: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
    """What is done, as it is done. A client that leaves does not stop a download: the next one finds it."""
    loop, stages = asyncio.get_running_loop(), asyncio.Queue[Mapping[str, Any] | None]()

    def report(stage: str, done: int, total: int) -> None:
        line = {"status": stage, "digest": digest_of_fields(spec, stage), "completed": done, "total": total}
        loop.call_soon_threadsafe(stages.put_nowait, line)

    yield {"status": "pulling manifest"}
    working = loop.run_in_executor(None, pull, spec, report)
    working.add_done_callback(lambda _: stages.put_nowait(None))
    while (line := await stages.get()) is not None:
        yield line
    working.result()
    yield last


async def delete_model(call: Call, body: ModelBody) -> Response:
    """Remove a pulled model; files used in place stay."""
    call.require_operator()
    spec = _spec(body)
    if spec == call.service.model:
        raise ApiError(409, f"{spec!r} is served here. Stop the server first, then: rekindle rm {spec}.")
    await call.in_thread(lambda: registry.remove(spec))
    return Response()


def _spec(body: ModelBody) -> str:
    if not body.named:
        raise ApiError(400, "model: Give the name of a model.", param="model")
    return body.named.removesuffix(":latest") if registry.lookup(body.named) is None else body.named
