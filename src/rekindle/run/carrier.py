"""Slices of a published context, from an origin to KV: what a `Link` asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from rekindle.core.cells import Cell, Cells
from rekindle.core.kv import LayerKv
from rekindle.errors import Cancelled
from rekindle.origin.client import Found, Origin, Transfer, decode_slice


class OriginCarrier:
    """Brings what an origin has of a prompt, in one quality."""

    def __init__(self, origin: Origin, found: Found, level: str) -> None:
        """Raises `ValueError` for a level that is not there."""
        self._origin, self._found, self.level = origin, found, level
        self.sizes = found.sizes(level)  # [chunks, layers] bytes
        self._lock = threading.Lock()
        self._coming: Transfer | None = None
        self._cancelled = False

    @property
    def cells(self) -> Cells:
        """What it can bring."""
        return Cells(self._found.tokens, len(self._found.manifest.model.layout.layers))

    def carry(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, LayerKv]]:
        """The KV of these cells as it comes. Raises `OriginFailed`, and `Cancelled`."""
        coming = self._origin.fetch(self._found, cells, self.level)
        with self._lock:
            if self._cancelled:
                raise Cancelled("The transfer was cancelled.")
            self._coming = coming
        for piece in coming:
            yield piece.cell, decode_slice(self._found, *piece.cell, piece.data)

    def size_bytes(self, cell: Cell) -> int:
        """How much of the link it takes."""
        return int(self.sizes[cell])

    def cancel(self) -> None:
        """End a transfer that is under way, and begin no other."""
        with self._lock:
            self._cancelled = True
            if self._coming is not None:
                self._coming.cancel()
