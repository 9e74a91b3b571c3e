"""What the page shows, and `rekindle top`: live requests, one request, the cache, the last month. For operators only.

Texts are shown only of what the operator asked, as everywhere else.
"""

from __future__ import annotations

import asyncio
import sqlite3
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

import psutil
from starlette.responses import JSONResponse, Response

from rekindle.cache.explain import Explanation
from rekindle.core.keys import TOKEN_BYTES, common_tokens, token_ids
from rekindle.core.size import parse_limit
from rekindle.errors import RekindleError
from rekindle.idle.log import recent_actions, summarize_actions
from rekindle.server.call import Call
from rekindle.server.errors import ApiError
from rekindle.server.protocol import EventStream
from rekindle.server.recent_requests import RecordedRequest
from rekindle.server.reply_fields import quote_of_source, retrieval_of, sources_of, stored_of
from rekindle.server.usage_log import HOUR, MINUTE
from rekindle.store import history, report

_TICK_SECONDS = 0.25
_SLOW_TICKS = 8  # between two looks at the cache folder
_SHOWN = 200  # answers and idle actions
_LABEL_TOKENS, _LEAD_TOKENS = 24, 8  # of the name of an entry, and those before in which its first word may begin


def _check(call: Call) -> None:
    """Raises `ApiError` unless there is a page, and the caller may see it."""
    if not call.host.shared.settings.page:
        raise ApiError(404, "This server has no page. Start it without --no-page.", code="no_page")
    call.require_operator()


async def watch_requests(call: Call) -> Response:
    """Requests as they come, are prefilled and answered, and the state of the server: a stream without an end."""
    _check(call)
    items = _live(call)
    return EventStream(call.protocol, items, {}, items, failed=lambda _: None)


async def _live(call: Call) -> AsyncGenerator[dict[str, Any], None]:
    service, seen, before, tick = call.service, 0, None, 0
    tiers: dict[str, Any] = {}
    while not call.host.stopping:
        if tick % _SLOW_TICKS == 0:
            tiers = await asyncio.get_running_loop().run_in_executor(service.side_threads, _tiers, call)
        rows, state = service.recent.rows(seen), _state(call) | tiers
        seen = service.recent.version
        if rows or state != before:
            yield {"first": tick == 0, "rows": rows, "server": state}
        before, tick = state, tick + 1
        await asyncio.sleep(_TICK_SECONDS)


def _state(call: Call) -> dict[str, Any]:
    service, session = call.service, call.service.session
    adapters = [{"name": one.name, "loaded": session.adapters.is_loaded(one)} for one in session.adapters]
    return {
        "model": service.model,
        "engine": session.engine_kind,
        "device": session.engine.device,
        "context_tokens": session.engine.context_tokens,
        "loaded": not session.resting,
        "started": call.host.shared.started,
        "running": service.admission.running,
        "waiting": service.admission.waiting,
        "parallel": service.admission.places,
        "queue": service.settings.queue,
        "reuse": session.settings.reuse,
        "adapters": adapters,
    }


def _tiers(call: Call) -> dict[str, Any]:
    store, session = call.service.session.cache.store, call.service.session
    limit = parse_limit(session.settings.memory_limit).resolve(psutil.virtual_memory().total)
    found: dict[str, Any] = {"process_bytes": psutil.Process().memory_info().rss, "memory_limit_bytes": limit}
    with suppress(OSError, sqlite3.Error):
        if store is not None:
            used = report.used_bytes(store.disk)
            found["memory"] = {"bytes": store.memory.size_bytes, "limit_bytes": store.memory.limit_bytes}
            found["disk"] = {"bytes": used, "limit_bytes": store.disk.room.limit_bytes(used)}
    return found


async def show_request(call: Call) -> Response:
    """One of the last requests: its times, its prompt by source, and the explanation of its reuse."""
    _check(call)
    wanted = call.http.path_params["id"]
    record = call.service.recent.get(int(wanted[:12])) if wanted.isascii() and wanted.isdigit() else None
    if record is None:
        raise ApiError(404, "That request is not among the last ones.", code="unknown_request")
    found = {**record.row(), **record.details()}
    if record.scope.tenant == call.caller.tenant:
        found |= await call.in_thread(lambda: _texts(call, record))
    return JSONResponse(found)


def _texts(call: Call, record: RecordedRequest) -> dict[str, Any]:
    """The prompt in runs of one source, the reply, what it stood on, and why not more was reused."""
    found: dict[str, Any] = {}
    service = call.host.models[record.model].service
    assert service is not None  # it answered
    session, tokens = service.session, token_ids(record.tokens)
    if tokens:
        with session.staying():
            spell = session.engine.tokenizer.spell
            found["prompt"] = [{"source": name, "text": spell(tokens[a:b])} for a, b, name in record.runs]
        found["prompt_tokens"] = tokens
        found["explanation"] = _explanation(call, record)
    if record.reply is not None:
        found |= {"reply": record.reply.text, "thinking": record.reply.thinking}
    if record.prepared is not None:
        found |= {"question": record.prepared.question, "sources": sources_of(record.prepared)}
        found["retrieval"] = retrieval_of(record.prepared)
        if record.reply is not None:
            found |= stored_of(record.prepared, record.reply) | quote_of_source(record.prepared, record.reply)
    return found


