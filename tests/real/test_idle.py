"""Working ahead with real weights: a foreseen question is answered faster, in the model's own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle import Session
from rekindle.engine.base import Engine
from rekindle.idle.generated_questions import PredictedQuestion
from rekindle.idle.idle import Idle, IdleOptions
from tests.unmeasured_costs import UnmeasuredCosts

pytestmark = pytest.mark.real

DOCUMENTS = [
    {
        "source": "lighthouse",
        "title": "The lighthouse of Ternholm",
        "text": "Mara Lindqvist keeps the lighthouse on Ternholm. She lights the lamp at dusk and writes the weather "
        "into a blue book. In March she ordered forty litres of lamp oil from the chandler in Vesk.",
    },
    {
        "source": "ferry",
        "title": "The ferry to Ormund",
        "text": "The ferry from Vesk to Ormund leaves on Tuesdays and Fridays at nine. A ticket costs eleven crowns, "
        "and bicycles travel free. The captain is Josef Haller, who once sailed to Greenland.",
    },
]


def test_a_foreseen_question_is_checked_instead_of_written_and_says_the_same(smollm2: Engine, tmp_path: Path) -> None:
    with Session(smollm2, cache=tmp_path / "cache", answers="verified") as session:
        session.cache.kv.costs = UnmeasuredCosts()  # whether loads and drafts pay depends on who else computes
        session.ingest(documents=DOCUMENTS[:1])
        idle = Idle(session, IdleOptions(settle_seconds=0.0, max_tokens=8))
        assert {did.action for did in idle.run()} == {"warm"} and "too small to ask" in idle.why_nothing()
        done = idle._preparer.prepare(
            PredictedQuestion("Who keeps the lighthouse on Ternholm?", "abstract", (1,)), "answer"
        )
        assert [did.action for did in done] == ["judge", "answer"] and all(did.finished for did in done)
        assert idle.spent_seconds >= sum(did.seconds for did in done) > 0
        session.flush()
        known = session.answers.bank().entries(where="origin!='user' AND state='fresh'")
        assert known and session.answers.bank().history(10) == []
        for entry in known[:1]:
            answer = session.ask(entry.question, max_tokens=8)
            plain = session.ask(entry.question, max_tokens=8, answers="off", reuse="off")
            assert answer.usage.drafted_tokens > 0 and answer.text == plain.text
            assert answer.reuse.computed <= 1 and answer.stored is not None and answer.stored.way == "verified"
