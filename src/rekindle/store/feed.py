"""From extents into a sequence, layer by layer, straight into the engine's own buffers.

A fill is one copy and the check, keys and values side by side. Nothing is read ahead: asking the system to, for all of
a file or for some layers, was measured to make a load from dropped pages slower by a fifth to a third.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rekindle.codec.extent import ExtentHeader
from rekindle.core.keys import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, chain
from rekindle.core.kv import Held, KvLayout, LayerKv, Span
from rekindle.errors import KvLost
from rekindle.index.prefix import Match, Piece
from rekindle.store.extents import ExtentFiles
from rekindle.store.memory import HeldExtent
from rekindle.store.opened import Damaged, OpenExtent


@dataclass(frozen=True, eq=False)
class Source:
    """A piece of a prompt and where its KV comes from: a file, or memory."""

    piece: Piece
    origin: OpenExtent | HeldExtent

    @property
    def header(self) -> ExtentHeader:
        """What the extent holds."""
        return self.origin.header

    def close(self, extents: ExtentFiles) -> None:
        """Close its file, if it is one."""
        if isinstance(self.origin, OpenExtent):
            extents.release(self.origin)

    @property
    def span(self) -> Span:
        """The tokens it takes, as the extent counts them."""
        start = self.piece.first * BLOCK_TOKENS + self.piece.skip
        return Span(start, start + len(self.piece.span))


class StoredFeed:
    """A feed (see `engine/base`) over pieces of extents. `lost` is told what could not be read, and why."""

    def __init__(
        self,
        layout: KvLayout,
        sources: tuple[Source, ...],
        extents: ExtentFiles,
        lost: Callable[[Piece, Exception], None],
    ) -> None:
        self.span = Span(sources[0].piece.span.start, sources[-1].piece.span.stop)
        self.layers = range(len(layout.layers))
        self._sources = sources
        self._extents = extents
        self._lost = lost
        self._closed = False

    def fill(self, layer: int, out: LayerKv) -> None:
        """Write the KV of `span` in `layer` into `out`. Raises `KvLost` if it cannot be read or was changed."""
        if self._closed:
            raise KvLost("The feed was closed; what it would have brought is computed instead.")
        for source in self._sources:
            start, stop = source.piece.span.start - self.span.start, source.piece.span.stop - self.span.start
            window = LayerKv(out.keys[:, start:stop], out.values[:, start:stop])
            if isinstance(source.origin, HeldExtent):
                self._copy(source.origin.layers[layer], source.span, window)
            else:
                self._read(source, source.origin, layer, window)
        if layer == self.layers[-1]:
            self.close()

    def held(self) -> list[Held] | None:
        """The KV where it stands, piece by piece; None unless all of it is in memory."""
        held = [Held(s.origin.layers, s.span) for s in self._sources if isinstance(s.origin, HeldExtent)]
        return held if len(held) == len(self._sources) else None

    def close(self) -> None:
        """Close the files. Idempotent."""
        if not self._closed:
            self._closed = True
            for source in self._sources:
                source.close(self._extents)

    def __enter__(self) -> StoredFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, source: Source, extent: OpenExtent, layer: int, out: LayerKv) -> None:
        try:
            self._extents.read(extent, layer, source.span, out)
        except (OSError, Damaged) as error:
            self.close()
            self._lost(source.piece, error)
            raise KvLost(f"KV from the cache could not be read ({error}); it is computed instead.") from error

    def _copy(self, held: LayerKv, span: Span, out: LayerKv) -> None:
        self._extents.side_by_side(
            lambda: np.copyto(out.keys, held.keys[:, span.start : span.stop]),
            lambda: np.copyto(out.values, held.values[:, span.start : span.stop]),
            out.keys.nbytes + out.values.nbytes,
        )


def is_in_place(source: Source, match: Match, shelf_digest: str) -> bool:
    """Whether the extent itself says that it holds these tokens in this place: the catalog's word is not enough."""
    plan, piece = source.header.plan, source.piece
    stored = plan.tokens[piece.first * BLOCK_BYTES :][: len(piece.span) * TOKEN_BYTES]
    wanted = match.tokens[piece.span.start * TOKEN_BYTES : piece.span.stop * TOKEN_BYTES]
    above = chain(plan.parent, plan.tokens[: piece.first * BLOCK_BYTES])
    parent = above[-1] if above else plan.parent
    return (plan.shelf, stored, parent) == (shelf_digest, wanted, match.key_before(piece.span.start // BLOCK_TOKENS))


def stretched(source: Source, match: Match, stop: int) -> Source | None:
    """The same extent for all tokens up to `stop`, if its file has those too, though they are listed elsewhere by now.

    The end of a prompt is: when the prompt went on, its last block was kept again as a whole.
    """
    plan, piece = source.header.plan, source.piece
    count = stop - piece.span.start
    stored = plan.tokens[piece.first * BLOCK_BYTES :][: count * TOKEN_BYTES]
    if stored != match.tokens[piece.span.start * TOKEN_BYTES : stop * TOKEN_BYTES]:
        return None
    return Source(replace(piece, span=Span(piece.span.start, stop)), source.origin)
