"""A small HTTP server on loopback that can misbehave."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Served:
    """What the server gives out, and what it was asked."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[str, bytes]] = {}  # path -> content type, body
        self.requests: list[tuple[str, str | None]] = []  # path, Range header
        self.logins: set[str | None] = set()
        self.cut_after: list[int] = []  # break off the next answers after so many bytes
        self.ranges = True
        self.url = ""


@contextmanager
def serving() -> Iterator[Served]:
    """Serve for as long as the block runs."""
    served = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            served.requests.append((self.path, wanted))
            served.logins.add(self.headers.get("Authorization"))
            if self.path not in served.pages:
                self.send_error(404)
                return
            kind, body = served.pages[self.path]
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and served.ranges else 0
            if start >= len(body) > 0 and start:
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            part = body[start:]
            if served.cut_after:
                part = part[: served.cut_after.pop(0)]
            self.wfile.write(part)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
