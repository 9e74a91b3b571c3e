"""Why a prompt is fast or slow: where each span of it comes from, what it differs in, and what would help."""

from __future__ import annotations

import html
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rekindle.core.cells import Event
from rekindle.core.identity import Identity
from rekindle.core.keys import TOKEN_BYTES, Shelf, common_tokens, token_bytes
from rekindle.core.kv import Span
from rekindle.core.plan import Compute, Mend, Plan, Stream
from rekindle.core.reply import ChunkReuse, Reuse
from rekindle.core.request import Message
from rekindle.core.visible import likeness, visible
from rekindle.engine.base import Tokenizer
from rekindle.errors import CacheError
from rekindle.index.prefix import Match
from rekindle.reuse.cost import Costs
from rekindle.reuse.reason import Reason, Sight, common_content, content_of, differences, judge
from rekindle.reuse.volatile import find_volatile
from rekindle.run.timeline import tell_timeline
from rekindle.store import history
from rekindle.store.tiered import TieredStore

_SHOWN_TOKENS = 12  # of each text at a difference
_LEAD_TOKENS = 8
_COMPARED = 12  # earlier prompts, for what changes


@dataclass(frozen=True)
class Part:
    """A span of the prompt, where its KV comes from, and the entry of the cache that has it."""

    start: int
    stop: int
    source: str  # engine, memory, disk, mended, streamed, compute
    entry: str | None = None


@dataclass(frozen=True)
class Difference:
    """The first token that differs from something known, and both texts, made visible."""

    position: int
    before: str  # what both begin with, its end
    ours: str
    known: str
    only_in: str | None  # Unicode form, invisible characters, whitespace, case: when the texts look alike


@dataclass(frozen=True)
class Change:
    """Text that changes between requests, early enough to spoil the rest."""

    start: int
    stop: int
    now: str
    earlier: tuple[str, ...]
    requests: int
    shared_tokens: int
    saved_seconds: float | None  # by moving it behind what is shared


