"""The service of one model: its session, admission queue and threads; and what all models of a server share."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from rekindle.core.reply import TextPiece
from rekindle.core.request import Request
from rekindle.core.scope import Scope, scope_of
from rekindle.core.size import keep_alive_seconds, parse_duration
from rekindle.engine.fairness import Requester
from rekindle.errors import Cancelled
from rekindle.machine import home_folder
from rekindle.server.admission_queue import AdmissionQueue
from rekindle.server.auth import ApiKeys, Caller
from rekindle.server.body import ReplyLength
from rekindle.server.client_apps import ClientApps
from rekindle.server.errors import ApiError
from rekindle.server.idle_thread import IdleThread
from rekindle.server.job import ChoiceEvent, Event, Finished, ReplyJob
from rekindle.server.metrics import Metrics
from rekindle.server.recent_requests import RecentRequests, RecordedRequest
from rekindle.server.schema import CacheBody
from rekindle.server.server_log import current_record
from rekindle.server.usage_log import UsageLog
from rekindle.session.ask import Prepared
from rekindle.session.session import Session
from rekindle.settings import ServerSettings, Settings
from rekindle.store import report
from rekindle.text.fill_in import has_fill_in

if TYPE_CHECKING:
    from rekindle.cache.prefix_cache import Prefetch

DEFAULT_PARALLEL = 8
_LAST_TOKEN_SECONDS = 10.0  # for the token that is being computed when the time is up


@dataclass
class Shared:
    """What all models of a server share."""

    settings: ServerSettings
    session_settings: Settings
    keys: ApiKeys
    apps: ClientApps
    metrics: Metrics
    recent: RecentRequests
    idle_thread: IdleThread | None = None
    started: float = field(default_factory=time.time)

    def scope(self, caller: Caller, salt: str | None) -> Scope:
        """The scope of a caller and a salt; None: the server's own salt."""
        return scope_of(self.session_settings, caller.tenant, salt)


