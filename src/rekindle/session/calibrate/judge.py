"""Whether a model can tell questions apart, and how sure it must be: on labelled pairs that come with the package.

The lowest threshold is sought whose yes is right often enough, on enough pairs. Where there is none, the model is not
asked, and stored answers are given for equal wordings and for what the rules of the guard know.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from rekindle.answers.ask_terms import asking
from rekindle.core.document import Quote
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.errors import ContextOverflow
from rekindle.session.answer_judge import JudgeSkill, judging_request, remember_skill, yes_share
from rekindle.session.session import Session

MIN_PRECISION, MIN_RECALL, MIN_SERVED = 0.95, 0.15, 40


@dataclass(frozen=True)
class LabelledPair:
    """Two questions about a passage, and whether they ask the same."""

    passage: str
    asked: str
    stored: str
    same: bool


def read_pairs() -> list[LabelledPair]:
    """The pairs of the package: a passage, `=` a question, `+` the same in other words, `-` others that look alike."""
    text = (resources.files("rekindle") / "samples" / "question_pairs.txt").read_text("utf-8")
    return [pair for block in text.strip().split("\n\n") for pair in _pairs(block.splitlines())]


def _pairs(lines: Sequence[str]) -> Iterator[LabelledPair]:
    passage, stored, others = lines[0], lines[1].removeprefix("= "), lines[2:]
    for line in others:
        yield LabelledPair(passage, line[2:], stored, line.startswith("+"))


def find_skill(engine: Engine, pairs: Sequence[LabelledPair]) -> JudgeSkill | None:
    """Ask the model about each pair, find its threshold, and keep it. None if its context is too short."""
    judged: list[tuple[float, bool]] = []
    with tempfile.TemporaryDirectory(prefix="rekindle-") as folder, _session(engine, folder) as session:
        for pair in pairs:
            request = Request(asking(pair.asked), quotes=(Quote(pair.passage),))
            try:
                reply = session.answer(judging_request(request, pair.asked, pair.stored)).reply
            except ContextOverflow:
                return None
            judged.append((yes_share(reply), pair.same))
    skill = choose_threshold(judged)
    remember_skill(engine, skill)
    return skill


def _session(engine: Engine, folder: str) -> Session:
    """A session that reuses the passages of earlier pairs, whatever the user's own settings are."""
    return Session(engine, cache=folder, reuse="exact", answers="off", origin="none", adapter="none", keep_alive="none")


def choose_threshold(judged: Sequence[tuple[float, bool]]) -> JudgeSkill:
    """The lowest threshold whose precision is enough; None as the threshold where none is, or it serves too few."""
    positive = max(1, sum(same for _, same in judged))
    tried = []
    for threshold in sorted({share for share, _ in judged}):
        served = [same for share, same in judged if share >= threshold]
        right = sum(served)
        tried.append(JudgeSkill(threshold, right / len(served), right / positive, len(served), len(judged)))
    for one in tried:
        if one.precision >= MIN_PRECISION and one.recall >= MIN_RECALL and one.served >= MIN_SERVED:
            return one
    best = max(reversed(tried), key=lambda one: one.precision, default=JudgeSkill(None, 0.0, 0.0, 0, len(judged)))
    return replace(best, threshold=None)
