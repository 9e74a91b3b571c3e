"""A connection to an origin with a bound on every wait and every byte.

The time left shrinks while nothing arrives and grows with what does, so a connection that trickles ends like a silent
one. Setting a `Stop` ends a wait from any thread.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Any

from rekindle.errors import Cancelled, RekindleError
from rekindle.remote.manifest import MAX_BYTES


class OriginFailed(RekindleError):
    """An origin does not answer, answers wrongly, or sends something other than was published: compute instead."""


@dataclass(frozen=True)
class OriginLimits:
    """Limits of what a client accepts from an origin.

    connect_seconds          to connect, TLS included
    silence_seconds          longest silence
    least_bytes_a_second     a slower origin counts as silent
    index_bytes              largest index that is read
    manifest_bytes           largest manifest that is read
    candidates               manifests read for one prompt
    request_bytes            size of one request, unless a single slice is larger
    ahead_bytes              the next request is sent when this much of the last is left
    """

    connect_seconds: float = 3.0
    silence_seconds: float = 5.0
    min_bytes_a_second: float = 4096.0
    index_bytes: int = 1 << 20
    manifest_bytes: int = MAX_BYTES
    candidates: int = 3
    request_bytes: int = 16 << 20
    ahead_bytes: int = 256 << 10


class Stop:
    """Ends transfers at once, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._connected: set[socket.socket] = set()

    @property
    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """End transfers in progress, and refuse new ones."""
        with self._lock:
            self._set = True
            for connected in self._connected:
                _shut(connected)

    def attach(self, connected: socket.socket | None) -> None:
        """Register a connection in use. Raises `Cancelled` if it is set."""
        with self._lock:
            if self._set:
                raise Cancelled("The transfer was stopped.")
            if connected is not None:
                self._connected.add(connected)

    def detach(self, connected: socket.socket | None) -> None:
        """Unregister a connection."""
        with self._lock:
            if connected is not None:
                self._connected.discard(connected)


class Timeouts:
    """Bounds the wait for the bytes of one request, and their number.

    The time left shrinks while waiting and grows with each byte, at the minimum rate, up to the allowed silence. Only
    waiting counts: a busy reader does not make the origin slow.
    """

    def __init__(self, limits: OriginLimits, stop: Stop, deadline: float | None = None) -> None:
        """`deadline`: absolute, by `time.monotonic()`; None: none."""
        self.stop = stop
        self.received = 0
        self._limits = limits
        self._deadline = deadline
        self._left_seconds = limits.silence_seconds
        self._left_bytes = 0

    def begin(self, max_bytes: int) -> None:
        """Start a request whose response may have `max_bytes`."""
        self.received = 0
        self._left_seconds = self._limits.silence_seconds
        self._left_bytes = max_bytes

    def allow(self, more_bytes: int) -> None:
        """Allow `more_bytes` more."""
        self._left_bytes += more_bytes

    def timeout(self, longest: float | None = None) -> float:
        """Seconds that may be waited now. Raises `OriginFailed` if none are left, and `Cancelled`."""
        if self.stop.is_set:
            raise Cancelled("The transfer was stopped.")
        left = self._left_seconds if longest is None else longest
        if self._deadline is not None:
            left = min(left, self._deadline - time.monotonic())
        if left <= 0:
            raise OriginFailed("The origin is too slow.")
        return left

    def took(self, seconds: float, count: int) -> None:
        """Record a wait of `seconds` for `count` bytes. Raises `OriginFailed` if there are too many."""
        self.received += count
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise OriginFailed("The origin sends more than was asked for.")
        gained = count / self._limits.min_bytes_a_second
        self._left_seconds = min(self._limits.silence_seconds, self._left_seconds - seconds + gained)


class Connection(http.client.HTTPConnection):
    """An HTTP connection with bounded waits."""

    def __init__(
        self, host: str, port: int | None, tls: ssl.SSLContext | None, limits: OriginLimits, timeouts: Timeouts
    ) -> None:
        super().__init__(host, port or (80 if tls is None else 443))
        self.default_port = 80 if tls is None else 443
        self.timeouts = timeouts
        self.connected: socket.socket | None = None
        self._limits = limits
        self._context = tls

    @property
    def ended(self) -> bool:
        """Whether it cannot be used for another request."""
        return self.sock is None

    def connect(self) -> None:
        """Connect within the limits."""
        deadline = time.monotonic() + self.timeouts.timeout(self._limits.connect_seconds)
        connected = socket.create_connection((self.host, self.port), max(0.001, deadline - time.monotonic()))
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                connected = secured = self._context.wrap_socket(
                    connected, server_hostname=self.host, do_handshake_on_connect=False
                )
                self.timeouts.stop.attach(connected)
                secured.settimeout(max(0.001, deadline - time.monotonic()))
                secured.do_handshake()
        except BaseException:
            connected.close()
            raise
        self.connected = connected
        self.sock = _Bounded(self, connected)

    def end(self) -> None:
        """Close the socket. `close` of http.client only means that no other request follows."""
        self.close()
        if self.connected is not None:
            self.connected.close()


class _Bounded:
    """The socket as http.client uses it."""

    def __init__(self, line: Connection, connected: socket.socket) -> None:
        self._line = line
        self._connected = connected

    def sendall(self, data: bytes) -> None:
        """Send a request."""
        self._connected.settimeout(self._line.timeouts.timeout())
        self._connected.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        """The reader of responses."""
        return io.BufferedReader(_Incoming(self._line, self._connected))

    def close(self) -> None:
        """No effect: the line closes the connection after the response is read."""


class _Incoming(io.RawIOBase):
    """The bytes of a response as they arrive."""

    def __init__(self, line: Connection, connected: socket.socket) -> None:
        super().__init__()
        self._line = line
        self._connected = connected

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        timeouts = self._line.timeouts
        self._connected.settimeout(timeouts.timeout())
        started = time.perf_counter()
        try:
            count = self._connected.recv_into(buffer)
        except TimeoutError:
            raise OriginFailed("The origin is silent, or too slow.") from None
        timeouts.took(time.perf_counter() - started, count)
        return count


def _shut(connected: socket.socket) -> None:
    """Wake a waiting reader. Not the method of a TLS socket, which is not thread-safe."""
    with contextlib.suppress(OSError):  # already closed
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
