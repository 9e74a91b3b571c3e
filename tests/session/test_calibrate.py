"""`rekindle.calibrate`: any model that an engine loads, with or without adapters, and sessions use what it finds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rekindle
from rekindle import Session
from rekindle.cache.coders import default_coder, recall_coder
from rekindle.chunks.match import calibration_of
from rekindle.engine.base import Logits
from rekindle.engine.fake import FakeEngine
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import AdapterRefused, InvalidSetting
from rekindle.models import adapter_registry
from rekindle.session.calibrate.budget import BUDGETS, EVERYTHING, KL_TOKENS, find_budget
from rekindle.session.calibrate.calibration import calibrated_parts, read_adapters
from rekindle.session.calibrate.judge import read_pairs
from rekindle.session.calibrate.nearness import Nearness, nearness, rouge_l
from rekindle.session.calibrate.prompts import read_questions, read_texts
from tests.lora import fake_pairs, save_lora
from tests.tiny import tiny_engine

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the labelled questions: all of them take minutes with an engine in Python."""
    monkeypatch.setattr("rekindle.session.calibrate.calibration.read_pairs", lambda: read_pairs()[:1])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Questions about short passages: tiny models have short contexts."""
    folder = tmp_path / "data"
    folder.mkdir()
    records = [
        {
            "question": f"Which lamp has number {number}?",
            "contexts": [
                {"title": f"Lamp {number}-{k}", "text": f"Lamp {number * 7 + k} burns {'long ' * 5}"} for k in range(5)
            ],
        }
        for number in range(3)
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, records)), "utf-8")
    (folder / "notes.md").write_text("The keeper lit the lamp at dusk and wrote the hour into the book. " * 20, "utf-8")
    return folder


def test_an_engine_of_any_model_is_calibrated_without_adapters_and_sessions_use_it(data: Path, tmp_path: Path) -> None:
    engine, parts = FakeEngine(), []
    found = rekindle.calibrate(engine, max_kl=5.0, data=data, prompts=2, progress=parts.append)
    assert found.budget is not None and found.bits is not None
    assert found.budget.prompts == 2 and any("budget" in part for part in parts)
    assert calibration_of(engine) == pytest.approx(found.budget.budget)
    assert recall_coder(engine) == found.bits.coder
    assert found.bits.coder.delta == default_coder(len(engine.layout.layers)).delta
    assert any("--adapter " in note for note in found.notes)
    assert calibrated_parts(engine.name) == ["passages", "quantized KV"]
    assert found.summary.startswith(f"From now on sessions of {engine.name} recompute")
    with Session(engine, cache=tmp_path / "cache", reuse="approximate") as session:
        assert session.cache.chunks.recompute_policy.calibrated
    assert calibration_of(FakeEngine(seed=1)) is None
    json.dumps(found.as_dict())


def test_differences_are_measured_with_the_adapters_that_are_named(tmp_path: Path, data: Path) -> None:
    engine, random = tiny_engine("llama"), np.random.default_rng(5)
    pair = random.normal(0, 0.1, (2, 32)).astype(np.float32), random.normal(0, 0.1, (16, 2)).astype(np.float32)
    save_lora(tmp_path / "adapters" / "one", {"model.layers.1.self_attn.k_proj": pair})
    (data / "questions.jsonl").unlink()  # a byte a token: these prompts would be longer than the context
    engine.capabilities = replace(engine.capabilities, recompute="none")
    found = rekindle.calibrate(engine, adapters=tmp_path / "adapters", data=data)
    assert found.budget is None and "cannot reuse passages" in found.notes[0]
    assert found.bits is not None and found.bits.kept("difference") is not None
    assert recall_coder(engine) == found.bits.coder
    assert calibrated_parts(engine.name) == ["deltas of adapters", "quantized KV"]
    again = rekindle.calibrate(engine, data=data)  # what adapters told once is not forgotten
    assert again.bits is not None and again.bits.coder.delta == found.bits.coder.delta


def test_adapters_are_given_by_name_by_path_and_by_folder(tmp_path: Path) -> None:
    one, two = (save_lora(tmp_path / "all" / name, fake_pairs(seed)) for seed, name in enumerate(("one", "two")))
    adapter_registry.add("mine", two, 0.5)
    digests = [lora.digest for lora in read_adapters([tmp_path / "all", f"x={one},scale=0.5", "mine", str(one)])]
    assert digests == [
        read_adapter(one).digest,
        read_adapter(two).digest,
        read_adapter(one, 0.5).digest,
        read_adapter(two, 0.5).digest,
        read_adapter(one).digest,
    ]
    assert read_adapters(()) == read_adapters(None) == []
    with pytest.raises(AdapterRefused, match="does not have"):
        rekindle.calibrate(tiny_engine("llama"), adapters=one)
    with pytest.raises(InvalidSetting, match="no adapters that PEFT saved"):
        read_adapters(tmp_path)
    with pytest.raises(InvalidSetting, match=r"no adapter 'nobody'.*rekindle adapters ls"):
        read_adapters("nobody")


def test_settings_of_the_user_do_not_stand_in_the_way(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"KEEP_ALIVE": "5m", "DETERMINISTIC": "true", "ORIGIN": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(f"REKINDLE_{name}", value)
    found = rekindle.calibrate(FakeEngine(), max_kl=5.0, data=data, prompts=2)
    assert found.budget is not None and found.budget.tried[0].computed_share < 1


def test_an_engine_that_can_do_neither_says_so(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.session.calibrate.calibration.read_pairs", list)
    engine = FakeEngine()
    engine.capabilities = replace(engine.capabilities, recompute="none", opaque="its state is a whole")
    with pytest.raises(InvalidSetting, match="cannot reuse passages.*its state is a whole"):
        rekindle.calibrate(engine, data=data)


def test_an_engine_that_appends_only_gets_a_budget_of_leading_tokens(data: Path) -> None:
    engine = FakeEngine()
    engine.capabilities = replace(engine.capabilities, recompute="leading")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rekindle.session.calibrate.budget.BudgetTrials.search", lambda *_: [])
        patch.setattr("rekindle.session.calibrate.budget.BudgetTrials.__init__", lambda *_: None)
        patch.setattr("rekindle.session.calibrate.calibration._about_budget", lambda *_: [])
        found = rekindle.calibrate(engine, data=data)
    assert found.budget is not None and (found.budget.recompute_policy, found.budget.budget) == ("leading", EVERYTHING)
    assert calibration_of(engine) == calibration_of(engine, "leading") == EVERYTHING


@pytest.mark.parametrize("choices", [{"max_kl": 0.0}, {"max_kl": math.inf}, {"prompts": 1}, {"adapters": "nowhere"}])
def test_what_makes_no_sense_is_refused_before_anything_is_computed(choices: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        rekindle.calibrate("no-such-model", **choices)  # type: ignore[arg-type]


def test_the_package_brings_questions_and_texts() -> None:
    assert len(read_questions(None)) >= 12
    assert all(len(text) > 5000 for text in read_texts(None)) and len(read_texts(None)) == 2


def test_passages_may_be_plain_strings_and_other_files_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "Why?", "contexts": ["Because.", "So."]}\n', "utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "something else"}\n', "utf-8")
    (one,) = read_questions(tmp_path)
    assert [quote.text for quote in one.paragraphs] == ["Because.", "So."]
    (tmp_path / "c.jsonl").write_text("{", "utf-8")
    with pytest.raises(InvalidSetting, match=r"c\.jsonl, line 1"):
        read_questions(tmp_path)


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence() -> None:
    assert rouge_l([1, 2, 3], [1, 2, 3]) == rouge_l([], []) == 1.0
    assert rouge_l([1, 2, 3, 4], [1, 9, 3]) == pytest.approx(2 * 2 / 7)
    assert rouge_l([1, 2], [2, 1]) == 0.5 and rouge_l([1], []) == 0.0


def test_the_search_tries_the_neighbours_of_the_budget_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.session.calibrate.budget import BudgetTrials, TriedBudget, min_budget

    trials = object.__new__(BudgetTrials)
    monkeypatch.setattr(trials, "_try", lambda budget: TriedBudget(budget, 0.0, 1 - budget, 0.0, budget), raising=False)
    for place, budget in enumerate(BUDGETS):
        tried = trials.search(BUDGETS, 1 - budget, lambda _: None)
        assert len(tried) <= 4 and min_budget(tried, 1 - budget) == pytest.approx(budget)
        assert set(BUDGETS[max(0, place - 1) : place + 1]) <= {one.budget for one in tried}
    assert min_budget(trials.search(BUDGETS, 0.1, lambda _: None), 0.1) is None
    halfway = [TriedBudget(budget, 0.0, kl, 0.0, budget) for budget, kl in ((0.1, 0.03), (0.2, 0.01))]
    assert min_budget(halfway, 0.02) == pytest.approx(0.15)


def test_a_budget_is_judged_by_distributions_along_sixteen_tokens_however_short_the_answer_is(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that ends at once says nothing: its text is the same whatever passages were reused."""
    engine, compared = FakeEngine(), list[int]()

    def noted(exact: Logits, other: Logits) -> Nearness:
        compared.append(len(exact))
        return nearness(exact, other)

    monkeypatch.setattr("rekindle.session.calibrate.budget.nearness", noted)
    monkeypatch.setattr(engine.tokenizer, "stop_ids", frozenset(range(1000)))
    found = find_budget(engine, read_questions(data), 1e-9, 2, lambda _: None)
    assert set(compared) == {KL_TOKENS} and KL_TOKENS >= 16
    assert found is not None and all(one.rouge_l <= 1.0 for one in found.tried)
