"""The server as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from rekindle.core.scope import Scope
from rekindle.server.auth import NOBODY, AnsweredHosts, Caller, OriginGuard
from rekindle.server.body import parse, salt_of, salt_of_refused
from rekindle.server.call import PLAN_HEADER, Call
from rekindle.server.errors import ApiError, api_error_of
from rekindle.server.host import Host
from rekindle.server.openapi import docs_page, openapi_document
from rekindle.server.page.views import page_files
from rekindle.server.protocol import ClientGone
from rekindle.server.routes import ENDPOINTS, Endpoint, protocol_of, where_to_go
from rekindle.server.schema import RequestBody
from rekindle.server.server_log import RequestLogger, current_record
from rekindle.server.service import Service

_MAX_PARTS = 100_000  # lists, objects and fields of a body; they parse in a fraction of a second
_SOON = {"Retry-After": "5", "Connection": "close"}
_CLOSED_REQUEST = 499  # the client is gone and does not read it


def make_app(host: Host) -> Starlette:
    """The ASGI application of a server; it closes the models when it stops."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.get_running_loop().run_in_executor(None, host.close)

    settings = host.shared.settings
    routes = [_route(path, host) for path in dict.fromkeys(path for one in ENDPOINTS for path in one.paths)]
    description, shown = _description()
    pages = {"/openapi.json": JSONResponse(description), "/docs": HTMLResponse(shown)}
    if settings.page:
        pages |= page_files()
    routes += [Route(path, _static(response)) for path, response in pages.items()]

    def refused(path: str, problem: ApiError) -> Response:
        host.shared.metrics.failed(Scope(NOBODY), problem.outcome)
        return protocol_of(path).error_response(problem)

    hosts = AnsweredHosts.of(settings, host.shared.keys)
    middleware = [Middleware(OriginGuard, settings=settings, hosts=hosts, refused=refused, pages=("/", *pages))]
    if settings.cors_origin:
        allowed: dict[str, Any] = {"allow_origins": list(settings.cors_origin), "allow_methods": ["*"]}
        allowed |= {"allow_headers": ["*"], "expose_headers": [PLAN_HEADER, "Retry-After"]}
        middleware.insert(0, Middleware(CORSMiddleware, **allowed))
    middleware.insert(0, Middleware(RequestLogger, running=host.calls, is_stopping=lambda: host.stopping))
    handlers = {HTTPException: _not_found, Exception: _failed}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)  # type: ignore[arg-type]
    app.state.host = host
    return app


@cache
def _description() -> tuple[dict[str, Any], str]:
    """What the server offers, for programs and for people: made once, it takes a moment."""
    return openapi_document(ENDPOINTS), docs_page(ENDPOINTS)


def _route(path: str, host: Host) -> Route:
    """One route for all methods of a path, so that another method gets 405 with the allowed ones."""
    handlers = {e.method: _handler(e, host) for e in ENDPOINTS if path in e.paths}

    async def handle(http: HttpRequest) -> Response:
        return await handlers["GET" if http.method == "HEAD" else http.method](http)

    return Route(path, handle, methods=list(handlers))


def _handler(endpoint: Endpoint, host: Host) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handle(http: HttpRequest) -> Response:
        call = Call(http, host, Caller(NOBODY), protocol=endpoint.protocol)
        try:
            if host.stopping:
                raise ApiError(503, "The server is stopping. Try again soon.", headers=_SOON)
            call = replace(call, caller=_identify(http, host, endpoint))
            current_record().tenant, current_record().operator = call.caller.tenant, call.caller.operator
            body: RequestBody | None = None
            if endpoint.body is not None:
                sent = _checked(await _read(http, host))
                try:
                    body = parse(endpoint.body, sent)
                except ApiError:
                    call = replace(call, salt=salt_of_refused(sent))
                    raise
            call = replace(call, salt=salt_of(body, http.query_params))
            call = replace(call, opened=await _service(call, endpoint, body))
            return await (endpoint.answer(call) if body is None else endpoint.answer(call, body))
        except (ClientGone, ClientDisconnect):
            call.failed("disconnected")
            return Response(status_code=_CLOSED_REQUEST)
        except Exception as error:  # noqa: BLE001  (whatever it was, the client gets an error, and others are served)
            problem = api_error_of(error, endpoint.prompt_field)
            call.failed(problem.outcome)
            return endpoint.protocol.error_response(problem)

    return handle


async def _service(call: Call, endpoint: Endpoint, body: RequestBody | None) -> Service | None:
    """The service that an endpoint needs. Raises `ApiError` 404 for a model that is not served."""
    if endpoint.needs == "nothing":
        return None
    named = getattr(body, "model", None) if endpoint.needs == "model" else None
    model = call.host.models[call.host.resolve(named).model]
    return await call.host.service_of(model, call.http.receive)


def _static(response: Response) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handle(_: HttpRequest) -> Response:
        return response

    return handle


def _identify(http: HttpRequest, host: Host, endpoint: Endpoint) -> Caller:
    caller = host.shared.keys.identify(http.headers.get("authorization"), http.headers.get("x-api-key"))
    if caller is None and endpoint.open:
        return Caller(NOBODY)
    if caller is None:
        raise ApiError(
            401, "Send an API key that this server knows: Authorization: Bearer KEY.", code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
    return caller


async def _read(http: HttpRequest, host: Host) -> bytes:
    """The body. Raises `ApiError` if it is too large or too slow."""
    too_large = ApiError(413, f"The body is larger than {host.body_bytes:,} bytes. Send less.", code="too_large")
    length = http.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > host.body_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    stream = http.stream()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + host.client_seconds
    while True:
        try:
            part = await asyncio.wait_for(anext(stream, None), max(0.0, deadline - loop.time()))
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"The body did not come within {host.client_seconds:g} s.", headers={"Connection": "close"}
            ) from None
        if part is None:
            return b"".join(parts)
        size += len(part)
        if size > host.body_bytes:
            raise too_large
        parts.append(part)


def _checked(body: bytes) -> bytes:
    """The body, unless parsing it would take long, which blocks the event loop: a list costs as much as 100 characters.

    Raises `ApiError` 400.
    """
    if _count(body) > _MAX_PARTS:
        outside_texts = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
        if _count(outside_texts) > _MAX_PARTS:
            message = f"The body has more than {_MAX_PARTS:,} lists, objects and fields, or {16 * _MAX_PARTS:,} values."
            raise ApiError(400, f"{message} Send less.", code="too_large")
    return body


def _count(body: bytes) -> int:
    """Number of lists, objects and fields; sixteen plain values count as one."""
    return body.count(b"[") + body.count(b"{") + body.count(b":") + body.count(b",") // 16


async def _not_found(http: HttpRequest, error: HTTPException) -> Response:
    path = http.url.path
    message = where_to_go(path) if error.status_code == 404 else f"{error.detail}. GET /docs lists what there is."
    problem = ApiError(error.status_code, message, headers=error.headers)
    return protocol_of(http.url.path).error_response(problem)


async def _failed(http: HttpRequest, error: Exception) -> Response:
    return protocol_of(http.url.path).error_response(api_error_of(error))
