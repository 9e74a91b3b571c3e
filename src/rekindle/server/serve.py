"""Running the server: sockets, signals, and a stop that loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from rekindle.config import home_folder
from rekindle.listening import Listener, address, bind, patient
from rekindle.run.session import Session
from rekindle.server.app import make_app
from rekindle.server.settings import ServerSettings

_HEADER_BYTES = 64 << 10


class Server:
    """A session behind a socket."""

    def __init__(self, session: Session, settings: ServerSettings | None = None) -> None:
        """Takes the port. Raises `InvalidSetting` if somebody else has it."""
        self.settings = settings or ServerSettings()
        advice = "; `rekindle ps` tells whether a server of ours has it"
        self._socket = bind(self.settings.host, self.settings.port, advice)
        self.app = make_app(session, self.settings)
        config = uvicorn.Config(
            self.app,
            http=patient(self.settings.idle_seconds),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(max(1, self.settings.idle_seconds)),
            timeout_graceful_shutdown=int(self.settings.stop_seconds),
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        self._uvicorn = Listener(config)

    @property
    def url(self) -> str:
        """Where it listens."""
        return address(self._socket)

    def run(self) -> None:
        """Serve until a signal comes: replies may end, what they computed is kept, then the model goes."""
        with _registered(self.url, self.app.state.service.model):
            self._uvicorn.run([self._socket])

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve in a thread of this process meanwhile; the address."""
        with self._uvicorn.running(self._socket, "rekindle-serve"):
            yield self.url


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
