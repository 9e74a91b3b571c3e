"""The stored prefix of a prompt, tier by tier. Reading changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rekindle.core.keys import KvSpace, token_bytes
from rekindle.core.kv import Span
from rekindle.core.plan import SHARED_TIERS, Tier
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

    def joined(self, following: Found) -> Found:
        """One run with the one that follows it in the same place."""
        span, sizes = Span(self.span.start, following.span.stop), self.size_bytes + following.size_bytes
        return replace(self, span=span, size_bytes=sizes, beside_bytes=self.beside_bytes + following.beside_bytes)


@dataclass(frozen=True)
class Matches:
    """What is stored of a prompt of `tokens` tokens.

    in_engine   number of its first tokens in a parked context
    stored      runs in memory or on disk, which tile `[0, n)`; `match` is what the store needs to load them
    kv_space    where they are stored, if not in the prompt's own KV space
    goes_on     the tokens that followed the whole prompt before, if they were asked for
    differs_at  where it begins to differ from all stored prompts, if more of it is stored than can be loaded; else 0
    asked_seconds  how long shared tiers took to answer
    """

    tokens: int
    in_engine: int = 0
    stored: tuple[Found, ...] = ()
    match: Match | None = None
    kv_space: KvSpace | None = None
    goes_on: tuple[int, ...] = ()
    differs_at: int = 0
    asked_seconds: float = 0.0

    def quantized_tokens(self, stop: int) -> int:
        """Number of the first `stop` tokens that were quantized."""
        return sum(max(0, min(found.span.stop, stop) - found.span.start) for found in self.stored if found.quantized)

    def load_bytes(self, stop: int, tier: Tier | None = None) -> int:
        """Bytes to load for the first `stop` tokens, with what is decoded beside them; of one tier, or of all."""
        used = [found for found in self.stored if found.span.start < stop and tier in (None, found.tier)]
        beside = sum(found.beside_bytes for found in used)
        return beside + sum(
            found.size_bytes * (min(found.span.stop, stop) - found.span.start) // len(found.span) for found in used
        )

    @property
    def local_tokens(self) -> int:
        """Number of first tokens stored on this machine."""
        return max((found.span.stop for found in self.stored if found.tier not in SHARED_TIERS), default=0)

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
    tiers: Collection[str] = (),
) -> Matches:
    """The longest stored prefix of `tokens`. A store in trouble finds nothing.

    `instead` is a KV space that is preferred where it has as much. Up to `follow` tokens that came next come too.
    `tiers` are the shared tiers that are asked for the rest.
    """
    if instead is not None:
        own, better = (
            find_matches(store, place, tokens, in_engine, follow=follow, tiers=tiers) for place in (kv_space, instead)
        )
        known = 0 if better.match is None else better.match.length
        preferred = known and known >= (own.match.length if own.match is not None else 0)
        return replace(better, kv_space=instead) if preferred else own
    match = store.lookup(kv_space, tokens)
    if match.tokens != token_bytes(tokens) or match.root != kv_space.namespace.root:
        return Matches(len(tokens), in_engine)  # an answer to another question
    whole = follow and match.length == len(tokens)
    goes_on = store.following(kv_space, match, follow) if whole else ()
    if tiers:
        match = store.shared.extend(kv_space, match, tiers)
    stored: list[Found] = []
    for piece in match.pieces:
        found = _found(store, kv_space, piece)
        last = stored[-1] if stored and piece.tier is not None else None
        if last is not None and (last.tier, last.quantized) == (found.tier, found.quantized):
            found = stored.pop().joined(found)  # one request brings a layer of all of them
        stored.append(found)
    return Matches(len(tokens), in_engine, tuple(stored), match, goes_on=goes_on)


def _found(store: TieredStore, kv_space: KvSpace, piece: Piece) -> Found:
    own: Tier = "disk" if piece.coding == "raw" else "coded"
    tier: Tier = "memory" if store.holds(piece) else piece.tier or own
    token_bytes = kv_space.layout.token_bytes
    overread = piece.overread * token_bytes if tier != "memory" else 0
    return Found(piece.span, tier, len(piece.span) * token_bytes, piece.coding == "quantized", overread)
