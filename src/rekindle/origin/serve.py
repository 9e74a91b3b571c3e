"""Running the server of an origin: the socket, TLS, and clients that hold connections for nothing."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from rekindle.errors import InvalidSetting
from rekindle.listening import Listener, address, bind, check_port, is_loopback, patient
from rekindle.origin.app import Tokens, make_app
from rekindle.origin.folder import OriginFolder

DEFAULT_PORT = 8378
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
        if not is_loopback(self.host) and not len(self.tokens) and not self.public:
            raise InvalidSetting(
                f"{self.host} can be reached by others, and there is no token. Give a --token-file, or let everybody "
                "read with --public."
            )
        check_port(self.port)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidSetting("TLS needs both --tls-cert and --tls-key.")


class OriginServer:
    """A folder behind a socket."""

    def __init__(self, folder: Path, settings: OriginSettings | None = None) -> None:
        """Takes the port. Raises `InvalidSetting` if somebody else has it, and for files that are no certificate."""
        self.settings = settings or OriginSettings()
        place = OriginFolder(folder).path
        config = uvicorn.Config(
            make_app(place, self.settings.tokens),
            http=patient(self.settings.idle_seconds),
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
        self._socket = bind(self.settings.host, self.settings.port)
        self._uvicorn = Listener(config)

    @property
    def url(self) -> str:
        """Where it listens."""
        return address(self._socket, "http" if self.settings.tls_cert is None else "https")

    def run(self) -> None:
        """Serve until a signal comes."""
        self._uvicorn.run([self._socket])

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve in a thread of this process meanwhile; the address."""
        with self._uvicorn.running(self._socket, "rekindle-origin"):
            yield self.url
