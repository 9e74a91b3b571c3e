"""The service behind the API: one session, its admission queue, threads, metrics and apps."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from rekindle.core.request import Request
from rekindle.core.scope import Scope, scope_of
from rekindle.core.size import keep_alive_seconds, parse_duration, parse_limit
from rekindle.engine.fairness import Requester
from rekindle.errors import Cancelled
from rekindle.idle.idle import IdleOptions
from rekindle.idle.worker import Budget, IdleConditions
from rekindle.machine import home_folder
from rekindle.server.admission_queue import AdmissionQueue
from rekindle.server.auth import ApiKeys, Caller
from rekindle.server.client_apps import ClientApps
from rekindle.server.errors import ApiError
from rekindle.server.idle_thread import IdleThread
from rekindle.server.job import ChoiceEvent, Event, Finished, ReplyJob
from rekindle.server.metrics import Metrics
from rekindle.server.model_names import ModelNames
from rekindle.server.recent_requests import RecentRequests, RecordedRequest
from rekindle.server.schema import CacheBody
from rekindle.server.usage_log import UsageLog
from rekindle.session.ask import Prepared
from rekindle.session.session import Session
from rekindle.settings import ServerSettings
from rekindle.store import report

if TYPE_CHECKING:
    from rekindle.cache.prefix_cache import Prefetch

DEFAULT_PARALLEL = 8


class Service:
    """One per server. Used by one event loop; computing happens in threads."""

    def __init__(
        self, session: Session, settings: ServerSettings, keys: ApiKeys, idle: IdleOptions | None = None
    ) -> None:
        """`idle` replaces the idle work that the settings say."""
        self.session = session
        session.adapters.loads_known = False  # only the operator decides what is served
        session.cache.owner_asks = False
        self.settings = settings
        self.keys = keys
        self.body_bytes = parse_limit(settings.max_body, "max_body").resolve(0)
        self.client_seconds = parse_duration(settings.client_timeout)
        self._timeout_seconds = parse_duration(settings.timeout)
        self.started = time.time()
        places = _places(session)
        self.line = AdmissionQueue(places, settings.queue, session.shares)
        self.threads = ThreadPoolExecutor(places, thread_name_prefix="rekindle-answer")
        self.side_threads = ThreadPoolExecutor(2, thread_name_prefix="rekindle-side")  # for work without a model
        self.ingesting = ThreadPoolExecutor(1, thread_name_prefix="rekindle-ingest")  # slow: it must not delay searches
        self.apps = ClientApps()
        self.names = ModelNames(self.model, settings.alias)
        self.metrics = Metrics(session, self.line)
        self.recent = RecentRequests() if settings.page else RecentRequests(max_rows=0)
        self.usage = _usage_log(session)
        self.stopping: Callable[[], bool] = lambda: False  # whether streams without an end shall end
        if idle is None and settings.idle:
            idle = _idle_options(settings)
        self.idle_thread = None if idle is None else IdleThread(session, idle, parse_duration(settings.quiet))
        self._tasks: dict[asyncio.Task[None], tuple[Scope, str]] = {}  # scope and app of each request
        self._jobs: set[ReplyJob] = set()  # those that are running

    @property
    def model(self) -> str:
        """The name of the model that is served."""
        return self.session.engine.name

    def scope(self, caller: Caller, salt: str | None) -> Scope:
        """The scope of a caller and a salt; None: the server's own salt."""
        return scope_of(self.session.settings, caller.tenant, salt)

    def token_limit(self) -> int:
        """The longest reply."""
        context = self.session.engine.context_tokens
        return context if self.settings.max_reply is None else min(context, self.settings.max_reply)

    def turn(self, caller: Caller, body: CacheBody) -> Requester:
        """The app of a request and its priority."""
        if body.keep_alive is not None and caller.operator:
            self.session.stay(keep_alive_seconds(body.keep_alive))
        app = self.apps.record(self.scope(caller, body.cache_salt), body.app, body.app_state)
        app.requests += 1
        return Requester(f"{caller.tenant}/{app.id}", background=app.state == "background")

    def begin(
        self, request: Request, caller: Caller, body: CacheBody, prepared: Prepared | None = None
    ) -> RecordedRequest:
        """Begin to record a request for the page; `prepared` if its passages were found."""
        scope = self.scope(caller, body.cache_salt)
        texts = caller.operator and scope.salt == self.session.settings.cache_salt
        record = self.recent.begin(scope, body.app, request.adapter or self.model, keeps_text=texts)
        record.prepared = prepared if record.keeps_text else None
        return record

    async def answer(
        self, requests: Sequence[Request], caller: Caller, body: CacheBody, prepared: Prepared | None = None
    ) -> AsyncGenerator[ChoiceEvent, None]:
        """The events of the requests until all are finished. Closing the generator stops the work.

        Raises what the session raises, and `ApiError` if the queue is full or it takes too long.
        """
        turn = self.turn(caller, body)
        queue: asyncio.Queue[ChoiceEvent | BaseException] = asyncio.Queue()
        # Not `wait_for`: cancelled at the moment an event arrives, it would swallow the cancellation.
        late = asyncio.get_running_loop().call_later(
            self._timeout_seconds, queue.put_nowait, _too_late(self._timeout_seconds)
        )
        tasks = [
            asyncio.create_task(self._follow(number, request, turn, record, queue))
            for number, request in enumerate(requests)
            for record in [self.begin(request, caller, body, prepared)]
        ]
        left = len(tasks)
        try:
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                left -= isinstance(item.event, Finished)
                yield item
        finally:
            late.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(
        self,
        number: int,
        request: Request,
        turn: Requester,
        record: RecordedRequest,
        queue: asyncio.Queue[ChoiceEvent | BaseException],
    ) -> None:
        arrived = time.perf_counter()
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = record.owner
        if self.idle_thread is not None:  # stop idle work before this request starts
            self.idle_thread.arrive(request)
        prefetch = None
        try:
            prefetch = self._prefetch(request, turn)
            async with self.line.place(turn):
                if prefetch is not None and not prefetch.done():  # too late
                    prefetch.cancel()
                    prefetch.add_done_callback(_drop)
                waited = time.perf_counter() - arrived
                record.enter("lookup")

                def pass_on(event: Event) -> None:
                    self.metrics.record(record.scope, event, waited)
                    queue.put_nowait(ChoiceEvent(number, event))
                    self.record(record, event)

                job = ReplyJob(self.session, request, turn)
                self._jobs.add(job)
                try:
                    await job.run(self.threads, pass_on)
                finally:
                    self._jobs.discard(job)
        except asyncio.CancelledError:  # killed; or the reader is gone, then nobody gets this either
            queue.put_nowait(Cancelled("The request was cancelled."))
            record.enter("cancelled")
            raise
        except Exception as error:  # noqa: BLE001  (raised again by the reader)
            queue.put_nowait(error)
            record.enter("failed", type(error).__name__)
        finally:
            del self._tasks[task]
            if prefetch is not None:
                prefetch.add_done_callback(_drop)
            if self.idle_thread is not None:
                self.idle_thread.leave()

    def record(self, record: RecordedRequest, event: Event) -> None:
        """Note an event of a request for the page."""
        self.recent.take(record, event)
        if isinstance(event, Finished) and self.settings.page and self.usage.count(event.reply):
            self.side_threads.submit(self.usage.flush)

    def _prefetch(self, request: Request, turn: Requester) -> Future[Prefetch | None] | None:
        """Start fetching a queued request's prompt KV from the origin."""
        if self.session.cache.remote is None or self.line.is_free(turn):
            return None
        return self.side_threads.submit(self.session.prefetch, request)

    def kill(self, scope: Scope, app: str) -> int:
        """Stop all requests of an app, queued ones too, and return their number."""
        own = [task for task, owner in self._tasks.items() if owner == (scope, app)]
        for task in own:
            task.cancel()
        return len(own)

    def close(self) -> None:
        """Stop all work, keep computed KV, free the model."""
        for job in list(self._jobs):
            job.cancel()
        if self.idle_thread is not None:
            self.idle_thread.close()
        self.threads.shutdown(wait=True)
        if self.settings.page:
            self.usage.flush()
        for threads in (self.side_threads, self.ingesting):
            threads.shutdown(wait=False, cancel_futures=True)
        self.session.close()


