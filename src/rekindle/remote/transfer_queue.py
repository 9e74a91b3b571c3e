"""The link to an origin: a thread that fetches slices in the order in which they are wanted now.

It requests a few at a time so that the order can change; slices already requested still arrive. After a failure it
records the reason and fetches nothing more: the rest is computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle.core.cells import Cell, CellGrid, TransferOrder
from rekindle.core.kv import LayerKv
from rekindle.errors import Cancelled, RekindleError
from rekindle.remote.client import CodedSlice, Origin, PublishedPrefix, SliceTransfer, coded_slice, decode_slice
from rekindle.remote.ladder import LevelLadder
from rekindle.remote.latency import MIN_BANDWIDTH, Bandwidth, TransferSample

log = logging.getLogger(__name__)

ArrivedKv = LayerKv | CodedSlice

AT_A_TIME_SECONDS = 0.2  # slices expected within this time share a request batch
_MAX_CELLS = 64
_PARTS = 8  # at most this fraction of what is wanted: the order may change
_BLOCK_SECONDS = 0.1  # slices expected within this time may come in file order: fewer requests
_FIRST_CELLS = 2  # while the bandwidth is not known
_STALLED_SECONDS, _STALLED = 0.25, 4.0  # nothing arrived for this long and this many times longer than expected


def _in_blocks(cells: Sequence[Cell], count: float) -> tuple[Cell, ...]:
    """The cells nearly in their order, with up to `count` neighbours in file order, which make one range."""
    size = max(1, min(int(count), _MAX_CELLS))
    blocks: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        blocks.setdefault((cell.chunk, cell.layer // size), []).append(cell)
    return tuple(cell for block in blocks.values() for cell in sorted(block))


class SliceSource(Protocol):
    """Fetches slices, one transfer at a time."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[chunks, layers] bytes to transfer for each cell, as they would be requested now."""

    def adapt(self, left: Sequence[Cell], bytes_per_second: float | None, pace: float) -> None:
        """Called before each request: may choose other sizes. `left`: the cells that may still be requested; `pace`:
        how many times longer computing takes than expected."""

    def carry(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, ArrivedKv]]:
        """The KV of these cells, in this order, as it arrives. Raises `RekindleError`."""

    def cancel(self) -> None:
        """End a transfer, from any thread."""


