"""A thread that helps to read an extent."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

_LAST_SECONDS = 1.0  # how long `close` waits for the thread
Work = Callable[[], None]


class ReadHelper:
    """Runs two pieces of work in parallel: one in the caller, one in a helper thread. Thread-safe.

    A thread pool does the same, but handing work over costs it three times as much: a tenth of a load.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def run(self, helped: Work, own: Work) -> None:
        """Run both; returns when both are done. Raises what either raised.

        While the thread is busy for another caller, both run in the caller.
        """
        if not self._free.acquire(blocking=False):
            helped()
            own()
            return
        try:
            self._run(helped, own)
        finally:
            self._free.release()

    def _run(self, helped: Work, own: Work) -> None:
        job = _Job(helped)
        self._running().put(job)
        try:
            own()
        finally:
            error = job.done.get()
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread. Idempotent; `run` starts another."""
        with self._lock:
            jobs, self._jobs = self._jobs, None
            thread, self._thread = self._thread, None
        if jobs is not None and thread is not None and self._process == os.getpid():
            jobs.put(None)
            thread.join(_LAST_SECONDS)

    def _running(self) -> queue.SimpleQueue[_Job | None]:
        with self._lock:
            if self._jobs is None or self._process != os.getpid():  # threads do not survive a fork
                self._process = os.getpid()
                self._jobs = queue.SimpleQueue()
                self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="rekindle-read", daemon=True)
                self._thread.start()
            return self._jobs


class _Job:
    def __init__(self, work: Work) -> None:
        self.work = work
        self.done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        failed: BaseException | None = None
        try:
            job.work()
        except BaseException as error:  # noqa: BLE001  (raised again in the caller)
            failed = error
        # The job may reference an engine's memory. Releasing that here, while the interpreter shuts down, would crash
        # torch, so it is released before the caller continues.
        done = job.done
        del job
        done.put(failed)
        del failed
