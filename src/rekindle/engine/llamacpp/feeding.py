"""Feeds at work: KV into the bytes of a state, layer by layer, then into the cells at once.

A thread brings it, so that a step that was cancelled does not wait for a read that hangs. The bytes are used again for
the next request, whose pages are then warm; a thread that is left behind keeps its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from rekindle.core.kv import LayerKv, Span
from rekindle.engine.base import KvFeed
from rekindle.engine.llamacpp.state import Bytes, StateLayout
from rekindle.errors import Cancelled

_LOOK_SECONDS = 0.005
_KEPT_BYTES = 256 << 20


class Staging:
    """Where a state is put together. One at a time."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        self._bytes: Bytes = np.empty(0, np.uint8)

    def bring(self, feeds: Sequence[KvFeed], span: Span, cancelled: Callable[[], bool] | None) -> Bytes:
        """The state of `span`, which the feeds cover together. Raises what a feed raised, or `Cancelled`."""
        state = self._room(self._layout.size_bytes(len(span)))
        self._layout.write(state, span)
        work = _Work(lambda: self._fill(state, feeds, span))
        if not work.done(cancelled):
            self._bytes = np.empty(0, np.uint8)  # somebody may still write to these
            raise Cancelled("The request was cancelled.")
        return state

    def _fill(self, state: Bytes, feeds: Sequence[KvFeed], span: Span) -> None:
        for layer, view in enumerate(self._layout.views(state, len(span))):
            # A feed wants each head in one piece; values that stand across go there by a second copy.
            values = np.empty(view.values.shape, view.values.dtype) if self._layout.transposed else view.values
            for feed in feeds:
                if layer in feed.layers:
                    start, stop = feed.span.start - span.start, feed.span.stop - span.start
                    feed.fill(layer, LayerKv(view.keys[:, start:stop], values[:, start:stop]))
            if values is not view.values:
                np.copyto(view.values, values)

    def _room(self, size_bytes: int) -> Bytes:
        if size_bytes > _KEPT_BYTES:
            return np.empty(size_bytes, np.uint8)
        if size_bytes > len(self._bytes):
            self._bytes = np.empty(size_bytes, np.uint8)
        return self._bytes[:size_bytes]


class _Work:
    """Something done in a thread of its own."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._over = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._do, name="rekindle-fill", daemon=True).start()

    def done(self, cancelled: Callable[[], bool] | None) -> bool:
        """Wait for it; False if it was cancelled before. Raises what it raised."""
        while not self._over.wait(None if cancelled is None else _LOOK_SECONDS):
            if cancelled is not None and cancelled():
                return False
        if self._error is not None:
            raise self._error
        return True

    def _do(self) -> None:
        try:
            self._job()
        except BaseException as error:  # noqa: BLE001  (raised again by whoever waits)
            self._error = error
        finally:
            self._over.set()
