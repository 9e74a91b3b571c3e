"""The three published cases of idle work, and KV by room, on the embedded model with short prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.answers import schedule as answer_schedule
from benchmarks.answers.report import measure_storage
from benchmarks.base import BenchOptions
from benchmarks.models import load
from benchmarks.personal import Person, personal_sets
from rekindle.engine.base import Engine
from rekindle.idle.generated_questions import PredictedQuestion
from rekindle.idle.idle import Idle
from rekindle.idle.log import IdleAction
from rekindle.idle.prepare import Preparer

pytestmark = [pytest.mark.real, pytest.mark.long]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = load(BenchOptions())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def person() -> Person:
    (sample,) = personal_sets(None)
    return next(person for person in sample.people if len(person.questions) >= 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedule")


def _foresee(idle: Idle, max_count: int) -> list[IdleAction]:
    """The embedded model is too small to ask: prepare what is known to be answered, each document once."""
    strategy, library = idle.strategy, idle._preparer.bank.library
    assert strategy is not None
    for document in library.entries():
        question = PredictedQuestion(f"What is {document.title} about?", "history", (document.id,))
        if done := idle._preparer.prepare(question, strategy):
            return done[:max_count]
    return []


@pytest.fixture(scope="module")
def cases(engine: Engine, person: Person, folder: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        small = {"QUESTIONS": 3, "STRIDE": 1, "NEW_TOKENS": 2, "TOP_K": 3, "_ROOM_TOKENS": 300}
        for name, value in small.items():
            patch.setattr(answer_schedule, name, value)
        patch.setattr(Idle, "predict_from_history", _foresee)
        patch.setattr(Preparer, "_judge", lambda *_: True)
        return answer_schedule.measure(engine, person, folder, lambda _: None)


def test_from_the_cut_off_on_questions_are_only_read_and_less_of_them_than_published(cases: dict[str, Any]) -> None:
    ways = cases["raised"]["ways"]
    always, published, ours = (ways[name]["idle_tokens"] for name in ("always", "percache", "rekindle"))
    assert always[:2] == published[:2] == ours[:2]
    assert ours[2] < published[2] < always[2]
    assert ways["rekindle"]["actions"] == {"answer": 2, "prefill": 1}
    seconds = [ways[name]["idle_seconds"][-1] for name in ("rekindle", "always")]
    assert cases["raised"]["saved_share"] == 1.0 - seconds[0] / seconds[1]


def test_what_was_only_read_is_answered_when_the_threshold_falls(cases: dict[str, Any]) -> None:
    ways = cases["fallen"]["ways"]
    assert ways["rekindle"]["actions"] == {"prefill": 2, "decode": 2, "answer": 1}
    assert ways["always"]["actions"] == {"answer": 3}


def test_what_had_to_go_comes_back_when_there_is_room(cases: dict[str, Any]) -> None:
    ways = cases["room"]["ways"]
    assert ways["rekindle"]["actions"]["restore"] > 0 and "restore" not in ways["always"]["actions"]
    assert ways["rekindle"]["later_known_tokens"] >= ways["always"]["later_known_tokens"]


def test_with_less_room_less_is_known(engine: Engine, person: Person, folder: Path, cases: dict[str, Any]) -> None:
    assert cases
    rows = measure_storage(engine, folder / "raised" / "always", [q.text for q in person.questions])
    known = [row["known_share"] for row in rows]
    assert [row["share"] for row in rows] == sorted((row["share"] for row in rows), reverse=True)
    assert known == sorted(known, reverse=True) and known[0] > known[-1]
