"""Why a prompt is fast or slow: where each span of it comes from, what it differs in, and what would help."""

from __future__ import annotations

import html
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from rekindle.cache.cost import Costs
from rekindle.cache.divergence import CAUSES, ChatPlace, Parting, cause_of, find_volatile, place_of
from rekindle.cache.miss_reason import MissEvidence, Reason, common_content, content_of, differences, reason_of
from rekindle.core.cells import TimelineEvent
from rekindle.core.identity import Identity
from rekindle.core.keys import TOKEN_BYTES, KvSpace, common_tokens, token_bytes
from rekindle.core.kv import Span
from rekindle.core.plan import Compute, FetchRemote, Plan, ReuseChunks
from rekindle.core.reply import ChunkReuse, OriginFinding, Reuse, source_bar
from rekindle.core.request import Message
from rekindle.core.size import count_of, human_seconds
from rekindle.errors import CacheError
from rekindle.store import history
from rekindle.store.prefix_index import Match
from rekindle.store.tiered import TieredStore
from rekindle.text.base import Tokenizer
from rekindle.text.visible import find_only_difference, visible

_SHOWN_TOKENS = 12  # of each text at a difference
_LEAD_TOKENS = 8
_COMPARED_TOKENS = 512  # of both prompts behind a difference
_COMPARED = 12  # earlier prompts, for what changes

_PASSAGE_ADVICE = (
    "Another question brings other passages, or the same in another order. `rekindle warm --knowledge` computes now "
    "what questions begin with; --reuse approximate reuses passages wherever they stand, partly recomputed."
)

_COLUMNS = 60
_NAMES = "0123456789abcdefghijklmnoprstuvwxyz"  # of chunks, over and over; q is the question


@dataclass(frozen=True)
class PromptPart:
    """A span of the prompt, where its KV comes from, and the entry of the cache that has it."""

    start: int
    stop: int
    source: str  # engine, memory, disk, reused, streamed, compute
    entry: str | None = None


@dataclass(frozen=True)
class Difference:
    """The first token that differs from a stored prompt, and both texts, made visible."""

    position: int
    before: str  # what both begin with, its end
    ours: str
    known: str
    only_in: str | None  # Unicode form, invisible characters, whitespace, case: when the texts look alike
    where: str | None = None  # the tools, or the message, of a chat
    cause: str | None = None  # a key of `divergence.CAUSES`


