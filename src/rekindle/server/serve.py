"""Running the server: sockets, signals, and a stop that loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rekindle.config import home_folder
from rekindle.errors import InvalidSetting
from rekindle.run.session import Session
from rekindle.server.app import make_app
from rekindle.server.settings import ServerSettings

_HEADER_BYTES = 64 << 10
_BACKLOG = 1024


class Server:
    """A session behind a socket."""

    def __init__(self, session: Session, settings: ServerSettings | None = None) -> None:
        """Takes the port. Raises `InvalidSetting` if somebody else has it."""
        self.settings = settings or ServerSettings()
        self._socket = _bind(self.settings.host, self.settings.port)
        self.app = make_app(session, self.settings)
        config = uvicorn.Config(
            self.app,
            http=type("Patient", (_Patient,), {"idle_seconds": self.settings.idle_seconds}),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(max(1, self.settings.idle_seconds)),
            timeout_graceful_shutdown=int(self.settings.stop_seconds),
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        self._uvicorn = _Quiet(config)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Serve until a signal comes: replies may end, what they computed is kept, then the model goes."""
        with _registered(self.url, self.app.state.service.model):
            self._uvicorn.run([self._socket])

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve in a thread of this process meanwhile; the address."""
        thread = threading.Thread(target=self._serve, name="rekindle-serve", daemon=True)
        thread.start()
        try:
            while not self._uvicorn.started:
                if not thread.is_alive():
                    raise InvalidSetting("The server did not start; its log tells why.")
                threading.Event().wait(0.01)
            yield self.url
        finally:
            self._uvicorn.should_exit = True
            thread.join()

    def _serve(self) -> None:
        asyncio.run(self._uvicorn.serve([self._socket]))


class _Quiet(uvicorn.Server):
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


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio sets no TCP_NODELAY
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise InvalidSetting(
            f"{host}:{port} cannot be used ({error.strerror}). Choose another with --host and --port; `rekindle ps` "
            "tells whether a server of ours has it."
        ) from None
    bound.listen(_BACKLOG)
    return bound


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


def servers_folder() -> Path:
    """Where running servers leave their addresses."""
    return home_folder() / "servers"


@contextmanager
def _registered(url: str, model: str) -> Iterator[None]:
    """Let `rekindle ps` find the server. Where that cannot be written, it runs all the same."""
    place = servers_folder() / f"{os.getpid()}.json"
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps({"url": url, "pid": os.getpid(), "model": model}), "utf-8")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)
