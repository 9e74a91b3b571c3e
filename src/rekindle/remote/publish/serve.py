"""The HTTP server of an origin: files of the format and nothing else, whole or in ranges (RFC 9110, section 14).

nginx or a CDN can serve the same folder. Slices are named after the digest of their content, so caches never have to
revalidate them; manifests and indexes are revalidated with a `304`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import ssl
import stat
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rekindle.addresses import is_loopback
from rekindle.core.kv import Span
from rekindle.errors import InvalidSetting
from rekindle.http_server import BACKLOG, HttpServer, bind, check_port, limited_protocol, url_of
from rekindle.remote.index import SERVED
from rekindle.remote.publish.folder import OriginFolder
from rekindle.safe_read import read_secret_file

MAX_RANGES = 64
_RANGE = re.compile(r"[ \t]*(?:([0-9]{1,18})-([0-9]{1,18})?|-([0-9]{1,18}))[ \t]*")


class RangeNotSatisfiable(Exception):
    """The ranges cover no byte of the file, or more bytes than it has."""


def parse_ranges(header: str | None, size: int) -> list[Span] | None:
    """The ranges in a `Range` header for a file of `size` bytes, in its order.

    None for no header or an unknown one: serve the whole file then. Raises `RangeNotSatisfiable`.
    """
    unit, _, texts = (header or "").partition("=")
    if unit.strip().lower() != "bytes":
        return None
    parts = [text for text in texts.split(",") if text.strip()]
    if len(parts) > MAX_RANGES:
        raise RangeNotSatisfiable
    found = []
    for text in parts:
        match = _RANGE.fullmatch(text)
        if match is None:
            return None
        first, last, suffix = match.groups()
        if first is None:
            span = Span(max(0, size - int(suffix)), size)
        elif last is not None and int(last) < int(first):
            return None
        else:
            start = min(int(first), size)
            span = Span(start, size if last is None else max(start, min(int(last) + 1, size)))
        found.append(span)
    spans = [span for span in found if len(span)]
    if not parts:
        return None
    if not spans or sum(map(len, spans)) > size:
        raise RangeNotSatisfiable
    return spans


_BLOCK_BYTES = 1 << 18
_MIN_CHARACTERS = 16
_YEAR_SECONDS = 31_536_000
_FLAGS = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


class AccessTokens:
    """Accepted access tokens; without any, every client may read."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        """Raises `InvalidSetting` for a token that could be guessed."""
        given = list(tokens)
        if any(len(token) < _MIN_CHARACTERS or not token.isascii() or not token.isprintable() for token in given):
            raise InvalidSetting(
                f"A token has at least {_MIN_CHARACTERS} ASCII characters. Make one: python -c "
                "'import secrets; print(secrets.token_urlsafe())'"
            )
        self._digests = [_digest(token) for token in given]

    def __len__(self) -> int:
        return len(self._digests)

    def allow(self, authorization: str | None) -> bool:
        """Whether this `Authorization` header has one of them, in constant time."""
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        right = [hmac.compare_digest(known, given) for known in self._digests]
        return not right or (any(right) and scheme.lower() == "bearer")


@dataclass(frozen=True)
class _File:
    """An open file and its headers."""

    handle: int
    size: int
    etag: str
    kind: str
    fresh_seconds: int


def make_app(folder: Path, tokens: AccessTokens | None = None) -> Starlette:
    """The ASGI application that serves the folder."""
    allowed = tokens or AccessTokens()

    async def answer(request: Request) -> Response:
        if not allowed.allow(request.headers.get("authorization")):
            return _refusal(401, "Send a token: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})
        path = request.scope["path"][1:]  # all of it: the route would leave a line break out
        file = await anyio.to_thread.run_sync(_open, folder, path) if SERVED.fullmatch(path) else None
        if file is None:
            return _refusal(404, "There is nothing.")
        return _respond(request, file, "private" if len(allowed) else "public")

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET"])])  # HEAD comes with GET


def _respond(request: Request, file: _File, whose: str) -> Response:
    headers = {
        "Accept-Ranges": "bytes",
        "Cache-Control": f"{whose}, max-age={file.fresh_seconds}, immutable" if file.fresh_seconds else "no-cache",
        "ETag": file.etag,
        "X-Content-Type-Options": "nosniff",
    }
    if _matches(request.headers.get("if-none-match"), file.etag):
        os.close(file.handle)
        return Response(status_code=304, headers=headers)
    if request.method == "HEAD":
        os.close(file.handle)
        return Response(headers={**headers, "Content-Length": str(file.size)}, media_type=file.kind)
    condition = request.headers.get("if-range")
    asked = request.headers.get("range") if condition in (None, file.etag) else None
    try:
        spans = parse_ranges(asked, file.size)
    except RangeNotSatisfiable:
        os.close(file.handle)
        return _refusal(416, "There are no such bytes.", {"Content-Range": f"bytes */{file.size}"})
    if spans is None:
        return _RangeResponse(file, [(b"", Span(0, file.size))], b"", 200, headers, file.kind)
    if len(spans) == 1:
        headers["Content-Range"] = _content_range(spans[0], file.size)
        return _RangeResponse(file, [(b"", spans[0])], b"", 206, headers, file.kind)
    boundary = secrets.token_hex(16)
    parts = [
        (
            f"\r\n--{boundary}\r\nContent-Type: {file.kind}\r\n"
            f"Content-Range: {_content_range(span, file.size)}\r\n\r\n".encode(),
            span,
        )
        for span in spans
    ]
    ending = f"\r\n--{boundary}--\r\n".encode()
    return _RangeResponse(file, parts, ending, 206, headers, f"multipart/byteranges; boundary={boundary}")


class _RangeResponse(StreamingResponse):
    """Spans of a file, each after a part header. Always closes the file."""

    def __init__(
        self,
        file: _File,
        parts: list[tuple[bytes, Span]],
        ending: bytes,
        status: int,
        headers: dict[str, str],
        kind: str,
    ) -> None:
        length = sum(len(before) + len(span) for before, span in parts) + len(ending)
        all_headers = {**headers, "Content-Length": str(length), "Content-Type": kind}
        super().__init__(self._blocks(file, parts, ending), status, all_headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._file.handle)

    @staticmethod
    async def _blocks(file: _File, parts: list[tuple[bytes, Span]], ending: bytes) -> AsyncIterator[bytes]:
        for before, span in parts:
            if before:
                yield before
            at = span.start
            while at < span.stop:
                size = min(_BLOCK_BYTES, span.stop - at)
                block = await anyio.to_thread.run_sync(_read, file.handle, size, at)
                if not block:
                    return  # truncated meanwhile: the connection ends early, and the client notices
                at += len(block)
                yield block
        if ending:
            yield ending


def _open(folder: Path, path: str) -> _File | None:
    try:
        handle = os.open(folder / path, _FLAGS)
    except OSError:
        return None
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            os.close(handle)
            return None
        if path.endswith((".kv", ".tokens")):  # named after their content's digest
            name = path.rsplit("/", 1)[1].split(".")[0]
            return _File(handle, about.st_size, f'"{name}"', "application/octet-stream", _YEAR_SECONDS)
        digest = hashlib.blake2b(digest_size=16)
        for start in range(0, about.st_size, _BLOCK_BYTES):
            digest.update(_read(handle, _BLOCK_BYTES, start))
    except BaseException:
        os.close(handle)
        raise
    kind = "application/json" if path.endswith(".json") else "application/octet-stream"
    return _File(handle, about.st_size, f'"{digest.hexdigest()}"', kind, 0)


def _read(handle: int, size: int, at: int) -> bytes:
    os.lseek(handle, at, os.SEEK_SET)  # each request has its own handle
    return os.read(handle, size)


def _matches(header: str | None, etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in (header or "").split(",")]
    return etag in tags or "*" in tags


def _content_range(span: Span, size: int) -> str:
    return f"bytes {span.start}-{span.stop - 1}/{size}"


def _refusal(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{text}\n", status, {"Cache-Control": "no-store", **(headers or {})})


def _digest(token: str) -> bytes:
    return hashlib.blake2b(token.encode("utf-8", "surrogateescape"), digest_size=32).digest()


DEFAULT_PORT = 8378
_HEADER_BYTES = 16 << 10


@dataclass(frozen=True)
class OriginSettings:
    """How an origin is served.

    tls_cert, tls_key   files of a certificate and its key; None: plain HTTP
    public              anybody may read without a token
    connections         concurrent connections; more get a 503
    idle_seconds        how long a client may send nothing, or not read its response
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    tokens: AccessTokens = field(default_factory=AccessTokens)
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
    """Serves a folder over HTTP."""

    def __init__(self, folder: Path, settings: OriginSettings | None = None) -> None:
        """Binds the port. Raises `InvalidSetting` if it is in use, and for invalid certificates."""
        self.settings = settings or OriginSettings()
        if self.settings.tls_key is not None:
            read_secret_file(self.settings.tls_key, "The certificate's key")
        place = OriginFolder(folder).path
        config = uvicorn.Config(
            make_app(place, self.settings.tokens),
            http=limited_protocol(self.settings.idle_seconds, self.settings.connections),
            backlog=BACKLOG,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(max(1, self.settings.idle_seconds)),
            timeout_graceful_shutdown=5,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            ssl_certfile=self.settings.tls_cert,
            ssl_keyfile=self.settings.tls_key,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            named = (self.settings.tls_cert, self.settings.tls_key)
            missing = [path for path in named if path is not None and not path.exists()]
            why = (
                f"There is no file {missing[0]}." if missing else f"The certificate or its key cannot be used: {error}."
            )
            raise InvalidSetting(why) from error
        if config.ssl is not None:
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        self._socket = bind(self.settings.host, self.settings.port)
        self._uvicorn = HttpServer(config)

    @property
    def url(self) -> str:
        """Its address."""
        return url_of(self._socket, "http" if self.settings.tls_cert is None else "https")

    def run(self) -> None:
        """Serve until a signal comes."""
        self._uvicorn.run([self._socket])

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve in a thread inside the block; yields the address."""
        with self._uvicorn.running(self._socket, "rekindle-origin"):
            yield self.url
