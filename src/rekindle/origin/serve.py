"""Running the server of an origin: the socket, TLS, and clients that hold connections for nothing."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rekindle.errors import InvalidSetting
from rekindle.origin.app import Tokens, make_app
from rekindle.origin.folder import OriginFolder

DEFAULT_PORT = 8378
_BACKLOG = 512
_HEADER_BYTES = 16 << 10


@dataclass(frozen=True)
class OriginSettings:
    """How an origin is served.

    tls_cert, tls_key   files with a certificate and its key; none: plain HTTP
    public              others may read without a token
    connections         so many at a time; more are told to come later
    idle_seconds        how long a client may say nothing, or not read what it asked for
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    tokens: Tokens = field(default_factory=Tokens)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    public: bool = False
    connections: int = 256
    idle_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self._is_local and not len(self.tokens) and not self.public:
            raise InvalidSetting(
                f"{self.host} can be reached by others, and there is no token. Give a --token-file, or let everybody "
                "read with --public."
            )
        if not 0 <= self.port < 1 << 16:
            raise InvalidSetting(f"port={self.port} makes no sense. Use 1 to 65535; 0 takes one that is free.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidSetting("TLS needs both --tls-cert and --tls-key.")

    @property
    def _is_local(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class OriginServer:
    """A folder behind a socket."""

    def __init__(self, folder: Path, settings: OriginSettings | None = None) -> None:
        """Takes the port. Raises `InvalidSetting` if somebody else has it, and for files that are no certificate."""
        self.settings = settings or OriginSettings()
        place = OriginFolder(folder).path
        config = uvicorn.Config(
            make_app(place, self.settings.tokens),
            http=type("Patient", (_Patient,), {"idle_seconds": self.settings.idle_seconds}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=self.settings.connections,
            timeout_keep_alive=int(max(1, self.settings.idle_seconds)),
            timeout_graceful_shutdown=5,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            ssl_certfile=self.settings.tls_cert,
            ssl_keyfile=self.settings.tls_key,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise InvalidSetting(f"The certificate or its key cannot be used: {error}.") from error
        if config.ssl is not None:
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        self._socket = _bind(self.settings.host, self.settings.port)
        self._uvicorn = uvicorn.Server(config)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        scheme = "http" if self.settings.tls_cert is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Serve until a signal comes."""
        self._uvicorn.run([self._socket])

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve in a thread of this process meanwhile; the address."""
        serve = lambda: asyncio.run(self._uvicorn.serve([self._socket]))  # noqa: E731
        thread = threading.Thread(target=serve, name="rekindle-origin", daemon=True)
        thread.start()
        try:
            while not self._uvicorn.started:
                if not thread.is_alive():
                    raise InvalidSetting("The origin did not start; its log tells why.")
                threading.Event().wait(0.01)
            yield self.url
        finally:
            self._uvicorn.should_exit = True
            thread.join()


class _Patient(H11Protocol):
    """Ends a connection on which nothing moves for a while: no whole request comes, or nobody reads the reply."""

    idle_seconds: float

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()  # a request is being answered

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start()

    def resume_writing(self) -> None:
        self._stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _start(self) -> None:
        # Not begun anew by single bytes: a request must be whole in that time. Not `close`, which would wait for them.
        if self._timer is None:
            self._timer = self.loop.call_later(self.idle_seconds, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio sets no TCP_NODELAY
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise InvalidSetting(
            f"{host}:{port} cannot be used ({error.strerror}). Choose another with --host and --port."
        ) from None
    bound.listen(_BACKLOG)
    return bound
