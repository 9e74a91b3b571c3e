"""What rules doubt, a model decides, if it was measured that it can; else it is said that it is not asked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.answers.guard import disagreement, is_doubt
from rekindle.core.request import MAX_LOGPROBS, Request
from rekindle.errors import InvalidSetting
from rekindle.session.answer_judge import JudgeSkill, judging_request, recall_skill, remember_skill, yes_share
from rekindle.session.calibrate.calibration import measure, missing_parts
from rekindle.session.calibrate.judge import choose_threshold, find_skill, read_pairs
from tests.server.soak import tiny_embedder
from tests.session.asking import Terse

BOATS = "Boats leave Vesk on Tuesdays. The ferry to Ormund costs eleven crowns."
FERRY, DOUBTED, OTHER = "What does the ferry cost?", "How expensive is the ferry?", "What does the ferry to Vesk cost?"
HOW: dict[str, Any] = {"top_k": 1, "retrieval": "bm25", "max_tokens": 16, "min_tokens": 2}
ABLE = JudgeSkill(0.9, 1.0, 0.9, 50, 100)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
def session(tmp_path: Path, embedder: str) -> Iterator[Session]:
    where = {"cache": tmp_path / "cache", "embedder": embedder, "answers": "direct", "similarity_threshold": 0.0}
    with Session(Terse(), **where) as made:
        made.ingest(documents=[{"text": BOATS, "source": "boats"}])
        made.ask(FERRY, **HOW)
        made.flush()
        yield made


def saying(monkeypatch: pytest.MonkeyPatch, share: float) -> list[str]:
    """Let the model be that sure; what it was asked."""
    asked: list[str] = []

    def shares(reply: Any) -> float:
        asked.append(reply.text)
        return share

    monkeypatch.setattr("rekindle.session.answer_judge.yes_share", shares)
    return asked


def test_a_doubted_answer_is_given_if_the_model_says_yes(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disagreement(DOUBTED, FERRY) is not None and is_doubt(DOUBTED, FERRY)
    remember_skill(session.engine, ABLE)
    asked = saying(monkeypatch, 0.95)
    given = session.ask(DOUBTED, **HOW)
    assert given.stored is not None and given.stored.way == "direct" and given.stored.question == FERRY
    assert [source.text for source in given.sources] == [BOATS] and len(asked) == 1 and given.refused is None


def test_a_model_that_is_not_sure_enough_answers_itself(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_skill(session.engine, ABLE)
    saying(monkeypatch, 0.85)
    given = session.ask(DOUBTED, **HOW)
    assert given.stored is None or given.stored.way == "verified"
    assert given.text == session.ask(DOUBTED, **HOW, answers="off").text


@pytest.mark.parametrize(
    ("skill", "words"), [(None, "was not measured"), (JudgeSkill(None, 0.5, 0.5, 9, 90), "cannot")]
)
def test_a_model_that_cannot_is_not_asked_and_that_is_said(
    session: Session, monkeypatch: pytest.MonkeyPatch, skill: JudgeSkill | None, words: str
) -> None:
    if skill is not None:
        remember_skill(session.engine, skill)
    asked = saying(monkeypatch, 1.0)
    given = session.ask(DOUBTED, **HOW)
    assert asked == [] and given.refused is not None and words in given.refused
    assert "equal wordings only" in given.refused


def test_what_rules_are_sure_of_is_not_asked(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_skill(session.engine, ABLE)
    asked = saying(monkeypatch, 1.0)
    given = session.ask(OTHER, **HOW)
    assert asked == [] and (given.stored is None or given.stored.way == "verified")


def test_the_question_of_the_judge_stands_behind_the_same_passages() -> None:
    request = Request.of([{"role": "system", "content": "s"}, {"role": "user", "content": "Question: x"}])
    judging = judging_request(request, "B?", "A?")
    assert judging.prompt[0] == request.prompt[0] and judging.max_tokens == 1 and judging.logprobs == MAX_LOGPROBS
    assert "Question A: A?" in str(judging.prompt[-1]) and "Question B: B?" in str(judging.prompt[-1])


def test_the_share_of_yes_counts_yes_and_no_alone(tmp_path: Path) -> None:
    with Session(Terse(), cache="off") as session:
        reply = session.chat("x", max_tokens=1, logprobs=20)
    assert 0.0 <= yes_share(reply) <= 1.0


# -- calibration


def test_the_lowest_threshold_that_is_right_often_enough_is_found() -> None:
    judged = [(0.5 + 0.005 * number, True) for number in range(60)] + [(0.005 * number, False) for number in range(90)]
    skill = choose_threshold(judged)
    assert skill.threshold is not None and skill.recall == 1.0 and 0.95 <= skill.precision < 0.96
    lower = [same for share, same in judged if share >= skill.threshold - 0.005]
    assert skill.served == len(lower) - 1 and sum(lower) < 0.95 * len(lower)


def test_a_model_that_guesses_or_dares_too_seldom_has_no_threshold() -> None:
    rng = random.Random(3)
    guessed = [(rng.random(), bool(number % 2)) for number in range(200)]
    assert choose_threshold(guessed).threshold is None
    few = [(1.0, True)] * 39 + [(0.1, number % 2 == 0) for number in range(100)]
    assert choose_threshold(few).threshold is None
    assert choose_threshold([*few, (1.0, True)]).threshold == 1.0
    assert choose_threshold([]).threshold is None


def test_calibrating_asks_about_each_pair_and_is_remembered(tmp_path: Path) -> None:
    engine = Terse(context_tokens=4000)
    pairs = read_pairs()[:2]
    assert recall_skill(engine) is None
    skill = find_skill(engine, pairs)
    assert skill is not None and skill.pairs == 2 and skill.threshold is None and recall_skill(engine) == skill
    with Session(engine, cache=tmp_path / "cache", answers="direct") as session:
        assert missing_parts(session) == []


def test_a_context_that_is_too_short_is_told() -> None:
    with pytest.raises(InvalidSetting, match="do not fit the 64 tokens"):
        measure(Terse(context_tokens=64), [], None, lambda _: None, parts=["judge"])


def test_the_pairs_are_many_and_rules_serve_no_near_miss() -> None:
    pairs = read_pairs()
    same = [pair for pair in pairs if pair.same]
    assert len(same) >= 80 and len(pairs) - len(same) >= 80
    assert len({(pair.asked, pair.stored) for pair in pairs}) == len(pairs)
    assert [pair for pair in pairs if not pair.same and disagreement(pair.asked, pair.stored) is None] == []


def test_ordinary_paraphrases_are_served_by_rules() -> None:
    assert (
        disagreement("When will the presentation rehearsal take place?", "When is the presentation rehearsal?") is None
    )
    assert disagreement("Where will the workshop be held?", "Where is the workshop?") is None
    assert disagreement("When will the rehearsal take place?", "Where will the rehearsal take place?") is not None
