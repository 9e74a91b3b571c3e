"""The child side of a `SandboxProcess`: answers its parent's messages and ends with it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

STACK_BYTES = 64 * 1024 * 1024  # llguidance recurses without checking its stack


ANSWERED, REFUSED = b"a", b"r"  # how a message to the parent begins


def serve_messages(answer: Callable[[bytes], bytes], refusals: tuple[type[Exception], ...] = ()) -> None:
    """Answer messages from standard input one by one, until the parent closes it or is gone.

    The first message only prepares; the last command-line argument limits the CPU time of every other answer. The text
    of an exception that is one of the `refusals` is the answer to a message; any other ends this process.
    """
    connection, cpu_seconds = _connection(), float(sys.argv[-1])

    def work() -> None:
        try:
            connection.send_bytes(answer(connection.recv_bytes()))
            while True:
                message = connection.recv_bytes()
                with _limit_cpu(cpu_seconds):
                    try:
                        answered = ANSWERED + answer(message)
                    except refusals as refusal:
                        answered = REFUSED + str(refusal).encode(errors="replace")
                connection.send_bytes(answered)
        finally:
            os._exit(1)  # the parent sees that the connection is closed

    threading.stack_size(STACK_BYTES)
    working = threading.Thread(target=work, daemon=True)
    working.start()
    if hasattr(select, "poll"):
        parent = select.poll()
        parent.register(0, 0)  # for no events but the one always reported: the other end closed
        parent.poll()
        os._exit(1)  # also during an answer, which nobody would stop now
    working.join()


@contextmanager
def _limit_cpu(cpu_seconds: float) -> Iterator[None]:
    """Let the system kill this process when it takes longer: the parent may get no CPU time to do it."""
    if sys.platform == "win32":
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _connection() -> Connection:
    if sys.platform == "win32":
        import msvcrt
        from multiprocessing.connection import PipeConnection

        return PipeConnection(msvcrt.get_osfhandle(0))
    return Connection(0)