@dataclass(frozen=True)
class ChangingText:
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
    """Why a prompt takes as long as it does. `str()` is for people."""

    model: str
    tokens: int
    parts: tuple[PromptPart, ...]
    reason: Reason
    difference: Difference | None = None
    change: ChangingText | None = None
    predicted_seconds: float | None = None
    cold_seconds: float | None = None
    first_token_seconds: float | None = None  # what it really took, for a request that was answered
    at: float | None = None
    opaque: str | None = None  # why reuse is by checkpoint, if it is
    passages: tuple[ChunkReuse, ...] = ()  # if they may be reused
    recomputed: int = 0  # number of their tokens that are recomputed
    recompute_policy: str | None = None  # if they are reused
    budget: float | None = None
    calibrated: bool | None = None
    streamed: int = 0  # tokens that came from an origin
    streamed_slices: Mapping[str, int] = field(default_factory=dict)  # of them, at each level
    timeline: tuple[TimelineEvent, ...] = ()  # when, and what was computed meanwhile
    origin: OriginFinding | None = None  # what it has, for a prompt that was not run; why nothing came from it
    advice: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Explanation:
        """What `as_dict` gave. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        fields = dict(values)
        fields["parts"] = tuple(PromptPart(**part) for part in fields["parts"])
        fields["reason"] = Reason(**{**fields["reason"], "differs_in": tuple(fields["reason"]["differs_in"])})
        fields["passages"] = tuple(
            ChunkReuse(**{**chunk, "recomputed_positions": tuple(chunk["recomputed_positions"])})
            for chunk in fields.get("passages", ())
        )
        fields["timeline"] = tuple(TimelineEvent(**event) for event in fields.get("timeline", ()))
        if fields.get("difference"):
            fields["difference"] = Difference(**fields["difference"])
        if fields.get("origin"):
            fields["origin"] = OriginFinding(**fields["origin"])
        if fields.get("change"):
            fields["change"] = ChangingText(**{**fields["change"], "earlier": tuple(fields["change"]["earlier"])})
        return cls(**fields)

    @property
    def reused(self) -> int:
        """Number of tokens that are not computed."""
        known = sum(part.stop - part.start for part in self.parts if part.source not in ("compute", "streamed"))
        return known + self.streamed - self.recomputed

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        counts: Counter[str] = Counter()
        for part in self.parts:  # in order, as a prompt is read
            counts[_SOURCES.get(part.source, part.source)] += part.stop - part.start
        return f"{source_bar(counts)}<pre>{html.escape(str(self))}</pre>"

    def _lines(self) -> list[str]:
        lines = [f"{self.model}: {self.reused:,} of {count_of(self.tokens, 'token')} reused"]
        for source, group in groupby(self.parts, key=lambda part: part.source):
            parts = list(group)
            names = list(dict.fromkeys(part.entry for part in parts if part.entry))
            entry = "" if not names else f"  entry {names[0][:8]}" if len(names) == 1 else f"  {len(names)} entries"
            where = _PLACES.get(source, f"from {source}")
            lines.append(f"  {parts[0].start:>6} to {parts[-1].stop:<6} {where}{entry}")
        times = {"expected": self.predicted_seconds, "without the cache about": self.cold_seconds}
        if self.first_token_seconds is not None:  # it was measured: what was expected says nothing more
            times = {"first token": self.first_token_seconds}
        shown = [f"{name} {human_seconds(value)}" for name, value in times.items() if value is not None]
        if shown:
            lines.append("  " + ", ".join(shown))
        lines.append(f"why: {self.reason.sentence}")
        lines += _passage_lines(self)
        if self.origin is not None:
            lines.append(f"origin: {self.origin}")
        if self.streamed_slices:
            lines.append(
                "slices from the origin: " + ", ".join(f"{n:,} {name}" for name, n in self.streamed_slices.items())
            )
        lines += timeline_lines(self.timeline)
        if self.opaque is not None:
            lines.append(f"reuse is by checkpoint, at the end of a message: {self.opaque}")
        if self.difference is not None:
            lines += _difference_lines(self.difference)
        if self.change is not None:
            named = self.difference is not None and self.difference.cause == "nonce"
            lines += _change_lines(self.change)[-1:] if named else _change_lines(self.change)
        return lines if self.advice is None else [*lines, self.advice]


@dataclass(frozen=True)
class Prompt:
    """A prompt to explain: its KV space, its tokens, and what was asked before it was tokenized."""

    kv_space: KvSpace
    identity: Identity
    model: str
    tokens: Sequence[int]
    asked: str | Sequence[int] | Sequence[Message]
    quotes: bool = False  # passages, whose places the user does not choose

    @cached_property
    def content(self) -> bytes:
        """Digests of what was asked; computed when needed, never before the first token."""
        return content_of(self.asked)


@dataclass(frozen=True)
class Explainer:
    """Explains prompts. Reads the catalog's history, which is slow: never on the path of a request."""

    store: TieredStore | None
    tokenizer: Tokenizer
    costs: Costs
    everyone: bool = False  # whether the reader may learn of prompts of other tenants and salts
    opaque: str | None = None  # why the model's state is kept and restored whole, if it is

    def explain(
        self, prompt: Prompt, plan: Plan, match: Match | None, reuse: Reuse, origin: OriginFinding | None = None
    ) -> Explanation:
        """Explain the plan of a prompt whose stored prefix is `match`. A store in trouble explains less.

        `origin`: what the origin has of a prompt that was not run."""
        if reuse.origin_miss is not None:
            origin = OriginFinding(miss=reuse.origin_miss)
        if self.opaque is not None:
            match = None  # its pages are no tokens
        parting = difference = change = None
        times, refused = (plan.refused_seconds, plan.cold_seconds), reuse.refused_chunks
        evidence = MissEvidence(len(prompt.tokens), plan.reused, miss=reuse.miss, times=times, refused=refused)
        if self.store is not None:
            try:
                parting = None if self.opaque is not None else self._parting(prompt, match, plan.reused)
                difference = None if parting is None else self._difference(prompt, parting)
                if difference is not None and difference.position == 0 and difference.only_in is None:
                    parting = None  # they have nothing in common
                evidence = self._evidence(prompt, evidence, parting is not None)
                change = self._change(prompt)
            except (OSError, sqlite3.Error, CacheError, ValueError):
                pass  # explain without the history
        reason = reason_of(evidence)
        kinds = ("differs", "gone", "elsewhere", "slower")
        if parting is None or reason.kind not in kinds or reuse.refused_chunks is not None:
            difference = None
        advice = None
        if prompt.quotes:  # who asked can neither move a text nor take one out
            change = None
            difference = None if difference is None else replace(difference, cause=None)
            advice = _PASSAGE_ADVICE if reason.kind in ("differs", "new") and not reuse.from_chunks else None
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
            recompute_policy=reuse.recompute_policy,
            budget=reuse.budget,
            calibrated=reuse.calibrated,
            streamed=reuse.streamed,
            streamed_slices=reuse.streamed_slices,
            timeline=reuse.timeline,
            origin=origin,
            advice=advice,
        )

    def _parting(self, prompt: Prompt, match: Match | None, reused: int) -> Parting | None:
        """Where a stored prompt parts from this one, at the end of the reuse or behind it; None if none does."""
        assert self.store is not None
        tokens = list(prompt.tokens)
        if match is None:
            match = self.store.lookup(prompt.kv_space, tokens)
        found = self.store.continuation(prompt.kv_space, match)
        if found is None or match.length >= len(tokens) - 1:
            return None
        known = np.frombuffer(found, "<u4").tolist()
        whole = self.store.lookup(prompt.kv_space, [*tokens[: match.length], *known])
        known += self.store.following(prompt.kv_space, whole, _COMPARED_TOKENS)
        rest = tokens[match.length :]
        common = common_tokens(token_bytes(rest), token_bytes(known))
        if match.length + common < reused:  # what is still in the engine goes further
            return None
        place = match.length + common
        return Parting(tokens[:place], tokens[place : place + _COMPARED_TOKENS], known[common:])

    def _evidence(self, prompt: Prompt, evidence: MissEvidence, goes_on: bool) -> MissEvidence:
        assert self.store is not None
        disk, own = self.store.disk, token_bytes(prompt.tokens[: history.MAX_TOKENS])
        here = history.recent(disk, prompt.kv_space)
        asked = max(here, key=lambda past: common_tokens(past.tokens, own), default=None)
        there = []
        for past in history.on_other_kv_spaces(disk, prompt.kv_space, own=not self.everyone):
            words = differences(prompt.kv_space, asdict(prompt.identity), past.kv_space, past.identity)
            there.append(
                (common_content(past.asked.content, prompt.content), tuple(words), str(past.kv_space["model"]))
            )
        return replace(
            evidence,
            asked=0 if asked is None else common_tokens(asked.tokens, own),
            asked_age=0.0 if asked is None else disk.clock() - asked.at,
            content=max((common_content(past.content, prompt.content) for past in here), default=0),
            elsewhere=max(there, key=lambda found: found[0], default=(0, (), "")),
            goes_on=goes_on,
            ttl_seconds=self.store.settings.ttl_seconds,
        )

    def _change(self, prompt: Prompt) -> ChangingText | None:
        assert self.store is not None
        tokens = list(prompt.tokens[: history.MAX_TOKENS])
        past = [p for p in history.recent(self.store.disk, prompt.kv_space, _COMPARED) if len(p.tokens) > TOKEN_BYTES]
        found = find_volatile(tokens, [np.frombuffer(p.tokens, "<u4").tolist() for p in past])
        if found is None:
            return None
        shared = Span(found.start, found.start + found.shared_tokens)
        return ChangingText(
            start=found.start,
            stop=found.stop,
            now=visible(self.tokenizer.spell(tokens[found.start : found.stop])),
            earlier=tuple(visible(self.tokenizer.spell(other)) for other in found.others[:3]),
            requests=found.requests,
            shared_tokens=found.shared_tokens,
            saved_seconds=self.costs.rates.compute_seconds(shared),
        )

    def _difference(self, prompt: Prompt, parting: Parting) -> Difference:
        spell = self.tokenizer.spell
        ours, theirs = spell(parting.ours[:_SHOWN_TOKENS]), spell(parting.known[:_SHOWN_TOKENS])
        messages = [message for message in prompt.asked if isinstance(message, Message)]
        place = place_of(parting, messages, self.tokenizer) if messages else None
        return Difference(
            position=len(parting.before),
            before=visible(spell(parting.before[-_LEAD_TOKENS:])),
            ours=visible(ours),
            known=visible(theirs),
            only_in=find_only_difference(ours, theirs),
            where=None if place is None else _where(place, messages),
            cause=None if place is None else cause_of(parting, place, messages, self.tokenizer),
        )


