"""What `python -m benchmarks chunks` does before and after a model is asked: prompts, donors, budgets, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import base
from benchmarks.__main__ import app
from benchmarks.baselines.recompute_policies import ScoredChunks
from benchmarks.chunks.endurance import slope
from benchmarks.chunks.modes import held, partly_changed
from benchmarks.quality import best_f1
from rekindle.chunks.prefill import ChunkPrefill
from rekindle.core.document import Quote
from rekindle.engine.fake import FakeEngine
from rekindle.session.calibrate.budget import PassageTrials, TriedBudget, min_budget
from rekindle.session.calibrate.prompts import PASSAGES, PassagePrompt, read_questions
from tests.benchmarks.test_units import stopping_after


class Accelerated(FakeEngine):
    """Says that it does not compute on a CPU."""

    device = "an accelerator"


def tried(*pairs: tuple[float, float]) -> list[TriedBudget]:
    """Budgets and the KL of each."""
    return [TriedBudget(budget, 0.0, kl, 0.0, budget) for budget, kl in pairs]


@pytest.mark.parametrize("seed", range(5))
def test_every_passage_stands_in_one_donor_without_the_others_of_its_prompt(seed: int) -> None:
    drawn = held(read_questions(None), calibration=3, test=6, seed=seed)
    assert len(drawn.calibration) == 3 and len(drawn.test) == 6
    standing = [quote for donor in drawn.donors for quote in donor.quotes]
    for prompt in (*drawn.calibration, *drawn.test):
        assert len(prompt.quotes) == PASSAGES
        for quote in prompt.quotes:
            assert standing.count(quote) == 1
        for donor in drawn.donors:
            assert len(set(donor.quotes) & set(prompt.quotes)) <= 1
            if set(donor.quotes) & set(prompt.quotes):
                assert donor.question != prompt.question and donor.quotes[0] != prompt.quotes[0]


@pytest.mark.parametrize("seed", range(5))
def test_where_part_of_a_prompt_has_changed_every_passage_stands_in_one_donor_and_all_but_one_together(
    seed: int,
) -> None:
    prompts = held(read_questions(None), calibration=3, test=6, seed=seed).test
    donors = partly_changed(prompts, seed)
    standing = [quote for donor in donors for quote in donor.quotes]
    assert sorted(map(str, standing)) == sorted(str(quote) for prompt in prompts for quote in prompt.quotes)
    for prompt, donor in zip(prompts, donors, strict=True):
        same = [one == other for one, other in zip(prompt.quotes, donor.quotes, strict=True)]
        assert same.count(False) == 1 and same[-1] and donor.question != prompt.question


def test_calibration_and_test_share_no_prompt_even_where_there_are_too_few() -> None:
    drawn = held(read_questions(None), calibration=24, test=150, seed=0)
    assert len(drawn.calibration) == 3 and len(drawn.test) == 9
    assert not set(drawn.calibration) & set(drawn.test)


def test_the_sample_answers_its_questions_in_what_is_marked() -> None:
    for one in read_questions(None):
        marked = " ".join(quote.text for quote in one.paragraphs[:3])
        assert len(one.paragraphs) == 6 and all(answer in marked for answer in one.answers), one.question


@pytest.mark.parametrize(("chunks", "scored"), [(ChunkPrefill, False), (ScoredChunks, True)])
def test_on_an_accelerator_passages_are_scored_for_the_bench_alone(chunks: type[ChunkPrefill], *, scored: bool) -> None:
    quotes = tuple(Quote(f"Passage {number} says that boat {number} leaves at {number}.") for number in range(3))
    engine = Accelerated()
    with PassageTrials.warmed(engine, [PassagePrompt("Who?", quotes)], lambda _: None, chunks) as session:
        prompt = PassagePrompt("Why?", quotes[::-1])
        tokens = prompt.encode(engine)
        with session.cache.peek(prompt.request(), tokens.tokens, tokens.prompt_layout) as prefill:
            passages = prefill.lookup.passages
            assert passages is not None and all(chunk.known for chunk in passages.picked)
            received = [set(chunk.known.variant.scores.received.tolist()) for chunk in passages.picked if chunk.known]
    assert all((len(some) > 1) == scored for some in received), received


def test_the_budget_lies_between_the_last_that_was_too_small_and_the_first_that_was_enough() -> None:
    assert min_budget(tried((0.1, 0.3), (0.2, 0.2), (0.3, 0.1)), 0.15) == pytest.approx(0.25)
    assert min_budget(tried((0.1, 0.3)), 0.5) == 0.1
    assert min_budget(tried((0.1, 0.3), (0.2, 0.4), (0.3, 0.1)), 0.2) == pytest.approx(0.25)  # noise is not believed
    assert min_budget(tried((0.1, 0.3), (0.7, 0.2)), 0.1) is None


def test_to_be_nearer_never_takes_a_smaller_budget() -> None:
    some = tried((0.05, 0.39), (0.1, 0.4), (0.2, 0.17), (0.4, 0.2), (0.7, 0.03))
    budgets = [min_budget(some, kl / 100) or 1.0 for kl in range(50, 0, -1)]
    assert budgets == sorted(budgets)


def test_a_steady_decay_has_an_interval_above_nothing() -> None:
    decay = slope([(number, 0.01 * number + 0.001 * (number % 3)) for number in range(40)], seed=0)
    assert decay is not None and decay["low"] > 0 and decay["per_100"] == pytest.approx(1.0, abs=0.05)
    assert slope([(0, 1.0), (1, 1.0)], seed=0) is None


def test_the_best_of_several_answers_counts() -> None:
    assert best_f1("It is the river Tamsel.", ["Corrow", "river Tamsel"]) == pytest.approx(2 * 2 / 6)
    assert best_f1("anything", []) is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["store", "--calibrate"], "--calibrate is for the benches chunks and adapters"),
        (["knowledge", "--kl", "0.1"], "kl"),
        (["chunks", "--kl", "0.1"], "kl"),
        (["chunks", "--calibrate"], "kl"),
        (["chunks", "--calibrate", "--kl", "0"], "kl"),
    ],
)
def test_calibrating_needs_the_chunks_and_a_bound(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code != 0 and named in str(done.exception)


def test_a_long_run_that_is_cut_goes_on_with_the_kv_that_it_left(spacious: Path, tmp_path: Path) -> None:
    arguments = ["chunks", "--workload", "endurance", "--quick", "--limit", "9", "--model", str(spacious)]

    def run() -> dict[str, Any]:
        file = ["--resume", str(tmp_path / "units.jsonl")]
        done = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--json", *file])
        assert done.exit_code == 0, done.exception
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "timed", lambda options, advance: stopping_after(5))
        assert run()["questions"] == 4
    found = run()
    assert found["questions"] == 9 and [one["first"] for one in found["windows"]] == [0, 3, 6]
    assert found["windows"][-1]["computed_share"] < found["windows"][0]["computed_share"]
    assert not list(tmp_path.glob("units.jsonl.*")), "nothing is left for later"


@pytest.mark.thorough
def test_parts_of_several_runs_make_the_report_of_one(spacious: Path, tmp_path: Path) -> None:
    arguments = ["chunks", "--quick", "--limit", "2", "--model", str(spacious), "--device", "cpu", "--json"]

    def run(file: str, *more: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, [*arguments, "--resume", str(tmp_path / file), *more])
        assert done.exit_code == 0, done.exception
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    shares = [("prompt 1",), ("[!p]*", "1/2"), ("[!p]*", "2/2"), ("p*",)]
    for number, parts in enumerate(shares):
        run(f"{number}.jsonl", *(word for part in parts for word in ("--part", part)))
    text = "".join((tmp_path / f"{number}.jsonl").read_text() for number in range(len(shares)))
    (tmp_path / "all.jsonl").write_text(text)
    found = run("all.jsonl", "--minutes", "0")
    assert found["prompts"] == found["partial"]["prompts"] == 2 and found["probe_cost"] > 0
    assert found["endurance"]["questions"] > 0 and all(one["questions"] for one in found["streams"].values())
    units = [json.loads(line) for line in text.splitlines() if line]
    measured = [(one["unit"], one["step"]) for one in units if one["unit"] not in ("alphas", "prompt 1")]
    assert len(set(measured)) == len(measured), "only what all need, and what was asked for twice"
    assert len(found["measured_by"]) == len(shares)
