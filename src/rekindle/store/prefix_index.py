"""The longest stored prefix of a prompt, token by token, without reading any KV.

Chains are prefix-closed (tails are evicted before heads), so the deepest stored block is found by binary search over
the chained keys. From there the extents that hold the chain are walked back to the root, one step per extent, and all
tokens are compared. In the first block that differs, one of the two neighbours of the prompt's tokens among the
parent's children shares the longest beginning with it: KV of the beginning of a block is a slice of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rekindle.core.keys import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, NodeKey, chain, common_tokens
from rekindle.core.kv import Span
from rekindle.core.plan import SharedTierName


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Where a block is: the extent, and its place among the extent's blocks."""

    extent: int
    place: int


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A child of a node."""

    spot: BlockRef
    tokens: bytes


class BlockIndex(Protocol):
    """The queries that the search needs, on one consistent view of a catalog."""

    def find(self, key: NodeKey) -> BlockRef | None:
        """The block with that key."""

    def name(self, extent: int) -> str | None:
        """The name of an extent; None if it may not be used."""

    def tokens(self, spot: BlockRef) -> bytes:
        """The tokens of an extent's blocks up to and including that place."""

    def neighbours(self, parent: NodeKey, tokens: bytes) -> Sequence[Neighbour]:
        """The children of `parent` just below (or at) and just above `tokens`, in the order of their bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a prompt's tokens whose KV is in one extent, from its block `first` on; the last block may be used in
    part.

    So may the first: its `skip` first tokens are left out. The name is needed because numbers of extents start over
    when a catalog is lost.
    """

    extent: int
    name: str
    first: int
    span: Span
    skip: int = 0
    coding: str = "raw"  # raw, exact or quantized
    overread: int = 0  # further tokens that must be decoded with it
    tier: SharedTierName | None = None  # the shared tier it is on; None: it is in this folder, and `extent` its number

    @property
    def last(self) -> int:
        """The place of the last block used."""
        return self.first + (self.skip + len(self.span) - 1) // BLOCK_TOKENS


@dataclass(frozen=True)
class Match:
    """The stored prefix of a prompt: pieces that tile `[0, length)` in order.

    `forks`: something stored goes on otherwise where it ends.
    """

    root: NodeKey
    tokens: bytes
    keys: tuple[NodeKey, ...]
    pieces: tuple[Piece, ...]
    forks: bool = False

    @property
    def length(self) -> int:
        """Number of stored tokens, from the first on."""
        return self.pieces[-1].span.stop if self.pieces else 0

    @property
    def full_blocks(self) -> int:
        """Number of whole blocks that are stored."""
        return self.length // BLOCK_TOKENS

    def key_before(self, block: int) -> NodeKey:
        """The parent node of block number `block` of the prompt."""
        return self.keys[block - 1] if block else self.root

    def until(self, length: int) -> Match:
        """The same, of at most the first `length` tokens: for loading less than is stored."""
        pieces = [
            replace(piece, span=Span(piece.span.start, min(piece.span.stop, length)))
            for piece in self.pieces
            if piece.span.start < length
        ]
        return Match(self.root, self.tokens, self.keys, tuple(pieces))

    def since(self, start: int) -> Match:
        """The same without what lies before `start`, the beginning of a block: for loading the rest."""
        pieces = []
        for piece in self.pieces:
            left_out = max(0, start - piece.span.start)
            if left_out < len(piece.span):
                first = piece.first + left_out // BLOCK_TOKENS
                pieces.append(replace(piece, first=first, span=Span(piece.span.start + left_out, piece.span.stop)))
        return replace(self, pieces=tuple(pieces))

    def gap(self) -> Span | None:
        """The span to keep: from the first block not stored as a whole. None if every token is stored."""
        count = len(self.tokens) // TOKEN_BYTES
        return None if self.length >= count else Span(self.full_blocks * BLOCK_TOKENS, count)


