"""The link to an origin: a thread that brings slices in the order in which they are wanted now.

It asks for a few at a time, so that the order can change meanwhile; what is on its way comes. When something goes
wrong it says why, once, and brings nothing more: then the rest is computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from rekindle.core.cells import Cell, Streamed
from rekindle.core.kv import LayerKv
from rekindle.errors import Cancelled, RekindleError
from rekindle.reuse.latency import LEAST_BANDWIDTH, Bandwidth, Transfer

log = logging.getLogger(__name__)

AT_A_TIME_SECONDS = 0.2  # slices that come within so long are asked for together
_MOST_CELLS = 64
_PARTS = 8  # nor more than this part of what is wanted: the order may change
_BLOCK_SECONDS = 0.1  # slices that come within so long may come in the order of the file: fewer requests
_FIRST_CELLS = 2  # while the bandwidth is not known
_STALLED_SECONDS, _STALLED = 0.25, 4.0  # so long, and so many times longer than expected, nothing came


def _in_blocks(cells: Sequence[Cell], count: float) -> tuple[Cell, ...]:
    """The same cells, nearly in their order, but so many neighbours at a time as they stand in the file: one range."""
    size = max(1, min(int(count), _MOST_CELLS))
    blocks: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        blocks.setdefault((cell.chunk, cell.layer // size), []).append(cell)
    return tuple(cell for block in blocks.values() for cell in sorted(block))


class Carrier(Protocol):
    """Brings slices: one transfer after the other."""

    def carry(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, LayerKv]]:
        """The KV of these cells, in this order, as it comes. Raises a `RekindleError` if it does not."""

    def size_bytes(self, cell: Cell) -> int:
        """How much of the link it takes."""

    def cancel(self) -> None:
        """End a transfer that is under way, from any thread."""


class Link:
    """One context on its way here. `want` something, then `wait`; `close` it, whatever happened."""

    def __init__(self, carrier: Carrier, bandwidth: Bandwidth | None = None) -> None:
        """`bandwidth` is what is known of the link already; it learns from this."""
        self._carrier = carrier
        self._changed = threading.Condition()
        self._bandwidth = bandwidth or Bandwidth()
        self._wanted: list[Cell] = []
        self._flying: tuple[Cell, ...] = ()
        self._arrived: dict[Cell, LayerKv] = {}
        self._since = 0.0  # when the link was asked, or brought something, last
        self._closed = False
        self._bytes = 0
        self._arrivals: list[tuple[Cell, float, float]] = []
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._run, name="rekindle-link", daemon=True)
        self._thread.start()

    @property
    def arrived(self) -> Mapping[Cell, LayerKv]:
        """What is here. It grows meanwhile, and never changes otherwise."""
        return MappingProxyType(self._arrived)

    @property
    def arrived_cells(self) -> frozenset[Cell]:
        """The cells that are here now."""
        with self._changed:
            return frozenset(self._arrived)

    @property
    def arrivals(self) -> tuple[tuple[Cell, float, float], ...]:
        """What came by now, since when it was on its way, and when it was here (`time.monotonic`)."""
        with self._changed:
            return tuple(self._arrivals)

    @property
    def flying(self) -> tuple[Cell, ...]:
        """What is on its way; nothing if it does not move any more, though it may come after all."""
        with self._changed:
            return () if self._is_stalled() else self._flying

    @property
    def busy_seconds(self) -> float:
        """How long it is expected to be busy with that."""
        with self._changed:
            speed = self._bandwidth.bytes_per_second()
            if not self._flying or speed is None or self._is_stalled():
                return 0.0
            left = sum(map(self._carrier.size_bytes, self._flying)) / speed
            return max(0.0, left - (time.monotonic() - self._since))

    def _is_stalled(self) -> bool:
        """Whether the slice that comes next should have come long ago."""
        if not self._flying:
            return False
        speed = self._bandwidth.bytes_per_second()
        expected = 0.0 if speed is None else self._carrier.size_bytes(self._flying[0]) / speed
        return time.monotonic() - self._since > max(_STALLED_SECONDS, _STALLED * expected)

    @property
    def size_bytes(self) -> int:
        """How many bytes of what arrived the link carried."""
        with self._changed:
            return self._bytes

    def bytes_per_second(self) -> float | None:
        """How fast it is by now; next to nothing once it has failed, None while nobody knows."""
        with self._changed:
            if self.failed is not None:
                return LEAST_BANDWIDTH
            underway = None
            if self._flying:
                now = time.monotonic()
                underway = Transfer(self._carrier.size_bytes(self._flying[0]), now - self._since, now)
            return self._bandwidth.bytes_per_second(underway)

    def want(self, order: Streamed | Iterable[Cell]) -> None:
        """Bring these next, in this order, and nothing else."""
        with self._changed:
            here = {*self._arrived, *self._flying}
            self._wanted = [cell for cell in order if cell not in here]
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until something comes, or fails, or so long."""
        with self._changed:
            before = len(self._arrived), self.failed
            self._changed.wait_for(lambda: (len(self._arrived), self.failed) != before, seconds)

    def close(self) -> None:
        """Bring nothing more. Idempotent; does not wait for a transfer that hangs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._carrier.cancel()

    def _run(self) -> None:
        while (cells := self._next()) is not None:
            try:
                self._bring(cells)
            except Cancelled:
                return
            except RekindleError as error:
                self._fail(str(error))
                return
            except Exception as error:  # whatever it is: the rest is computed
                log.exception("Streaming failed.")
                self._fail(f"{type(error).__name__}: {error}")
                return

    def _next(self) -> tuple[Cell, ...] | None:
        """The cells to ask for now; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._wanted))
            if self._closed:
                return None
            speed = self._bandwidth.bytes_per_second()
            taken: list[Cell] = []
            room = speed * AT_A_TIME_SECONDS if speed is not None else 0.0
            most = min(_MOST_CELLS, max(_FIRST_CELLS, len(self._wanted) // _PARTS))
            while self._wanted and len(taken) < most:
                room -= self._carrier.size_bytes(self._wanted[0])
                if room < 0 and len(taken) >= _FIRST_CELLS:
                    break
                taken.append(self._wanted.pop(0))
            self._flying = _in_blocks(taken, 1 if speed is None else speed * _BLOCK_SECONDS / self._mean_bytes(taken))
            self._since = time.monotonic()
            return self._flying

    def _mean_bytes(self, cells: Sequence[Cell]) -> float:
        return max(1.0, sum(map(self._carrier.size_bytes, cells)) / len(cells))

    def _bring(self, cells: Sequence[Cell]) -> None:
        for cell, kv in self._carrier.carry(cells):
            with self._changed:
                now, size = time.monotonic(), self._carrier.size_bytes(cell)
                self._bandwidth.add(Transfer(size, now - self._since, now))  # with its decoding, and with being asked
                self._arrivals.append((cell, self._since, now))
                self._since = now
                self._arrived[cell] = kv
                self._bytes += size
                self._flying = self._flying[1:]
                self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        with self._changed:
            self.failed = reason
            self._flying = ()
            self._wanted = []
            self._changed.notify_all()