def _where(place: ChatPlace, messages: Sequence[Message]) -> str:
    if place.in_tools:
        return "the tools"
    if place.message is None:
        return "what stands before the first message"
    return f"message {place.message + 1} of {len(messages)} ({messages[place.message].role})"


def _parts(plan: Plan, match: Match | None) -> tuple[PromptPart, ...]:
    """The steps of a plan, loads by the entry they come from."""
    parts: list[PromptPart] = []
    for step in plan.steps:
        if isinstance(step, ReuseChunks):
            parts += [PromptPart(span.start, span.stop, "reused") for span in step.spans]
            continue
        if isinstance(step, FetchRemote):
            parts.append(PromptPart(step.span.start, step.span.stop, "streamed"))
            continue
        if isinstance(step, Compute):
            parts.append(PromptPart(step.span.start, step.span.stop, "compute"))
            continue
        pieces = [] if match is None or step.tier == "engine" else match.until(step.span.stop).pieces
        named = [piece for piece in pieces if piece.span.start >= step.span.start]
        if not named:
            parts.append(PromptPart(step.span.start, step.span.stop, step.tier))
        parts += [PromptPart(piece.span.start, piece.span.stop, step.tier, piece.name) for piece in named]
    return tuple(sorted(parts, key=lambda part: part.start))


