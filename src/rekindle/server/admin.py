"""/v1/rekindle/: administer the cache and the apps of a running server; /health and /metrics.

A caller only sees what belongs to its own tenant; an operator sees everything.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response

from rekindle import __version__
from rekindle.cache.explain import Explanation
from rekindle.core.request import Request
from rekindle.errors import CacheUnusable
from rekindle.server.call import Call
from rekindle.server.errors import ApiError
from rekindle.server.host import ServedModel
from rekindle.server.metrics import CONTENT_TYPE
from rekindle.server.openai.translate import prompt_request
from rekindle.server.page.views import page_files
from rekindle.server.pending_reply import PendingReply
from rekindle.server.recorded import recorded_request
from rekindle.server.reply_fields import rekindle_of
from rekindle.server.schema import AppRequest, CheckRequest, ExplainRequest, PromptRequest
from rekindle.store import history, report
from rekindle.store.check import check as verify
from rekindle.store.tiered import TieredStore

_T = TypeVar("_T")


def _store(call: Call) -> TieredStore:
    store = call.service.session.cache.store
    if store is None:
        raise ApiError(404, "This server runs without a cache. Start it without --cache off.", code="no_cache")
    return store


async def _with_cache(call: Call, work: Callable[[], _T]) -> _T:
    """Run something that uses the cache folder in a thread. Raises `CacheUnusable`."""
    try:
        return await asyncio.get_running_loop().run_in_executor(call.service.side_threads, work)
    except (OSError, sqlite3.Error) as error:
        raise CacheUnusable(f"The cache could not be used: {error}. Try again.") from error


async def health(call: Call) -> Response:
    """Whether the server answers. Needs no key, and reveals nothing else."""
    return JSONResponse({"status": "ok", "version": __version__, "uptime_seconds": _uptime(call)})


async def greet(call: Call) -> Response:
    """The page for browsers, a greeting for others. Needs no key: clients ask before they send anything."""
    if call.host.shared.settings.page and "text/html" in call.http.headers.get("accept", ""):
        return page_files()["/page/index.html"]
    return JSONResponse({"name": "Rekindle", "version": __version__, "docs": "/docs"})


async def metrics(call: Call) -> Response:
    """Prometheus metrics."""
    text = await call.in_thread(lambda: call.host.shared.metrics.text(call.caller))
    return Response(text, media_type=CONTENT_TYPE)


def _uptime(call: Call) -> float:
    return time.time() - call.host.shared.started


async def show_server(call: Call) -> Response:
    """The models, engines and load of this server: for `rekindle ps`. What is not in `models` is the default's."""
    host = call.host
    models = [_about_model(model) for model in host.models.values()]
    keep_alive = host.shared.session_settings.keep_alive
    fields: dict[str, Any] = {**models[0], "keep_alive": keep_alive, "uptime_seconds": _uptime(call), "models": models}
    if call.caller.operator:
        queues = [service.admission for service in host.services()]
        waiting = sum(queue.waiting for queue in queues) + sum(model.waiting for model in host.models.values())
        fields |= {"pid": os.getpid(), "running": sum(queue.running for queue in queues), "waiting": waiting}
        fields["parallel"] = sum(queue.places for queue in queues)
    return JSONResponse(fields)


def _about_model(model: ServedModel) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": model.name, "loaded": model.loaded}
    if model.service is None:
        return fields
    session = model.service.session
    about = {"engine": session.engine_kind, "device": session.engine.device}
    return {**fields, **about, "context_tokens": session.engine.context_tokens}


async def show_stats(call: Call) -> Response:
    """What the cache holds: totals, and by model."""
    store, scope = _store(call), call.stats_scope

    def collect() -> dict[str, Any]:
        fields = {**report.summary(store.disk, scope), "models": report.by_kv_space(store.disk, scope)}
        if scope is None:
            used = report.used_bytes(store.disk)
            fields |= report.written(store.disk, store.settings.write_budget_bytes)
            fields["tiers"] = {
                "memory": {"bytes": store.memory.size_bytes, "limit_bytes": store.memory.limit_bytes},
                "disk": {"bytes": used, "limit_bytes": store.disk.room.limit_bytes(used)},
            }
        return fields

    return JSONResponse(await _with_cache(call, collect))


async def list_entries(call: Call) -> Response:
    """Entries, a page at a time: `after` is the name of the last one of the previous page."""
    store, wanted = _store(call), call.page()
    entries = await _with_cache(call, lambda: report.entries(store.disk, scope=call.stats_scope))
    ordered = sorted(entries, key=lambda entry: entry.extent.name)
    page = [entry for entry in ordered if entry.extent.name > wanted.after][: wanted.limit]
    more = bool(page) and page[-1] is not ordered[-1]
    return JSONResponse({"data": [entry.as_dict() for entry in page], "total": len(ordered), "has_more": more})


