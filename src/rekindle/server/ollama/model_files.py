"""/api/pull and /api/delete: the models on this machine, for operators."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
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
    last = {"status": "success", "rekindle": {"served": spec in call.host.models, "ignored": body.ignored()}}
    lines = _progress(spec, last)
    if body.stream is not False:
        return EventStream(OLLAMA, lines, {}, lines, call.failed)
    async for _ in lines:
        pass
    return JSONResponse(last)


async def _progress(spec: str, last: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
    """What is done, as it is done. A client that leaves does not stop a download, a server that stops does."""
    loop, stages = asyncio.get_running_loop(), asyncio.Queue[Mapping[str, Any] | Exception]()

    def report(stage: str, done: int, total: int) -> None:
        line = {"status": stage, "digest": digest_of_fields(spec, stage), "completed": done, "total": total}
        loop.call_soon_threadsafe(stages.put_nowait, line)

    def work() -> None:
        outcome: Mapping[str, Any] | Exception = last
        try:
            pull(spec, report)
        except Exception as error:  # noqa: BLE001  (raised again by the reader)
            outcome = error
        with suppress(RuntimeError):  # the server stopped
            loop.call_soon_threadsafe(stages.put_nowait, outcome)

    yield {"status": "pulling manifest"}
    threading.Thread(target=work, name="rekindle-pull", daemon=True).start()
    line: Mapping[str, Any] | None = None
    while line is not last:
        item = await stages.get()
        if isinstance(item, Exception):
            raise item
        line = item
        yield line


async def delete_model(call: Call, body: ModelBody) -> Response:
    """Remove a pulled model; files used in place stay."""
    call.require_operator()
    spec = _spec(body)
    if spec in call.host.models:
        raise ApiError(409, f"{spec!r} is served here. Stop the server first, then: rekindle rm {spec}.")
    await call.in_thread(lambda: registry.remove(spec))
    return JSONResponse({})


def _spec(body: ModelBody) -> str:
    if not body.named:
        raise ApiError(400, "model: Give the name of a model.", param="model")
    return body.named.removesuffix(":latest") if registry.lookup(body.named) is None else body.named
