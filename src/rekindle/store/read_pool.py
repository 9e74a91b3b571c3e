"""Threads that help to read extents."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from rekindle.machine import usable_cores

_LAST_SECONDS = 1.0  # how long `close` waits for the thread
Work = Callable[[], None]


class ReadHelper:
    """Runs two pieces of work in parallel: one in the caller, one in a helper thread of its own. Thread-safe.

    A thread pool does the same, but handing work over costs it three times as much: a tenth of a load.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._helped = 0  # callers
        self._most = max(1, usable_cores() // 2)
        self._process = os.getpid()

    def run(self, helped: Work, own: Work) -> None:
        """Run both; returns when both are done. Raises what either raised.

        While all threads are busy for other callers, both run in the caller.
        """
        if not self._take_thread():
            helped()
            own()
            return
        try:
            self._run(helped, own)
        finally:
            with self._lock:
                self._helped -= 1

    def _run(self, helped: Work, own: Work) -> None:
        job = _Job(helped)
        self._jobs.put(job)
        try:
            own()
        finally:
            error = job.done.get()
        if error is not None:
            raise error

    def close(self) -> None:
        """End the threads. Idempotent; `run` starts others."""
        with self._lock:
            threads, self._threads = self._threads, []
        if self._process == os.getpid():
            for _ in threads:
                self._jobs.put(None)
            for thread in threads:
                thread.join(_LAST_SECONDS)

    def _take_thread(self) -> bool:
        """Reserve a thread, started if need be; False if all are busy."""
        with self._lock:
            if self._process != os.getpid():  # threads do not survive a fork
                self._process, self._jobs, self._threads, self._helped = os.getpid(), queue.SimpleQueue(), [], 0
            if self._helped == self._most:
                return False
            self._helped += 1
            if self._helped > len(self._threads):
                thread = threading.Thread(target=_serve, args=(self._jobs,), name="rekindle-read", daemon=True)
                thread.start()
                self._threads.append(thread)
            return True


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