def _usage_log(session: Session) -> UsageLog:
    """The log of the cache folder; without one, nothing is written."""
    store = session.cache.store
    if store is None:
        return UsageLog(None)
    name = hashlib.blake2b(str(store.disk.folder).encode(), digest_size=8).hexdigest()

    def measure() -> Mapping[str, float]:
        with suppress(OSError, sqlite3.Error):
            evicted = {f"evicted.{reason}": count for reason, count in store.disk.room.evicted_bytes.items()}
            return {"bytes.memory": store.memory.size_bytes, "bytes.disk": report.used_bytes(store.disk), **evicted}
        return {}

    return UsageLog(home_folder() / "usage" / f"{name}.db", measure)


def _idle_options(settings: ServerSettings) -> IdleOptions:
    """The idle work that the settings say. Raises `InvalidSetting`."""
    seconds = None if settings.idle_seconds is None else parse_duration(settings.idle_seconds)
    return IdleOptions(
        stride=settings.idle_stride,
        rounds=settings.idle_rounds,
        seconds_per_hit=parse_duration(settings.idle_per_hit),
        sources=settings.idle_sources,
        settle_seconds=parse_duration(settings.idle_settle),
        warm_passages=settings.idle_passages,
        budget=Budget(seconds, settings.idle_tflop, settings.idle_joules),
        conditions=IdleConditions(settings.idle_load, settings.on_battery),
        calibrate_seconds=0.0 if settings.idle_calibrate is None else parse_duration(settings.idle_calibrate),
    )


def _places(session: Session) -> int:
    """The number of requests answered at the same time."""
    if session.settings.deterministic and session.engine.capabilities.crowded:
        return 1  # other rows in the batch would change the last bits
    return session.settings.parallel or DEFAULT_PARALLEL


def _too_late(limit: float) -> ApiError:
    return ApiError(
        504, f"The request took longer than {limit:g} s. Ask for less, or start the server with a longer --timeout."
    )


def _drop(prefetch: Future[Prefetch | None]) -> None:
    """Release a prefetch whose request has begun or was given up, whatever its outcome."""
    if not prefetch.cancelled() and prefetch.exception() is None and (prefetched := prefetch.result()) is not None:
        prefetched.close()
