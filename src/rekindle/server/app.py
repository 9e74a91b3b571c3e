"""The server as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from rekindle.run.session import Session
from rekindle.server.asked import parse
from rekindle.server.call import Call
from rekindle.server.keys import Caller
from rekindle.server.openapi import document, page
from rekindle.server.problem import Problem, problem_of
from rekindle.server.replies import PLAN_HEADER
from rekindle.server.routes import ENDPOINTS, Endpoint
from rekindle.server.service import Service
from rekindle.server.settings import ServerSettings
from rekindle.server.stream import Gone

_CLOSED_REQUEST = 499  # nobody reads it: the client is gone


def make_app(session: Session, settings: ServerSettings | None = None) -> Starlette:
    """An application that answers for a session, and closes it when it stops."""
    service = Service(session, settings or ServerSettings())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.get_running_loop().run_in_executor(None, service.close)

    routes = [_route(path, service) for path in dict.fromkeys(endpoint.path for endpoint in ENDPOINTS)]
    routes += [
        Route("/openapi.json", _static(service, JSONResponse(document(ENDPOINTS)))),
        Route("/docs", _static(service, HTMLResponse(page(ENDPOINTS)))),
    ]
    middleware = []
    if service.settings.origins:
        allowed, told = list(service.settings.origins), [PLAN_HEADER, "Retry-After"]
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=allowed,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=told,
            )
        )
    handlers = {HTTPException: _not_found, Exception: _failed}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)  # type: ignore[arg-type]
    app.state.service = service
    return app


def _route(path: str, service: Service) -> Route:
    """All methods of a path: whoever comes with another one is told which there are."""
    handlers = {e.method: _handler(e, service) for e in ENDPOINTS if e.path == path}

    async def handle(http: HttpRequest) -> Response:
        return await handlers["GET" if http.method == "HEAD" else http.method](http)

    return Route(path, handle, methods=list(handlers))


def _handler(endpoint: Endpoint, service: Service) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handle(http: HttpRequest) -> Response:
        caller = Caller("nobody")
        try:
            _check_host(http, service.settings)
            caller = _identify(http, service, endpoint)
            call = Call(http, service, caller)
            if endpoint.body is None:
                return await endpoint.answer(call)
            body = parse(endpoint.body, await _read(http, service.settings))
            return await endpoint.answer(call, body)
        except (Gone, ClientDisconnect):
            service.metrics.failed(caller.tenant, "gone")
            return Response(status_code=_CLOSED_REQUEST)
        except Exception as error:  # noqa: BLE001  (whatever it was: the client is told, and others are served)
            problem = problem_of(error)
            service.metrics.failed(caller.tenant, problem.outcome)
            return problem.response()

    return handle


def _static(service: Service, response: Response) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handle(http: HttpRequest) -> Response:
        try:
            _check_host(http, service.settings)
        except Problem as problem:
            return problem.response()
        return response

    return handle


def _check_host(http: HttpRequest, settings: ServerSettings) -> None:
    hosts = settings.hosts
    if hosts is None:
        return
    given = http.headers.get("host", "").lower()
    name = given.rsplit(":", 1)[0] if not given.endswith("]") else given
    if name not in hosts:
        raise Problem(
            403,
            f"The name {name[:100]!r} is not answered here. Start the server with --allowed-hosts.",
            code="bad_host",
        )


def _identify(http: HttpRequest, service: Service, endpoint: Endpoint) -> Caller:
    caller = service.settings.keys.identify(http.headers.get("authorization"))
    if caller is None and endpoint.open:
        return Caller("nobody")
    if caller is None:
        raise Problem(
            401, "Send an API key that this server knows: Authorization: Bearer KEY.", code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
    return caller


async def _read(http: HttpRequest, settings: ServerSettings) -> bytes:
    """The body, if it is not too large and comes in time."""
    too_large = Problem(413, f"The body is larger than {settings.body_bytes:,} bytes. Send less.", code="too_large")
    length = http.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > settings.body_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    stream = http.stream()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.idle_seconds
    while True:
        try:
            part = await asyncio.wait_for(anext(stream, None), max(0.0, deadline - loop.time()))
        except asyncio.TimeoutError:
            raise Problem(
                408, f"The body did not come within {settings.idle_seconds:g} s.", headers={"Connection": "close"}
            ) from None
        if part is None:
            return b"".join(parts)
        size += len(part)
        if size > settings.body_bytes:
            raise too_large
        parts.append(part)


async def _not_found(_: HttpRequest, error: HTTPException) -> Response:
    advice = "GET /docs lists what there is."
    return Problem(error.status_code, f"{error.detail}. {advice}", headers=error.headers).response()


async def _failed(_: HttpRequest, error: Exception) -> Response:
    return problem_of(error).response()
