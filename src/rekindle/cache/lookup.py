"""The result of looking a prompt up, and why not more of it is reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.cache.context import Context, cut_passages
from rekindle.cache.inflight import InflightPrefill
from rekindle.cache.matches import Matches
from rekindle.cache.planner import PrefillSteps
from rekindle.cache.writer import WriteGuard
from rekindle.core.chunk import ChunkMatches
from rekindle.core.keys import KvSpace
from rekindle.core.plan import Plan
from rekindle.core.reply import ChunkReuse
from rekindle.core.scope import AppRef
from rekindle.store.prefix_index import Piece
from rekindle.store.variants import StoredVariant


@dataclass(frozen=True)
class CacheLookup:
    """What is stored of a prompt, and the parked context it can continue, which is taken until it is parked again."""

    kv_space: KvSpace
    tokens: Sequence[int]
    matches: Matches
    parked: Context | None = None
    trouble: str | None = None
    off: bool = False  # no lookup, and nothing is written
    guard: WriteGuard | None = None  # decides whether its KV may be written
    inflight: InflightPrefill | None = None  # others may wait for it
    passages: ChunkMatches | None = None  # if passages may come from other prompts
    app_ref: AppRef | None = None  # the app that asks
    wanted: bool = False  # asked for only to be kept
    parked_goes_on: bool = False  # the parked context had more tokens than the prompt shares with it

    def passages_before(self, plan: Plan) -> tuple[ChunkReuse, ...]:
        """The passages in the part of the context that a plan continues."""
        return cut_passages(self.parked.chunk_reuse, plan.reused) if self.parked is not None and plan.in_engine else ()

    @property
    def has_documents(self) -> bool:
        """Whether passages may be reused that were given as documents, not only text that was found."""
        return self.passages is not None and len(self.passages.prompt_layout.texts) < len(
            self.passages.prompt_layout.chunks
        )

    @property
    def source(self) -> KvSpace:
        """The KV space of the stored prefix."""
        return self.matches.kv_space or self.kv_space

    @property
    def stored_tokens(self) -> int:
        """Number of tokens stored on this machine in the prompt's own KV space."""
        return self.matches.local_tokens if self.matches.kv_space is None else 0

    @property
    def forks(self) -> bool:
        """Whether something stored goes on otherwise where the reuse can end at the latest."""
        matches, match = self.matches, self.matches.match
        in_store = match is not None and match.forks and match.length == matches.length
        return in_store or (self.parked_goes_on and matches.in_engine == matches.length)

    def quantized_tokens(self, plan: Plan) -> int:
        """Number of tokens that a plan reuses whose KV was quantized."""
        if plan.in_engine:
            return 0 if self.parked is None else min(self.parked.quantized_tokens, plan.reused)
        return self.matches.quantized_tokens(plan.reused)


def stored_pieces(known: CacheLookup, plan: Plan) -> list[Piece]:
    """The stored pieces of a prompt that it may load: its prefix, unless a parked context has it, then its passages."""
    prefix = () if known.matches.match is None or plan.in_engine else known.matches.match.pieces
    picked = () if known.passages is None else known.passages.picked
    passages = [chunk.known for chunk in picked if chunk.span.stop > known.matches.length]
    return [*prefix, *(piece for one in passages if isinstance(one, StoredVariant) for piece in one.pieces)]


def why_missed(known: CacheLookup, plan: Plan, cut: PrefillSteps, lost: str | None) -> str | None:
    """Why not more is reused, in a word; None if all that is stored is, and the rest is new. See `Reuse`."""
    last = len(known.tokens) - 1
    if known.off:
        return "off"
    if known.trouble is not None:
        return "late"
    if lost is not None:
        return "lost"
    if plan.reuse_chunks is None and (
        _refuses_chunks(known, plan) or plan.reused < cut.reusable(min(known.matches.length, last))
    ):
        return "slower"
    if plan.reused == last:
        return None
    if not known.matches.length:
        return "unknown"
    return "differs" if known.forks else None


def refused_kinds(known: CacheLookup, plan: Plan, cut: PrefillSteps) -> set[str]:
    """What a plan does not do because computing is expected to be faster: loads by tier, and chunk reuse."""
    if known.off or why_missed(known, plan, cut, None) != "slower":
        return set()
    tiers = {str(found.tier) for found in known.matches.stored if found.span.stop > plan.reused}
    return {*tiers, "chunks"} if _refuses_chunks(known, plan) else tiers


def _refuses_chunks(known: CacheLookup, plan: Plan) -> bool:
    return known.passages is not None and known.passages.knows_more_than(plan.reused)
