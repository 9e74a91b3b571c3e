"""Requests as several apps with adapters would make them. A pure function of material and seed.

when, who   every time an app comes to the foreground in a recorded usage it asks once; what happens to apps in between
            (they step back, they are closed) happens between the requests. Hours become moments: only the order counts
adapter     drawn by a Pareto law over the adapters, whose ranks the seed gives: writing tools serve every app
context     a conversation or a document of which every app may ask. An app draws it by the same law, each with another
            favourite. A conversation is longer by some turns every time it is asked about, up to the longest input
prompt      the context, then one of some short instructions

So an app comes back to what it asked before, others ask the same of other adapters, and both grow rare by the same law.
The limit is a share of what all this KV takes raw. Of the source's budgets 2 GB hold four of its longest prompts and
4 GB eight; four contexts make the limit hold about as many here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

import numpy as np

from benchmarks.adapters.data import AppUsage, Event
from rekindle.core.scope import AppState

EXPONENT = 1.16  # of the Pareto law
LIMIT_SHARE = 0.4  # of the working set
CONTEXTS = 4  # at hand at the same time
TURN_TOKENS = 32  # by which a conversation is longer when it is asked about again
INSTRUCTIONS = (
    "Summarize this in one sentence.",
    "Give this text a title.",
    "What should be done next?",
    "Which names occur here?",
)

Kind = Literal["conversation", "writing"]
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Scenario:
    """As in the source, with inputs a quarter as long: the number of adapters, and the largest prompt in tokens."""

    name: str
    adapters: int
    input_tokens: int


SCENARIOS = (
    Scenario("S1", 5, 256),
    Scenario("S2", 5, 256),
    Scenario("S3", 5, 512),
    Scenario("S4", 10, 256),
    Scenario("S5", 10, 512),
)


@dataclass(frozen=True)
class WorkloadContext:
    """Something to ask about, as tokens; as many as an input may have."""

    kind: Kind
    tokens: Tokens


@dataclass(frozen=True)
class AdapterRequest:
    """One request: by an app in the foreground, of an adapter. `changes` are what happened to apps before it.

    `seconds` is when the app came to the foreground.
    """

    app: str
    adapter: str
    kind: Kind
    prompt: Tokens
    changes: tuple[tuple[str, AppState], ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class AppWorkload:
    """The requests of a scenario in order. The first `filling` only fill the caches, and are not measured."""

    scenario: Scenario
    usage: str
    adapters: tuple[str, ...]
    asks: tuple[AdapterRequest, ...]
    filling: int

    @property
    def measured(self) -> tuple[AdapterRequest, ...]:
        """Those that are."""
        return self.asks[self.filling :]

    @property
    def working_set_tokens(self) -> int:
        """Tokens whose KV a cache without limit holds in the end, that of each adapter by itself."""
        return len({(ask.adapter, hash(ask.prompt[:stop])) for ask in self.asks for stop in _stops(ask.prompt)})

    @property
    def max_hit_share(self) -> float:
        """Of the tokens that are measured, those that stood at the same place of the same adapter's prompt before."""
        seen: set[tuple[str, int]] = set()
        known = total = 0
        for number, ask in enumerate(self.asks):
            places = {(ask.adapter, hash(ask.prompt[:stop])) for stop in _stops(ask.prompt)}
            if number >= self.filling:
                known, total = known + len(places & seen), total + len(places)
            seen |= places
        return known / total

    @property
    def lru_hit_share(self) -> float:
        """The same of a cache that holds whole prompts up to the limit without any loss of room, the latest ones."""
        room = LIMIT_SHARE * self.working_set_tokens
        held: dict[tuple[str, Tokens], Tokens] = {}
        known = total = 0
        for number, ask in enumerate(self.asks):
            place = ask.adapter, ask.prompt[:TURN_TOKENS]
            before = held.pop(place, ())
            if number >= self.filling:
                known, total = known + _common(before, ask.prompt), total + len(ask.prompt)
            held[place] = ask.prompt
            while sum(map(len, held.values())) > room:
                held.pop(next(iter(held)))
        return known / total


