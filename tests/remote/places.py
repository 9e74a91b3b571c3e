"""Contexts to publish, clients of them, and a server that can lie."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.codec.cipher import Secret
from rekindle.core.cells import Cell
from rekindle.core.kv import Kv, KvLayout, LayerKv, LayerShape, Span
from rekindle.remote.client import Origin, PublishedPrefix, decode_slice
from rekindle.remote.connection import OriginLimits
from rekindle.remote.index import KvModel
from rekindle.remote.publish.publisher import Publisher, PublishResult, PublishSource
from rekindle.remote.signing import SigningKey
from rekindle.remote.slices import level_named

LAYOUT = KvLayout("float32", (LayerShape(2, 8, 8), LayerShape(2, 8, 8), LayerShape(1, 4, 12)))
MODEL = KvModel("ee" * 16, "aa" * 16, LAYOUT)
TOKENS = tuple(
    int(token) for token in np.random.default_rng(7).integers(0, 50_000, 5 * 128 + 60)
)  # 5 chunks and a part
QUICK = OriginLimits(connect_seconds=5.0, silence_seconds=0.3, min_bytes_a_second=4096.0)


def synthetic(model: KvModel = MODEL, tokens: Sequence[int] = TOKENS, tenant: str = "local") -> PublishSource:
    """A context whose KV is a function of nothing but its length."""
    kv = random_kv(model.layout, len(tokens))

    def export(span: Span) -> Kv:
        at = slice(span.start, span.stop)
        return Kv(span, model.layout, tuple(LayerKv(one.keys[:, at], one.values[:, at]) for one in kv))

    return PublishSource(model, tuple(tokens), export, tenant, "synthetic")


def random_kv(layout: KvLayout, tokens: int) -> list[LayerKv]:
    """Numbers as a model might have them, in the type of the layout."""
    random = np.random.default_rng(3)

    def numbers(heads: int, dim: int) -> Any:
        wide = random.normal(size=(heads, tokens, dim)).astype(np.float32)
        if layout.dtype == "bfloat16":
            return (wide.view(np.uint32) >> 16).astype(np.uint16)
        if layout.dtype == "uint8":
            return random.integers(0, 256, wide.shape, np.uint8)
        return wide.astype(layout.numpy_dtype)

    return [
        LayerKv(numbers(shape.kv_heads, shape.key_dim), numbers(shape.kv_heads, shape.value_dim))
        for shape in layout.layers
    ]


def publish(
    folder: Path,
    key: SigningKey,
    levels: str = "raw",
    source: PublishSource | None = None,
    secret: Secret | None = None,
) -> PublishResult:
    """Publish a context, the synthetic one by default."""
    source = source or synthetic()
    chosen = [level_named(name, source.model.layout) for name in levels.split(",")]
    return Publisher(folder, key, secret=secret).publish(source, chosen)


def find(origin: Origin, tokens: Sequence[int] = TOKENS, model: KvModel = MODEL) -> PublishedPrefix | None:
    """What an origin has of a prompt."""
    return origin.find(tokens, model)


def cells_of(found: PublishedPrefix) -> list[Cell]:
    """All cells, as they stand in the file."""
    layers = len(found.manifest.model.layout.layers)
    return [Cell(chunk, layer) for chunk in range(found.chunks) for layer in range(layers)]


def fetch_all(
    origin: Origin, found: PublishedPrefix, level: str = "raw", cells: Sequence[Cell] | None = None
) -> dict[Cell, Any]:
    """The KV of cells, all by default."""
    wanted = cells_of(found) if cells is None else cells
    return {
        one.cell: decode_slice(found, one.cell.chunk, one.cell.layer, one.data)
        for one in origin.fetch(found, wanted, level)
    }


def same_bits(got: LayerKv, expected: LayerKv, span: Span) -> bool:
    """Whether KV of a span is what it was, bit by bit."""
    at = slice(span.start, span.stop)
    pairs = ((got.keys, expected.keys[:, at]), (got.values, expected.values[:, at]))
    return all(a.dtype == b.dtype and a.tobytes() == np.ascontiguousarray(b).tobytes() for a, b in pairs)


@dataclass
class Reply:
    """What a server is about to send. With `raw` it does that instead, and the connection ends."""

    path: str
    status: int
    headers: dict[str, str]
    body: bytes
    raw: Callable[[socket.socket], None] | None = None


@dataclass
class Liar:
    """A server of an origin's folder that changes what it sends."""

    url: str
    lie: Callable[[Reply], None] = lambda reply: None
    paths: list[str] = field(default_factory=list)
    connections: int = 0
    authorizations: set[str | None] = field(default_factory=set)


@contextmanager
def lying(folder: Path) -> Iterator[Liar]:
    """A server that tells the truth until its `lie` is set."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def setup(self) -> None:
            super().setup()
            liar.connections += 1

        def do_GET(self) -> None:
            liar.paths.append(self.path)
            liar.authorizations.add(self.headers.get("Authorization"))
            reply = _honest(folder, self.path, self.headers.get("Range"))
            liar.lie(reply)
            if reply.raw is not None:
                with suppress(OSError):  # the client has gone
                    reply.raw(self.connection)
                self.close_connection = True
                return
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            try:
                self.wfile.write(reply.body)
            except OSError:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # clients leave when they are lied to

    server = Server(("127.0.0.1", 0), Handler)
    liar = Liar(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield liar
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _honest(folder: Path, path: str, asked: str | None) -> Reply:
    file = folder / path.lstrip("/")
    if not file.is_file():
        return Reply(path, 404, {}, b"nothing")
    data = file.read_bytes()
    if asked is None:
        return Reply(path, 200, {}, data)
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
    assert match is not None, asked
    first, last = map(int, match.groups())
    return Reply(path, 206, {"Content-Range": f"bytes {first}-{last}/{len(data)}"}, data[first : last + 1])
