"""What is known of one prompt while it is answered, and what it was spared in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.core.app import Asker
from rekindle.core.keys import Shelf
from rekindle.core.kv import Span
from rekindle.core.plan import Plan, Tier
from rekindle.core.reply import ChunkReuse, Reuse
from rekindle.origin.slices import RAW
from rekindle.reuse.lookup import Matches
from rekindle.reuse.mending import Mender, expected_anew
from rekindle.reuse.planner import Cut
from rekindle.run.chunks import Passages
from rekindle.run.context import Context, cut_passages
from rekindle.run.flight import Flight
from rekindle.run.keep import Guard
from rekindle.run.prefill import Filled


@dataclass(frozen=True)
class Known:
    """What is known of a prompt, and the context it can go on from, which is its own until it is given back."""

    shelf: Shelf
    tokens: Sequence[int]
    matches: Matches
    parked: Context | None = None
    trouble: str | None = None
    off: bool = False  # nothing was looked for, and nothing shall be kept
    guard: Guard | None = None  # which decides whether it may be kept
    flight: Flight | None = None  # by which others know that it is being computed
    passages: Passages | None = None  # if some of it may come from other prompts
    asker: Asker | None = None  # the app that asks

    def passages_before(self, plan: Plan) -> tuple[ChunkReuse, ...]:
        """The passages that stand in the context that a plan goes on from, as far as it does."""
        return cut_passages(self.parked.mended, plan.reused) if self.parked is not None and plan.in_engine else ()

    @property
    def source(self) -> Shelf:
        """Where what the store knows of it stands."""
        return self.matches.shelf or self.shelf

    @property
    def stored_tokens(self) -> int:
        """How many tokens the store knows, where the prompt's own KV belongs."""
        matches = self.matches
        return matches.stored[-1].span.stop if matches.stored and matches.shelf is None else 0

    def near_tokens(self, plan: Plan) -> int:
        """How many of the tokens that a plan reuses have KV that was quantized."""
        if plan.in_engine:
            return 0 if self.parked is None else min(self.parked.near_tokens, plan.reused)
        return self.matches.near_tokens(plan.reused)


def spared(known: Known, plan: Plan, filled: Filled | None, miss: str | None, mender: Mender) -> Reuse:
    """What a prompt is spared by a plan; once it is filled, what it was really spared."""
    tiers = Counter({load.tier: 0 for load in plan.loads})
    for load in plan.loads:
        tiers[load.tier] += len(load.span)
    chunks = _chunks(known, plan) if filled is None else filled.context.mended
    stayed, moved = _mended_before(chunks, plan), _tokens(plan.mend.spans) if plan.mend is not None else 0
    tiers["engine"] -= stayed  # they are still there from the last request
    mended = stayed + moved
    mends = plan.mend is not None
    near = known.near_tokens(plan) if filled is None else min(filled.context.near_tokens, plan.reused)
    is_near = near > 0
    streamed = 0 if plan.stream is None else plan.stream.tokens
    if plan.stream is not None and plan.stream.level != RAW:
        near = known.near_tokens(plan) + streamed
        is_near = near > 0 or plan.stream.brings  # also what is less than a token's worth
    anew = len(filled.anew) if filled is not None else _expected(known, plan, mender)
    return Reuse(
        level="off" if known.off else "approximate" if mended else "near" if is_near else "exact",
        computed=len(known.tokens) - plan.reused - moved + anew - streamed,
        engine=tiers["engine"],
        memory=tiers["memory"],
        disk=tiers["disk"] + tiers["coded"],
        near=near,
        mended=mended,
        recomputed=anew,
        streamed=streamed,
        timeline=() if filled is None or filled.streamed is None else tuple(filled.streamed.events),
        load_seconds=0.0 if filled is None else filled.load_seconds,
        predicted_seconds=plan.predicted_seconds,
        cold_seconds=plan.cold_seconds,
        miss=miss,
        chunks=chunks if mended or known.passages is not None else (),
        mender=mender.name if mends else None,
        budget=mender.budget if mends else None,
        calibrated=mender.calibrated if mends else None,
    )


def why_missed(known: Known, plan: Plan, cut: Cut, lost: str | None) -> str | None:
    """Why not everything but the last token is reused, in a word; None if it is. See `Reuse`."""
    last = len(known.tokens) - 1
    if known.off:
        return "off"
    if known.trouble is not None:
        return "late"
    if lost is not None:
        return "lost"
    if plan.mend is None and plan.reused < cut.reusable(min(known.matches.length, last)):
        return "slower"
    if plan.reused == last:
        return None
    return "differs" if known.matches.length else "unknown"


def refused_tiers(known: Known, plan: Plan, cut: Cut) -> set[Tier]:
    """Where something is known that a plan does not load, because computing is expected to be sooner."""
    if known.off or why_missed(known, plan, cut, None) != "slower":
        return set()
    return {found.tier for found in known.matches.stored if found.span.stop > plan.reused}


def _chunks(known: Known, plan: Plan) -> tuple[ChunkReuse, ...]:
    """Where the KV of the passages will come from."""
    before = known.passages_before(plan)
    return before if known.passages is None else known.passages.report(plan, (), before)


def _expected(known: Known, plan: Plan, mender: Mender) -> int:
    return 0 if known.passages is None else expected_anew(known.passages.mended(plan), mender)


def _tokens(spans: Sequence[Span]) -> int:
    return sum(map(len, spans))


def _mended_before(chunks: Sequence[ChunkReuse], plan: Plan) -> int:
    """How many tokens of passages were mended by earlier requests; what stands behind them is computed."""
    return sum(max(0, min(chunk.stop, plan.reused) - chunk.start) for chunk in chunks if chunk.source == "mended")
