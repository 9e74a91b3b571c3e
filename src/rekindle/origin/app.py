"""Serving the folder of an origin over HTTP: files of the format and nothing else, whole or in ranges.

nginx or a CDN does it as well; this is for who has neither. The names of slices are digests of their content, so who
caches them need never ask again; manifests and indexes are asked for anew, at the price of a `304`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rekindle.core.kv import Span
from rekindle.errors import InvalidSetting
from rekindle.origin.names import SERVED
from rekindle.origin.ranges import Unsatisfiable, wanted

_BLOCK_BYTES = 1 << 18
_LEAST_CHARACTERS = 16
_YEAR_SECONDS = 31_536_000
_FLAGS = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


class Tokens:
    """The tokens that a client may send; without any, everybody is let in."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        """Raises `InvalidSetting` for one that could be guessed."""
        given = list(tokens)
        if any(len(token) < _LEAST_CHARACTERS or not token.isascii() or not token.isprintable() for token in given):
            raise InvalidSetting(
                f"A token has at least {_LEAST_CHARACTERS} ASCII characters. Make one: python -c "
                "'import secrets; print(secrets.token_urlsafe())'"
            )
        self._digests = [_digest(token) for token in given]

    def __len__(self) -> int:
        return len(self._digests)

    def allow(self, authorization: str | None) -> bool:
        """Whether this `Authorization` header has one of them. Takes as long for any wrong one."""
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        right = [hmac.compare_digest(known, given) for known in self._digests]
        return not right or (any(right) and scheme.lower() == "bearer")


@dataclass(frozen=True)
class _File:
    """An open file and what is said about it."""

    handle: int
    size: int
    etag: str
    kind: str
    fresh_seconds: int


def make_app(folder: Path, tokens: Tokens | None = None) -> Starlette:
    """An application that serves the folder."""
    allowed = tokens or Tokens()

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
        spans = wanted(asked, file.size)
    except Unsatisfiable:
        os.close(file.handle)
        return _refusal(416, "There are no such bytes.", {"Content-Range": f"bytes */{file.size}"})
    if spans is None:
        return _Parts(file, [(b"", Span(0, file.size))], b"", 200, headers, file.kind)
    if len(spans) == 1:
        headers["Content-Range"] = _content_range(spans[0], file.size)
        return _Parts(file, [(b"", spans[0])], b"", 206, headers, file.kind)
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
    return _Parts(file, parts, ending, 206, headers, f"multipart/byteranges; boundary={boundary}")


class _Parts(StreamingResponse):
    """Spans of a file, each behind some bytes. Closes the file, whatever happens."""

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
        told = {**headers, "Content-Length": str(length), "Content-Type": kind}
        super().__init__(self._blocks(file, parts, ending), status, told)
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
                    return  # it was cut meanwhile: the connection ends early, and the client notices
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
        if path.endswith((".kv", ".tokens")):  # named after their content
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
    os.lseek(handle, at, os.SEEK_SET)  # the handle is one request's own
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