async def pin_entry(call: Call) -> Response:
    """Never evict an entry, nor the entries it depends on; DELETE allows it again."""
    store, pinned = _store(call), call.http.method == "PUT"

    def work() -> None:
        found = report.entries(store.disk, [call.http.path_params["name"]], call.stats_scope)
        tenant = None if call.caller.operator else call.caller.tenant
        store.disk.pin([entry.extent for entry in found], pinned, tenant=tenant)

    await _with_cache(call, work)
    return JSONResponse({"pinned": pinned})


async def remove_entry(call: Call) -> Response:
    """Remove an entry and those that depend on it."""
    store = _store(call)

    def work() -> int:
        found = report.entries(store.disk, [call.http.path_params["name"]], call.stats_scope)
        store.memory.forget([entry.extent.name for entry in found])
        return store.disk.remove([entry.extent for entry in found])

    removed = await _with_cache(call, work)
    for service in call.host.services():
        service.session.cache.unpark(call.stats_scope)
    return JSONResponse({"removed": removed})


async def check_cache(call: Call, body: CheckRequest) -> Response:
    """Verify the catalog and every byte of every entry."""
    call.require_operator()
    store = _store(call)
    return JSONResponse(asdict(await _with_cache(call, lambda: verify(store.disk, fix=body.fix))))


def _prompt_request(call: Call, body: PromptRequest) -> Request:
    adapter = call.adapter_of(body.model)
    call.check_tokens(body.prompt)
    request, _ = call.canonical(prompt_request(body, call.caller.tenant))
    return replace(request, adapter=adapter)


async def warm_prompt(call: Call, body: PromptRequest) -> Response:
    """Prefill a prompt now and keep its KV."""
    request = _prompt_request(call, body)
    events = call.service.answer([request], call.caller, body)
    _, (reply,) = await PendingReply(call, request, events, []).replies()
    await _with_cache(call, call.service.session.flush)
    usage = {"prompt_tokens": reply.usage.prompt_tokens, "cached_tokens": reply.usage.cached_tokens}
    return JSONResponse({"usage": usage, "rekindle": rekindle_of(reply.reuse, call.ignored(body))})


async def explain_prompt(call: Call, body: ExplainRequest) -> Response:
    """Where the KV of a prompt would come from, and why not more of it, without computing it.

    The body is the one of a chat in any protocol, or has a `prompt`.
    """
    if body.messages is None and body.input is None:
        request = _prompt_request(call, PromptRequest.model_validate(body.model_dump(exclude_unset=True)))
    else:
        adapter = call.adapter_of(body.model)
        if body.prompt is not None:
            raise ApiError(400, "Give either messages or a prompt.", param="messages")
        request, _ = call.canonical(recorded_request(body.model_dump(exclude_unset=True), call.caller.tenant))
        request = replace(request, adapter=adapter)
    explanation = await _with_cache(call, lambda: call.service.session.explain_request(request))
    return JSONResponse({**explanation.as_dict(), "text": str(explanation)})


async def explain_last(call: Call) -> Response:
    """The caller's last answered request, and why it took as long as it did."""
    store = _store(call)

    def work() -> dict[str, Any]:
        call.service.session.flush(1.0)
        found = history.last(store.disk, 1, call.scope)
        if not found:
            raise ApiError(404, "Nothing was asked yet.", code="nothing_asked")
        explanation = Explanation.from_dict(found[0].record)
        return {**explanation.as_dict(), "text": str(explanation)}

    return JSONResponse(await _with_cache(call, work))


async def list_apps(call: Call) -> Response:
    """The apps that sent requests, and their states."""
    scope = call.scope
    kept = await _with_cache(call, lambda: call.service.session.apps.ls(scope.tenant, scope.salt))
    return JSONResponse({"data": [asdict(app) for app in call.service.apps.merge_catalog(scope, kept)]})


async def set_app(call: Call, body: AppRequest) -> Response:
    """Set the state of an app; a killed app's requests stop, and KV kept only for it is evicted soon."""
    id, scope = call.http.path_params["id"], call.scope
    if len(id) > 256:
        raise ApiError(400, "The name of an app has up to 256 characters.", param="id")
    app = call.service.apps.set(scope, id, body.state)
    stopped = call.host.kill(scope, id) if body.state == "killed" else 0
    if call.service.session.cache.store is not None:
        await _with_cache(call, lambda: call.service.session.apps.set(id, body.state, scope.tenant, scope.salt))
    return JSONResponse({**asdict(app), "stopped_requests": stopped})
