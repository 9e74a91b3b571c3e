"""Where a chunk's KV stands among the chains that are kept: found from its end, walking back to its beginning.

    chain     [ block ][ block ][ block ][ block ...
    chunk          [...............]
                                ^ tail: the tokens of the last block it needs, up to its end; `parent` is the node above

The last block may be kept again, longer, when its prompt goes on: any child of the parent that begins with the tail
will do. Above it, each extent names the node it hangs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rekindle.core.keys import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, NodeKey
from rekindle.core.kv import Span
from rekindle.index.prefix import Piece


@dataclass(frozen=True, slots=True)
class Seat:
    """A chunk's place in a chain. `span` counts from the chain's root."""

    parent: NodeKey
    tail: bytes
    span: Span

    @property
    def last(self) -> int:
        """The last block it needs, counted from the root."""
        return (self.span.stop - 1) // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Holding:
    """A block that may be used: its extent, its place there, and how many blocks are above the extent."""

    extent: int
    name: str
    place: int
    depth: int


class ChunkRows(Protocol):
    """What the walk needs of a catalog, from one consistent view of it. What may not be used is not there."""

    def beginning(self, parent: NodeKey, tokens: bytes) -> Holding | None:
        """A child of `parent` that begins with `tokens`."""

    def holding(self, key: NodeKey) -> Holding | None:
        """The block of a node."""

    def above(self, extent: int) -> NodeKey | None:
        """The node that an extent hangs on."""


def seat(root: NodeKey, keys: Sequence[NodeKey], tokens: bytes, span: Span) -> Seat:
    """The seat of `span` in a prompt of `tokens` whose blocks have these keys."""
    last = (span.stop - 1) // BLOCK_TOKENS
    tail = tokens[last * BLOCK_BYTES : span.stop * TOKEN_BYTES]
    return Seat(keys[last - 1] if last else root, tail, span)


def locate(rows: ChunkRows, seat: Seat, tokens: bytes) -> tuple[Piece, ...] | None:
    """The pieces that hold a chunk of these tokens, in order, with spans counted from the root.

    None if not all of it is there. Only the tail is compared: the node above it stands for all tokens before, and
    whoever loads the pieces compares every token with what their files say.
    """
    span, block, tail = seat.span, seat.last, seat.tail
    if not tokens or len(tokens) != len(span) * TOKEN_BYTES:
        return None
    shared = min(len(tail), len(tokens))
    if len(tail) != (span.stop - block * BLOCK_TOKENS) * TOKEN_BYTES or tail[-shared:] != tokens[-shared:]:
        return None
    found = rows.beginning(seat.parent, tail)
    stop, pieces = span.stop, list[Piece]()
    while found is not None and found.depth + found.place == block:
        start = max(span.start, found.depth * BLOCK_TOKENS)
        first = start // BLOCK_TOKENS - found.depth
        pieces.append(Piece(found.extent, found.name, first, Span(start, stop), start % BLOCK_TOKENS))
        if start == span.start:
            return tuple(reversed(pieces))
        stop, block = start, found.depth - 1
        above = rows.above(found.extent)
        found = None if above is None else rows.holding(above)
    return None