def _common(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _stops(prompt: Tokens) -> range:
    return range(1, len(prompt) + 1)


def pareto_weights(count: int) -> list[float]:
    """The share of each of `count` ranks: the first has most, falling with the exponent."""
    raw = [rank**-EXPONENT for rank in range(1, count + 1)]
    return [weight / sum(raw) for weight in raw]


def make_workload(
    scenario: Scenario,
    adapters: Sequence[str],
    contexts: Sequence[WorkloadContext],
    instructions: Sequence[Tokens],
    usage: AppUsage,
    requests: tuple[int, int],
    random: np.random.Generator,
) -> AppWorkload:
    """Requests that fill the caches, then requests that are measured, over the adapters of the scenario."""
    filling, measured = requests
    ranked = [adapters[place] for place in random.permutation(len(adapters))][: scenario.adapters]
    apps = most_used(usage, scenario.adapters)
    shares, context_shares = pareto_weights(len(ranked)), pareto_weights(len(contexts))
    order = random.permutation(len(contexts))
    visits: Counter[int] = Counter()
    asks = []
    for coming, changes in islice(_arrivals(usage, apps, random), filling + measured):
        app = coming.app
        adapter = ranked[int(random.choice(len(ranked), p=shares))]
        drawn = int(random.choice(len(contexts), p=context_shares))
        place = int(order[(drawn + apps.index(app)) % len(contexts)])
        instruction = instructions[int(random.integers(len(instructions)))]
        context, room = contexts[place], scenario.input_tokens - max(map(len, instructions))
        prompt = visible(context, room, visits[place]) + instruction
        visits[place] += 1
        asks.append(AdapterRequest(app, adapter, context.kind, prompt, changes, coming.seconds))
    return AppWorkload(scenario, usage.name, tuple(ranked), tuple(asks), filling)


def visible(context: WorkloadContext, token_limit: int, visits: int) -> Tokens:
    """What there is of a context when it was asked about so often: a document at once, a conversation from its half."""
    if context.kind == "writing":
        return context.tokens[:token_limit]
    return context.tokens[: min(token_limit, token_limit // 2 + visits * TURN_TOKENS)]


def most_used(usage: AppUsage, count: int) -> list[str]:
    """The apps that came to the foreground most often, the first most."""
    comings = Counter(event.app for event in usage.events if event.state == "foreground")
    return [app for app, _ in comings.most_common(count)]


def _arrivals(
    usage: AppUsage, apps: Sequence[str], random: np.random.Generator
) -> Iterator[tuple[Event, tuple[tuple[str, AppState], ...]]]:
    """Apps as they come to the foreground, from some moment on, and again from the first if there are too few."""
    own = [event for event in usage.events if event.app in apps]
    start = int(random.integers(len(own)))
    since: dict[str, AppState] = {}
    event: Event
    for event in cycle([*own[start:], *own[:start]]):
        if event.state != "foreground":
            since[event.app] = event.state
            continue
        since.pop(event.app, None)
        yield event, tuple(since.items())
        since = {}


def make_contexts(
    conversations: Sequence[Sequence[int]],
    documents: Sequence[Sequence[int]],
    tokens: int,
    count: int,
    random: np.random.Generator,
) -> list[WorkloadContext]:
    """Contexts of `tokens` tokens: conversations and documents in turn, short ones joined with the next."""
    kinds: list[tuple[Kind, Iterator[Tokens]]] = []
    if conversations:
        kinds.append(("conversation", _joined(conversations, tokens, random)))
    if documents:
        kinds.append(("writing", _joined(documents, tokens, random)))
    turns = cycle(kinds)
    return [WorkloadContext(kind, next(texts)) for kind, texts in islice(turns, count)]


def _joined(texts: Sequence[Sequence[int]], tokens: int, random: np.random.Generator) -> Iterator[Tokens]:
    """Texts in a random order, each of that length; no two of the first ones begin alike, if there are enough."""
    order = cycle(int(place) for place in random.permutation(len(texts)))
    while True:
        joined: list[int] = []
        while len(joined) < tokens:
            joined += texts[next(order)]
        yield tuple(joined[:tokens])
