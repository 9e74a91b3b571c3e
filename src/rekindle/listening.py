"""What every server of ours does alike: its socket, signals, and clients that hold connections for nothing."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rekindle.errors import InvalidSetting

_BACKLOG = 1024


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_port(port: int) -> None:
    """Raises `InvalidSetting` for a number that is none."""
    if not 0 <= port < 1 << 16:
        raise InvalidSetting(f"port={port} makes no sense. Use 1 to 65535; 0 takes one that is free.")


def bind(host: str, port: int, advice: str = "") -> socket.socket:
    """A socket that listens. Raises `InvalidSetting` if the port cannot be had; `advice` ends its sentence."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio sets no TCP_NODELAY
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise InvalidSetting(
            f"{host}:{port} cannot be used ({error.strerror}). Choose another with --host and --port{advice}."
        ) from None
    bound.listen(_BACKLOG)
    return bound


def address(bound: socket.socket, scheme: str = "http") -> str:
    """Where a socket listens."""
    host, port = bound.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class Listener(uvicorn.Server):
    """Ends by itself after a signal, instead of by the signal: it was asked to stop, and it did."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at the first signal that asks for it, at once at the second."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def running(self, bound: socket.socket, name: str) -> Iterator[None]:
        """Serve in a thread of this process meanwhile."""
        thread = threading.Thread(target=lambda: asyncio.run(self.serve([bound])), name=name, daemon=True)
        thread.start()
        try:
            while not self.started:
                if not thread.is_alive():
                    raise InvalidSetting("The server did not start; its log tells why.")
                threading.Event().wait(0.01)
            yield
        finally:
            self.should_exit = True
            thread.join()


def patient(idle_seconds: float) -> type[H11Protocol]:
    """A protocol that waits so long for a client, and no longer."""
    return type("Patient", (_Patient,), {"idle_seconds": idle_seconds})


class _Countdown:
    """Does something after a while, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, do: Callable[[], None]) -> None:
        self._start = functools.partial(loop.call_later, seconds, do)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to count, if it does not yet."""
        self._timer = self._timer or self._start()

    def stop(self) -> None:
        """Count no more, until it is started anew."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Patient(H11Protocol):
    """Closes a connection on which no whole request comes, or whose client does not read what it asked for: else such
    clients would hold all of them.
    """

    idle_seconds: float

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Not `close`, which would wait until the client has read everything.
        self._silent = _Countdown(self.loop, self.idle_seconds, transport.abort)
        self._unread = _Countdown(self.loop, self.idle_seconds, transport.abort)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.start()

    def resume_writing(self) -> None:
        self._unread.stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._silent.stop()
        self._unread.stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._silent.stop()
        else:
            self._silent.start()