def _explanation(call: Call, record: RecordedRequest) -> dict[str, Any] | None:
    """What was noted of it for `explain`: of equal prompts, the one nearest in time."""
    store = call.service.session.cache.store
    if store is None or record.reply is None:
        return None
    call.service.session.flush(1.0)
    with suppress(OSError, sqlite3.Error):
        began = record.at + record.marks.get("decode", record.marks.get("done", 0.0))
        noted = history.last(store.disk, history.MAX_ROWS, record.scope)
        start = record.tokens[: history.MAX_TOKENS * TOKEN_BYTES]
        equal = [past for past in noted if past.tokens == start]
        if equal:
            explanation = Explanation.from_dict(min(equal, key=lambda past: abs(past.at - began)).record)
            return {**explanation.as_dict(), "text": str(explanation)}
    return None


async def show_map(call: Call) -> Response:
    """The entries of the cache as a tree of prefixes, and the caller's answers, idle work and origin."""
    _check(call)
    entries = await call.in_thread(lambda: _entries(call))
    about = await call.in_thread(lambda: _about(call))
    return JSONResponse({"entries": entries, **about})


def _entries(call: Call) -> list[dict[str, Any]]:
    store = call.service.session.cache.store
    if store is None:
        return []
    own = report.kv_spaces(store.disk, call.service.scope(call.caller, None))
    places = report.places(store.disk)
    found, beside = [], defaultdict[tuple[int, str | None], list[bytes]](list)  # what continues the same entry
    for entry in report.entries(store.disk):
        if (place := places.get(entry.extent.id)) is not None:
            insort(beside[entry.extent.kv_space, place.parent], place.tokens)
    for entry in report.entries(store.disk):
        place = places.get(entry.extent.id)
        fields = entry.as_dict() | {"parent": place and place.parent, "apps": place.apps if place else []}
        if place is not None and entry.extent.kv_space in own:
            alike = beside[entry.extent.kv_space, place.parent]
            fields["text"] = _label(call, entry.kv_space.model, place, alike)
        found.append(fields)
    return found


def _label(call: Call, model: str, place: report.EntryPlace, alike: Sequence[bytes]) -> str | None:
    """The text of an entry from the word on in which it differs from those that begin like it: `alike`, in order.

    None if another model wrote it.
    """
    session, tokens, at = call.service.session, place.tokens, bisect_left(alike, place.tokens)
    if session.resting or model != session.engine.name:
        return None
    nearest = [*alike[max(0, at - 1) : at], *alike[at + 1 : at + 2]]
    differs = max((common_tokens(tokens, other) for other in nearest), default=0)
    known, start = token_ids(tokens), max(0, differs - _LEAD_TOKENS)
    with suppress(ValueError, IndexError, RekindleError):
        decode = session.engine.tokenizer.decode
        text, stop = decode(known[start : differs + _LABEL_TOKENS]), len(decode(known[start:differs])) + 1
        word = max(text.rfind(" ", 0, stop), text.rfind("\n", 0, stop)) + 1 if differs else 0
        return ("…" if differs or place.parent else "") + text[word:].strip()
    return None


def _about(call: Call) -> dict[str, Any]:
    session, scope = call.service.session, call.service.scope(call.caller, None)
    remote = session.cache.remote
    found: dict[str, Any] = {}
    found["origins"] = [] if remote is None else [{"url": session.settings.origin, "speed": remote.bytes_per_second}]
    found |= {"answers": [], "idle": [], "idle_actions": [], "idle_on": call.service.idle_thread is not None}
    if session.knowledge.holds(scope.tenant, scope.salt):
        library = session.knowledge.library(scope.tenant, scope.salt)
        with library.reading() as connection:
            rows = connection.execute(
                "SELECT id, question, origin, state, uses, saved FROM answers ORDER BY used DESC, id DESC LIMIT ?",
                (_SHOWN,),
            )
            names = ("id", "question", "origin", "state", "uses", "saved_seconds")
            found["answers"] = [dict(zip(names, row, strict=True)) for row in rows]
        found["idle"] = [asdict(one) for one in summarize_actions(library)]
        found["idle_actions"] = [asdict(one) for one in recent_actions(library, _SHOWN)]
    return found


async def show_usage(call: Call) -> Response:
    """What was computed and spared, by minute for the last hour and by hour for the last month."""
    _check(call)
    usage = call.service.usage
    hour = await call.in_thread(lambda: usage.rows(MINUTE, HOUR))
    month = await call.in_thread(lambda: usage.rows(HOUR, 31 * 24 * HOUR))
    return JSONResponse({"hour": hour, "month": month})


_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@cache
def page_files() -> dict[str, Response]:
    """All files by path; the page itself is at /page/index.html, and `greet` gives it to browsers at /."""
    found = {}
    for file in files(__package__).joinpath("static").iterdir():
        media_type = _TYPES[file.name.rsplit(".", 1)[1]]
        found[f"/page/{file.name}"] = Response(file.read_bytes(), headers=_HEADERS, media_type=media_type)
    return found
