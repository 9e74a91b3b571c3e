"""The requests of `python -m benchmarks adapters`: the same for the same seed, by the law, as in the usage."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.adapters.data import AppUsage, Event, made_up_usage, read_adapters, read_material
from benchmarks.adapters.workload import (
    CONTEXTS,
    EXPONENT,
    SCENARIOS,
    TURN_TOKENS,
    AppWorkload,
    Scenario,
    WorkloadContext,
    make_contexts,
    make_workload,
    most_used,
    pareto_weights,
    visible,
)
from rekindle.errors import InvalidSetting

ADAPTERS = [f"adapter-{number}" for number in range(12)]
INSTRUCTIONS = [(1, 2, 3), (4, 5, 6, 7)]
USAGE = made_up_usage(0)


def texts(count: int, first: int) -> list[list[int]]:
    return [[first + 1000 * number + at for at in range(90)] for number in range(count)]


def workload(seed: int = 0, scenario: Scenario = SCENARIOS[0], requests: tuple[int, int] = (12, 24)) -> AppWorkload:
    random = np.random.default_rng(seed)
    contexts = make_contexts(texts(6, 10_000), texts(6, 50_000), scenario.input_tokens, CONTEXTS, random)
    return make_workload(scenario, ADAPTERS, contexts, INSTRUCTIONS, USAGE, requests, random)


def test_a_seed_gives_the_same_requests_and_another_one_others() -> None:
    assert workload(3) == workload(3)
    assert workload(3).asks != workload(4).asks


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_has_its_adapters_and_lengths(scenario: Scenario) -> None:
    found = workload(1, scenario, (0, 400))
    assert len(found.adapters) == scenario.adapters
    assert {ask.adapter for ask in found.asks} == set(found.adapters)
    lengths = [len(ask.prompt) for ask in found.asks]
    # The longest instruction fits; a document is whole from the first request on.
    assert max(lengths) == scenario.input_tokens
    assert min(lengths) >= scenario.input_tokens // 2 - 4
    assert {ask.kind for ask in found.asks} == {"conversation", "writing"}


def test_the_scenarios_are_those_of_the_source() -> None:
    assert [scenario.adapters for scenario in SCENARIOS] == [5, 5, 5, 10, 10]
    assert [scenario.input_tokens for scenario in SCENARIOS] == [256, 256, 512, 256, 512]


def test_weights_fall_by_the_exponent() -> None:
    weights = pareto_weights(10)
    assert sum(weights) == pytest.approx(1.0)
    assert weights[0] / weights[4] == pytest.approx(5**EXPONENT)


def test_adapters_answer_by_the_law() -> None:
    found = workload(2, SCENARIOS[0], (0, 4000))
    counts = Counter(ask.adapter for ask in found.asks)
    shares = [counts[adapter] / 4000 for adapter in found.adapters]
    assert shares == pytest.approx(pareto_weights(5), abs=0.03)


def test_apps_ask_in_the_order_in_which_they_came_up() -> None:
    events = [Event(1, "mail", "foreground"), Event(2, "mail", "background"), Event(3, "notes", "foreground")]
    events += [Event(4, "chat", "foreground"), Event(5, "mail", "killed"), Event(6, "chat", "background")]
    usage = AppUsage("short", tuple(events))
    contexts = [WorkloadContext("writing", tuple(range(100)))]
    random = np.random.default_rng(0)
    found = make_workload(Scenario("S", 3, 64), ["one"], contexts, INSTRUCTIONS, usage, (0, 9), random)
    asked = [ask.app for ask in found.asks]
    start = ["mail", "notes", "chat"].index(asked[0])
    assert asked == [["mail", "notes", "chat"][(start + number) % 3] for number in range(9)]
    # What happens between two requests is told with the second.
    changes = {ask.app: ask.changes for ask in found.asks[3:]}
    assert changes == {"mail": (("chat", "background"),), "notes": (("mail", "background"),), "chat": ()}


def test_an_app_that_comes_back_was_not_killed_for_the_request_it_makes() -> None:
    for ask in workload(5, SCENARIOS[3], (0, 300)).asks:
        assert ask.app not in dict(ask.changes)


def test_the_most_used_apps_ask() -> None:
    comings = Counter(event.app for event in USAGE.events if event.state == "foreground")
    apps = most_used(USAGE, 5)
    assert apps == [app for app, _ in comings.most_common(5)]
    assert {ask.app for ask in workload(0, SCENARIOS[0], (0, 200)).asks} == set(apps)


def test_a_conversation_grows_and_a_document_does_not() -> None:
    spoken, written = (WorkloadContext(kind, tuple(range(300))) for kind in ("conversation", "writing"))
    lengths = [len(visible(spoken, 240, visits)) for visits in range(6)]
    assert lengths == [120, 120 + TURN_TOKENS, 120 + 2 * TURN_TOKENS, 120 + 3 * TURN_TOKENS, 240, 240]
    assert {len(visible(written, 240, visits)) for visits in range(6)} == {240}


def test_contexts_are_of_both_kinds_and_differ_at_once() -> None:
    contexts = make_contexts(texts(6, 10_000), texts(6, 50_000), 256, CONTEXTS, np.random.default_rng(0))
    assert [context.kind for context in contexts] == ["conversation", "writing"] * (CONTEXTS // 2)
    assert all(len(context.tokens) == 256 for context in contexts)
    assert len({context.tokens[0] for context in contexts}) == CONTEXTS
    assert {context.kind for context in make_contexts([], texts(3, 0), 256, CONTEXTS, np.random.default_rng(0))} == {
        "writing"
    }


def test_the_working_set_counts_each_adapters_tokens_once() -> None:
    contexts = [WorkloadContext("writing", tuple(range(100)))]
    found = make_workload(
        Scenario("S", 1, 64), ["one"], contexts, [(200,), (201,)], USAGE, (0, 40), np.random.default_rng(0)
    )
    assert found.working_set_tokens == 63 + 2
    # All but the first prompt and the first use of the other instruction were there before.
    assert found.max_hit_share == pytest.approx((40 * 64 - 64 - 1) / (40 * 64))
    assert found.lru_hit_share == 0.0  # not even one prompt fits


def test_no_limited_cache_spares_more_than_one_without_limit() -> None:
    for seed in range(5):
        found = workload(seed, SCENARIOS[0], (16, 24))
        assert 0 < found.lru_hit_share <= found.max_hit_share < 1


def test_several_adapters_are_asked_about_the_same_text() -> None:
    found = workload(0, SCENARIOS[3], (0, 60))
    adapters: dict[tuple[int, ...], set[str]] = {}
    for ask in found.asks:
        adapters.setdefault(ask.prompt[:32], set()).add(ask.adapter)
    assert sum(len(some) > 1 for some in adapters.values()) >= CONTEXTS - 1


def test_a_data_folder_is_read_by_the_form_of_its_records(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    for name, record in {
        "chats/talks.jsonl": {"turns": turns},
        "news/all.jsonl": {"document": "It rained."},
        "else/corpus.jsonl": {"text": "passed over"},
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(record) + "\n", "utf-8")
    lines = ["user_id,timestamp,app,event", "u,1,Mail,foreground", "u,2,Mail,gone", "u,3,Mail,screen_on"]
    lines += ["u,4,com.android.launcher,foreground"]
    (tmp_path / "use").mkdir()
    (tmp_path / "use" / "one.csv").write_text("\n".join(lines), "utf-8")
    (tmp_path / "use" / "speed.csv").write_text("time_s,mbps\n1,2\n", "utf-8")
    found = read_material(tmp_path, 0)
    assert found.conversations == ("User: Hello?\nAssistant: Hello.",) and found.documents == ("It rained.",)
    (usage,) = found.usages
    assert usage == AppUsage("one", (Event(1.0, "Mail", "foreground"), Event(2.0, "Mail", "killed")))
    assert not found.reasons


def test_without_data_there_is_the_sample_and_it_says_so() -> None:
    found = read_material(None, 0)
    assert found.conversations and found.documents and len(found.reasons) == 2
    assert {event.state for event in found.usages[0].events} == {"foreground", "background", "killed"}
    assert [adapter.name for adapter in read_adapters(None)] == ["json", "list", "pirate"]


def test_folders_without_anything_are_refused(tmp_path: Path) -> None:
    for read in (lambda: read_material(tmp_path, 0), lambda: read_adapters(tmp_path)):
        with pytest.raises(InvalidSetting):
            read()
    with pytest.raises(InvalidSetting):
        read_adapters(tmp_path / "none")