def _passage_lines(explanation: Explanation) -> list[str]:
    if not any(chunk.source == "reused" for chunk in explanation.passages):
        return []
    lines = []
    if explanation.recompute_policy is not None and explanation.budget is not None:
        advice = "calibrated" if explanation.calibrated else "not calibrated: rekindle calibrate MODEL"
        lines.append(
            f"passages: recompute policy {explanation.recompute_policy}, budget {explanation.budget:.2f} ({advice}):"
        )
    for chunk in explanation.passages:
        lines.append(f"  [{chunk.number or '-'}] {_found(chunk)}{_scores(chunk)}")
    return lines


_SOURCES = {"compute": "computed", "reused": "passages", "streamed": "remote", "coded": "quantized"}
_PLACES = {
    "compute": "computed",
    "reused": "from another prompt, partly recomputed",
    "streamed": "streamed from the origin, partly computed meanwhile",
}
_PASSAGES = {"exact": "exact", "reused": "from another prompt", "computed": "new: computed, after reused passages"}


def _found(chunk: ChunkReuse) -> str:
    """Where a passage is, and where it was in the prompt that its KV comes from."""
    there = "" if chunk.found_at is None else f", where it began at token {chunk.found_at:,}"
    return f"tokens {chunk.start:,} to {chunk.stop:,}: {_PASSAGES[chunk.source]}{there}"


