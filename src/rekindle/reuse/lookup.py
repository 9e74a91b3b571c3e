"""What is known of a prompt, tier by tier. Looking changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.core.keys import Shelf, token_bytes
from rekindle.core.kv import Span
from rekindle.core.plan import Tier
from rekindle.index.prefix import Match
from rekindle.store.tiered import TieredStore


@dataclass(frozen=True, slots=True)
class Found:
    """A run of tokens whose KV is in one place."""

    span: Span
    tier: Tier
    size_bytes: int


@dataclass(frozen=True)
class Matches:
    """Everything known of a prompt of `tokens` tokens.

    in_engine   so many tokens, from the first on, are still in a sequence that nobody uses
    stored      runs in memory or on disk, which tile `[0, n)`; `match` is what the store needs to load them
    """

    tokens: int
    in_engine: int = 0
    stored: tuple[Found, ...] = ()
    match: Match | None = None

    @property
    def length(self) -> int:
        """How many tokens are known, wherever."""
        return max(self.in_engine, self.stored[-1].span.stop if self.stored else 0)


def lookup(store: TieredStore, shelf: Shelf, tokens: Sequence[int], in_engine: int = 0) -> Matches:
    """Ask the store for the longest known prefix of `tokens`. A store in trouble knows nothing."""
    match = store.lookup(shelf, tokens)
    if match.tokens != token_bytes(tokens) or match.root != shelf.namespace.root:
        return Matches(len(tokens), in_engine)  # an answer to another question
    stored = tuple(
        Found(piece.span, "memory" if store.holds(piece) else "disk", len(piece.span) * shelf.layout.token_bytes)
        for piece in match.pieces
    )
    return Matches(len(tokens), in_engine, stored, match)
