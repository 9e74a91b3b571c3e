"""Writing new KV: in the background, after the first token, and within a time limit at the end."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from rekindle.apps import mark_ended
from rekindle.cache.explain import Explainer, Prompt
from rekindle.core.keys import BLOCK_TOKENS, KvSpace
from rekindle.core.kv import Kv, Span
from rekindle.core.plan import Plan
from rekindle.core.reply import Reuse
from rekindle.core.scope import AppRef
from rekindle.errors import KvLost
from rekindle.store.prefix_index import Match
from rekindle.store.tiered import Kept, TieredStore

log = logging.getLogger("rekindle.keep")

_MAX_JOBS = 64
_MAX_DETACHED_BYTES = 1 << 30
_LAST_SECONDS = 5.0
_IDLE_SECONDS = 0.5  # without work, before the store does its maintenance


class BackgroundJob(Protocol):
    """Work on the store that nobody waits for."""

    def do(self, store: TieredStore) -> str:
        """Do it; returns the outcome in one word. An exception means that it failed."""

    def detached_bytes(self) -> int:
        """Bytes of memory that only this job holds."""
        return 0


class WriteGuard(Protocol):
    """Decides when KV is written whether it may still be."""

    @property
    def allows(self) -> bool:
        """Whether it may be written now."""

    def note(self) -> None:
        """Record what will be written, so that `forget` finds it; from then on it may be allowed."""

    def present(self) -> bool:
        """Whether all sources are still there. Asked when the KV is listed: `forget` removes sources first, then KV."""


class WriteJob:
    """Writes the KV of `tokens`, as far as it is new.

    `export(span)` copies the KV of a span that begins at a block. It is called once, on the writer's thread or by
    `detach`. The first `known` tokens were in the store when this was made.
    """

    def __init__(
        self, kv_space: KvSpace, tokens: tuple[int, ...], export: Callable[[Span], Kv], *, known: int = 0
    ) -> None:
        self.kv_space = kv_space
        self.tokens = tokens
        self._start = known - known % BLOCK_TOKENS
        self._export: Callable[[Span], Kv] | None = export
        self._kv: Kv | None = None
        self._lock = threading.Lock()
        self.kept = False  # whether the store has all of it
        self.then: Callable[[], None] | None = None  # called when it is done, whatever the outcome
        self.guard: WriteGuard | None = None
        self.app_ref: AppRef | None = None  # the app it was computed for
        self.last = True  # whether no other job of the same request follows
        self.is_text = True  # whether the tokens are those of a prompt, which others may quote
        self.shares = False  # whether it goes to shared tiers too
        self.shared_tokens = 0  # number of its first tokens that came from there
        self.lossy = False  # whether some of those were quantized

    def do(self, store: TieredStore) -> str:
        """Write what the store does not have yet."""
        try:
            outcome = self._do_guarded(store)
        finally:
            if self.then is not None:
                self.then()
        if outcome == "kept" and self.is_text:  # nobody waits for this
            store.text.record(self.kv_space, self.tokens)
        if outcome in ("kept", "known") and self.shares:
            store.shared.later(partial(store.shared.share, self.kv_space, self.tokens, present_of(self.guard)))
        return outcome

    def _do_guarded(self, store: TieredStore) -> str:
        if self.guard is not None and not self.guard.allows:
            self.guard.note()
        if self.guard is not None and not self.guard.allows:
            self._drop()
            return "barred"
        return self._do(store)

    def _do(self, store: TieredStore) -> str:
        gap = store.admit(self.kv_space, self.tokens, last=self.last)
        if isinstance(gap, Kept):
            self._drop()
            self.kept = gap.outcome == "known"
            return gap.outcome
        kv = self._take(gap)
        if kv is None:
            return "gone"
        present = None if self.guard is None else self.guard.present
        keep = partial(store.keep, self.kv_space, self.tokens, app=self.app_ref, present=present)
        # What shared tiers have is kept apart, so that it is not written there again, and not quantized again.
        up = BLOCK_TOKENS - 1 if self.lossy else 0
        shared = min((self.shared_tokens + up) // BLOCK_TOKENS * BLOCK_TOKENS, gap.stop)
        done = Kept("kept") if gap.start >= shared else keep(_until(kv, shared), lossy=self.lossy)
        if done.outcome in ("kept", "known") and done.whole and shared < gap.stop:
            done = keep(kv)
        self.kept = done.outcome in ("kept", "known") and done.whole and gap.stop == len(self.tokens)
        return done.outcome

    def detach(self) -> None:
        """Copy what is needed now: the context is about to change."""
        with self._lock:
            if self._export is not None:
                span, export, self._export = Span(self._start, len(self.tokens)), self._export, None
                try:
                    self._kv = export(span) if len(span) else None
                except KvLost as error:
                    log.info("not kept: %s", error)

    @property
    def detached(self) -> bool:
        """Whether it no longer reads from the context."""
        return self._export is None

    def detached_bytes(self) -> int:
        """Bytes of its copy."""
        kv = self._kv
        return 0 if kv is None else len(kv.span) * kv.layout.token_bytes

    def _take(self, gap: Span) -> Kv | None:
        with self._lock:
            if self._export is not None:
                exported, self._export = self._export(gap), None
                return exported
            kv, self._kv = self._kv, None
        return None if kv is None or gap.start < kv.span.start else _until(kv, gap.stop)

    def _drop(self) -> None:
        with self._lock:
            self._export = self._kv = None


def present_of(guard: WriteGuard | None) -> Callable[[], bool]:
    """What asks a guard whether all sources are still there; without one they are."""
    return (lambda: True) if guard is None else guard.present


class BackgroundWriter:
    """A thread that runs jobs in order. Its queue is bounded: jobs that do not fit are dropped and counted."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._jobs: deque[BackgroundJob] = deque()
        self._changed = threading.Condition()
        self._working = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self.outcomes: Counter[str] = Counter()
        self.free_killed: Callable[[], None] | None = None  # frees memory of killed apps; called when idle

    @property
    def backlog(self) -> int:
        """Number of jobs left."""
        return len(self._jobs) + self._working

    def offer(self, job: BackgroundJob) -> bool:
        """Queue a job; False if the queue is full or closed."""
        with self._changed:
            held = sum(waiting.detached_bytes() for waiting in self._jobs)
            if self._closed or len(self._jobs) >= _MAX_JOBS or held > _MAX_DETACHED_BYTES:
                self.outcomes["backlog"] += 1
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="rekindle-keep", daemon=True)
                self._thread.start()
        return True

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all jobs are done; False on timeout."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._jobs or self._working:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return not (self._jobs or self._working)
        return True

    def close(self, timeout_seconds: float) -> bool:
        """Run the jobs left within the timeout, and drop the rest. True if the store is no longer in use."""
        with self._changed:
            self._closed = True
        finished = self.flush(timeout_seconds)
        with self._changed:
            self.outcomes["dropped"] += len(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        if finished and self._thread is not None and self._thread is not threading.current_thread():
            # It frees tensors: at interpreter exit, torch would crash the process over that.
            self._thread.join(_LAST_SECONDS)
        if not finished:
            log.warning("The cache did not take everything within %.0f s: some KV was not kept.", timeout_seconds)
        return finished

    def _serve(self) -> None:
        tended = True
        while True:
            with self._changed:
                woken = True
                if not self._jobs and not self._closed:
                    woken = self._changed.wait(self._store.wake_seconds if tended else _IDLE_SECONDS)
                job = self._jobs.popleft() if self._jobs else None
                if job is None and self._closed:
                    return
                if job is None and tended and woken:
                    continue
                self._working = True
            try:
                self._do(job)
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()
            tended = job is None

    def _do(self, job: BackgroundJob | None) -> None:
        try:
            if job is None:
                self._store.maintain()
                if self._store.wake_seconds is not None:  # apps are known
                    mark_ended(self._store.disk)
                    if self.free_killed is not None:
                        self.free_killed()
            else:
                self.outcomes[job.do(self._store)] += 1
        except Exception as error:  # noqa: BLE001  (not written; the jobs behind it still run)
            self.outcomes["failed"] += 1
            log.debug("not kept: %s", error)


def _until(kv: Kv, stop: int) -> Kv:
    """The KV up to `stop`; copied, because views would hold on to the whole."""
    if stop >= kv.span.stop:
        return kv
    count = stop - kv.span.start
    layers = tuple(layer.window(0, count).copy() for layer in kv.layers)
    return Kv(Span(kv.span.start, stop), kv.layout, layers)


@dataclass(frozen=True)
class Note(BackgroundJob):
    """Explains a request and stores the explanation."""

    explainer: Explainer
    prompt: Prompt
    plan: Plan
    match: Match | None
    reuse: Reuse
    first_token_seconds: float
    guard: WriteGuard | None = None

    def do(self, store: TieredStore) -> str:
        """Runs before the prompt is written: else it would be its own explanation."""
        if self.guard is not None and not self.guard.allows:
            return "barred"
        explanation = self.explainer.explain(self.prompt, self.plan, self.match, self.reuse)
        explanation = replace(explanation, first_token_seconds=self.first_token_seconds, at=store.disk.clock())
        asked, present = self.prompt, None if self.guard is None else self.guard.present
        store.note(asked.kv_space, asked.identity, asked.tokens, asked.content, explanation.as_dict(), present=present)
        return "noted"


@dataclass(frozen=True)
class StoreNote(BackgroundJob):
    """Tells the store of a use, behind the write jobs before it: then all of it is found."""

    tell: Callable[[TieredStore], None]

    def do(self, store: TieredStore) -> str:
        self.tell(store)
        return "noted"
