"""The second part of `python -m benchmarks chunks`: questions of one person, one after the other, over shared passages.

none      everything is computed
prefix    the exact cache: what a prompt shares with the beginning of an earlier one
reused    passages of earlier prompts as well, at the budget in use
warmed    the same, where every passage that is asked for was computed once beforehand, off the clock

Each has a folder of its own and keeps what it computed, as in use. They take turns, question by question.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.base import Advance, BenchOptions, Units, mean, rotated
from benchmarks.personal import Person, PersonalSet
from benchmarks.quality import POSITIONS, compare
from rekindle.answers.ask_terms import asking
from rekindle.core.document import Quote
from rekindle.core.request import Request, ReuseLevel
from rekindle.engine.base import Engine
from rekindle.session.calibrate.budget import StartedPrompt, start_prompt
from rekindle.session.prompt import PromptTokens, encode_prompt
from rekindle.session.session import Session

QUESTIONS, QUICK_QUESTIONS = 20, 4
TOP_K, QUICK_TOP_K = 5, 2
COMPARED = 5  # how often answers are compared, in questions
WARMED_TOGETHER = 3  # passages of one prompt, when they are warmed
_LEVELS: Mapping[str, ReuseLevel] = {
    "none": "off",
    "prefix": "exact",
    "reused": "approximate",
    "warmed": "approximate",
}


@dataclass(frozen=True)
class PreparedPrompt:
    """A question with its passages, as a prompt."""

    request: Request
    tokens: PromptTokens


@dataclass
class _StreamTimes:
    """What one set of questions took, by mode."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _LEVELS})
    computed: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in _LEVELS})
    found: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in _LEVELS})  # tokens from passages
    fallbacks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_LEVELS, 0))
    quality: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"reused": [], "warmed": []})
    budgets: set[float] = field(default_factory=set)
    calibrated: bool = False

    def add(self, name: str, some: StartedPrompt) -> None:
        self.seconds[name].append(some.seconds)
        self.computed[name].append(some.reuse.computed)
        self.found[name].append(some.reuse.from_chunks)
        self.fallbacks[name] += some.fallback
        if some.reuse.budget is not None:
            self.budgets.add(some.reuse.budget)
            self.calibrated |= bool(some.reuse.calibrated)

    def take(self, other: _StreamTimes) -> None:
        """Add what was measured with another person."""
        for name in _LEVELS:
            self.seconds[name] += other.seconds[name]
            self.computed[name] += other.computed[name]
            self.found[name] += other.found[name]
            self.fallbacks[name] += other.fallbacks[name]
        for name, pairs in self.quality.items():
            pairs += other.quality[name]
        self.budgets |= other.budgets
        self.calibrated |= other.calibrated


