"""Child processes that are killed if their work takes too long or too much memory, or is cancelled.

Neither the grammar compiler nor chat templates have limits that hold for every input, and a thread running them can
neither be stopped nor kept from taking all memory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import psutil

from rekindle.errors import Cancelled, EngineMissing, OutOfMemory
from rekindle.text.sandbox_worker import REFUSED, STACK_BYTES

CPU_SECONDS = 1.5  # for one answer; then the system, or this process, kills it
HEAP_BYTES = 120 * 1024 * 1024  # beyond what the process uses when it is ready, without its stack
_WALL_SECONDS = 60.0  # for a process that gets no CPU time
_POLL_SECONDS = 0.05
_HEAP_PER_BYTE = 16  # of a long message, on top
_SHORT_MESSAGE_BYTES = 256 * 1024
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_TOO_LONG = "it takes too long"
_MAX_IDLE_BYTES = 32 * 1024 * 1024  # growth after which an idle process is not reused
# Isolated, so that nothing is imported from the current folder; then with the sys.path of this process.
_START = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); importlib.import_module(sys.argv[2]).main()"
)


class LimitExceeded(Exception):
    """The process took too long or too much memory, or failed, and was killed. The text says which."""


class WorkRefused(Exception):
    """The process cannot do what it was asked for. The text says why; the next message may be another."""


class SandboxProcess:
    """A Python process that answers messages within limits. Not for two threads at once."""

    def __init__(self, module: str, first_message: bytes) -> None:
        """Start `main()` of a module, which calls `serve_messages`; `first_message` prepares it, without limits.

        Returns at once: the first `ask` waits until the process is ready. Raises `OutOfMemory` if none can be started.
        """
        if not sys.executable or getattr(sys, "frozen", False):  # a frozen program would start itself again
            raise EngineMissing("Grammars and chat templates run in a process of Python: run this with Python itself.")
        self._connection, theirs = multiprocessing.Pipe()
        try:
            with theirs:
                self._process = _start(module, theirs)
        except OSError as error:
            raise OutOfMemory(f"No process can be started ({error}). Close other programs, or raise limits.") from error
        self._end = weakref.finalize(self, _end_process, self._process, self._connection)
        self._owner_pid = os.getpid()
        self._first_message: bytes | None = first_message
        self._heap_bytes = 0

    @property
    def usable(self) -> bool:
        """Whether the process runs and was started by this process, not by the parent of a fork."""
        return self._end.alive and self._owner_pid == os.getpid() and self._process.poll() is None

    @property
    def is_small(self) -> bool:
        """Whether it released the memory of its answers."""
        with suppress(psutil.Error):
            return int(self._usage.memory_info().rss) < self._ready_rss_bytes + _MAX_IDLE_BYTES
        return False

    def ask(self, message: bytes, cancelled: Callable[[], bool] = lambda: False) -> bytes:
        """The answer. Raises `WorkRefused`, and `LimitExceeded` or `Cancelled` after killing the process.

        Raises `OutOfMemory` for a process that never became ready.
        """
        try:
            if self._first_message is not None:
                self._prepare(self._first_message, cancelled)
                self._first_message = None
            self._limit_heap(HEAP_BYTES + _HEAP_PER_BYTE * max(0, len(message) - _SHORT_MESSAGE_BYTES))
            self._connection.send_bytes(message)
            self._wait(cancelled, CPU_SECONDS)
            answer = self._connection.recv_bytes(_MAX_ANSWER_BYTES)
        except (EOFError, OSError, psutil.Error):
            self.close()
            if self._first_message is not None:
                raise OutOfMemory(f"A process of {sys.executable} ends as soon as it starts. Free memory.") from None
            if hasattr(signal, "SIGPROF") and self._process.returncode == -signal.SIGPROF:
                raise LimitExceeded(_TOO_LONG) from None
            raise LimitExceeded("it takes too much memory or is nested too deeply") from None
        except BaseException:
            self.close()
            raise
        if answer[:1] == REFUSED:
            raise WorkRefused(answer[1:].decode())
        return answer[1:]

    def close(self) -> None:
        """Kill the process. Idempotent."""
        self._end()

    def _prepare(self, message: bytes, cancelled: Callable[[], bool]) -> None:
        self._connection.send_bytes(message)
        self._wait(cancelled, _WALL_SECONDS)
        self._connection.recv_bytes(_MAX_ANSWER_BYTES)
        self._usage = psutil.Process(self._process.pid)
        memory = self._usage.memory_info()
        self._ready_rss_bytes, self._ready_address_bytes = int(memory.rss), int(memory.vms)

    def _limit_heap(self, heap_bytes: int) -> None:
        """Let the system refuse more memory, where it can; `_wait` checks only now and then."""
        if heap_bytes != self._heap_bytes and hasattr(self._usage, "rlimit"):
            wanted = self._ready_address_bytes + heap_bytes
            with suppress(psutil.AccessDenied, OSError):  # then `_wait` alone must do
                _, hard = self._usage.rlimit(psutil.RLIMIT_AS)
                self._usage.rlimit(psutil.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))
        self._heap_bytes = heap_bytes

    def _wait(self, cancelled: Callable[[], bool], cpu_seconds: float) -> None:
        """Return when there is an answer or the process is gone."""
        deadline = time.monotonic() + _WALL_SECONDS
        process = psutil.Process(self._process.pid) if not self._connection.poll(_POLL_SECONDS) else None
        spent_before = _cpu_seconds(process) if process is not None else 0.0
        while process is not None and not self._connection.poll(_POLL_SECONDS):
            if cancelled():
                raise Cancelled("The request was cancelled.")
            if _cpu_seconds(process) - spent_before > cpu_seconds or time.monotonic() > deadline:
                raise LimitExceeded(_TOO_LONG)
            max_bytes = self._heap_bytes + STACK_BYTES
            if self._heap_bytes and process.memory_info().rss > self._ready_rss_bytes + max_bytes:
                raise LimitExceeded("it takes too much memory")


class SandboxPool:
    """Interchangeable processes of one module, kept for reuse because starting one is slow. Thread-safe."""

    def __init__(self, module: str, first_message: Callable[[], bytes], max_idle: int) -> None:
        self._module = module
        self._max_idle = max_idle
        self._first_message = first_message
        self._idle: deque[SandboxProcess] = deque()  # no lock: `give_back` may be called from a finalizer

    def take(self) -> SandboxProcess:
        """A process for exclusive use, until it is given back."""
        with suppress(IndexError):
            while True:
                process = self._idle.pop()
                if process.usable:
                    return process
                process.close()
        return SandboxProcess(self._module, self._first_message())

    def give_back(self, process: SandboxProcess) -> None:
        """Keep a process for reuse, or kill it."""
        if len(self._idle) < self._max_idle and process.usable and process.is_small:
            self._idle.append(process)
        else:
            process.close()

    def close(self) -> None:
        """Kill the idle processes."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()


def _start(module: str, theirs: Connection) -> subprocess.Popen[bytes]:
    places = json.dumps([str(place) for place in sys.path])
    command = [sys.executable, "-I", "-c", _START, places, module, str(CPU_SECONDS)]
    stdin = theirs.fileno()
    if sys.platform == "win32":
        import msvcrt

        stdin = msvcrt.open_osfhandle(stdin, 0)
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the parent
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # else every thread reserves addresses, which count as memory
    )


def _end_process(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5.0)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
