"""What answers: one session, and the line in front of it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rekindle.core.request import Request
from rekindle.core.size import parse_duration
from rekindle.errors import Cancelled, InvalidSetting
from rekindle.run.session import Session
from rekindle.run.turn import Turn
from rekindle.server.apps import Apps
from rekindle.server.embeddings import Embeddings
from rekindle.server.idle import Idler
from rekindle.server.job import Event, Finished, Job
from rekindle.server.keys import Caller
from rekindle.server.line import Line
from rekindle.server.metrics import Metrics
from rekindle.server.problem import Problem
from rekindle.server.schema import Cached
from rekindle.server.settings import DEFAULT_PARALLEL, ServerSettings

if TYPE_CHECKING:
    from rekindle.run.streams import Prefetched


@dataclass(frozen=True)
class Happened:
    """Something happened to the choice of that number."""

    choice: int
    event: Event


class Service:
    """One for each server. Used by one event loop; what computes does so in threads."""

    def __init__(self, session: Session, settings: ServerSettings) -> None:
        self.session = session
        session.adapters.loads_known = False  # what is served is said by whoever runs the server
        self.settings = settings
        self.started = time.time()
        places = _places(session)
        self.line = Line(places, settings.queue, session.shares)
        self.threads = ThreadPoolExecutor(places, thread_name_prefix="rekindle-answer")
        self.aside = ThreadPoolExecutor(2, thread_name_prefix="rekindle-aside")  # for what asks no model
        self.ingesting = ThreadPoolExecutor(1, thread_name_prefix="rekindle-ingest")  # long: questions go past it
        self.apps = Apps()
        self.embeddings = Embeddings(session)
        self.metrics = Metrics(self)
        self.idler = None if settings.ahead is None else Idler(session, settings.ahead, settings.quiet_seconds)
        self._asked: dict[asyncio.Task[None], tuple[str, str]] = {}  # whose they are: tenant and app
        self._jobs: set[Job] = set()  # those that have their turn

    @property
    def model(self) -> str:
        """The name of the model that is served."""
        return self.session.engine.name

    def most_tokens(self) -> int:
        """The longest reply."""
        context = self.session.engine.context_tokens
        return context if self.settings.most_tokens is None else min(context, self.settings.most_tokens)

    def turn(self, caller: Caller, body: Cached) -> Turn:
        """On whose behalf a request is answered."""
        if body.keep_alive is not None and caller.operator:
            self.session.stay(_stay_seconds(body.keep_alive))
        app = self.apps.see(caller.tenant, body.app, body.app_state)
        app.requests += 1
        return Turn(f"{caller.tenant}/{app.id}", background=app.state == "background")

    async def answer(self, requests: Sequence[Request], caller: Caller, body: Cached) -> AsyncGenerator[Happened, None]:
        """What happens to the requests, until all are finished. Whoever stops reading stops the work.

        Raises what the session raises, and `Problem` where the line is full or it takes too long.
        """
        turn = self.turn(caller, body)
        happened: asyncio.Queue[Happened | BaseException] = asyncio.Queue()
        # Not `wait_for`: being cancelled in the moment something happens, it would forget that it was.
        late = asyncio.get_running_loop().call_later(
            self.settings.timeout_seconds, happened.put_nowait, _too_late(self.settings.timeout_seconds)
        )
        tasks = [
            asyncio.create_task(self._follow(number, request, turn, (caller.tenant, body.app), happened))
            for number, request in enumerate(requests)
        ]
        left = len(tasks)
        try:
            while left:
                what = await happened.get()
                if isinstance(what, BaseException):
                    raise what
                left -= isinstance(what.event, Finished)
                yield what
        finally:
            late.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(
        self,
        number: int,
        request: Request,
        turn: Turn,
        owner: tuple[str, str],
        happened: asyncio.Queue[Happened | BaseException],
    ) -> None:
        arrived = time.perf_counter()
        task = asyncio.current_task()
        assert task is not None
        self._asked[task] = owner
        if self.idler is not None:  # it stops before this one takes its place
            self.idler.arrive(request)
        ahead = None
        try:
            ahead = self._prefetch(request, turn)
            async with self.line.place(turn):
                if ahead is not None and not ahead.done():  # too late
                    ahead.cancel()
                    ahead.add_done_callback(_drop)
                waited = time.perf_counter() - arrived
                job = Job(self.session, request, turn)
                self._jobs.add(job)
                try:
                    async with aclosing(job.events(self.threads)) as events:
                        async for event in events:
                            self.metrics.happened(owner[0], event, waited)
                            happened.put_nowait(Happened(number, event))
                finally:
                    self._jobs.discard(job)
        except asyncio.CancelledError:  # killed; or nobody listens any more, then this is not heard either
            happened.put_nowait(Cancelled("The request was cancelled."))
            raise
        except Exception as error:  # noqa: BLE001  (raised again by whoever listens)
            happened.put_nowait(error)
        finally:
            del self._asked[task]
            if ahead is not None:
                ahead.add_done_callback(_drop)
            if self.idler is not None:
                self.idler.leave()

    def _prefetch(self, request: Request, turn: Turn) -> Future[Prefetched | None] | None:
        """While a request stands in line, its prompt may come from the origin already."""
        if self.session.cache.streams is None or self.line.is_free(turn):
            return None
        return self.aside.submit(self.session.prefetch, request)

    def kill(self, tenant: str, app: str) -> int:
        """Stop everything that an app asked, also what still stands in line; how many requests that were."""
        own = [task for task, owner in self._asked.items() if owner == (tenant, app)]
        for task in own:
            task.cancel()
        return len(own)

    def close(self) -> None:
        """Stop all work, keep what was computed, free the model."""
        for job in list(self._jobs):
            job.cancel()
        if self.idler is not None:
            self.idler.close()
        self.threads.shutdown(wait=True)
        for beside in (self.aside, self.ingesting):
            beside.shutdown(wait=False, cancel_futures=True)
        self.session.close()


def _places(session: Session) -> int:
    """How many requests are answered at the same time."""
    if session.settings.deterministic and session.engine.capabilities.crowded:
        return 1  # what else is in the buffer would change the last bits
    return session.settings.parallel or DEFAULT_PARALLEL


def _stay_seconds(given: str | float) -> float | None:
    """How long a model shall stay, as Ollama has it: seconds, or 5m; less than nothing is for ever."""
    if isinstance(given, str):
        return None if given.strip().startswith("-") else min(parse_duration(given), threading.TIMEOUT_MAX)
    if not -math.inf < given < math.inf:
        raise InvalidSetting(f"keep_alive={given!r} makes no sense. Use 30s, 5m, or -1 for ever.")
    return None if given < 0 else float(min(given, threading.TIMEOUT_MAX))


def _too_late(limit: float) -> Problem:
    return Problem(
        504, f"The request took longer than {limit:g} s. Ask for less, or start the server with a longer --timeout."
    )


def _drop(ahead: Future[Prefetched | None]) -> None:
    """Its request has begun, or was given up. Whatever went wrong, it was only ahead."""
    if not ahead.cancelled() and ahead.exception() is None and (prefetched := ahead.result()) is not None:
        prefetched.close()
