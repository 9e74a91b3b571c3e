"""One API call: the HTTP request, its caller, and helpers that endpoints share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from rekindle.cache.prefill import IsCancelled
from rekindle.core.request import Message, Request
from rekindle.core.scope import Scope
from rekindle.errors import ContextOverflow
from rekindle.server.auth import Caller
from rekindle.server.canonical import canonical_request
from rekindle.server.errors import ApiError
from rekindle.server.host import Host
from rekindle.server.protocol import OPENAI, WireProtocol, until_disconnect
from rekindle.server.schema import CacheBody, RequestBody
from rekindle.server.server_log import current_record
from rekindle.server.service import Service, too_late
from rekindle.session.prompt import template_options
from rekindle.text.base import cancellable

_Result = TypeVar("_Result")
PAGE = 100
MAX_PAGE = 1000
PLAN_HEADER = "X-Rekindle-Plan"


@dataclass(frozen=True)
class Page:
    """The requested part of a list: `limit` items after the one named `after`."""

    limit: int
    after: str


@dataclass(frozen=True)
class Call:
    """What an endpoint gets besides the body."""

    http: HttpRequest
    host: Host
    caller: Caller
    salt: str | None = None  # from the body or the query
    protocol: WireProtocol = OPENAI
    opened: Service | None = None

    @property
    def service(self) -> Service:
        """That of the model which the call names: for endpoints that need one."""
        assert self.opened is not None
        return self.opened

    @property
    def scope(self) -> Scope:
        """The caller's tenant, and the salt of the call."""
        return self.host.shared.scope(self.caller, self.salt)

    @property
    def stats_scope(self) -> Scope | None:
        """The scope of statistics: the call's own; None (everybody's) for an operator who names no salt."""
        return None if self.caller.operator and self.salt is None else self.scope

    def adapter_of(self, name: str | None) -> str:
        """The adapter that a model name stands for, "" for the base model. Raises `ApiError` 404 for unknown names."""
        return self.host.resolve(name).adapter

    def canonical(self, request: Request) -> tuple[Request, list[str]]:
        """The request without what no model should read, and the names of that."""
        return canonical_request(request, self.host.shared.settings.canonical)

    def ignored(self, body: RequestBody) -> list[str]:
        """The request fields that were ignored, for everybody or for this caller."""
        barred = isinstance(body, CacheBody) and body.keep_alive is not None and not self.caller.operator
        return sorted([*body.ignored(), *(["keep_alive"] if barred else [])])

    def check_tokens(self, prompt: object) -> None:
        """Raises `ContextOverflow` for more token ids than the context holds."""
        context = self.service.session.engine.context_tokens
        if isinstance(prompt, list) and len(prompt) > context:
            raise ContextOverflow(len(prompt), context, "Send fewer.")

    def require_operator(self) -> None:
        """Raises `ApiError` 403 unless the caller is an operator."""
        if not self.caller.operator:
            raise ApiError(403, "This concerns all tenants: use an --admin-key.", code="operator_only")

    def page(self) -> Page:
        """`limit` and `after` of the query. Raises `ApiError` 400."""
        query = self.http.query_params
        limit = query.get("limit", str(PAGE))
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_PAGE):
            raise ApiError(400, f"limit is a number from 1 to {MAX_PAGE}.", param="limit")
        return Page(int(limit), query.get("after", ""))

    async def in_thread(
        self, work: Callable[[], _Result], threads: Executor | None = None, limit_seconds: float | None = None
    ) -> _Result:
        """Run something in a thread. Raises `ClientGone` as soon as the client disconnects, and `TimeoutError`.

        Work that has not begun is then cancelled; work that has begun continues.
        """
        threads = threads or (None if self.opened is None else self.opened.side_threads)
        working = asyncio.get_running_loop().run_in_executor(threads, work)

        async def done() -> _Result:
            return await working

        return await until_disconnect(self.http.receive, done(), limit_seconds)

    async def within_time(self, work: Callable[[IsCancelled], _Result], threads: Executor) -> _Result:
        """The same within the time that a request may take. Raises `ApiError` 504, and `ClientGone`; `work` can ask."""
        ended = threading.Event()
        try:
            return await self.in_thread(lambda: work(ended.is_set), threads, self.service.timeout_seconds)
        except TimeoutError:
            raise too_late(self.service.timeout_seconds) from None
        finally:
            ended.set()

    async def tokenized(self, work: Callable[[], _Result]) -> _Result:
        """Run something that renders or tokenizes, as `within_time`: long texts must not delay other side work."""

        def cancellable_work(is_cancelled: IsCancelled) -> _Result:
            with cancellable(is_cancelled):
                return work()

        return await self.within_time(cancellable_work, self.service.tokenizing)

    async def encode_chat(self, request: Request, *, token_limit: int | None = None) -> list[int]:
        """The tokens of a chat as the model reads it."""
        messages = [message for message in request.prompt if isinstance(message, Message)]
        session = self.service.session

        def encode() -> list[int]:
            with session.staying():
                return session.engine.tokenizer.encode_chat(messages, **template_options(request, token_limit))

        return await self.tokenized(encode)

    async def template(self) -> str:
        """The model's chat template."""
        return await self.in_thread(lambda: self.service.template)

    def failed(self, outcome: str) -> None:
        """Count a request that ended without a reply: disconnected, 4xx, 5xx."""
        current_record().outcome = outcome
        self.host.shared.metrics.failed(self.scope, outcome)
