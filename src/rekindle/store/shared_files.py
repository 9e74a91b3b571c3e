"""Extents on a shared tier, read as files: `ExtentFiles` reads and checks them as those of a folder.

A layer is fetched with one request, and the next ones while the engine computes: each read then finds its bytes here.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rekindle.core.kv import Span
from rekindle.store.files import Files, Handle
from rekindle.store.objects import ByteRange, ObjectStore

_LAYERS_AHEAD = 3
_WORKERS = 4


class SharedFiles(Files):
    """The objects of a shared tier that were announced by `expect`. A handle's descriptor is a number of our own."""

    def __init__(self, objects: ObjectStore) -> None:
        super().__init__()
        self._objects = objects
        self._workers = ThreadPoolExecutor(_WORKERS, "rekindle-tier")
        self._numbers = itertools.count()
        self._open: dict[int, _Reading] = {}
        self._expected: dict[str, tuple[int, bytes]] = {}

    def expect(self, path: Path, size_bytes: int, head: bytes) -> None:
        """Let a file be opened whose first bytes are known."""
        while len(self._expected) >= 1024:
            self._expected.pop(next(iter(self._expected)), None)
        self._expected[path.as_posix()] = size_bytes, head

    def open(self, path: Path) -> Handle:
        """Open a file. Asks nobody. Raises `FileNotFoundError` for one that was not announced."""
        key = path.as_posix()
        if (expected := self._expected.get(key)) is None:
            raise FileNotFoundError(f"{key} is not on the tier")
        number = next(self._numbers)
        self._open[number] = _Reading(self._objects, self._workers, key, *expected)
        return Handle(number)

    def size(self, handle: Handle) -> int:
        return self._open[handle.descriptor].size_bytes

    def read_at(self, handle: Handle, offset: int, out: memoryview) -> None:
        """Fill all of `out`. Raises `EOFError` if the object is gone or shorter, and `TierFailed`."""
        reading = self._open.get(handle.descriptor)
        if reading is None:
            raise FileNotFoundError("the file was closed")
        reading.read(offset, out.cast("B"))

    def read_ahead(self, handle: Handle, layers: Sequence[Sequence[Span]]) -> None:
        """Begin to fetch the bytes of each layer that will be read."""
        self._open[handle.descriptor].begin(layers)

    def close(self, handle: Handle) -> None:
        if (reading := self._open.pop(handle.descriptor, None)) is not None:
            reading.close()

    def end(self) -> None:
        """End the threads. Idempotent."""
        self._workers.shutdown(wait=False, cancel_futures=True)


class _Reading:
    """One open file. Thread-safe."""

    def __init__(
        self, objects: ObjectStore, workers: ThreadPoolExecutor, key: str, size_bytes: int, head: bytes
    ) -> None:
        self.size_bytes = size_bytes
        self._objects, self._workers, self._key, self._head = objects, workers, key, head
        self._lock = threading.Lock()
        self._layers: Sequence[Sequence[Span]] = ()
        self._starts: list[int] = []
        self._fetched: dict[int, Future[list[bytes]]] = {}

    def begin(self, layers: Sequence[Sequence[Span]]) -> None:
        self._layers, self._starts = layers, [spans[0].start for spans in layers]
        self._layer(0)

    def read(self, offset: int, out: memoryview) -> None:
        wanted = Span(offset, offset + len(out))
        if wanted.stop <= len(self._head):
            out[:] = self._head[offset : wanted.stop]
            return
        layer = bisect_right(self._starts, offset) - 1
        for span, data in zip(self._layers[layer], self._layer(layer).result(), strict=True) if layer >= 0 else ():
            if span.start <= offset and wanted.stop <= span.stop:
                out[:] = memoryview(data)[offset - span.start : wanted.stop - span.start]
                return
        (data,) = self._fetch([wanted])
        out[:] = data

    def close(self) -> None:
        with self._lock:
            for fetch in self._fetched.values():
                fetch.cancel()
            self._fetched.clear()

    def _layer(self, layer: int) -> Future[list[bytes]]:
        """The bytes of a layer; the next ones follow, and those long before it are forgotten."""
        with self._lock:
            for number in range(layer, min(layer + 1 + _LAYERS_AHEAD, len(self._layers))):
                if number not in self._fetched:
                    self._fetched[number] = self._workers.submit(self._fetch, self._layers[number])
            for number in [number for number in self._fetched if number < layer - 1]:
                del self._fetched[number]
            return self._fetched[layer]

    def _fetch(self, spans: Sequence[Span]) -> list[bytes]:
        found = self._objects.get_ranges([ByteRange(self._key, span.start, span.stop) for span in spans])
        whole = [data for data in found if data is not None]
        if len(whole) < len(spans):
            raise FileNotFoundError(f"{self._key} is no longer on the tier, or was cut off")
        return whole
