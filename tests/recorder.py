"""A server of this machine that writes down what it is sent, and may send clients elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Recorder:
    """`connections` counts them, `seen` has every request with its headers as text."""

    port: int = 0
    redirect: str | None = None
    connections: int = 0
    seen: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def recording(redirect: str | None = None) -> Iterator[Recorder]:
    recorder = Recorder(redirect=redirect)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def verify_request(self, request: Any, client_address: Any) -> bool:
            recorder.connections += 1
            return True

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            recorder.seen.append(f"{self.requestline}\n{self.headers}")
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(404 if recorder.redirect is None else 307)
            if recorder.redirect is not None:
                self.send_header("Location", recorder.redirect)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        recorder.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield recorder
        finally:
            server.shutdown()
            thread.join()
