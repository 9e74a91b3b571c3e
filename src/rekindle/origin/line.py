"""A connection to an origin whose every wait and every byte is bounded.

Time left goes down while nothing comes and up with what does, so one that trickles is ended like one that is silent.
Setting a `Stop` ends a wait from any thread.
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

from rekindle.errors import Cancelled
from rekindle.origin.failure import OriginFailed


@dataclass(frozen=True)
class OriginLimits:
    """What an origin may ask of a client.

    connect_seconds          to connect, TLS included
    silence_seconds          how long it may say nothing
    least_bytes_a_second     slower than that counts as silence
    index_bytes              the largest index that is read
    manifest_bytes           the largest manifest that is read
    candidates               how many manifests are looked at for one prompt
    request_bytes            how many bytes one request asks for, unless one slice alone is larger
    ahead_bytes              the next request is sent when so few bytes of the last are left to come
    """

    connect_seconds: float = 3.0
    silence_seconds: float = 5.0
    least_bytes_a_second: float = 4096.0
    index_bytes: int = 1 << 20
    manifest_bytes: int = 32 << 20
    candidates: int = 3
    request_bytes: int = 16 << 20
    ahead_bytes: int = 256 << 10


class Stop:
    """Ends a transfer, from any thread and at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = False
        self._connected: set[socket.socket] = set()

    @property
    def asked(self) -> bool:
        """Whether it was set."""
        return self._asked

    def set(self) -> None:
        """End what is under way, and what would begin."""
        with self._lock:
            self._asked = True
            for connected in self._connected:
                _shut(connected)

    def attach(self, connected: socket.socket | None) -> None:
        """A connection is used now. Raises `Cancelled` if it shall not be."""
        with self._lock:
            if self._asked:
                raise Cancelled("The transfer was stopped.")
            if connected is not None:
                self._connected.add(connected)

    def detach(self, connected: socket.socket | None) -> None:
        """It is not used any more."""
        with self._lock:
            if connected is not None:
                self._connected.discard(connected)


class Patience:
    """How long is waited for the bytes of one request, and how many of them are taken.

    The time left goes down while nothing comes and up with what does, at the least rate, never above the silence that
    is allowed. Only waiting counts: a reader that has other things to do does not make the origin slow.
    """

    def __init__(self, limits: OriginLimits, stop: Stop, deadline: float | None = None) -> None:
        """`deadline`: by `time.monotonic()`, whatever comes; None: none."""
        self.stop = stop
        self.received = 0
        self._limits = limits
        self._deadline = deadline
        self._left_seconds = limits.silence_seconds
        self._left_bytes = 0

    def begin(self, most_bytes: int) -> None:
        """A request begins, which may bring so many bytes."""
        self.received = 0
        self._left_seconds = self._limits.silence_seconds
        self._left_bytes = most_bytes

    def allow(self, more_bytes: int) -> None:
        """It may bring so many more."""
        self._left_bytes += more_bytes

    def timeout(self, longest: float | None = None) -> float:
        """How long may be waited now. Raises `OriginFailed` if no longer, and `Cancelled`."""
        if self.stop.asked:
            raise Cancelled("The transfer was stopped.")
        left = self._left_seconds if longest is None else longest
        if self._deadline is not None:
            left = min(left, self._deadline - time.monotonic())
        if left <= 0:
            raise OriginFailed("The origin is too slow.")
        return left

    def took(self, seconds: float, count: int) -> None:
        """So long was waited for so many bytes. Raises `OriginFailed` if that are too many."""
        self.received += count
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise OriginFailed("The origin sends more than was asked for.")
        gained = count / self._limits.least_bytes_a_second
        self._left_seconds = min(self._limits.silence_seconds, self._left_seconds - seconds + gained)


class Line(http.client.HTTPConnection):
    """A connection whose every wait is bounded."""

    def __init__(
        self, host: str, port: int | None, tls: ssl.SSLContext | None, limits: OriginLimits, patience: Patience
    ) -> None:
        super().__init__(host, port or (80 if tls is None else 443))
        self.default_port = 80 if tls is None else 443
        self.patience = patience
        self.connected: socket.socket | None = None
        self._limits = limits
        self._context = tls

    @property
    def ended(self) -> bool:
        """Whether it cannot be used for another request."""
        return self.sock is None

    def connect(self) -> None:
        """Connect within the limits."""
        deadline = time.monotonic() + self.patience.timeout(self._limits.connect_seconds)
        connected = socket.create_connection((self.host, self.port), max(0.001, deadline - time.monotonic()))
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                connected = secured = self._context.wrap_socket(
                    connected, server_hostname=self.host, do_handshake_on_connect=False
                )
                self.patience.stop.attach(connected)
                secured.settimeout(max(0.001, deadline - time.monotonic()))
                secured.do_handshake()
        except BaseException:
            connected.close()
            raise
        self.connected = connected
        self.sock = _Bounded(self, connected)

    def end(self) -> None:
        """Close it. What http.client calls `close` means that no other request follows: the last is read still."""
        self.close()
        if self.connected is not None:
            self.connected.close()


class _Bounded:
    """What http.client knows as its socket."""

    def __init__(self, line: Line, connected: socket.socket) -> None:
        self._line = line
        self._connected = connected

    def sendall(self, data: bytes) -> None:
        """Send a request."""
        self._connected.settimeout(self._line.patience.timeout())
        self._connected.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        """What responses are read from."""
        return io.BufferedReader(_Incoming(self._line, self._connected))

    def close(self) -> None:
        """Nothing: the line ends the connection, when the response has been read as well."""


class _Incoming(io.RawIOBase):
    """The bytes of a response as they come."""

    def __init__(self, line: Line, connected: socket.socket) -> None:
        super().__init__()
        self._line = line
        self._connected = connected

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        patience = self._line.patience
        self._connected.settimeout(patience.timeout())
        started = time.perf_counter()
        try:
            count = self._connected.recv_into(buffer)
        except TimeoutError:
            raise OriginFailed("The origin is silent, or too slow.") from None
        patience.took(time.perf_counter() - started, count)
        return count


def _shut(connected: socket.socket) -> None:
    """Wake whoever waits for it. Not the method of a TLS socket, which is not for two threads."""
    with contextlib.suppress(OSError):  # it is closed already
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
