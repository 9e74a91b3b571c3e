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
from rekindle.server.auth import NOBODY, Caller, OriginGuard
from rekindle.server.body import parse, salt_of, salt_of_refused
from rekindle.server.call import PLAN_HEADER, Call
from rekindle.server.errors import ApiError, api_error_of
from rekindle.server.event_stream import ClientGone
from rekindle.server.openapi import docs_page, openapi_document
from rekindle.server.page.static_files import page_files
from rekindle.server.routes import ENDPOINTS, Endpoint, protocol_of
from rekindle.server.service import Service

_MAX_PARTS = 100_000  # lists, objects and fields of a body; they parse in a fraction of a second
_CLOSED_REQUEST = 499  # the client is gone and does not read it


def make_app(service: Service) -> Starlette:
    """The ASGI application of a service; it closes the service when it stops."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.get_running_loop().run_in_executor(None, service.close)

    routes = [_route(path, service) for path in dict.fromkeys(endpoint.path for endpoint in ENDPOINTS)]
    description, shown = _description()
    pages = {"/openapi.json": JSONResponse(description), "/docs": HTMLResponse(shown)}
    if service.settings.page:
        pages |= page_files()
    routes += [Route(path, _static(response)) for path, response in pages.items()]

    def refused(path: str, problem: ApiError) -> Response:
        service.metrics.failed(Scope(NOBODY), problem.outcome)
        return protocol_of(path).error_response(problem)

    middleware = [Middleware(OriginGuard, settings=service.settings, refused=refused, pages=("/", *pages))]
    if service.settings.cors_origin:
        allowed, exposed = list(service.settings.cors_origin), [PLAN_HEADER, "Retry-After"]
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=allowed,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=exposed,
            ),
        )
    handlers = {HTTPException: _not_found, Exception: _failed}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)  # type: ignore[arg-type]
    app.state.service = service
    return app


@cache
def _description() -> tuple[dict[str, Any], str]:
    """What the server offers, for programs and for people: made once, it takes a moment."""
    return openapi_document(ENDPOINTS), docs_page(ENDPOINTS)


def _route(path: str, service: Service) -> Route:
    """One route for all methods of a path, so that another method gets 405 with the allowed ones."""
    handlers = {e.method: _handler(e, service) for e in ENDPOINTS if e.path == path}

    async def handle(http: HttpRequest) -> Response:
        return await handlers["GET" if http.method == "HEAD" else http.method](http)

    return Route(path, handle, methods=list(handlers))


def _handler(endpoint: Endpoint, service: Service) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handle(http: HttpRequest) -> Response:
        call = Call(http, service, Caller(NOBODY), protocol=endpoint.protocol)
        try:
            call = replace(call, caller=_identify(http, service, endpoint))
            if endpoint.body is None:
                call = replace(call, salt=salt_of(None, http.query_params))
                return await endpoint.answer(call)
            sent = _checked(await _read(http, service))
            try:
                body = parse(endpoint.body, sent)
            except ApiError:
                call = replace(call, salt=salt_of_refused(sent))
                raise
            call = replace(call, salt=salt_of(body, http.query_params))
            return await endpoint.answer(call, body)
        except (ClientGone, ClientDisconnect):
            service.metrics.failed(call.scope, "disconnected")
            return Response(status_code=_CLOSED_REQUEST)
        except Exception as error:  # noqa: BLE001  (whatever it was, the client gets an error, and others are served)
            problem = api_error_of(error)
            service.metrics.failed(call.scope, problem.outcome)
            return endpoint.protocol.error_response(problem)

    return handle


def _static(response: Response) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handle(_: HttpRequest) -> Response:
        return response

    return handle


def _identify(http: HttpRequest, service: Service, endpoint: Endpoint) -> Caller:
    caller = service.keys.identify(http.headers.get("authorization"), http.headers.get("x-api-key"))
    if caller is None and endpoint.open:
        return Caller(NOBODY)
    if caller is None:
        raise ApiError(
            401, "Send an API key that this server knows: Authorization: Bearer KEY.", code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
    return caller


async def _read(http: HttpRequest, service: Service) -> bytes:
    """The body. Raises `ApiError` if it is too large or too slow."""
    too_large = ApiError(413, f"The body is larger than {service.body_bytes:,} bytes. Send less.", code="too_large")
    length = http.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > service.body_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    stream = http.stream()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + service.client_seconds
    while True:
        try:
            part = await asyncio.wait_for(anext(stream, None), max(0.0, deadline - loop.time()))
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"The body did not come within {service.client_seconds:g} s.", headers={"Connection": "close"}
            ) from None
        if part is None:
            return b"".join(parts)
        size += len(part)
        if size > service.body_bytes:
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
    advice = "GET /docs lists what there is."
    problem = ApiError(error.status_code, f"{error.detail}. {advice}", headers=error.headers)
    return protocol_of(http.url.path).error_response(problem)


async def _failed(http: HttpRequest, error: Exception) -> Response:
    return protocol_of(http.url.path).error_response(api_error_of(error))