class TransferQueue:
    """Fetches one context: call `want`, then `wait`. Always `close` it."""

    def __init__(self, source: SliceSource | None, bandwidth: Bandwidth | None = None) -> None:
        """`bandwidth`: the estimate so far, updated by every slice. A subclass may find its source later."""
        self._source = source
        self._changed = threading.Condition()
        self._bandwidth = bandwidth or Bandwidth()
        self._wanted: list[Cell] = []
        self._flying: tuple[Cell, ...] = ()
        self._arrived: dict[Cell, ArrivedKv] = {}
        self._since = 0.0  # time of the last request or arrival
        self._closed = False
        self._arrivals: list[tuple[Cell, float, float]] = []
        self.failed: str | None = None
        self.pace = 1.0  # actual over expected time of computing, for who knows
        self._thread = threading.Thread(target=self._run, name="rekindle-link", daemon=True)
        self._thread.start()

    @property
    def arrived(self) -> Mapping[Cell, ArrivedKv]:
        """KV that has arrived. Only grows."""
        return MappingProxyType(self._arrived)

    @property
    def arrived_cells(self) -> frozenset[Cell]:
        """Cells that have arrived."""
        with self._changed:
            return frozenset(self._arrived)

    @property
    def arrivals(self) -> tuple[tuple[Cell, float, float], ...]:
        """Arrived cells, each with the start and end of its transfer (`time.monotonic`)."""
        with self._changed:
            return tuple(self._arrivals)

    @property
    def source(self) -> SliceSource | None:
        """Where slices come from; None before that was found."""
        return self._source

    @property
    def flying(self) -> tuple[Cell, ...]:
        """Requested cells; empty while the link is stalled, though they may still arrive."""
        with self._changed:
            return () if self._is_stalled() else self._flying

    @property
    def busy_seconds(self) -> float:
        """Expected seconds until those have arrived."""
        with self._changed:
            speed = self._bandwidth.bytes_per_second()
            if not self._flying or speed is None or self._is_stalled():
                return 0.0
            left = sum(map(self._size_bytes, self._flying)) / speed
            return max(0.0, left - (time.monotonic() - self._since))

    def _is_stalled(self) -> bool:
        """Whether the next slice is long overdue."""
        if not self._flying:
            return False
        speed = self._bandwidth.bytes_per_second()
        expected = 0.0 if speed is None else self._size_bytes(self._flying[0]) / speed
        return time.monotonic() - self._since > max(_STALLED_SECONDS, _STALLED * expected)

    def bytes_per_second(self) -> float | None:
        """Current speed; the minimum once it has failed, None while unknown."""
        with self._changed:
            if self.failed is not None:
                return MIN_BANDWIDTH
            underway = None
            if self._flying:
                now = time.monotonic()
                underway = TransferSample(self._size_bytes(self._flying[0]), now - self._since, now)
            return self._bandwidth.bytes_per_second(underway)

    def want(self, order: TransferOrder | Iterable[Cell]) -> None:
        """Fetch these next, in this order, and nothing else."""
        with self._changed:
            here = {*self._arrived, *self._flying}
            self._wanted = [cell for cell in order if cell not in here]
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until a slice arrives, the link fails or `seconds` pass."""
        with self._changed:
            before = len(self._arrived), self.failed
            self._changed.wait_for(lambda: (len(self._arrived), self.failed) != before, seconds)

    def lose(self, reason: str) -> None:
        """What has arrived cannot be used, and nothing more is fetched."""
        with self._changed:
            self._arrived = {}
            self._fail(reason)
        self.close()

    def close(self) -> None:
        """Fetch nothing more. Idempotent; does not wait for a hanging transfer."""
        with self._changed:
            now = time.monotonic()
            if self._flying and not self._closed and not self._arrivals and now - self._since > AT_A_TIME_SECONDS:
                # Nothing came all the while: at most so fast. Else the link would never be measured, and tried again.
                self._bandwidth.add(TransferSample(self._size_bytes(self._flying[0]), now - self._since, now))
            self._closed = True
            self._changed.notify_all()
            source = self._source
        if source is not None:
            source.cancel()

    def _size_bytes(self, cell: Cell) -> int:
        assert self._source is not None  # nothing is requested before
        return int(self._source.sizes[cell])

    def _run(self) -> None:
        while (cells := self._next()) is not None:
            try:
                self._bring(cells)
            except Cancelled:
                return
            except RekindleError as error:
                self._fail(str(error))
                return
            except Exception as error:  # any failure: the rest is computed
                log.exception("Streaming failed.")
                self._fail(f"{type(error).__name__}: {error}")
                return

    def _next(self) -> tuple[Cell, ...] | None:
        """The cells to request now; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._wanted))
            if self._closed:
                return None
            speed = self._bandwidth.bytes_per_second()
            assert self._source is not None  # else nothing is wanted
            self._source.adapt(self._wanted, speed, self.pace)
            taken: list[Cell] = []
            room = speed * AT_A_TIME_SECONDS if speed is not None else 0.0
            most = min(_MAX_CELLS, max(_FIRST_CELLS, len(self._wanted) // _PARTS))
            while self._wanted and len(taken) < most:
                room -= self._size_bytes(self._wanted[0])
                if room < 0 and len(taken) >= _FIRST_CELLS:
                    break
                taken.append(self._wanted.pop(0))
            self._flying = _in_blocks(taken, 1 if speed is None else speed * _BLOCK_SECONDS / self._mean_bytes(taken))
            self._since = time.monotonic()
            return self._flying

    def _mean_bytes(self, cells: Sequence[Cell]) -> float:
        return max(1.0, sum(map(self._size_bytes, cells)) / len(cells))

    def _bring(self, cells: Sequence[Cell]) -> None:
        assert self._source is not None
        for cell, kv in self._source.carry(cells):
            with self._changed:
                now, size = time.monotonic(), self._size_bytes(cell)
                self._bandwidth.add(TransferSample(size, now - self._since, now))  # with the request, and decoding here
                self._arrivals.append((cell, self._since, now))
                self._since = now
                self._arrived[cell] = kv
                self._flying = self._flying[1:]
                self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        with self._changed:
            self.failed = reason
            self._flying = ()
            self._wanted = []
            self._changed.notify_all()


class OriginSlices:
    """Fetches the published prefix of a prompt, at the levels that the ladder chooses."""

    def __init__(
        self, origin: Origin, found: PublishedPrefix, ladder: LevelLadder, *, left_coded: bool = False
    ) -> None:
        """`left_coded`: the engine decodes quantized slices itself."""
        self._origin, self._found, self.ladder, self._left_coded = origin, found, ladder, left_coded
        self._lock = threading.Lock()
        self._coming: SliceTransfer | None = None
        self._cancelled = False

    @property
    def cells(self) -> CellGrid:
        """The cells it can fetch."""
        return self._found.cells

    def carry(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, ArrivedKv]]:
        """The KV of these cells as it arrives. Raises `OriginFailed`, and `Cancelled`."""
        coming = self._origin.fetch(self._found, cells, self.ladder.level.name)
        self.ladder.take(cells)
        with self._lock:
            if self._cancelled:
                raise Cancelled("The transfer was cancelled.")
            self._coming = coming
        for piece in coming:
            coded = coded_slice(self._found, *piece.cell, piece.data) if self._left_coded else None
            yield piece.cell, coded or decode_slice(self._found, *piece.cell, piece.data)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[chunks, layers] bytes of each slice at the current level."""
        return self.ladder.level.sizes

    def adapt(self, left: Sequence[Cell], bytes_per_second: float | None, pace: float) -> None:
        """Choose the level of the next slices."""
        self.ladder.adapt(left, bytes_per_second, pace)

    def cancel(self) -> None:
        """End the current transfer, and start no other."""
        with self._lock:
            self._cancelled = True
            if self._coming is not None:
                self._coming.cancel()
