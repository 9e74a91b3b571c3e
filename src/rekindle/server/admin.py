"""/v1/rekindle/: look after the cache and the apps of a running server. Whoever calls sees what is theirs."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response

from rekindle.errors import CacheUnusable
from rekindle.run.explain import Explanation
from rekindle.server.asked import prompt_request
from rekindle.server.call import Call
from rekindle.server.problem import Problem
from rekindle.server.replies import rekindle_of
from rekindle.server.schema import AppRequest, CheckRequest, PromptRequest
from rekindle.store import history, report
from rekindle.store.check import check as verify
from rekindle.store.tiered import TieredStore

_T = TypeVar("_T")


def _store(call: Call) -> TieredStore:
    store = call.service.session.cache.store
    if store is None:
        raise Problem(404, "This server runs without a cache. Start it without --cache off.", code="no_cache")
    return store


def _tenant(call: Call) -> str | None:
    """Whose things are shown; None: everybody's."""
    return None if call.caller.operator else call.caller.tenant


async def _aside(call: Call, work: Callable[[], _T]) -> _T:
    """Do something with the folder, beside the event loop."""
    try:
        return await asyncio.get_running_loop().run_in_executor(call.service.aside, work)
    except (OSError, sqlite3.Error) as error:
        raise CacheUnusable(f"The cache could not be used: {error}. Try again.") from error


async def show_server(call: Call) -> Response:
    """What runs here: for `rekindle ps`."""
    service, session = call.service, call.service.session
    told: dict[str, Any] = {
        "model": service.model,
        "engine": session.engine_kind,
        "device": session.engine.device,
        "context_tokens": session.engine.context_tokens,
        "loaded": not session.resting,
        "keep_alive": session.settings.keep_alive,
        "uptime_seconds": time.time() - service.started,
    }
    if call.caller.operator:
        told |= {"pid": os.getpid(), "running": service.line.running, "waiting": service.line.waiting}
        told["parallel"] = service.line.places
    return JSONResponse(told)


async def show_stats(call: Call) -> Response:
    """What the cache holds: sums, and by model."""
    store, tenant = _store(call), _tenant(call)

    def collect() -> dict[str, Any]:
        told = {**report.summary(store.disk, tenant), "models": report.by_shelf(store.disk, tenant)}
        if tenant is None:
            used = report.used_bytes(store.disk)
            told["tiers"] = {
                "memory": {"bytes": store.memory.size_bytes, "limit_bytes": store.memory.limit_bytes},
                "disk": {"bytes": used, "limit_bytes": store.disk.room.limit_bytes(used)},
            }
        return told

    return JSONResponse(await _aside(call, collect))


async def list_entries(call: Call) -> Response:
    """Entries, a page at a time: `after` is the name of the last one of the page before."""
    store, wanted = _store(call), call.page()
    entries = await _aside(call, lambda: report.entries(store.disk, tenant=_tenant(call)))
    ordered = sorted(entries, key=lambda entry: entry.extent.name)
    page = [entry for entry in ordered if entry.extent.name > wanted.after][: wanted.limit]
    more = bool(page) and page[-1] is not ordered[-1]
    return JSONResponse({"data": [entry.as_dict() for entry in page], "total": len(ordered), "has_more": more})


async def pin_entry(call: Call) -> Response:
    """Never evict an entry, nor what it hangs on; DELETE allows it again."""
    store, pinned = _store(call), call.http.method == "PUT"

    def work() -> None:
        found = report.entries(store.disk, [call.http.path_params["name"]], _tenant(call))
        store.disk.pin([entry.extent for entry in found], pinned)

    await _aside(call, work)
    return JSONResponse({"pinned": pinned})


async def remove_entry(call: Call) -> Response:
    """Remove an entry and what hangs on it."""
    store = _store(call)

    def work() -> int:
        found = report.entries(store.disk, [call.http.path_params["name"]], _tenant(call))
        store.memory.forget([entry.extent.name for entry in found])
        return store.disk.remove([entry.extent for entry in found])

    removed = await _aside(call, work)
    call.service.session.cache.unpark()
    return JSONResponse({"removed": removed})


async def check_cache(call: Call, body: CheckRequest) -> Response:
    """Verify the catalog and every byte."""
    call.require_operator()
    store = _store(call)
    return JSONResponse(asdict(await _aside(call, lambda: verify(store.disk, fix=body.fix))))


async def warm_prompt(call: Call, body: PromptRequest) -> Response:
    """Compute a prompt now and keep its KV."""
    adapter = call.adapter_of(body.model)
    request = replace(prompt_request(body, call.caller.tenant), adapter=adapter)
    _, (reply,) = await call.collect(call.service.answer([request], call.caller, body), 1)
    await _aside(call, call.service.session.flush)
    usage = {"prompt_tokens": reply.usage.prompt_tokens, "cached_tokens": reply.usage.cached_tokens}
    return JSONResponse({"usage": usage, "rekindle": rekindle_of(reply.reuse, call.ignored(body))})


async def explain_prompt(call: Call, body: PromptRequest) -> Response:
    """Where the KV of a prompt would come from and why not more of it, without computing it."""
    adapter = call.adapter_of(body.model)
    request = replace(prompt_request(body, call.caller.tenant), adapter=adapter)
    told = await _aside(call, lambda: call.service.session.explain_request(request))
    return JSONResponse({**told.as_dict(), "text": str(told)})


async def explain_last(call: Call) -> Response:
    """The last request that was answered, and why it took as long as it did."""
    store = _store(call)

    def work() -> dict[str, Any]:
        call.service.session.flush(1.0)
        found = history.last(store.disk, 1, _tenant(call))
        if not found:
            raise Problem(404, "Nothing was asked yet.", code="nothing_asked")
        told = Explanation.from_dict(found[0].record)
        return {**told.as_dict(), "text": str(told)}

    return JSONResponse(await _aside(call, work))


async def list_apps(call: Call) -> Response:
    """The apps that asked, and their states."""
    tenant = call.caller.tenant
    kept = await _aside(call, lambda: call.service.session.apps.ls(tenant))
    return JSONResponse({"data": [asdict(app) for app in call.service.apps.learn(tenant, kept)]})


async def set_app(call: Call, body: AppRequest) -> Response:
    """Say whether somebody looks at an app; what is computed for a killed one stops, and what is kept for it goes."""
    id = call.http.path_params["id"]
    if len(id) > 256:
        raise Problem(400, "The name of an app has up to 256 characters.", param="id")
    app = call.service.apps.set(call.caller.tenant, id, body.state)
    stopped = call.service.kill(call.caller.tenant, id) if body.state == "killed" else 0
    if call.service.session.cache.store is not None:
        await _aside(call, lambda: call.service.session.apps.set(id, body.state, call.caller.tenant))
    return JSONResponse({**asdict(app), "stopped_requests": stopped})
