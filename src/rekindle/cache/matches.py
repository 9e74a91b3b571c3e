"""The stored prefix of a prompt, tier by tier. Reading changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rekindle.core.keys import KvSpace, token_bytes
from rekindle.core.kv import Span
from rekindle.core.plan import Tier
from rekindle.store.prefix_index import Match, Piece
from rekindle.store.tiered import TieredStore


@dataclass(frozen=True, slots=True)
class Found:
    """A run of tokens whose KV is in one place."""

    span: Span
    tier: Tier
    size_bytes: int
    quantized: bool = False  # it was quantized
    beside_bytes: int = 0  # decoded as well, of no use here


@dataclass(frozen=True)
class Matches:
    """What is stored of a prompt of `tokens` tokens.

    in_engine   number of its first tokens in a parked context
    stored      runs in memory or on disk, which tile `[0, n)`; `match` is what the store needs to load them
    kv_space    where they are stored, if not in the prompt's own KV space
    goes_on     the tokens that followed the whole prompt before, if they were asked for
    differs_at  where it begins to differ from all stored prompts, if more of it is stored than can be loaded; else 0
    """

    tokens: int
    in_engine: int = 0
    stored: tuple[Found, ...] = ()
    match: Match | None = None
    kv_space: KvSpace | None = None
    goes_on: tuple[int, ...] = ()
    differs_at: int = 0

    def quantized_tokens(self, stop: int) -> int:
        """Number of the first `stop` tokens that were quantized."""
        return sum(max(0, min(found.span.stop, stop) - found.span.start) for found in self.stored if found.quantized)

    def load_bytes(self, stop: int) -> int:
        """Bytes to load for the first `stop` tokens, with what is decoded beside them."""
        used = [found for found in self.stored if found.span.start < stop]
        beside = sum(found.beside_bytes for found in used)
        return beside + sum(
            found.size_bytes * (min(found.span.stop, stop) - found.span.start) // len(found.span) for found in used
        )

    @property
    def length(self) -> int:
        """Number of first tokens found anywhere."""
        return max(self.in_engine, self.stored[-1].span.stop if self.stored else 0)


def find_matches(
    store: TieredStore,
    kv_space: KvSpace,
    tokens: Sequence[int],
    in_engine: int = 0,
    instead: KvSpace | None = None,
    follow: int = 0,
) -> Matches:
    """The longest stored prefix of `tokens`. A store in trouble finds nothing.

    `instead` is a KV space that is preferred where it has as much. Up to `follow` tokens that came next come too.
    """
    if instead is not None:
        own, better = (find_matches(store, place, tokens, in_engine, follow=follow) for place in (kv_space, instead))
        known = 0 if better.match is None else better.match.length
        preferred = known and known >= (own.match.length if own.match is not None else 0)
        return replace(better, kv_space=instead) if preferred else own
    match = store.lookup(kv_space, tokens)
    if match.tokens != token_bytes(tokens) or match.root != kv_space.namespace.root:
        return Matches(len(tokens), in_engine)  # an answer to another question
    stored = tuple(_found(store, kv_space, piece) for piece in match.pieces)
    whole = follow and match.length == len(tokens)
    goes_on = store.following(kv_space, match, follow) if whole else ()
    return Matches(len(tokens), in_engine, stored, match, goes_on=goes_on)


def _found(store: TieredStore, kv_space: KvSpace, piece: Piece) -> Found:
    tier: Tier = "memory" if store.holds(piece) else "disk" if piece.coding == "raw" else "coded"
    token_bytes = kv_space.layout.token_bytes
    overread = piece.overread * token_bytes if tier == "coded" else 0
    return Found(piece.span, tier, len(piece.span) * token_bytes, piece.coding == "quantized", overread)
