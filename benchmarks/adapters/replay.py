"""`python -m benchmarks policies`: what eviction policies keep, replayed without a model.

The requests of all scenarios of `bench adapters` go through a real store with empty KV and the clock of the recorded
usage. What counts is the number of tokens that would have to be computed. Each usage is cut in the middle: weights are
chosen on the first halves and shown on the second halves, with other apps' turns, texts and draws.

A half is played in episodes of as many requests as `bench adapters` makes, one after the other in one store. In every
other trace an episode keeps only half of the contexts of the one before it: what was used often falls out of use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from benchmarks.adapters.data import AppUsage, read_material
from benchmarks.adapters.workload import (
    CONTEXTS,
    LIMIT_SHARE,
    SCENARIOS,
    AdapterRequest,
    AppWorkload,
    Scenario,
    WorkloadContext,
    make_workload,
)
from benchmarks.base import Advance, BenchOptions, Report, TableRow, scratch
from benchmarks.baselines.policies import Aged, MobiLora, PlainLru, install
from rekindle.apps import Apps
from rekindle.core.keys import KvSpace, Namespace
from rekindle.core.kv import Kv, KvLayout, LayerKv, LayerShape
from rekindle.core.scope import AppRef, Scope
from rekindle.errors import CacheUnusable
from rekindle.store.disk import Machine
from rekindle.store.evict import POLICIES, Lru, Policy, Utility
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore

TraceHalf = Literal["first", "second"]
LIMIT_SHARES = (LIMIT_SHARE / 2, LIMIT_SHARE, 2 * LIMIT_SHARE)  # of what an episode takes
EPISODES, REQUESTS = 4, 24
WEIGHTS = tuple(Aged(length, unhit) for length in (0.0, 1.0) for unhit in (1.0, 1.5))
SHOWN: tuple[Policy, ...] = (PlainLru(), Lru(), Utility(), MobiLora())
LAYOUT = KvLayout("float16", (LayerShape(4, 512, 512),))  # 8 KB a token: the catalog takes little beside it
INSTRUCTIONS = tuple(tuple(range(first, first + 8)) for first in range(0, 32, 8))
_VOCABULARY = 1 << 20
_SCOPE = Scope("local", "")


@dataclass(frozen=True)
class PolicyTrace:
    """The requests of one scenario over one half of a usage; those of the first episode are not counted."""

    name: str
    episodes: tuple[AppWorkload, ...]

    def limit_bytes(self, share: float) -> int:
        """Bytes of a share of the KV of an episode."""
        tokens = np.mean([episode.working_set_tokens for episode in self.episodes])
        return int(share * tokens) * LAYOUT.token_bytes


def make_traces(usages: Sequence[AppUsage], half: TraceHalf, seed: int) -> list[PolicyTrace]:
    """A trace for every scenario and usage. The halves share no event, no text and no draw."""
    traces = []
    for number, scenario in enumerate(SCENARIOS):
        for place, usage in enumerate(usages):
            random = np.random.default_rng((seed, number, place, get_args(TraceHalf).index(half)))
            step = CONTEXTS // 2 if (number + place) % 2 else 0
            traces.append(_make_trace(scenario, _half(usage, half), step, random))
    return traces


def _half(usage: AppUsage, half: TraceHalf) -> AppUsage:
    middle = len(usage.events) // 2
    return AppUsage(usage.name, usage.events[:middle] if half == "first" else usage.events[middle:])


def _make_trace(scenario: Scenario, usage: AppUsage, step: int, random: np.random.Generator) -> PolicyTrace:
    """`step`: the number of contexts that are new in each episode."""
    texts = random.integers(100, _VOCABULARY, (EPISODES * step + CONTEXTS, scenario.input_tokens))
    contexts = [
        WorkloadContext("writing" if place % 2 else "conversation", tuple(map(int, text)))
        for place, text in enumerate(texts)
    ]
    adapters = [str(number) for number in random.permutation(scenario.adapters)]
    episodes = []
    for number in range(EPISODES):
        start, stop = (len(usage.events) * at // EPISODES for at in (number, number + 1))
        part = AppUsage(usage.name, usage.events[start:stop])
        own = contexts[number * step : number * step + CONTEXTS]
        episodes.append(make_workload(scenario, adapters, own, INSTRUCTIONS, part, (0, REQUESTS), random))
    return PolicyTrace(f"{scenario.name}, {usage.name}", tuple(episodes))


class _UsageClock:
    """A clock that is set to the moment of each request."""

    def __init__(self) -> None:
        self.now = 1_900_000_000.0

    def __call__(self) -> float:
        return self.now


def computed_tokens(trace: PolicyTrace, policy: Policy, limit_bytes: int, folder: Path) -> int:
    """Tokens that are not found when they are asked for, after the first episode."""
    clock = _UsageClock()
    POLICIES[policy.name] = policy
    settings = StoreSettings(
        disk_limit=limit_bytes, memory_limit=0, policy=policy.name, killed_ttl_seconds=None, exact=None
    )
    computed = 0
    with TieredStore(folder, settings, Machine(clock=clock)) as store:
        for number, episode in enumerate(trace.episodes):
            before = episode.asks[0].seconds
            for ask in episode.asks:
                clock.now += 1.0 + max(0.0, ask.seconds - before)  # a usage that is too short begins again
                before = ask.seconds
                missing = _ask(store, ask)
                computed += missing if number else 0
    return computed


def _ask(store: TieredStore, ask: AdapterRequest) -> int:
    """What a request does; returns the number of tokens to compute."""
    for app, state in ask.changes:
        try:
            Apps(store.disk, _SCOPE).set(app, state)
        except CacheUnusable:  # no room to note it
            continue
    app_ref = AppRef(_SCOPE.tenant, ask.app, "foreground")
    kv_space = KvSpace(Namespace("replay"), LAYOUT, adapter=ask.adapter)
    match = store.lookup(kv_space, ask.prompt)
    if match.length:
        store.record_use(match, saved_ms=float(match.length))
    gap = match.gap()
    if gap is not None:
        empty = np.zeros((4, len(gap), 512), np.float16)  # [kv_heads, tokens, dim]
        store.keep(kv_space, ask.prompt, Kv(gap, LAYOUT, (LayerKv(empty, empty),)), app=app_ref)
    store.record_request(kv_space, ask.prompt, app_ref)
    store.maintain()
    return len(ask.prompt) - match.length


Computed = dict[str, list[int]]  # by policy, of each trace and limit


def replay(traces: Sequence[PolicyTrace], policies: Sequence[Policy], advance: Advance) -> Computed:
    """Tokens that each policy leaves to compute."""
    found: Computed = {policy.name: [] for policy in policies}
    for trace in traces:
        for share in LIMIT_SHARES:
            advance(f"{trace.name}, limit {share:.0%}")
            for policy in policies:
                with scratch() as folder:
                    tokens = computed_tokens(trace, policy, trace.limit_bytes(share), Path(folder) / "cache")
                found[policy.name].append(tokens)
    return found


def fewer(found: Computed, policy: str, against: str) -> dict[str, float]:
    """The share of computed tokens that a policy saves: of all, with its standard error over traces, and by limit."""
    shape = -1, len(LIMIT_SHARES)  # [traces, limits]
    ours, theirs = (np.reshape(found[name], shape).astype(float) for name in (policy, against))
    each = 1 - ours.sum(1) / theirs.sum(1)
    by_limit = 1 - ours.sum(0) / theirs.sum(0)
    return {
        "all": float(1 - ours.sum() / theirs.sum()),
        "error": float(each.std() / len(each) ** 0.5),
        **{f"limit_{100 * share:.0f}": float(saved) for share, saved in zip(LIMIT_SHARES, by_limit, strict=True)},
    }


def run(options: BenchOptions, advance: Advance) -> Report:
    """Choose weights on the first halves; compare them with the other policies on the second halves."""
    install()
    usages = read_material(options.data, options.seed).usages[: 1 if options.quick else None]
    first, second = (make_traces(usages, half, options.seed) for half in get_args(TraceHalf))
    tried = replay(first, WEIGHTS, advance)
    best = min(WEIGHTS, key=lambda policy: sum(tried[policy.name]))
    baseline = SHOWN[0].name
    shown = replay(second, (*SHOWN, best), advance)
    report = Report("policies", fields={"device": "cpu", "seed": options.seed, "traces": [one.name for one in second]})
    report.fields["first_half"] = [_fields(name, tried, WEIGHTS[0].name) for name in tried]
    report.fields["second_half"] = [_fields(name, shown, baseline) for name in shown]
    report.fields["chosen"] = best.name
    report.rows = [_row(found) for found in report.fields["second_half"]]
    return report


def _fields(policy: str, found: Computed, against: str) -> dict[str, Any]:
    return {"policy": policy, "computed_tokens": sum(found[policy]), **fewer(found, policy, against)}


def _row(found: Mapping[str, Any]) -> TableRow:
    limits = ", ".join(f"{found[f'limit_{100 * share:.0f}']:+.1%} at limit {share:.0%}" for share in LIMIT_SHARES)
    saved = f"{found['all']:+.1%} ± {found['error']:.1%}"
    return TableRow(
        f"second halves, {found['policy']}", f"{found['computed_tokens']:,} tokens to compute", limits, saved
    )
