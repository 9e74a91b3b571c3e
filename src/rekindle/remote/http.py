"""The part of HTTP that a client of an origin needs.

Connections are kept alive and reused. Redirects are not followed, nothing is decompressed, and there are no cookies and
no proxies from the environment.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rekindle.addresses import refuse_plain_http
from rekindle.core.kv import Span
from rekindle.errors import Cancelled, InvalidSetting
from rekindle.remote.connection import Connection, OriginFailed, OriginLimits, Timeouts

if TYPE_CHECKING:
    from typing_extensions import Self

_HEAD_BYTES = 1 << 16  # status line and headers
_BLOCK_BYTES = 1 << 16
_GONE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class HttpClient:
    """HTTP requests to one origin over kept connections. Thread-safe."""

    def __init__(
        self, url: str, token: str | None = None, limits: OriginLimits | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """`tls`: trusted certificates, by default the system's.

        Raises `InvalidSetting`, also for a token sent to another machine over plain http.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise InvalidSetting(f"{url} has no host or port that makes sense.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InvalidSetting(f"{url} is not the address of an origin: http://HOST[:PORT][/PATH], or https.")
        if parts.username is not None or parts.password is not None:
            raise InvalidSetting("The address of an origin must not contain a name or password. Give a token instead.")
        if token is not None and not (token and token.isascii() and token.isprintable() and token.strip() == token):
            raise InvalidSetting("The token of an origin has ASCII characters, and no space around them.")
        if token is not None:
            refuse_plain_http(parts.scheme, parts.hostname, "The token of an origin")
        self.limits = limits or OriginLimits()
        self.host, self.prefix = parts.hostname, parts.path.rstrip("/")
        self._port = port
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self.headers = {"Accept-Encoding": "identity", "User-Agent": "rekindle"}
        if token is not None:
            self.headers["Authorization"] = f"Bearer {token}"
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    def get(self, path: str, max_bytes: int, timeouts: Timeouts) -> bytes | None:
        """A whole file of at most `max_bytes`; None if there is none. Raises `OriginFailed`."""
        with Exchange(self, path, None, timeouts) as exchange:
            exchange.wait(2 * max_bytes)  # chunked encoding adds some
            if exchange.status == 404:
                exchange.read(_HEAD_BYTES)  # so that the connection can be reused
                return None
            exchange.expect(200)
            if exchange.length is not None and exchange.length > max_bytes:
                raise OriginFailed(f"The origin's {path} has {exchange.length} bytes, not at most {max_bytes}.")
            data = exchange.read(max_bytes + 1)
            if len(data) > max_bytes:
                raise OriginFailed(f"The origin's {path} has more than {max_bytes} bytes.")
            if exchange.length is not None and len(data) != exchange.length:
                raise OriginFailed(f"The origin's {path} ends early.")
            return data

    def acquire(self, timeouts: Timeouts) -> tuple[Connection, bool]:
        """A connection, and whether it is new."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            connection.timeouts = timeouts
            return connection, False
        connection = Connection(self.host, self._port, self._tls, self.limits, timeouts)
        connection.connect()
        return connection, True

    def release(self, connection: Connection) -> None:
        """Keep a connection whose response was read to the end."""
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.end()

    def close(self) -> None:
        """Close the idle connections. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.end()


class Exchange:
    """A request that was sent, and its response. Close it."""

    def __init__(self, client: HttpClient, path: str, span: Span | None, timeouts: Timeouts) -> None:
        """Sends the request for a file, or for its bytes `span`. Raises `OriginFailed` and `Cancelled`, as all do."""
        self._client = client
        self._path = path
        self._span = span
        self._timeouts = timeouts
        self._connection: Connection | None = None
        self._fresh = False
        self._response: http.client.HTTPResponse | None = None
        timeouts.begin(_HEAD_BYTES)
        with self._failing():
            self._send()

    @property
    def response(self) -> http.client.HTTPResponse:
        assert self._response is not None, "wait for it first"
        return self._response

    @property
    def status(self) -> int:
        return self.response.status

    @property
    def length(self) -> int | None:
        """Announced size of the body; None if unknown."""
        text = self.response.headers.get("Content-Length", "")
        chunked = "Transfer-Encoding" in self.response.headers
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 and not chunked else None

    def wait(self, max_bytes: int) -> None:
        """Wait for the headers; `max_bytes` may follow."""
        with self._failing():
            while self._response is None:
                assert self._connection is not None
                try:
                    self._response = self._connection.getresponse()
                except _GONE as error:
                    self._drop(error)
                    self._send()
        if self.response.headers.get("Content-Encoding", "identity") != "identity":
            raise OriginFailed("The origin sends something compressed that nobody asked for.")
        self._timeouts.allow(max_bytes)

    def wait_for_range(self, size_bytes: int) -> None:
        """Wait for the headers of a range response with exactly the requested bytes of a file of `size_bytes`."""
        assert self._span is not None
        self.wait(len(self._span))
        if self.status == 200:
            raise OriginFailed("The origin sends whole files in place of ranges.")
        self.expect(206)
        sent = self.response.headers.get("Content-Range", "").strip()
        if sent != f"bytes {self._span.start}-{self._span.stop - 1}/{size_bytes}":
            raise OriginFailed(f"The origin sends other bytes than were asked for: {sent[:80]!r}.")
        if self.length != len(self._span):
            raise OriginFailed(f"The origin announces {self.length} bytes in place of {len(self._span)}.")

    def expect(self, status: int) -> None:
        """Raises `OriginFailed` for any other status."""
        if self.status == status:
            return
        if 300 <= self.status < 400:
            raise OriginFailed("The origin sent a redirect, which is not followed.")
        if self.status in (401, 403):
            raise OriginFailed(f"The origin wants another token ({self.status}).")
        raise OriginFailed(f"The origin answers {self.status} for {self._path}.")

    def fill(self, buffer: Any) -> None:
        """Fill `buffer` with the next bytes. Raises `OriginFailed` if the body ends before."""
        view = memoryview(buffer).cast("B")
        with self._failing():
            while len(view):
                count = self.response.readinto(view)
                if not count:
                    raise OriginFailed(f"The origin's {self._path} ends early.")
                view = view[count:]

    def read(self, max_bytes: int) -> bytes:
        """The first `max_bytes` of the body."""
        parts, left = [], max_bytes
        with self._failing():
            while left and (part := self.response.read(min(left, _BLOCK_BYTES))):
                parts.append(part)
                left -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Keep the connection if the response was read to the end, else close it. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._timeouts.stop.detach(connection.connected)
        whole = self._response is not None and self._response.isclosed() and not connection.ended
        if whole and not self._timeouts.stop.is_set:
            self._client.release(connection)
        else:
            connection.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self) -> None:
        headers = dict(self._client.headers)
        if self._span is not None:
            headers["Range"] = f"bytes={self._span.start}-{self._span.stop - 1}"
        while self._connection is None:
            self._connection, self._fresh = self._client.acquire(self._timeouts)
            try:
                self._timeouts.stop.attach(self._connection.connected)
                self._connection.request("GET", f"{self._client.prefix}/{self._path}", headers=headers)
            except _GONE as error:
                self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Drop a connection that the origin closed. That is an error unless it was an idle one."""
        waited = not self._fresh and self._timeouts.received == 0
        self.close()
        if not waited:
            raise error

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn every failure of the connection into `OriginFailed`, and close it."""
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError, OriginFailed) as error:
            self.close()
            if self._timeouts.stop.is_set:  # a body that was cut off here ends early, too
                raise Cancelled("The transfer was stopped.") from error
            if isinstance(error, OriginFailed):
                raise
            reason = str(error) or type(error).__name__
            raise OriginFailed(f"The origin {self._client.host} does not answer as it should: {reason}.") from error
        except BaseException:
            self.close()
            raise