def search(rows: BlockIndex, root: NodeKey, tokens: bytes) -> Match:
    """The longest stored prefix of `tokens`."""
    keys = chain(root, tokens)
    pieces = _whole_blocks(rows, keys[: len(tokens) // BLOCK_BYTES], tokens)
    stored = pieces[-1].span.stop // BLOCK_TOKENS if pieces else 0
    rest = tokens[stored * BLOCK_BYTES : (stored + 1) * BLOCK_BYTES]
    near = rows.neighbours(keys[stored - 1] if stored else root, rest) if rest else ()
    if piece := _inside_block(rows, near, rest, stored):
        if pieces and pieces[-1].extent == piece.extent and pieces[-1].last + 1 == piece.first:
            last = pieces.pop()
            piece = Piece(last.extent, last.name, last.first, Span(last.span.start, piece.span.stop))
        pieces.append(piece)
    inside = 0 if not pieces else pieces[-1].span.stop * TOKEN_BYTES - stored * BLOCK_BYTES
    return Match(root, tokens, tuple(keys), tuple(pieces), _continued(near, rest[:inside]) is not None)


def _whole_blocks(rows: BlockIndex, keys: Sequence[NodeKey], tokens: bytes) -> list[Piece]:
    limit = len(keys)
    while limit:
        depth, spot = _deepest(rows, keys[:limit])
        if spot is None:
            return []
        pieces: list[Piece] = []
        while spot is not None:
            first = depth - 1 - spot.place  # the depth of the extent's first block
            name = rows.name(spot.extent) if first >= 0 else None
            if name is None or rows.tokens(spot) != tokens[first * BLOCK_BYTES : depth * BLOCK_BYTES]:
                # Damaged, expired, or a collision: what follows it is unusable too.
                limit = max(0, min(first, depth - 1))
                break
            pieces.append(Piece(spot.extent, name, 0, Span(first * BLOCK_TOKENS, depth * BLOCK_TOKENS)))
            if first == 0:
                return pieces[::-1]
            depth, limit = first, first - 1
            spot = rows.find(keys[depth - 1])
    return []


def _deepest(rows: BlockIndex, keys: Sequence[NodeKey]) -> tuple[int, BlockRef | None]:
    """The number of chained keys that are stored, and where the last one is."""
    stored, missing, spot = 0, len(keys) + 1, None
    while missing - stored > 1:
        middle = (stored + missing) // 2
        found = rows.find(keys[middle - 1])
        if found is None:
            missing = middle
        else:
            stored, spot = middle, found
    return stored, spot


def _inside_block(rows: BlockIndex, near: Sequence[Neighbour], rest: bytes, depth: int) -> Piece | None:
    best: Piece | None = None
    start = depth * BLOCK_TOKENS
    for neighbour in near:
        common = common_tokens(neighbour.tokens, rest)
        spot = neighbour.spot
        if common > (len(best.span) if best else 0) and (name := rows.name(spot.extent)) is not None:
            best = Piece(spot.extent, name, spot.place, Span(start, start + common))
    return best


def following(rows: BlockIndex, match: Match, max_count: int) -> bytes:
    """Up to `max_count` tokens that follow a whole match; of several continuations, the first in the order of bytes."""
    block = match.full_blocks
    parent, stored = match.key_before(block), match.tokens[block * BLOCK_BYTES :]
    found = b""
    while len(found) < max_count * TOKEN_BYTES:
        near = [child.tokens for child in rows.neighbours(parent, stored) if child.tokens.startswith(stored)]
        longer = max(near, key=len, default=stored)[:BLOCK_BYTES]
        more = longer[len(stored) :]
        if not more or len(more) % TOKEN_BYTES:
            break
        found, stored = found + more, longer  # a longer one may continue it
        if len(stored) == BLOCK_BYTES:
            (parent,), stored = chain(parent, stored), b""
    return found[: max_count * TOKEN_BYTES]


def continuation(rows: BlockIndex, match: Match) -> bytes | None:
    """The tokens of a stored continuation where `match` ends and the prompt differs; None if there is none.

    Of several, the nearest in the order of token bytes.
    """
    block = match.full_blocks
    rest = match.tokens[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
    stored = (match.length - block * BLOCK_TOKENS) * TOKEN_BYTES
    return _continued(rows.neighbours(match.key_before(block), rest), rest[:stored])


def _continued(near: Sequence[Neighbour], stored: bytes) -> bytes | None:
    longer = (n.tokens for n in near if n.tokens.startswith(stored) and len(n.tokens) > len(stored))
    return next((tokens[len(stored) :] for tokens in longer), None)
