"""Policies replayed: the halves of a usage share nothing, and the better policy is the one that computes less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.adapters import replay
from benchmarks.adapters.data import made_up_usage
from benchmarks.adapters.replay import computed_tokens, fewer, make_traces
from benchmarks.base import BenchOptions
from benchmarks.baselines.policies import LFU, PlainLru
from rekindle.store.evict import Lru

pytestmark = pytest.mark.usefixtures("published_policies")


def test_the_halves_share_no_event_and_no_text() -> None:
    usages = [made_up_usage(0)]
    first, second = make_traces(usages, "first", 0), make_traces(usages, "second", 0)
    assert [one.name for one in first] == [one.name for one in second] and len(first) == 5
    for one, other in zip(first, second, strict=True):
        asks = [[ask for episode in trace.episodes for ask in episode.asks] for trace in (one, other)]
        assert max(ask.seconds for ask in asks[0]) <= min(ask.seconds for ask in asks[1])
        texts = [{ask.prompt[:32] for ask in some} for some in asks]
        assert texts[0].isdisjoint(texts[1])
    assert make_traces(usages, "first", 0) == first


def test_without_a_limit_every_policy_computes_each_token_once(tmp_path: Path) -> None:
    trace = make_traces([made_up_usage(0)], "first", 0)[0]
    few = replace(trace, episodes=tuple(replace(episode, asks=episode.asks[:6]) for episode in trace.episodes[:2]))
    roomy = [computed_tokens(few, policy, 1 << 30, tmp_path / policy.name) for policy in (PlainLru(), Lru(), LFU)]
    tight = computed_tokens(few, Lru(), 8 << 20, tmp_path / "tight")
    asked = sum(len(ask.prompt) for ask in few.episodes[1].asks)
    assert len(set(roomy)) == 1 and roomy[0] < tight <= asked


def test_fewer_is_the_share_of_tokens_that_are_not_computed() -> None:
    found = {"one": [100, 200, 100] * 2, "other": [100, 100, 100] * 2}
    assert fewer(found, "other", "one") == {
        "all": 0.25, "error": 0.0, "limit_20": 0.0, "limit_40": 0.5, "limit_80": 0.0
    }  # fmt: skip


def test_weights_are_chosen_on_the_first_halves_and_shown_on_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "SCENARIOS", replay.SCENARIOS[:1])
    monkeypatch.setattr(replay, "LIMIT_SHARES", (0.4,))
    monkeypatch.setattr(replay, "EPISODES", 2)
    monkeypatch.setattr(replay, "REQUESTS", 6)
    parts: list[str] = []
    report = replay.run(BenchOptions(quick=True), parts.append).as_json()
    assert [row["policy"] for row in report["first_half"]] == [policy.name for policy in replay.WEIGHTS]
    best = min(report["first_half"], key=lambda row: row["computed_tokens"])
    shown = [row["policy"] for row in report["second_half"]]
    assert shown == [*(policy.name for policy in replay.SHOWN), best["policy"]] and report["chosen"] == best["policy"]
    assert len(report["table"]) == len(shown) and parts == ["S1, made up, limit 40%"] * 2
