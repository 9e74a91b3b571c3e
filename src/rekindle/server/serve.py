"""Run the server: socket, signals, and a shutdown that loses nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from rekindle.core.size import parse_duration
from rekindle.http_server import BACKLOG, HttpServer, bind, limited_protocol, url_of
from rekindle.idle.idle import IdleOptions
from rekindle.json_file import write_json
from rekindle.machine import home_folder
from rekindle.server.app import make_app
from rekindle.server.auth import ApiKeys, check_settings
from rekindle.server.host import Host, ServedModel
from rekindle.session.session import Session
from rekindle.session.session_group import SessionGroup
from rekindle.settings import ServerSettings, Settings

_HEADER_BYTES = 64 << 10
_UNREAD_SECONDS = 2  # for clients to read the end of their replies when the server stops


class Server:
    """Models behind a socket."""

    def __init__(
        self,
        models: Session | Sequence[ServedModel],
        settings: ServerSettings | None = None,
        keys: ApiKeys | None = None,
        idle: IdleOptions | None = None,
        group: SessionGroup | None = None,
        session_settings: Settings | None = None,
    ) -> None:
        """Bind the port. `models` is one whose session is open, or all, opened when requests name them. See `Host`.

        Raises `InvalidSetting`, also if the port is taken.
        """
        settings = settings or ServerSettings()
        keys = ApiKeys() if keys is None else keys  # also without keys it names the tenant
        check_settings(settings, keys)
        advice = "; `rekindle ps` tells whether a server of ours has it"
        self._socket = bind(settings.host, settings.port, advice)
        self.host = Host(models, settings, keys, idle, group, session_settings)
        self.app = make_app(self.host)
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
            timeout_graceful_shutdown=_UNREAD_SECONDS,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        self._uvicorn = HttpServer(config, self.host.drain)

    @property
    def url(self) -> str:
        """Where it listens."""
        return url_of(self._socket)

    def run(self) -> None:
        """Open the default model and serve until a signal: replies may finish, their KV is kept, models are freed.

        Raises what opening it raises.
        """
        self.host.start(self.stop)
        with _registered(self.url, ", ".join(self.host.models)):
            self._uvicorn.run([self._socket])
        if self.host.failure is not None:
            raise self.host.failure

    def stop(self) -> None:
        """Stop serving, as a signal does. From any thread."""
        self._uvicorn.should_exit = True

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
        write_json(place, {"url": url, "pid": os.getpid(), "model": model})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)