class Service:
    """One per model. Used by one event loop; computing happens in threads."""

    def __init__(self, model: str, session: Session, shared: Shared) -> None:
        """`model` is the name that it is served under."""
        settings = shared.settings
        self.model = model
        self.session = session
        self.shared = shared
        session.adapters.loads_known = False  # only the operator decides what is served
        session.cache.owner_asks = False
        self.settings, self.apps, self.metrics, self.scope = settings, shared.apps, shared.metrics, shared.scope
        self.timeout_seconds = parse_duration(settings.timeout)
        places = _places(session)
        self.admission = AdmissionQueue(places, settings.queue, session.shares)
        self.threads = ThreadPoolExecutor(places, thread_name_prefix="rekindle-answer")
        self.side_threads = ThreadPoolExecutor(2, thread_name_prefix="rekindle-side")  # for work without a model
        self.tokenizing = ThreadPoolExecutor(2, thread_name_prefix="rekindle-tokenize")  # seconds for a long text
        self.embedding = ThreadPoolExecutor(2, thread_name_prefix="rekindle-embed")  # a minute for many texts
        self.prefetching = ThreadPoolExecutor(1, thread_name_prefix="rekindle-prefetch")  # slow, too
        self.ingesting = ThreadPoolExecutor(1, thread_name_prefix="rekindle-ingest")  # slow: it must not delay searches
        self.recent, self.usage = shared.recent, _usage_log(session)
        self._tasks: dict[asyncio.Task[None], tuple[Scope, str]] = {}  # scope and app of each request
        self._jobs: set[ReplyJob] = set()  # those that are running

    @property
    def idle_thread(self) -> IdleThread | None:
        """What does idle work."""
        return self.shared.idle_thread

    @cached_property
    def template(self) -> str:
        """The model's chat template; the model may have to be loaded for it, once."""
        with self.session.staying():
            return self.session.engine.tokenizer.template

    @cached_property
    def fills_in(self) -> bool:
        """Whether the model fills in text; it may have to be loaded to find out, once."""
        with self.session.staying():
            return has_fill_in(self.session.engine.tokenizer)

    def load(self) -> None:
        """Load the model, if it rests."""
        with self.session.awake():
            pass

    def reply_length(self) -> ReplyLength:
        """How long replies may be."""
        context, longest = self.session.engine.context_tokens, self.settings.max_reply
        return ReplyLength(context if longest is None else min(context, longest), self.settings.default_reply)

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
        record = self.recent.begin(scope, body.app, self.model, request.adapter, keeps_text=texts)
        record.prepared = prepared if record.keeps_text else None
        return record

    async def answer(
        self, requests: Sequence[Request], caller: Caller, body: CacheBody, prepared: Prepared | None = None
    ) -> AsyncGenerator[ChoiceEvent, None]:
        """The events of the requests until all are finished. Closing the generator stops the work.

        Raises what the session raises, and `ApiError` if the queue is full or it takes too long to begin. Replies that
        are being written when the time is up end with what they have.
        """
        turn = self.turn(caller, body)
        queue: asyncio.Queue[ChoiceEvent | BaseException] = asyncio.Queue()
        watches = bool(getattr(body, "return_progress", None) and getattr(body, "stream", None))
        jobs = [ReplyJob(self.session, request, turn, watches=watches) for request in requests]
        writing = False

        def time_is_up() -> None:
            for job in jobs:
                job.end()
            if not writing:
                queue.put_nowait(late)

        # Not `wait_for`: cancelled at the moment an event arrives, it would swallow the cancellation.
        loop, limit, late = asyncio.get_running_loop(), self.timeout_seconds, too_late(self.timeout_seconds)
        timers = [
            loop.call_later(limit, time_is_up),
            loop.call_later(limit + _LAST_TOKEN_SECONDS, queue.put_nowait, late),
        ]
        tasks = [
            asyncio.create_task(self._follow(number, job, turn, self.begin(job.request, caller, body, prepared), queue))
            for number, job in enumerate(jobs)
        ]
        left = len(tasks)
        try:
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                writing = writing or isinstance(item.event, TextPiece)
                left -= isinstance(item.event, Finished)
                yield item
        finally:
            for timer in timers:
                timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(
        self,
        number: int,
        job: ReplyJob,
        turn: Requester,
        record: RecordedRequest,
        queue: asyncio.Queue[ChoiceEvent | BaseException],
    ) -> None:
        arrived, access = time.perf_counter(), current_record()
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = record.owner
        if self.idle_thread is not None:  # stop idle work before this request starts
            self.idle_thread.arrive(job.request)
        prefetch = None
        try:
            prefetch = self._prefetch(job.request, turn)
            async with self.admission.place(turn):
                if prefetch is not None:
                    prefetch.end()
                waited = time.perf_counter() - arrived
                record.enter("lookup")

                def pass_on(event: Event) -> None:
                    access.add(event)
                    self.metrics.record(record.scope, event, waited)
                    queue.put_nowait(ChoiceEvent(number, event))
                    self.record(record, event)
                    if prefetch is not None and isinstance(event, TextPiece):  # its prompt is in the engine
                        prefetch.close()

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
                prefetch.close()
            if self.idle_thread is not None:
                self.idle_thread.leave()

    def record(self, record: RecordedRequest, event: Event) -> None:
        """Note an event of a request for the page."""
        self.recent.take(record, event)
        if isinstance(event, Finished) and self.settings.page and self.usage.count(event.reply):
            self.side_threads.submit(self.usage.flush)

    def _prefetch(self, request: Request, turn: Requester) -> _QueuedPrefetch | None:
        """Start bringing a queued request's prompt KV from an origin and from disk; None if it does not wait."""
        if self.session.cache.store is None or self.admission.is_free(turn):
            return None
        return _QueuedPrefetch(self.session, request, self.prefetching)

    def kill(self, scope: Scope, app: str) -> int:
        """Stop all requests of an app, queued ones too, and return their number."""
        own = [task for task, owner in self._tasks.items() if owner == (scope, app)]
        for task in own:
            task.cancel()
        return len(own)

    def cancel(self) -> None:
        """Stop all requests, queued ones too."""
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        """Stop all work, keep computed KV, free the model."""
        for job in list(self._jobs):
            job.cancel()
        self.threads.shutdown(wait=True)
        if self.settings.page:
            self.usage.flush()
        for threads in (self.side_threads, self.tokenizing, self.embedding, self.prefetching, self.ingesting):
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


def _places(session: Session) -> int:
    """The number of requests answered at the same time."""
    if session.settings.deterministic and session.engine.capabilities.crowded:
        return 1  # other rows in the batch would change the last bits
    return session.settings.parallel or DEFAULT_PARALLEL


def too_late(limit: float) -> ApiError:
    """The error of a request that took longer than `limit` seconds."""
    return ApiError(
        504, f"The request took longer than {limit:g} s. Ask for less, or start the server with a longer --timeout."
    )


class _QueuedPrefetch:
    """The prefetch of a queued request, in a thread of `threads`."""

    def __init__(self, session: Session, request: Request, threads: ThreadPoolExecutor) -> None:
        self._ended = threading.Event()
        self._future = threads.submit(session.prefetch, request, self._ended.is_set)

    def end(self) -> None:
        """The request has its turn: bring nothing more. What is here stays for it until `close`."""
        self._ended.set()
        if not self._future.done():  # too late
            self.close()

    def close(self) -> None:
        """The request has begun or was given up: release what was brought, now or once its thread ends. Idempotent."""
        self._ended.set()
        self._future.cancel()
        self._future.add_done_callback(_release)


def _release(prefetch: Future[Prefetch]) -> None:
    if not prefetch.cancelled() and prefetch.exception() is None:
        prefetch.result().close()
