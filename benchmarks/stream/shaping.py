"""A link of a chosen speed: a proxy on this machine that passes real bytes at the rate of a trace.

    client  <----  proxy, as fast as the trace says  <----  server
    client  ---->  proxy, after the latency          ---->  server

All connections share one link. It works as a token bucket that holds next to nothing: what was not used is gone, but
who woke up a little late has not lost time. Bytes go in pieces of about ten milliseconds.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from benchmarks.stream.traces import Trace

_PIECE_SECONDS = 0.01
_MIN_PIECE, _MAX_PIECE = 1 << 10, 1 << 16  # bytes
_BUCKET_SECONDS = 0.05  # what the bucket holds
_CONNECT_SECONDS = 10.0


class ShapedLink:
    """Says when bytes may go. Used from several threads."""

    def __init__(self, trace: Trace) -> None:
        """The trace begins now."""
        self._lock = threading.Lock()
        self.begin(trace)

    def begin(self, trace: Trace) -> None:
        """Another trace, from its beginning, from now on; nothing was carried yet."""
        with self._lock:
            self._trace, self._started, self._free = trace, time.monotonic(), 0.0
            self._carried = 0

    @property
    def carried_bytes(self) -> int:
        """How much it was asked to carry since it began."""
        with self._lock:
            return self._carried

    def piece_bytes(self) -> int:
        """How much to send at once, as fast as it is now."""
        with self._lock:
            rate = self._trace.rate_at(max(self._free, time.monotonic() - self._started))
        return int(min(max(rate * _PIECE_SECONDS, _MIN_PIECE), _MAX_PIECE))

    def carry(self, size_bytes: int) -> float:
        """Occupy the link for some bytes, after those of others; returns in how many seconds they are through."""
        with self._lock:
            now = time.monotonic() - self._started
            self._free = self._trace.moment(max(self._free, now - _BUCKET_SECONDS, 0.0), size_bytes)
            self._carried += size_bytes
            return max(0.0, self._free - now)


class ShapedProxy:
    """A TCP proxy in front of a server. `close` ends it, its connections and its threads."""

    def __init__(self, host: str, port: int, trace: Trace, latency_seconds: float = 0.0) -> None:
        """Listens on a free port of this machine."""
        self.link = ShapedLink(trace)
        self._upstream = host, port
        self._latency_seconds = latency_seconds
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._accepting = self._thread(self._accept)

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def begin(self, trace: Trace) -> None:
        """End all connections, and begin another trace."""
        self._hang_up()
        self.link.begin(trace)

    def close(self) -> None:
        """End everything, and wait until it has. Idempotent."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # else who waits for a client goes on waiting
        self._socket.close()
        self._accepting.join()
        self._hang_up()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> ShapedProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _thread(self, work: Callable[..., None], *sockets: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=work, args=sockets, name="rekindle-shaping", daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._upstream, _CONNECT_SECONDS)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads += [self._thread(self._up, client, server), self._thread(self._down, client, server)]

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        """What the client says: late by the latency, and as it comes."""
        with contextlib.suppress(OSError):
            while data := client.recv(_MAX_PIECE):
                if self._latency_seconds and self._closing.wait(self._latency_seconds):
                    break
                server.sendall(data)
        self._drop(client, server)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        """What the server says: as fast as the trace is."""
        with contextlib.suppress(OSError):
            while data := server.recv(self.link.piece_bytes()):
                seconds = self.link.carry(len(data))
                if seconds and self._closing.wait(seconds):
                    break
                client.sendall(data)
        self._drop(client, server)

    def _drop(self, *sockets: socket.socket) -> None:
        """Both directions end together."""
        with self._lock:
            self._open -= set(sockets)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _hang_up(self) -> None:
        with self._lock:
            left = tuple(self._open)
        for one in left:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