def _scores(chunk: ChunkReuse) -> str:
    if chunk.source != "reused":
        return "" if chunk.share is None else "; known, but all of it depends on text that has changed"
    how = ", fetched from the origin" if chunk.streamed else ""
    if chunk.recomputed_positions:
        how += f", {chunk.recomputed} of {chunk.stop - chunk.start} tokens recomputed"
    elif chunk.share is not None:
        how += f", about {chunk.share:.0%} to recompute"
    if chunk.impact is None or chunk.change is None:
        return how
    if not chunk.change:
        return f"{how}; after the same text as when its KV was computed"
    here, order = 1.0 if chunk.overlap is None else chunk.overlap, chunk.disorder or 0.0
    ordered = f", {order:.0%} of that in another order" if order else ""
    return (
        f"{how}; {chunk.change:.0%} of what its KV depends on has changed: context impact {chunk.impact:.2f}, "
        f"{here:.0%} of the context it attended to is before it now{ordered}"
    )


def _difference_lines(difference: Difference) -> list[str]:
    where = f", in {difference.where}" if difference.where else ""
    lines = [
        f"first difference: token {difference.position:,}{where}, after {difference.before!r}"
        if difference.before
        else f"first difference: the very first token{where}",
        f"  this prompt: {difference.ours}",
        f"  earlier:     {difference.known}",
    ]
    if difference.cause is not None:
        lines.append(f"  likely cause: {CAUSES[difference.cause]}")
    elif difference.only_in is not None:
        lines.append(f"  they differ only in {difference.only_in}, which makes other tokens of them")
    return lines


def _change_lines(change: ChangingText) -> list[str]:
    shared = count_of(change.shared_tokens, "token")
    saved = "" if change.saved_seconds is None else f", saving about {human_seconds(change.saved_seconds)} per request"
    return [
        f"this text changes with every request: {change.now}  (tokens {change.start:,} to {change.stop:,})",
        *(f"  earlier it was: {earlier}" for earlier in change.earlier),
        f"  Move it behind the {shared} that stay the same: they are then reused{saved}.",
    ]


def timeline_lines(events: Sequence[TimelineEvent]) -> list[str]:
    """Both lanes of a prompt that was computed and fetched at once, as text; empty where nothing was fetched.

    compute  00001111222233..44qq
    link     7777766666555554444.     a column is a moment, a digit the chunk that was worked on
    """
    if not events:
        return []
    seconds = max(event.stop for event in events)
    question = max(event.chunk for event in events if event.lane == "compute")
    column = seconds / _COLUMNS * 1e3
    lines = [
        f"computed and streamed in {seconds:.2f} s (one column is {column:.0f} ms, a digit the chunk, q the question):"
    ]
    for lane in ("compute", "link"):
        own = [event for event in events if event.lane == lane]
        lines.append(f"  {lane:8} {''.join(_chunk_at(own, seconds, column, question) for column in range(_COLUMNS))}")
    return lines


def _chunk_at(events: Sequence[TimelineEvent], seconds: float, column: int, question: int) -> str:
    """What was worked on longest in a column; a dot for nothing."""
    start, stop = seconds * column / _COLUMNS, seconds * (column + 1) / _COLUMNS
    shares: dict[int, float] = {}
    for event in events:
        common = min(stop, event.stop) - max(start, event.start)
        if common > 0:
            shares[event.chunk] = shares.get(event.chunk, 0.0) + common
    if not shares:
        return "."
    chunk = max(shares, key=lambda name: shares[name])
    return "q" if chunk == question else _NAMES[chunk % len(_NAMES)]