@dataclass(frozen=True)
class Explanation:
    """Everything that is known about why a prompt takes as long as it does. `str()` tells it to people."""

    model: str
    tokens: int
    parts: tuple[Part, ...]
    reason: Reason
    difference: Difference | None = None
    change: Change | None = None
    predicted_seconds: float | None = None
    cold_seconds: float | None = None
    first_token_seconds: float | None = None  # what it really took, for a request that was answered
    at: float | None = None
    opaque: str | None = None  # why reuse is by checkpoint, if it is
    passages: tuple[ChunkReuse, ...] = ()  # if they may be mended
    recomputed: int = 0  # so many of their tokens are computed anew
    mender: str | None = None  # if they are mended
    budget: float | None = None
    calibrated: bool | None = None
    streamed: int = 0  # tokens that came from an origin
    timeline: tuple[Event, ...] = ()  # when, and what was computed meanwhile

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Explanation:
        """What `as_dict` gave. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        fields = dict(values)
        fields["parts"] = tuple(Part(**part) for part in fields["parts"])
        fields["reason"] = Reason(**{**fields["reason"], "differs_in": tuple(fields["reason"]["differs_in"])})
        fields["passages"] = tuple(
            ChunkReuse(**{**chunk, "anew": tuple(chunk["anew"])}) for chunk in fields.get("passages", ())
        )
        fields["timeline"] = tuple(Event(**event) for event in fields.get("timeline", ()))
        if fields.get("difference"):
            fields["difference"] = Difference(**fields["difference"])
        if fields.get("change"):
            fields["change"] = Change(**{**fields["change"], "earlier": tuple(fields["change"]["earlier"])})
        return cls(**fields)

    @property
    def reused(self) -> int:
        """How many tokens are not computed."""
        known = sum(part.stop - part.start for part in self.parts if part.source not in ("compute", "streamed"))
        return known + self.streamed - self.recomputed

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _lines(self) -> list[str]:
        lines = [f"{self.model}: {self.reused} of {self.tokens} tokens reused"]
        for part in self.parts:
            where = _PLACES.get(part.source, f"from {part.source}")
            entry = f"  entry {part.entry[:8]}" if part.entry else ""
            lines.append(f"  {part.start:>6} to {part.stop:<6} {where}{entry}")
        times = {"expected": self.predicted_seconds, "without the cache": self.cold_seconds}
        shown = [f"{name} {_seconds(value)}" for name, value in times.items() if value is not None]
        if self.first_token_seconds is not None:
            shown.insert(0, f"first token {_seconds(self.first_token_seconds)}")
        if shown:
            lines.append("  " + ", ".join(shown))
        lines.append(f"why: {self.reason.sentence}")
        lines += _tell_passages(self)
        lines += tell_timeline(self.timeline)
        if self.opaque is not None:
            lines.append(f"reuse is by checkpoint, where messages end: {self.opaque}")
        if self.difference is not None:
            lines += _tell_difference(self.difference)
        if self.change is not None:
            lines += _tell_change(self.change)
        return lines


@dataclass(frozen=True)
class Prompt:
    """A prompt to be explained: where it belongs, its tokens, and what was asked whatever the model makes of it."""

    shelf: Shelf
    identity: Identity
    model: str
    tokens: Sequence[int]
    asked: str | Sequence[int] | Sequence[Message]

    @cached_property
    def content(self) -> bytes:
        """Digests of what was asked; made when they are wanted, which is never before the first token."""
        return content_of(self.asked)


@dataclass(frozen=True)
class Explainer:
    """What explaining needs. Slow parts (the catalog's history) are read when it is used, off a request's path."""

    store: TieredStore | None
    tokenizer: Tokenizer
    costs: Costs
    other_tenants: bool = True  # whether the reader may learn that another tenant knows a prompt
    opaque: str | None = None  # why the model's state is kept and restored whole, if it is

    def explain(self, prompt: Prompt, plan: Plan, match: Match | None, reuse: Reuse) -> Explanation:
        """Explain a plan for a prompt of which the store knows `match`. A store in trouble explains less."""
        if self.opaque is not None:
            match = None  # its pages are no tokens
        goes_on = difference = change = None
        sight = Sight(len(prompt.tokens), plan.reused, miss=reuse.miss)
        if self.store is not None:
            try:
                goes_on = None if self.opaque is not None else self._goes_on(prompt, match, plan.reused)
                difference = None if goes_on is None else self._difference(prompt.tokens, plan.reused, goes_on)
                if difference is not None and plan.reused == 0 and difference.only_in is None:
                    goes_on = None  # they have nothing in common
                sight = self._sight(prompt, sight, goes_on is not None)
                change = self._change(prompt)
            except (OSError, sqlite3.Error, CacheError, ValueError):
                pass  # what the catalog cannot tell stays untold
        reason = judge(sight)
        if goes_on is None or reason.kind not in ("differs", "gone", "elsewhere"):
            difference = None
        return Explanation(
            model=prompt.model,
            tokens=len(prompt.tokens),
            parts=_parts(plan, match),
            reason=reason,
            difference=difference,
            change=change,
            predicted_seconds=plan.predicted_seconds,
            cold_seconds=plan.cold_seconds,
            opaque=self.opaque,
            passages=reuse.chunks,
            recomputed=reuse.recomputed,
            mender=reuse.mender,
            budget=reuse.budget,
            calibrated=reuse.calibrated,
            streamed=reuse.streamed,
            timeline=reuse.timeline,
        )

    def _goes_on(self, prompt: Prompt, match: Match | None, reused: int) -> list[int] | None:
        """The tokens with which something known goes on where the reuse ends."""
        assert self.store is not None
        if match is None:
            match = self.store.lookup(prompt.shelf, prompt.tokens)
        if match.length > reused or match.length >= len(prompt.tokens) - 1:
            return None
        found = self.store.continuation(prompt.shelf, match)
        return None if found is None else np.frombuffer(found, "<u4").tolist()

    def _sight(self, prompt: Prompt, sight: Sight, goes_on: bool) -> Sight:
        assert self.store is not None
        disk, own = self.store.disk, token_bytes(prompt.tokens[: history.MOST_TOKENS])
        here = history.recent(disk, prompt.shelf)
        asked = max(here, key=lambda past: common_tokens(past.tokens, own), default=None)
        there = []
        for past in history.elsewhere(disk, prompt.shelf):
            if not self.other_tenants and past.shelf["tenant"] != prompt.shelf.namespace.tenant:
                continue
            words = differences(prompt.shelf, asdict(prompt.identity), past.shelf, past.identity)
            there.append((common_content(past.asked.content, prompt.content), tuple(words), str(past.shelf["model"])))
        return Sight(
            tokens=sight.tokens,
            reused=sight.reused,
            asked=0 if asked is None else common_tokens(asked.tokens, own),
            asked_age=0.0 if asked is None else disk.clock() - asked.at,
            content=max((common_content(past.content, prompt.content) for past in here), default=0),
            elsewhere=max(there, key=lambda found: found[0], default=(0, (), "")),
            goes_on=goes_on,
            miss=sight.miss,
            ttl_seconds=self.store.settings.ttl_seconds,
        )

    def _change(self, prompt: Prompt) -> Change | None:
        assert self.store is not None
        tokens = list(prompt.tokens[: history.MOST_TOKENS])
        past = [p for p in history.recent(self.store.disk, prompt.shelf, _COMPARED) if len(p.tokens) > TOKEN_BYTES]
        found = find_volatile(tokens, [np.frombuffer(p.tokens, "<u4").tolist() for p in past])
        if found is None:
            return None
        shared = Span(found.start, found.start + found.shared_tokens)
        return Change(
            start=found.start,
            stop=found.stop,
            now=visible(self.tokenizer.spell(tokens[found.start : found.stop])),
            earlier=tuple(visible(self.tokenizer.spell(other)) for other in found.others[:3]),
            requests=found.requests,
            shared_tokens=found.shared_tokens,
            saved_seconds=self.costs.rates.compute_seconds(shared),
        )

    def _difference(self, tokens: Sequence[int], position: int, known: list[int]) -> Difference:
        spell = self.tokenizer.spell
        ours = spell(tokens[position : position + _SHOWN_TOKENS])
        theirs = spell(known[:_SHOWN_TOKENS])
        return Difference(
            position=position,
            before=visible(spell(tokens[max(0, position - _LEAD_TOKENS) : position])),
            ours=visible(ours),
            known=visible(theirs),
            only_in=likeness(ours, theirs),
        )


def _parts(plan: Plan, match: Match | None) -> tuple[Part, ...]:
    """The steps of a plan, loads by the entry they come from."""
    parts: list[Part] = []
    for step in plan.steps:
        if isinstance(step, Mend):
            parts += [Part(span.start, span.stop, "mended") for span in step.spans]
            continue
        if isinstance(step, Stream):
            parts.append(Part(step.span.start, step.span.stop, "streamed"))
            continue
        if isinstance(step, Compute):
            parts.append(Part(step.span.start, step.span.stop, "compute"))
            continue
        pieces = [] if match is None or step.tier == "engine" else match.until(step.span.stop).pieces
        named = [piece for piece in pieces if piece.span.start >= step.span.start]
        if not named:
            parts.append(Part(step.span.start, step.span.stop, step.tier))
        parts += [Part(piece.span.start, piece.span.stop, step.tier, piece.name) for piece in named]
    return tuple(sorted(parts, key=lambda part: part.start))


def _tell_passages(told: Explanation) -> list[str]:
    if not any(chunk.source == "mended" for chunk in told.passages):
        return []
    lines = []
    if told.mender is not None and told.budget is not None:
        advice = "calibrated" if told.calibrated else "not calibrated: rekindle bench chunks --calibrate --quality 0.9"
        lines.append(f"passages are mended by {told.mender} with a budget of {told.budget:.2f} ({advice}):")
    for chunk in told.passages:
        lines.append(f"  [{chunk.number or '-'}] {_PASSAGES[chunk.source]}{_tell_scores(chunk)}")
    return lines


_PLACES = {
    "compute": "computed",
    "mended": "from another prompt, mended",
    "streamed": "streamed from the origin and computed at once",
}
_PASSAGES = {
    "exact": "exact",
    "mended": "from another prompt",
    "computed": "new, computed behind mended passages",
}


def _tell_scores(chunk: ChunkReuse) -> str:
    if chunk.source != "mended" or chunk.impact is None:
        return ""
    came = ", come from the origin" if chunk.streamed else ""
    anew = f"{came}, {chunk.recomputed} of {chunk.stop - chunk.start} tokens computed anew" if chunk.anew else came
    here, order = 1.0 if chunk.overlap is None else chunk.overlap, chunk.disorder or 0.0
    return (
        f"{anew}; context impact {chunk.impact:.2f}, {here:.0%} of what it looked at stands before it now"
        + (f", {order:.0%} of that in another order" if order else "")
        + (f", overhead {chunk.overhead:.2f}" if chunk.overhead is not None else "")
    )


def _tell_difference(difference: Difference) -> list[str]:
    lines = [
        f"first difference: token {difference.position}, after {difference.before!r}"
        if difference.before
        else "first difference: the very first token",
        f"  this prompt: {difference.ours}",
        f"  known:       {difference.known}",
    ]
    if difference.only_in is not None:
        lines.append(f"  they differ in {difference.only_in} only; to a model these are other tokens")
    return lines


def _tell_change(change: Change) -> list[str]:
    saved = "" if change.saved_seconds is None else f", about {_seconds(change.saved_seconds)} a request"
    return [
        f"this text changes from request to request: {change.now}  (tokens {change.start} to {change.stop})",
        *(f"  earlier it was: {earlier}" for earlier in change.earlier),
        f"  Moving it behind the {change.shared_tokens} tokens that stay the same would let those be reused{saved}.",
    ]


def _seconds(value: float) -> str:
    return f"{value * 1e3:,.0f} ms" if value < 10 else f"{value:,.1f} s"
