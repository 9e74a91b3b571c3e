"""Feeds at work: KV into the bytes of a state, layer by layer, then into the cells at once.

A thread brings it, so that a step that was cancelled does not wait for a read that hangs. The bytes are used again for
the next request, whose pages are then warm; a thread that is left behind keeps its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rekindle.core.kv import LayerKv, Span
from rekindle.engine.base import KvFeed
from rekindle.engine.llamacpp.state import Bytes, StateLayout
from rekindle.errors import Cancelled

_LOOK_SECONDS = 0.005
_KEPT_BYTES = 256 << 20
_WARM_BYTES = 48 << 20
_BESIDE_BYTES = 128 << 10  # of a layer's values: fewer are turned before another thread would have begun


class Staging:
    """Where a state of at most `context_tokens` is put together. One at a time."""

    def __init__(self, layout: StateLayout, context_tokens: int) -> None:
        self._layout = layout
        self._state, self._across = _Room(), _Room()
        # The first request after a start shall not pay for pages that nobody touched yet.
        warm_bytes = min(_WARM_BYTES, layout.size_bytes(context_tokens))
        self._state.take(warm_bytes).fill(0)
        if layout.transposed:
            self._across.take(warm_bytes // 2).fill(0)

    def close(self) -> None:
        """Let go of the bytes."""
        self._state, self._across = _Room(), _Room()

    def bring(self, feeds: Sequence[KvFeed], span: Span, cancelled: Callable[[], bool] | None) -> Bytes:
        """The state of `span`, which the feeds cover together. Raises what a feed raised, or `Cancelled`."""
        state = self._state.take(self._layout.size_bytes(len(span)))
        self._layout.write(state, span)
        fill = self._fill_across if self._layout.transposed else self._fill
        if not _Work(lambda: fill(state, feeds, span)).done(cancelled):
            self._state, self._across = _Room(), _Room()  # somebody may still write to these
            raise Cancelled("The request was cancelled.")
        return state

    def _fill(self, state: Bytes, feeds: Sequence[KvFeed], span: Span) -> None:
        for layer, out in enumerate(self._layout.views(state, len(span))):
            _fill_layer(feeds, span, layer, out)

    def _fill_across(self, state: Bytes, feeds: Sequence[KvFeed], span: Span) -> None:
        """A feed wants each head in one piece. Values that stand across are turned beside the next layer's reading."""
        dtype, shapes = self._layout.kv.numpy_dtype, self._layout.kv.layers
        sizes = np.cumsum([0, *(len(span) * shape.value_dim * dtype.itemsize for shape in shapes)])
        values = self._across.take(int(sizes[-1]))
        with ThreadPoolExecutor(1, thread_name_prefix="rekindle-turn") as turning:
            turned = []
            for layer, out in enumerate(self._layout.views(state, len(span))):
                upright = values[sizes[layer] : sizes[layer + 1]].view(dtype).reshape(out.values.shape)
                _fill_layer(feeds, span, layer, LayerKv(out.keys, upright))
                if upright.nbytes < _BESIDE_BYTES:
                    np.copyto(out.values, upright)
                else:
                    turned.append(turning.submit(np.copyto, out.values, upright))
            for done in turned:
                done.result()


def _fill_layer(feeds: Sequence[KvFeed], span: Span, layer: int, out: LayerKv) -> None:
    for feed in feeds:
        if layer in feed.layers:
            start, stop = feed.span.start - span.start, feed.span.stop - span.start
            feed.fill(layer, LayerKv(out.keys[:, start:stop], out.values[:, start:stop]))


class _Room:
    """Bytes that are used again, unless they are very many."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, np.uint8)

    def take(self, size_bytes: int) -> Bytes:
        """So many bytes, whatever is in them."""
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
