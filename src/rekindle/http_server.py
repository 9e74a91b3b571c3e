"""What both servers share: the socket, signals, and limits on clients that hold connections idle."""

from __future__ import annotations

import asyncio
import functools
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rekindle.errors import InvalidSetting

BACKLOG = 128  # connections accepted at once, before those above the limit are refused
_LINGERING = 64  # refused connections that still get a reason; others are just closed
_LINGER_SECONDS = 2.0  # for a refused client to read the reason
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Retry-After: 5\r\nContent-Length: 51\r\n\r\nThere are too many connections now. Try again soon."
)


def check_port(port: int) -> None:
    """Raise `InvalidSetting` for an invalid port."""
    if not 0 <= port < 1 << 16:
        raise InvalidSetting(f"port={port} makes no sense. Use 1 to 65535; 0 takes one that is free.")


def bind(host: str, port: int, advice: str = "") -> socket.socket:
    """A listening socket. Raises `InvalidSetting` if the port cannot be used; `advice` ends its sentence."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # with IPPROTO_TCP asyncio sets TCP_NODELAY
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise InvalidSetting(
            f"{host}:{port} cannot be used ({error.strerror}). Choose another with --host and --port{advice}."
        ) from None
    bound.listen(BACKLOG)
    return bound


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    """The URL of a listening socket."""
    host, port = bound.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


Drain = Callable[[Callable[[], bool]], Awaitable[None]]


class HttpServer(uvicorn.Server):
    """Returns after a signal instead of dying by it."""

    def __init__(self, config: uvicorn.Config, drain: Drain | None = None) -> None:
        """`drain` ends the running requests before the socket closes; it may ask whether that is urgent."""
        super().__init__(config)
        self._drain = drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer until the running requests have ended, then close the socket and the connections."""
        if self._drain is not None:
            await self._drain(lambda: self.force_exit)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop gracefully at the first signal, at once at the second."""
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
        """Serve in a thread inside the block."""
        thread = threading.Thread(target=lambda: asyncio.run(self.serve([bound])), name=name, daemon=True)
        thread.start()
        try:
            while not self.started:
                if not thread.is_alive():
                    raise InvalidSetting("The server did not start; its log says why.")
                threading.Event().wait(0.01)
            yield
        finally:
            self.should_exit = True
            thread.join()


def limited_protocol(idle_seconds: float, max_connections: int) -> type[H11Protocol]:
    """A protocol that drops clients idle for `idle_seconds` and refuses more than `max_connections`."""
    return type(
        "LimitedProtocol", (_LimitedProtocol,), {"idle_seconds": idle_seconds, "max_connections": max_connections}
    )


class _Countdown:
    """Calls `do` after a while, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, do: Callable[[], None]) -> None:
        self._start = functools.partial(loop.call_later, seconds, do)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = self._timer or self._start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _LimitedProtocol(H11Protocol):
    """Closes connections on which no whole request arrives or whose client does not read its reply, so that they cannot
    use up all connections. Connections above the limit get 503, so that the process never runs out of files.
    """

    idle_seconds: float
    max_connections: int
    _refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        everybody: Any = self.connections
        refused = sum(one._refused for one in everybody)
        if len(everybody) - refused > self.max_connections:
            self._refuse(transport, with_reason=refused < _LINGERING)
            return
        # `close` would wait until the client has read everything.
        self._silent = _Countdown(self.loop, self.idle_seconds, transport.abort)
        self._unread = _Countdown(self.loop, self.idle_seconds, transport.abort)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._refused:  # already answered
            return
        super().data_received(data)
        self._watch()

    def _refuse(self, transport: Any, *, with_reason: bool) -> None:
        """Send the reason and wait a moment: a client that is cut off while sending may not read it."""
        self._refused = True
        self._silent = self._unread = _Countdown(self.loop, _LINGER_SECONDS, transport.abort)
        if not with_reason:
            transport.abort()
            return
        transport.write(_FULL)
        if transport.can_write_eof():
            transport.write_eof()
        self._silent.start()

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