class Streams:
    """A session for each way on one engine, and the library that all questions are asked of."""

    def __init__(self, engine: Engine, folder: Path, options: BenchOptions) -> None:
        self._engine, self._options = engine, options
        self._sessions = {
            name: Session(
                engine, cache=folder / name, library=folder / "library", reuse=level, disk_limit="90%", answers="off"
            )
            for name, level in _LEVELS.items()
        }
        self._library = self._sessions["prefix"]

    def close(self) -> None:
        """Close the sessions; the engine stays."""
        for session in self._sessions.values():
            session.close()

    def measure(self, some: PersonalSet, units: Units) -> dict[str, Any]:
        """The fields of one set."""
        times, left = _StreamTimes(), self._options.rounds(QUESTIONS, QUICK_QUESTIONS)
        for person in some.people:
            count = min(left, len(person.questions))
            left -= count
            if count:
                name = f"questions of {some.name}, {person.name or 'one person'}"
                job = partial(self._person, f"{some.name}/{person.name}", person, count, units.advance)
                times.take(units.one(name, _StreamTimes, job) or _StreamTimes())
        return _fields(times)

    def prepare(self, tenant: str, person: Person, max_count: int, top_k: int) -> list[PreparedPrompt]:
        """Ingest the documents of a person, and find the passages of the first questions."""
        self._library.ingest(documents=person.documents, tenant=tenant)
        found = []
        for question in islice(person.questions, max_count):
            request = self._library.prepare(question.text, top_k=top_k, tenant=tenant, max_tokens=1).request
            tokens = encode_prompt(self._engine, request)
            if tokens.prompt_layout is not None:
                found.append(PreparedPrompt(request, tokens))
        return found

    def _person(self, tenant: str, person: Person, max_count: int, advance: Advance) -> _StreamTimes:
        times = _StreamTimes()
        asked = self.prepare(tenant, person, max_count, QUICK_TOP_K if self._options.quick else TOP_K)
        quotes = list(dict.fromkeys(quote for one in asked for quote in one.request.quotes))
        self._warm(tenant, random.Random(self._options.seed).sample(quotes, len(quotes)))  # not as they are asked for
        for number, one in enumerate(asked):
            advance(f"question {number + 1} of {len(asked)}")
            self._ask(one, number, times, compared=number % COMPARED == 0 and self._options.shape is None)
        for session in self._sessions.values():
            session.cache.unpark()
        return times

    def _warm(self, tenant: str, quotes: Sequence[Quote]) -> None:
        session = self._sessions["warmed"]
        for place in range(0, len(quotes), WARMED_TOGETHER):
            session.warm(asking(""), documents=quotes[place : place + WARMED_TOGETHER], tenant=tenant)

    def _ask(self, one: PreparedPrompt, number: int, times: _StreamTimes, *, compared: bool) -> None:
        starts: dict[str, StartedPrompt] = {}
        for name in rotated(list(_LEVELS), number):
            cache = self._sessions[name].cache
            starts[name] = start_prompt(cache, self._engine, one.request, one.tokens, POSITIONS if compared else 0)
            times.add(name, starts[name])
            if not compared:
                starts[name].end(cache, keep=True)
        if compared:
            others = ("reused", "warmed")
            found = compare(self._engine, starts["prefix"], [starts[name] for name in others])
            for name, (kl, top1) in zip(others, found, strict=True):
                times.quality[name].append((kl, top1))
            for name, some in starts.items():
                some.end(self._sessions[name].cache, keep=True)
        for session in self._sessions.values():
            session.flush()


def _fields(times: _StreamTimes) -> dict[str, Any]:
    if not times.seconds["prefix"]:
        return {"questions": 0, "reason": "no question has passages that are long enough to be found again"}
    reused = _against(times, "reused")
    return {
        "questions": len(times.seconds["prefix"]),
        "budget": max(times.budgets, default=None),
        "calibrated": times.calibrated,
        "computed_tokens_none": sum(times.computed["none"]),
        "ttft_none_s": statistics.median(times.seconds["none"]),
        "computed_tokens_prefix": sum(times.computed["prefix"]),
        "ttft_prefix_s": statistics.median(times.seconds["prefix"]),
        "computed_tokens_reused": reused.pop("computed_tokens"),
        **reused,
        "first_sight": _sooner(times, "reused", found=False),
        "warmed": _against(times, "warmed"),
    }


def _sooner(times: _StreamTimes, name: str, *, found: bool) -> dict[str, Any]:
    """How much sooner than prefix caching: questions for which passages were found, or the others."""
    pairs = zip(times.seconds["prefix"], times.seconds[name], times.found[name], strict=True)
    ratios = [theirs / own for theirs, own, tokens in pairs if (tokens > 0) == found]
    return {"questions": len(ratios), "ttft_vs_prefix": statistics.median(ratios) if ratios else None}


def _against(times: _StreamTimes, name: str) -> dict[str, Any]:
    theirs, own = times.seconds["prefix"], times.seconds[name]
    computed, before = sum(times.computed[name]), sum(times.computed["prefix"])
    return {
        "known": _sooner(times, name, found=True),
        "ttft_vs_none": statistics.median(a / b for a, b in zip(times.seconds["none"], own, strict=True)),
        "computed_tokens": computed,
        "reduction": 1.0 - computed / before,
        "ttft_s": statistics.median(own),
        "ttft_vs_prefix": statistics.median(a / b for a, b in zip(theirs, own, strict=True)),
        "ttft_vs_prefix_sums": sum(theirs) / sum(own),
        "fallbacks": times.fallbacks[name],
        "kl": mean(kl for kl, _ in times.quality[name]),
        "top1": mean(top1 for _, top1 in times.quality[name]),
    }


def shuffled(one: PreparedPrompt, quotes: Sequence[Quote], engine: Engine) -> PreparedPrompt:
    """The same question about other passages, or about the same in another order."""
    request = replace(one.request, quotes=tuple(quotes))
    return PreparedPrompt(request, encode_prompt(engine, request))
