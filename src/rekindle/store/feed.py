"""From extents into a sequence, layer by layer, straight into the engine's own buffers.

What must come from the medium is asked for at once (`prefetch`), so the system reads it while earlier layers compute;
what is left for `fill` is one copy and the check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rekindle.codec.extent import ExtentHeader
from rekindle.core.keys import BLOCK_TOKENS
from rekindle.core.kv import KvLayout, LayerKv, Span
from rekindle.errors import KvLost
from rekindle.index.prefix import Piece
from rekindle.store.extents import Damaged, ExtentFiles, OpenExtent
from rekindle.store.memory import HeldExtent


@dataclass(frozen=True, eq=False)
class Source:
    """A piece of a prompt and where its KV comes from: a file, or memory."""

    piece: Piece
    origin: OpenExtent | HeldExtent

    @property
    def header(self) -> ExtentHeader:
        """What the extent holds."""
        return self.origin.header

    @property
    def span(self) -> Span:
        """The tokens it takes, as the extent counts them."""
        start = self.piece.first * BLOCK_TOKENS
        return Span(start, start + len(self.piece.span))


class StoredFeed:
    """A feed (see `engine/base`) over pieces of extents. `lost` is told which extent could not be read, and why."""

    def __init__(
        self,
        layout: KvLayout,
        sources: tuple[Source, ...],
        extents: ExtentFiles,
        lost: Callable[[int, Exception], None],
    ) -> None:
        self.span = Span(sources[0].piece.span.start, sources[-1].piece.span.stop)
        self.layers = range(len(layout.layers))
        self._sources = sources
        self._extents = extents
        self._lost = lost
        self._closed = False
        for source in sources:
            if isinstance(source.origin, OpenExtent):
                extents.files.prefetch(source.origin.handle)

    def fill(self, layer: int, out: LayerKv) -> None:
        """Write the KV of `span` in `layer` into `out`. Raises `KvLost` if it cannot be read or was changed."""
        for source in self._sources:
            start, stop = source.piece.span.start - self.span.start, source.piece.span.stop - self.span.start
            window = LayerKv(out.keys[:, start:stop], out.values[:, start:stop])
            if isinstance(source.origin, HeldExtent):
                self._copy(source.origin.layers[layer], source.span, window)
            else:
                self._read(source, source.origin, layer, window)
        if layer == self.layers[-1]:
            self.close()

    def close(self) -> None:
        """Close the files. Idempotent."""
        if not self._closed:
            self._closed = True
            for source in self._sources:
                if isinstance(source.origin, OpenExtent):
                    self._extents.files.close(source.origin.handle)

    def __enter__(self) -> StoredFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, source: Source, extent: OpenExtent, layer: int, out: LayerKv) -> None:
        try:
            self._extents.read(extent, layer, source.span, out)
        except (OSError, Damaged) as error:
            self.close()
            self._lost(source.piece.extent, error)
            raise KvLost(f"KV from the cache could not be read ({error}); it is computed instead.") from error

    def _copy(self, held: LayerKv, span: Span, out: LayerKv) -> None:
        self._extents.side_by_side(
            lambda: np.copyto(out.keys, held.keys[:, span.start : span.stop]),
            lambda: np.copyto(out.values, held.values[:, span.start : span.stop]),
            out.keys.nbytes + out.values.nbytes,
        )
