"""Run the server: socket, signals, and a shutdown that loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from rekindle.core.size import parse_duration
from rekindle.http_server import BACKLOG, HttpServer, bind, limited_protocol, url_of
from rekindle.idle.idle import IdleOptions
from rekindle.machine import home_folder
from rekindle.server.app import make_app
from rekindle.server.auth import ApiKeys, check_settings
from rekindle.server.service import Service
from rekindle.session.session import Session
from rekindle.settings import ServerSettings

_HEADER_BYTES = 64 << 10


class Server:
    """A session behind a socket."""

    def __init__(
        self,
        session: Session,
        settings: ServerSettings | None = None,
        keys: ApiKeys | None = None,
        idle: IdleOptions | None = None,
    ) -> None:
        """Bind the port. `idle` replaces the idle work that the settings say.

        Raises `InvalidSetting`, also if the port is taken.
        """
        settings = settings or ServerSettings()
        keys = ApiKeys() if keys is None else keys  # also without keys it names the tenant
        check_settings(settings, keys)
        advice = "; `rekindle ps` tells whether a server of ours has it"
        self._socket = bind(settings.host, settings.port, advice)
        self.app = make_app(Service(session, settings, keys, idle))
        client_seconds = parse_duration(settings.client_timeout)
        config = uvicorn.Config(
            self.app,
            http=limited_protocol(client_seconds, settings.max_connections),
            backlog=BACKLOG,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(max(1, client_seconds)),
            timeout_graceful_shutdown=int(parse_duration(settings.stop_timeout)),
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        self._uvicorn = HttpServer(config)
        self.app.state.service.stopping = lambda: self._uvicorn.should_exit

    @property
    def url(self) -> str:
        """Where it listens."""
        return url_of(self._socket)

    def run(self) -> None:
        """Serve until a signal: replies may finish, their KV is kept, then the model is freed."""
        with _registered(self.url, self.app.state.service.model):
            self._uvicorn.run([self._socket])

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve in a thread while the block runs; yields the address."""
        with self._uvicorn.running(self._socket, "rekindle-serve"):
            yield self.url


def servers_folder() -> Path:
    """Where running servers register their addresses."""
    return home_folder() / "servers"


@contextmanager
def _registered(url: str, model: str) -> Iterator[None]:
    """Register the server for `rekindle ps`. If that cannot be written, it runs all the same."""
    place = servers_folder() / f"{os.getpid()}.json"
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps({"url": url, "pid": os.getpid(), "model": model}), "utf-8")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)
